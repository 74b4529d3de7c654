"""Pauses between two tries to reach an engine, or a kvd that chooses for the gateway."""

from __future__ import annotations

from itertools import pairwise

import trio
from trio.testing import MockClock

from kvd.gateway import following, remote_kvd
from kvd.gateway.dns_names import Wanted
from kvd.gateway.exchanges import Exchanges, RelayLimits
from kvd.gateway.remote import RemoteChoices
from kvd.gateway.upstreams import Upstreams
from kvd.net.dialing import Dialer, Unreachable

URL = "http://away:8000"
TRIES = 9


class Away(Dialer):
    """Finds no address, and notes when it was asked for one."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_at: list[float] = []
        self.tried_enough = trio.Event()

    async def addresses(self, host: str) -> list[str]:
        self.asked_at.append(trio.current_time())
        if len(self.asked_at) == TRIES:
            self.tried_enough.set()
        raise Unreachable(f"{host} is away")

    def pauses(self) -> list[float]:
        return [round(after - before, 6) for before, after in pairwise(self.asked_at)]


def doubling(first_s: float, longest_s: float) -> list[float]:
    return [min(first_s * 2**number, longest_s) for number in range(TRIES - 1)]


async def test_the_pauses_between_tries_double_from_the_first_on(autojump_clock: MockClock) -> None:
    dialer, exchanges = Away(), Exchanges(RelayLimits())
    choices = RemoteChoices((URL,), exchanges, dialer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(choices.run)
        await dialer.tried_enough.wait()
        nursery.cancel_scope.cancel()
    assert dialer.pauses() == doubling(remote_kvd.RETRY_S, remote_kvd.MAX_RETRY_S)
    dialer = Away()
    engines = Upstreams("g", [Wanted(URL)], exchanges, choices, dialer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engines.run)
        await dialer.tried_enough.wait()
        nursery.cancel_scope.cancel()
    assert dialer.pauses() == doubling(following.RETRY_S, following.HEALTH_S)
