"""Collects metrics of gateway processes that share a port, and of the kvd that chooses for them.

A client of the shared port reaches any one of them. That process answers an operator for all: it
asks the others over their own Unix sockets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import trio

from kvd.gateway.exchanges import ExchangeFailed, Exchanges
from kvd.gateway.heads import own_head
from kvd.telemetry.metrics import Family, counter

ANSWER_S = 1.0  # time in which another process returns its metrics
TEXT_BYTES = 64 * 1024 * 1024  # bytes of another process's metrics
KVD = "kvd"  # the process that chooses


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies this process among several."""

    name: str
    sockets: Mapping[str, str]  # paths, by the name of the process that listens there
    restarts: int  # of this process since the service was started
    token: bytes = field(repr=False, default=b"")  # which the processes at these sockets accept

    @property
    def gateway_id(self) -> str:
        """Returns an id that all processes of this gateway have, and nobody else."""
        return hashlib.blake2b(self.token, digest_size=8).hexdigest()

    @property
    def prefix(self) -> str:
        """Returns the beginning of ids that no other process makes."""
        return f"{self.name_prefix}{self.restarts}-"

    @property
    def name_prefix(self) -> str:
        """Returns what the ids of all processes of this name begin with: it may be a later one."""
        return f"{self.name}-{self.gateway_id}."

    def families(self) -> Iterator[Family]:
        """Yields the metrics of the process itself."""
        help = "Number of times the process has been started again after it ended"
        yield counter("kvd_process_restarts_total", help, self.restarts)


class Siblings:
    """Asks the other processes for their metrics."""

    def __init__(self, identity: ProcessIdentity, exchanges: Exchanges) -> None:
        self.identity = identity
        self._exchanges = exchanges
        self._engines = {
            name: exchanges.relay.add_engine(path, 0)
            for name, path in identity.sockets.items()
            if name != identity.name
        }

    async def metrics(self, name: str) -> bytes | None:
        """Returns the metrics of one process; None if it does not answer in time."""
        path = f"/metrics?process={name}"
        head = own_head("GET", path, b"localhost", 0, self.identity.token)
        with trio.move_on_after(ANSWER_S):
            try:
                engine = self._engines[name]
                answer = await self._exchanges.ask(engine, head, b"", TEXT_BYTES)
            except ExchangeFailed:  # it has just ended, which kvd_process_up shows
                return None
            return answer.held if answer.status == 200 else None
        return None

    async def every_metrics(self, own: bytes) -> dict[str, bytes | None]:
        """Returns the metrics of each process, `own` for this one, in a fixed order."""
        found: dict[str, bytes | None] = {self.identity.name: own}

        async def ask(name: str) -> None:
            found[name] = await self.metrics(name)

        async with trio.open_nursery() as nursery:
            for name in self._engines:
                nursery.start_soon(ask, name)
        return {name: found[name] for name in self.identity.sockets}
