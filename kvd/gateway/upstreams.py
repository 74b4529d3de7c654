"""The engines behind the gateway: which there are, and which of them serve a model.

    want ──> followed (following) ──> registered: named, and chosen for requests ──> unwant

Every upstream is a worker of the selection service. The worker's id is made from the URL, so it is
the same after a restart and for every gateway. An upstream stays as long as an owner wants it: the
settings, the fleet file, a call, or a name that leads to it (`kvd.gateway.dns_names`). After that
it gets no new requests, and finishes its answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import trio

from kvd.errors import Conflict, NotFound, Unavailable
from kvd.gateway.choices import Choices
from kvd.gateway.dns_names import FollowedName, Wanted
from kvd.gateway.exchanges import Exchanges
from kvd.gateway.following import DISAGREE, Follower, Task
from kvd.gateway.probing import (
    EngineKind,
    Facts,
    ListedModel,
    NotAnEngine,
)
from kvd.gateway.tunnels import UpstreamTls
from kvd.gateway.upstream import Upstream, UpstreamState, record_of, upstream_of, worker_id_of
from kvd.net.dialing import Dialer
from kvd.selection.worker_record import Role
from kvd.telemetry.logs import get_logger
from kvd.wire.urls import parse_upstream

# Engines and names that lead to engines, some 2 KB each; further ones are refused.
MAX_UPSTREAMS = 4096

DEFAULT_TLS = UpstreamTls()
# The owners of engines and of names; a name owns the engines that it leads to, by its URL.
SETTINGS = "settings"
CALLS = "calls"  # POST /upstreams
FLEET_FILE = "fleet file"

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
        self._changing = trio.Lock()
        # What each name that clients may use stands for. Engines may have the same name for
        # different models, or for an adapter: each of these has its own fleet.
        self.names: dict[str, list[Served]] = {}
        self._by_served: dict[Served, _Engines] = {}  # a cache, cleared when any engine changes
        # The tasks that follow new engines and names, on their way to the nursery of `run`.
        self._put_task, self._tasks = trio.open_memory_channel[Task](math.inf)
        self._follower = Follower(
            self.gateway_id,
            exchanges,
            choices,
            dialer,
            tls,
            self._register,
            self._put_task.send_nowait,
            proves=proves,
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
            await self._follower.keep_known(upstream)
        async with self._changing:  # it has been left, but may be wanted again meanwhile
            if upstream.worker_id not in self.each:
                await self._choices.deregister(upstream.worker_id)
        if upstream.engine is not None:
            self._exchanges.relay.remove_engine(upstream.engine)
            upstream.engine = None  # the next engine may get this number
        if upstream.tunnel is not None:
            upstream.tunnel.leave()

    async def _register(self, upstream: Upstream, facts: Facts) -> None:
        """Registers the engine as a worker, or again if its description has changed."""
        async with self._changing:
            self._check_role(upstream, facts)
            if upstream.advice == DISAGREE:
                facts = replace(facts, events={}, replays={})
            if (twin := self._twin(upstream, facts)) is not None:
                reasons = [f"it is the same engine as {twin.url}, and would count twice"]
            else:
                reasons = await self._choices.register(record_of(upstream, facts))
            upstream.facts = facts
            upstream.changed()
            self._name()
            if reasons:
                raise NotAnEngine("; ".join(reasons))

    def _twin(self, upstream: Upstream, facts: Facts) -> Upstream | None:
        """Returns the serving engine that is the same process, under another URL; None without one.

        Engines behind one proxy share its address, so their start decides as well.
        """
        if facts.started is None:
            return None
        address = upstream.address, upstream.target.port, facts.started
        for other in self:
            if other is upstream or other.state is not UpstreamState.SERVING or other.facts is None:
                continue
            if (other.address, other.target.port, other.facts.started) == address:
                return other
        return None

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
