"""Lets tasks use the relay: await an engine's answer where it begins and where it ends.

One task moves bytes whenever the relay's epoll set is readable. The tasks of requests sleep until
their answer begins, and again until it has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from types import TracebackType

import trio

from kvd.http.idle_poll import Turn, polled_when_idle
from kvd.http.untasked import Signal, has_task, signalled
from kvd.telemetry.stretches import RELAY
from kvd_core.relay.relay import NO_CLIENT, SOME, Answer, Ending, ExchangeOutcome, Relay

# Time for which the relay serves its events in a row before other tasks run.
TURN_NS = 500_000
# Time to connect to an engine.
CONNECT_S = 2.0
# Pause between two checks for exchanges that take too long.
SWEEP_S = 0.25


# Why an engine has not answered, for operators and clients.
FAILURE_TEXTS = {
    ExchangeOutcome.UNREACHABLE: "unreachable: nothing accepts connections there",
    ExchangeOutcome.NO_ANSWER: "the connection was closed before an answer",
    ExchangeOutcome.BROKEN: "an answer was broken off",
    ExchangeOutcome.MALFORMED: "an answer was malformed or too long",
    ExchangeOutcome.CONNECT_TIME: "no connection was accepted in time",
    ExchangeOutcome.SILENCE: "nothing was sent for too long",
    ExchangeOutcome.NO_ROOM: "kvd has no descriptor, port or memory left for a connection",
}


# Outcomes that show that an engine cannot be used now. Others may be due to the question, or to
# this process.
GONE = frozenset(
    (
        ExchangeOutcome.UNREACHABLE,
        ExchangeOutcome.CONNECT_TIME,
        ExchangeOutcome.NO_ANSWER,
        ExchangeOutcome.BROKEN,
    )
)


# Outcomes after which an engine may be well: the request may have been at fault.
IN_DOUBT = frozenset(
    (
        ExchangeOutcome.NO_ANSWER,
        ExchangeOutcome.BROKEN,
        ExchangeOutcome.MALFORMED,
        ExchangeOutcome.CLOSED,
    )
)


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Time limits of an exchange, in seconds."""

    connect_s: float = CONNECT_S
    silence_s: float = 600.0  # without a byte from the engine, which is silent in a long prefill
    client_s: float = 60.0  # without a byte taken by the client
    idle_s: float = 3.0  # of a kept connection: engines close theirs after 5 s
    gone_s: float = 60.0  # without a sign of life of an engine's host, by whole seconds
    filler_s: float = 30.0  # proxies give up a silent stream after 60 s; 0: no filler


class ExchangeFailed(Exception):
    """An engine has not answered a request of the gateway's own."""

    def __init__(self, outcome: ExchangeOutcome) -> None:
        super().__init__(FAILURE_TEXTS[outcome])
        self.outcome = outcome


class Exchanges:
    """All exchanges of a gateway."""

    def __init__(self, limits: RelayLimits) -> None:
        self.relay = Relay(self._notice)
        self.relay.set_limits(
            limits.connect_s, limits.silence_s, limits.client_s, limits.idle_s, limits.gone_s
        )
        self.limits = limits
        self._waiting: dict[int, trio.lowlevel.Task | Signal] = {}

    async def run(self) -> None:
        """Moves bytes until it is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sweep)
            with polled_when_idle(self, Turn.ANSWERS, TURN_NS) as between:
                while True:
                    await trio.lowlevel.wait_readable(self.fileno())
                    between.warm = True
                    while between.serve_row() == SOME:
                        await trio.lowlevel.checkpoint()

    def fileno(self) -> int:
        return self.relay.fileno()

    def serve_ready(self, budget_ns: int, /) -> int:
        """Moves the bytes that have come, within a time budget; returns NOTHING, ALL or SOME."""
        with RELAY:
            return self.relay.serve_ready(budget_ns)

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(SWEEP_S)
            self.relay.sweep()

    def begin(
        self, engine: int, head: bytes, body: bytes, hold: int, client_fd: int = NO_CLIENT
    ) -> Exchange:
        """Sends a request to an engine; at most `hold` bytes of the answer wait to be forwarded."""
        return Exchange(self, self.relay.begin(engine, client_fd, head, body, hold))

    async def ask(self, engine: int, head: bytes, body: bytes, limit: int) -> Answer:
        """Returns the whole answer to a request of the gateway's own; raises ExchangeFailed."""
        with self.begin(engine, head, body, limit) as exchange:
            answer = await exchange.begins()
            if answer is None:
                raise ExchangeFailed(exchange.ending().outcome)
            if not answer.whole:
                raise ExchangeFailed(ExchangeOutcome.MALFORMED)
            return answer

    def noticed(self, exchange: int) -> Awaitable[None]:
        """Waits for the next notice of an exchange that has not ended."""
        if has_task():
            return self._noticed_in_task(exchange)
        signal = self._waiting[exchange] = Signal()
        return signalled(signal)

    async def _noticed_in_task(self, exchange: int) -> None:
        self._waiting[exchange] = trio.lowlevel.current_task()

        def forget(_: object) -> trio.lowlevel.Abort:
            del self._waiting[exchange]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(forget)

    def drop(self, exchange: int) -> None:
        """Drops an exchange, and the signal that waits for its notice if there is one."""
        self._waiting.pop(exchange, None)
        self.relay.drop(exchange)

    def _notice(self, exchange: int) -> None:
        waiting = self._waiting.pop(exchange, None)
        if isinstance(waiting, Signal):
            waiting.set()
        elif waiting is not None:
            trio.lowlevel.reschedule(waiting)


class Exchange:
    """One request to an engine; leaving its context aborts it, unless it has ended."""

    __slots__ = ("_all", "_id")

    def __init__(self, exchanges: Exchanges, exchange: int) -> None:
        self._all = exchanges
        self._id = exchange

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._all.drop(self._id)

    async def begins(self) -> Answer | None:
        """Waits for the beginning of the answer; None if the exchange has ended without one."""
        relay = self._all.relay
        if not relay.ready(self._id) and not relay.ended(self._id):
            await self._all.noticed(self._id)
        elif has_task():
            await trio.lowlevel.checkpoint()
        return relay.answer(self._id) if relay.ready(self._id) else None

    @property
    def waits(self) -> bool:
        """Whether its answer waits to be forwarded; False once the client has left."""
        return self._all.relay.ready(self._id)

    def forward(self, head: bytes, *, chunked: bool, marked: bool = False) -> None:
        """Sends the answer on to the client, behind this head.

        The stream of a `marked` one ends with [DONE]; without that its outcome is CLOSED.
        """
        self._all.relay.forward(self._id, head, chunked, marked)

    def fill(self, filler: bytes) -> None:
        """Sends `filler` to the client whenever a stream is silent for `filler_s`."""
        self._all.relay.fill(self._id, filler, self._all.limits.filler_s)

    async def ends(self) -> Ending:
        """Waits until the exchange has ended; returns how it went."""
        while not self._all.relay.ended(self._id):
            await self._all.noticed(self._id)
        return self.ending()

    def ending(self) -> Ending:
        """Returns how an exchange that has ended went."""
        return self._all.relay.ending(self._id)
