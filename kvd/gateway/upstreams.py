"""The engines behind the gateway: who they are, what they serve, whether they are well.

    UNKNOWN ── probed ──> SERVING <── a health check succeeds ── OUT
       ^                     └── refused, reset, 3 failed health checks ──^
       └──────────── well again: asked anew, as another engine may be there now

The health checks of an engine that shuts down succeed until it ends. So one that says by a request
that it does so is out until its next health check, and again after the next request.

Every upstream is a worker of the selection service. The worker's id is made from the URL, so it is
the same after a restart and for every gateway. An upstream stays as long as an owner wants it: the
settings, the fleet file, a call, or a name that leads to it (`kvd.gateway.dns_names`). After that
it gets no new requests, and finishes its answers.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, NoReturn

import trio

from kvd.errors import Conflict, KvdError, NotFound, Unavailable
from kvd.gateway.canary import Canary
from kvd.gateway.choices import Choices
from kvd.gateway.dns_names import FollowedName, Wanted
from kvd.gateway.exchanges import ExchangeFailed, Exchanges
from kvd.gateway.heads import own_head
from kvd.gateway.probing import (
    EngineKind,
    Facts,
    ListedModel,
    NotAnEngine,
    Probe,
    Unanswered,
)
from kvd.gateway.tunnels import Tunnel, UpstreamTls
from kvd.gateway.upstream import Upstream, UpstreamState, record_of, upstream_of, worker_id_of
from kvd.net.dialing import Dialer, Unreachable, next_address
from kvd.selection.worker_record import Role
from kvd.telemetry.logs import get_logger
from kvd.wire.urls import parse_upstream
from kvd_core.relay.relay import ExchangeOutcome

HEALTH_S = 5.0  # pause between two health checks of an engine
# Pause before the second try to reach an engine that is out; each next one is twice as long.
RETRY_S = 0.1
HEALTH_TIMEOUT_S = 3.0  # time for the answer to a health check
MAX_FAILURES = 3  # failed health checks in a row before a serving engine is out
REFRESH_S = 30.0  # pause before a serving engine is asked again what it serves
HEALTH_BYTES = 64 * 1024  # bytes of an answer to a health check
# Engines and names that lead to engines, some 2 KB each; further ones are refused.
MAX_UPSTREAMS = 4096

DEFAULT_TLS = UpstreamTls()
# The owners of engines and of names; a name owns the engines that it leads to, by its URL.
SETTINGS = "settings"
CALLS = "calls"  # POST /upstreams
FLEET_FILE = "fleet file"

DISAGREE = (
    "tokens and events do not agree: what it computed for a prompt of its own tokens was not in "
    "its events, so what it caches is predicted. Is its event endpoint another engine's?"
)
UNHEARD = (
    "its events are not received, so nothing counts as cached there; it must bind the endpoint, as "
    "tcp://*:PORT does, and this kvd must reach it"
)

log = get_logger(__name__)


class Served(NamedTuple):
    """The model that a name in a request stands for."""

    model: str  # the base model, by which the selection service knows the fleet
    adapter: str | None = None
    alias: str | None = None  # another name of either, which some of its engines may lack

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.alias or self.adapter or self.model


class _Engines(NamedTuple):
    """The engines of a model."""

    serving: tuple[Upstream, ...]  # those that are well, and those in doubt as `serving` says
    keepers: tuple[Upstream, ...]  # those that are well or in doubt
    prefills: bool  # whether any engine, well or not, is meant to prefill for others
    basis: bytes  # what blocks depend on besides the prompt: weights and block sizes


class Upstreams:
    """All engines of a gateway, followed by a task each."""

    def __init__(
        self,
        gateway_id: str,
        wanted: Iterable[Wanted],
        exchanges: Exchanges,
        choices: Choices,
        dialer: Dialer,
        key: bytes = b"",
        tls: UpstreamTls = DEFAULT_TLS,
        *,
        proves: bool = True,
    ) -> None:
        """`wanted` are the engines of the settings; `tls` is for engines with https: URLs.

        `gateway_id` is with each model in this gateway's list: what comes back is passed over.

        Unless `proves` is False, an engine that publishes events is tested: its events must agree
        with its tokens, or its cache is predicted.
        """
        self.gateway_id = gateway_id.encode()
        self.each: dict[int, Upstream] = {}
        self.followed: dict[Wanted, FollowedName] = {}
        self.refused = 0  # beyond MAX_UPSTREAMS
        self.changes = 0  # how often an owner has begun or ceased to want an engine or a name
        self._exchanges = exchanges
        self._choices = choices
        self._dialer = dialer
        self._key = key
        self._tls = tls
        self._tls_context: ssl.SSLContext | None = None  # made for the first that needs it
        self._canary = Canary(exchanges, choices) if proves else None
        self._changing = trio.Lock()
        # What each name that clients may use stands for. Engines may have the same name for
        # different models, or for an adapter: each of these has its own fleet.
        self.names: dict[str, list[Served]] = {}
        self._by_served: dict[Served, _Engines] = {}  # a cache, cleared when any engine changes
        # The tasks that follow new engines and names, on their way to the nursery of `run`.
        self._put_task, self._tasks = trio.open_memory_channel[Callable[[], Awaitable[None]]](
            math.inf
        )
        for each in wanted:
            self.want(each, SETTINGS)

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self.each.values())

    async def run(self) -> None:
        """Follows every engine, and every name, until it is cancelled."""
        if not self.each and not self.followed:
            log.warning("upstreams_missing")
        async with trio.open_nursery() as nursery:
            async for task in self._tasks:
                nursery.start_soon(task)

    async def all_met(self) -> None:
        """Waits until every name has been looked up and every engine asked once what it is.

        A lookup or a question that failed counts as well.
        """
        for name in list(self.followed.values()):
            await name.met.wait()
        for upstream in list(self):
            await upstream.met.wait()

    # ---- engines that come and go

    def want(self, wanted: Wanted, owner: str) -> Upstream | FollowedName:
        """Follows an engine, or the engines behind a name, on behalf of an owner.

        Raises Conflict if the owner wants it already, or if it is followed with another role;
        Unavailable beyond MAX_UPSTREAMS.
        """
        found = self._find(wanted)
        if found is None:
            found = self._admit(wanted)
        elif owner in found.owners:
            raise Conflict(f"{wanted.url} is registered already")
        elif isinstance(found, Upstream) and found.prefills != wanted.prefills:
            raise Conflict(f"{wanted.url} is registered already, with another role")
        found.owners.add(owner)
        self.changes += 1
        return found

    def unwant(self, wanted: Wanted, owner: str) -> None:
        """Stops following an engine, or the engines behind a name, if no other owner wants it.

        Its answers under way go on. Raises NotFound if this owner does not want it.
        """
        found = self._find(wanted)
        if found is None:
            raise NotFound(f"{wanted.url} is not registered")
        if owner not in found.owners:
            others = " and ".join(sorted(found.owners))
            raise NotFound(f"{wanted.url} comes from the {others}, and is removed there")
        found.owners.discard(owner)
        self.changes += 1
        if found.owners:
            return
        if isinstance(found, FollowedName):
            del self.followed[wanted]
            for url in list(found.urls):
                self.unwant(Wanted(url, wanted.prefills), wanted.url)
        else:
            del self.each[found.worker_id]
            found.changed()
            self._name()
            log.info("upstream_left", url=found.url)
        found.following.cancel()

    def holds(self, wanted: Wanted, owner: str) -> Upstream | FollowedName | None:
        """Returns the engine or name that an owner wants, None if this owner does not want it."""
        found = self._find(wanted)
        return found if found is not None and owner in found.owners else None

    def _find(self, wanted: Wanted) -> Upstream | FollowedName | None:
        if wanted.name is not None:
            return self.followed.get(wanted)
        return self.each.get(worker_id_of(parse_upstream(wanted.url)))

    def _admit(self, wanted: Wanted) -> Upstream | FollowedName:
        if len(self.each) + len(self.followed) >= MAX_UPSTREAMS:
            self.refused += 1
            raise Unavailable(f"the limit of {MAX_UPSTREAMS} upstreams is reached")
        found: Upstream | FollowedName
        if wanted.name is not None:
            found = self.followed[wanted] = FollowedName(wanted)
            self._put_task.send_nowait(partial(found.run, self, self._dialer))
        else:
            found = upstream_of(wanted, self.gateway_id, self._key, self._by_served.clear)
            self.each[found.worker_id] = found
            found.changed()
            self._put_task.send_nowait(partial(self._watch, found))
        return found

    def serving(self, served: Served) -> Sequence[Upstream]:
        """Returns the healthy engines that serve a model: the same object until any changes.

        If no prefill engine is healthy, or no other one, those in doubt are among them. A request
        that an engine does not answer is tried with others, and puts all of them out; those may be
        well nevertheless.
        """
        return self._engines_of(served).serving

    def keepers(self, served: Served) -> Sequence[Upstream]:
        """Returns the engines of a model that may keep a response, healthy or in doubt."""
        return self._engines_of(served).keepers

    def prefills(self, served: Served) -> bool:
        """Returns whether prefill engines are meant for a model, well or not."""
        return self._engines_of(served).prefills

    def basis(self, served: Served) -> bytes:
        """Returns what the blocks of a model's prompts depend on, as its healthy engines say it.

        Under a name that stays, an engine may come back with another model or block size.
        """
        return self._engines_of(served).basis

    def _engines_of(self, served: Served) -> _Engines:
        found = self._by_served.get(served)
        if found is None:
            serving: list[Upstream] = []
            in_doubt: list[Upstream] = []
            prefills = False
            for one in self:
                serves = one.facts is None or _serves(one.facts, served)  # unknown engines may
                prefills = prefills or (serves and one.role is Role.PREFILL)
                if serves and one.facts is not None and one.state is UpstreamState.SERVING:
                    serving.append(one)
                elif serves and one.in_doubt:
                    in_doubt.append(one)
            keepers = tuple(serving + in_doubt)
            # Prefill engines do not stand in for the others, nor these for them.
            healthy = {one.role is Role.PREFILL for one in serving}
            serving += [one for one in in_doubt if (one.role is Role.PREFILL) not in healthy]
            found = _Engines(tuple(serving), keepers, prefills, _basis(serving))
            self._by_served[served] = found
        return found

    def advice_about(self, upstream: Upstream) -> str | None:
        """Returns what an engine lacks, so that it can be served better; None if nothing."""
        facts = upstream.facts
        if upstream.advice is not None or upstream.state is not UpstreamState.SERVING:
            return upstream.advice
        assert facts is not None
        why = self._choices.fault_of_events(record_of(upstream, facts))
        return None if why is None else f"{UNHEARD}: {why}"

    def only_name(self) -> str | None:
        """Returns the only base model, None if there is none or several."""
        bases = {served.model for each in self.names.values() for served in each}
        return next(iter(bases)) if len(bases) == 1 else None

    def resolve_model(self, name: str) -> Served | None:
        """Returns what a name stands for: of several models the first with a healthy engine."""
        found = self.names.get(name)
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        return next((served for served in found if self.serving(served)), found[0])

    def all_known(self) -> bool:
        """Returns whether every engine has said what it serves."""
        return all(upstream.facts is not None for upstream in self)

    async def _watch(self, upstream: Upstream) -> None:
        with upstream.following:
            await self._keep_known(upstream)
        async with self._changing:  # it has been left, but may be wanted again meanwhile
            if upstream.worker_id not in self.each:
                await self._choices.deregister(upstream.worker_id)
        if upstream.engine is not None:
            self._exchanges.relay.remove_engine(upstream.engine)
            upstream.engine = None  # the next engine may get this number
        if upstream.tunnel is not None:
            upstream.tunnel.leave()

    async def _keep_known(self, upstream: Upstream) -> NoReturn:
        retry_s = RETRY_S
        while True:
            upstream.failed = trio.Event()
            if upstream.state is UpstreamState.SERVING:
                await self._check(upstream)
            else:
                await self._meet(upstream)
                upstream.met.set()
                await self._prove(upstream)
            now = trio.current_time()
            if upstream.state is UpstreamState.SERVING:
                retry_s = RETRY_S
                until = now + HEALTH_S
                if upstream.failures == 0:  # after a failure the next health check comes first
                    until = min(until, upstream.ask_at)
            else:
                until = now + retry_s
                retry_s = min(2 * retry_s, HEALTH_S)
            with trio.move_on_at(until):
                await upstream.failed.wait()

    async def _meet(self, upstream: Upstream) -> None:
        """Resolves an engine's address, checks its health and asks it what it is."""
        try:
            await self._resolve(upstream)
            if (fault := await self._fault(upstream)) is not None:
                raise NotAnEngine(fault)
            facts = await self._ask(upstream)
        except (NotAnEngine, ExchangeFailed, Unreachable, KvdError) as error:
            if upstream.problem != str(error):
                log.warning("upstream_unusable", url=upstream.url, reason=error)
            upstream.problem = str(error)
            if upstream.in_doubt:
                upstream.in_doubt = False
                upstream.changed()
            return
        upstream.state, upstream.problem, upstream.failures = UpstreamState.SERVING, None, 0
        upstream.in_doubt = False
        upstream.changed()
        log.info(
            "upstream_serving",
            url=upstream.url,
            engine=facts.kind.value,
            models=",".join(facts.names),
            block_size=facts.block_size,
            events=len(facts.events),
        )

    async def _prove(self, upstream: Upstream) -> None:
        """Tests whether an engine's events agree with its tokens; if not, predicts its cache."""
        facts = upstream.facts
        if self._canary is None or facts is None or upstream.state is not UpstreamState.SERVING:
            return
        assert upstream.engine is not None
        agrees = await self._canary.agrees(
            upstream.engine, upstream.authority, upstream.key, record_of(upstream, facts), facts
        )
        if agrees is not False:
            return
        log.warning("upstream_events_disagree", url=upstream.url)
        upstream.advice = DISAGREE
        with suppress(NotAnEngine, KvdError):  # its next health check finds the problem
            await self._register(upstream, facts)

    async def _ask(self, upstream: Upstream) -> Facts:
        """Asks an engine what it is, and registers it at the selection service."""
        assert upstream.engine is not None
        upstream.asked_at = trio.current_time()
        upstream.ask_at = upstream.asked_at + REFRESH_S
        probe = Probe(
            self._exchanges, upstream.engine, upstream.target, upstream.key, self.gateway_id
        )
        facts = await probe.ask()
        if self._doubts(upstream, probe.faults):
            assert upstream.facts is not None
            return upstream.facts
        if upstream.advice != DISAGREE or upstream.state is not UpstreamState.SERVING:
            upstream.advice = facts.advice
        await self._register(upstream, facts)
        return facts

    def _doubts(self, upstream: Upstream, faults: frozenset[str]) -> bool:
        """Returns whether to keep what an engine has said before, as it has failed to say it now.

        A path that is never answered well, or not MAX_FAILURES times in a row, counts as missing.
        """
        doubts = bool(faults - upstream.faults) and upstream.state is UpstreamState.SERVING
        if doubts and upstream.doubts < MAX_FAILURES:
            upstream.doubts += 1
            return True
        upstream.faults, upstream.doubts = faults, 0
        return False

    async def _resolve(self, upstream: Upstream) -> None:
        found = await self._dialer.addresses(upstream.target.host)
        address = next_address(found, upstream.address, failed=upstream.unreached)
        relay = self._exchanges.relay
        engine_address = address, upstream.target.port
        if upstream.target.tls:
            tunnel = upstream.tunnel or self._tunnel(upstream)
            tunnel.address = address
            engine_address = tunnel.name, 0
        if upstream.engine is None:
            upstream.engine = relay.add_engine(*engine_address)
        elif address != upstream.address:
            relay.move_engine(upstream.engine, *engine_address)
        upstream.address = address

    def _tunnel(self, upstream: Upstream) -> Tunnel:
        """Opens the tunnel to an engine with TLS; raises Unreachable."""
        name = self._tls.server_name or upstream.server_name or upstream.target.host
        try:
            context = self._tls_context = self._tls_context or self._tls.context()
            tunnel = Tunnel(upstream.target, context, name, self._exchanges.limits)
        except (OSError, ValueError) as error:
            raise Unreachable(str(error)) from None
        upstream.tunnel = tunnel
        self._put_task.send_nowait(tunnel.run)  # outlives an engine that is left: answers go on
        return tunnel

    async def _check(self, upstream: Upstream) -> None:
        problem = await self._fault(upstream)
        if problem is None and trio.current_time() >= upstream.ask_at:
            try:
                await self._ask(upstream)  # adapters come and go
            except Unanswered as error:
                problem, upstream.ask_at = str(error), upstream.asked_at
            except (NotAnEngine, ExchangeFailed, KvdError) as error:
                if not (isinstance(error, ExchangeFailed) and upstream.lacks_room(error)):
                    upstream.note_gone(str(error))
                    return
        upstream.problem = problem
        if problem is None:
            upstream.failures = 0
            return
        upstream.failures += 1
        if upstream.failures >= MAX_FAILURES:
            upstream.note_gone(problem)

    async def _fault(self, upstream: Upstream) -> str | None:
        """Asks an engine for its health, a cheap question; returns what is wrong, None if well."""
        assert upstream.engine is not None
        is_sglang = upstream.facts is not None and upstream.facts.kind is EngineKind.SGLANG
        path = "/ready" if is_sglang else "/health"
        head = own_head("GET", path, upstream.authority, 0, upstream.key)
        status, problem = 0, f"{path} has not answered within {HEALTH_TIMEOUT_S:g} s"
        try:
            with trio.move_on_after(HEALTH_TIMEOUT_S):
                answer = await self._exchanges.ask(upstream.engine, head, b"", HEALTH_BYTES)
                status = answer.status
        except ExchangeFailed as error:
            if upstream.state is UpstreamState.SERVING and upstream.lacks_room(error):
                return None  # this says nothing of the engine
            if upstream.outcome_of(error.outcome) is ExchangeOutcome.UNREACHABLE:
                upstream.note_ended()
            problem = upstream.fault_of(str(error))
        upstream.unreached = not status
        if upstream.unreached:
            return problem
        if status in (200, 204, 404):  # 404: an engine without that path answers at least
            if upstream.note_answered() and upstream.facts is not None:
                self._choices.note_emptied(record_of(upstream, upstream.facts))
            return None
        return f"{path} answers {status}"

    async def _register(self, upstream: Upstream, facts: Facts) -> None:
        """Registers the engine as a worker, or again if its description has changed."""
        async with self._changing:
            self._check_role(upstream, facts)
            if upstream.advice == DISAGREE:
                facts = replace(facts, events={}, replays={})
            reasons = await self._choices.register(record_of(upstream, facts))
            upstream.facts = facts
            upstream.changed()
            self._name()
            if reasons:
                raise NotAnEngine("; ".join(reasons))

    def _check_role(self, upstream: Upstream, facts: Facts) -> None:
        """Raises NotAnEngine for a prefill engine that cannot hand over to others of its model."""
        if not upstream.prefills and facts.role is not Role.PREFILL:
            return
        if facts.kind is EngineKind.OPENAI:
            raise NotAnEngine("a prefill engine must be vLLM or SGLang")
        if facts.kind is EngineKind.SGLANG and facts.role is not Role.PREFILL:
            mode = "null" if facts.role is None else facts.role
            text = f"the engine's disaggregation_mode is {mode}, not prefill"
            raise NotAnEngine(f"{text}: start it with --disaggregation-mode prefill")
        for other in self:
            known = other.facts
            if other is upstream or known is None or other.role is not Role.PREFILL:
                continue
            if known.models[0].name == facts.models[0].name and known.kind is not facts.kind:
                text = f"the engine is {facts.kind}, {other.url} is {known.kind}"
                raise NotAnEngine(f"{text}: all prefill engines of a model must be of one kind")

    def _name(self) -> None:
        """Finds out anew what each name stands for."""
        self.names = {}
        for upstream in self:
            if upstream.facts is None:
                continue
            for listed in upstream.facts.models:
                found = self.names.setdefault(listed.name, [])
                served = _served(upstream.facts, listed)
                if served not in found:
                    found.append(served)


def _served(facts: Facts, listed: ListedModel) -> Served:
    base, adapter = facts.models[0].name, listed.adapter
    return Served(base, adapter, listed.name if listed.name != (adapter or base) else None)


def _serves(facts: Facts, served: Served) -> bool:
    return any(
        listed.name == served.name and _served(facts, listed) == served for listed in facts.models
    )


def _basis(serving: Sequence[Upstream]) -> bytes:
    # vLLM's `root` is where it has loaded the model from.
    each = {
        (str(one.facts.models[0].members.get("root")), one.facts.block_size)
        for one in serving
        if one.facts is not None
    }
    return repr(sorted(each)).encode()
