"""Follows one engine: finds its address, asks what it is, and whether it is well.

    UNKNOWN ── probed ──> SERVING <── a health check succeeds ── OUT
       ^                     └── refused, reset, 3 failed health checks ──^
       └──────────── well again: asked anew, as another engine may be there now

The health checks of an engine that shuts down succeed until it ends. So one that says by a request
that it does so is out until its next health check, and again after the next request.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NoReturn

import trio

from kvd.errors import KvdError
from kvd.gateway.canary import Canary
from kvd.gateway.choices import Choices
from kvd.gateway.exchanges import ExchangeFailed, Exchanges
from kvd.gateway.heads import own_head
from kvd.gateway.probing import EngineKind, Facts, NotAnEngine, Probe, Unanswered
from kvd.gateway.tunnels import Tunnel, UpstreamTls
from kvd.gateway.upstream import Upstream, UpstreamState, record_of
from kvd.net.dialing import Dialer, Unreachable, next_address
from kvd.telemetry.logs import get_logger
from kvd_core.relay.relay import ExchangeOutcome

HEALTH_S = 5.0  # pause between two health checks of an engine
# Pause before the second try to reach an engine that is out; each next one is twice as long.
RETRY_S = 0.1
HEALTH_TIMEOUT_S = 3.0  # time for the answer to a health check
MAX_FAILURES = 3  # failed health checks in a row before a serving engine is out
REFRESH_S = 30.0  # pause before a serving engine is asked again what it serves
HEALTH_BYTES = 64 * 1024  # bytes of an answer to a health check
DISAGREE = (
    "tokens and events do not agree: what it computed for a prompt of its own tokens was not in "
    "its events, so what it caches is predicted. Is its event endpoint another engine's?"
)

Task = Callable[[], Awaitable[None]]

log = get_logger(__name__)


class Follower:
    """Follows engines, each in a task of its own."""

    def __init__(
        self,
        gateway_id: bytes,
        exchanges: Exchanges,
        choices: Choices,
        dialer: Dialer,
        tls: UpstreamTls,
        register: Callable[[Upstream, Facts], Awaitable[None]],
        start: Callable[[Task], None],
        *,
        proves: bool,
    ) -> None:
        """`register` makes known what an engine says of itself, and raises NotAnEngine or KvdError.

        `start` runs a task that may outlive an engine that is left. With `proves`, engines that
        publish events are tested.
        """
        self._gateway_id = gateway_id
        self._exchanges = exchanges
        self._choices = choices
        self._dialer = dialer
        self._tls = tls
        self._tls_context: ssl.SSLContext | None = None  # made for the first that needs it
        self._register = register
        self._start = start
        self._canary = Canary(exchanges, choices) if proves else None

    async def keep_known(self, upstream: Upstream) -> NoReturn:
        """Keeps the state of an engine, until it is cancelled."""
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
            self._exchanges, upstream.engine, upstream.target, upstream.key, self._gateway_id
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
        self._start(tunnel.run)  # outlives an engine that is left: answers go on
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
