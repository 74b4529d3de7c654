"""Probes of engines that cannot be reached."""

from __future__ import annotations

import trio

from kvd.net.dialing import Dialer
from kvd.net.probing import AFTER_S, PROBES_A_PASS, PROBES_AT_ONCE, Prober
from kvd.wire.event_stream import EventStream
from tests.support.listening import Applied
from tests.support.ports import find_free_port
from tests.support.zmtp_fakes import NOT_MY_FAULT_S


class Counting(Dialer, trio.abc.Instrument):
    """Counts the probes that begin in each pass of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = [0]

    def after_io_wait(self, timeout: float) -> None:
        self.begun.append(0)

    async def endpoint(self, endpoint: str) -> str:
        self.begun[-1] += 1
        return await super().endpoint(endpoint)


async def test_a_few_probes_begin_in_a_pass_and_a_bounded_number_at_once() -> None:
    dialer, now = Counting(), trio.current_time()
    unserved = f"tcp://127.0.0.1:{find_free_port()}"
    listeners = [EventStream(f"{n}:0", unserved, Applied()) for n in range(PROBES_AT_ONCE + 1)]
    trio.lowlevel.add_instrument(dialer)
    try:
        async with trio.open_nursery() as nursery:
            prober = Prober(nursery, dialer, NOT_MY_FAULT_S)
            for listener in listeners:
                prober.note_state(listener, now)
            await prober.start(now + AFTER_S)
    finally:
        trio.lowlevel.remove_instrument(dialer)
    assert sum(dialer.begun) == PROBES_AT_ONCE
    assert max(dialer.begun) <= PROBES_A_PASS
    refused = [each for each in listeners if each.link.last_error is not None]
    assert len(refused) == PROBES_AT_ONCE


async def test_who_leaves_before_its_turn_is_not_probed() -> None:
    dialer, now = Counting(), trio.current_time()
    unserved = f"tcp://127.0.0.1:{find_free_port()}"
    listeners = [EventStream(f"{n}:0", unserved, Applied()) for n in range(4 * PROBES_A_PASS + 1)]
    async with trio.open_nursery() as nursery:
        prober = Prober(nursery, dialer, NOT_MY_FAULT_S)
        for listener in listeners:
            prober.note_state(listener, now)
        nursery.start_soon(prober.start, now + AFTER_S)
        while not sum(dialer.begun):
            await trio.lowlevel.checkpoint()
        prober.forget(listeners[-1])  # some passes before it would be probed
    assert sum(dialer.begun) == 4 * PROBES_A_PASS
