"""A writer's view of all live requests: written to the server in pieces, merged by others.

    ledgers ── export, a slice at a time ──> pieces ──> list view:WRITER:N
                                                           │ whole
    view:WRITER <── its head ──────────────────────────────┘
        └──> others: head, pieces ──> Merge, then the stream from where the writer had read it

A view is written piece by piece while requests come and go. Each piece states how far the writer
had read when it was made, so a process that merges it knows which steps it already has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass, replace

import trio
from coredis.exceptions import WrongTypeError

from kvd.selection.affinity import Affinity
from kvd.shared_state.booked import BOUND, SCRATCH_BYTES, Faces
from kvd.shared_state.entries import (
    ENTRY_BYTES,
    MAX_ENTRY_BYTES,
    Dot,
    LedgerName,
    Name,
    Outputs,
    Unreadable,
)
from kvd.shared_state.keys import Keys
from kvd.shared_state.mirror import Mirror
from kvd.shared_state.outbox import Outbox
from kvd.shared_state.pieces import Piece, ViewHead
from kvd.shared_state.server import Client
from kvd.wire import affinity as sessions
from kvd_core.ledger.journal import Booked, Journal, read

# Time that a view is kept unless it is written anew: with default settings the bookings of a writer
# that is gone for longer have expired.
VIEW_S = 900
OLD_PIECES_S = 60  # time that pieces of a replaced view are kept for their readers

# Pieces of one view that are read, 16 GiB: a view that claims more is refused.
MAX_PIECES = 2**18

# Sessions, requests without a rank, and ended bookings in one piece: at most some 50 KB, and under
# 1 ms.
SESSIONS_A_PIECE = 256
ELSEWHERE_A_PIECE = 512
ENDED_A_PIECE = 512


@dataclass(slots=True)
class ViewStats:
    """The cost of views; plain numbers for metrics."""

    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0


class Views:
    """Writes this process's views."""

    def __init__(
        self,
        mirror: Mirror,
        outbox: Outbox,
        faces: Faces,
        affinity: Affinity | None,
        served: Collection[tuple[str, str | None]],
        at_rest: trio.Lock,
    ) -> None:
        """`at_rest` is a lock that is held while an entry is applied, from first step to last."""
        self.stats = ViewStats()
        self.number = 0  # of the last whole view
        self._begun = 0  # number of the last view that was begun
        self._mirror = mirror
        self._outbox = outbox
        self._faces = faces
        self._affinity = affinity
        self._served = served
        self._at_rest = at_rest
        self._scratch = Journal(SCRATCH_BYTES)
        self._server_s = 0.0  # the server's clock minus ours

    async def write(self, client: Client, keys: Keys, server_s: float) -> None:
        """Writes a view of the present live requests; raises what the client raises.

        The server's clock is `server_s` ahead of ours.
        """
        self._server_s = server_s
        progress = self._mirror.progress
        async with self._at_rest:
            await self._outbox.drain()
            numbers, position, own = progress.whole_numbers(), progress.position, progress.own
            ended = list(progress.ended)
        # A number is used once: the server may have a head whose writing seems to have failed, and
        # who reads its pieces must not get some of those of a later view.
        if self._begun != self.number:
            await client.delete([keys.pieces(progress.writer, self._begun)])
        self._begun = number = self._begun + 1
        name = keys.pieces(progress.writer, number)
        pieces = size = 0
        async with aclosing(self._pieces(ended)) as made:
            async for piece in made:
                content = piece.packed()
                await client.rpush(name, [content])
                if not pieces:  # so that it expires if this process ends before the view is whole
                    await client.expire(name, VIEW_S)
                pieces += 1
                size += len(content)
        head = ViewHead(number, pieces, size, numbers, position, own, list(self._served))
        await client.set(keys.view(progress.writer), head.packed(), ex=VIEW_S)
        if self.number:
            await client.expire(keys.pieces(progress.writer, self.number), OLD_PIECES_S)
        self.number = number
        self.stats.written += 1
        self.stats.written_bytes += size

    async def _pieces(self, ended: list[Dot]) -> AsyncGenerator[Piece, None]:
        for kind, face in self._faces.items():
            for owner in list(face.owners()):
                after: int | None = 0 if owner.ledger_block_size else None
                while after is not None:
                    async with self._at_rest:
                        await self._outbox.drain()
                        after = owner.ledger.export(self._scratch, after, ENTRY_BYTES)
                        records = self._scratch.take()
                        ledger = LedgerName(kind, owner.key, owner.ledger_block_size or 0)
                        piece = self._of_bookings(owner.ledger.number, ledger, records)
                    if records:
                        yield piece
        async with self._at_rest:
            elsewhere = [(name, known.dot) for name, known in self._mirror.waiting.items()]
        for at in range(0, len(elsewhere), ELSEWHERE_A_PIECE):
            yield replace(self._bare(), elsewhere=elsewhere[at : at + ELSEWHERE_A_PIECE])
        for at in range(0, len(ended), ENDED_A_PIECE):
            yield replace(self._bare(), ended=ended[at : at + ENDED_A_PIECE])
        if self._affinity is not None:
            for number, bound in enumerate(self._affinity.bound(), 1):
                self._scratch.put(BOUND, sessions.encode(bound))
                if number % SESSIONS_A_PIECE == 0:
                    yield replace(self._bare(), records=self._scratch.take())
            if len(self._scratch):
                yield replace(self._bare(), records=self._scratch.take())

    def _of_bookings(self, number: int, ledger: LedgerName, records: bytes) -> Piece:
        """Returns a piece with bookings of the ledger that has this number in their records."""
        mirror = self._mirror
        dots: list[Dot | None] = []
        outputs: list[list[Outputs] | None] = []
        also: list[list[Dot]] = []
        for booked in read(records):
            assert isinstance(booked, Booked)
            known = mirror.known(Name(ledger.face, ledger.key, booked.request_id))
            dots.append(None if known is None else known.dot)
            outputs.append(None if known is None else mirror.outputs_of(known, booked))
            also.append([] if known is None else list(known.also))
        return replace(
            self._bare(),
            ledgers={number: ledger},
            records=records,
            dots=dots,
            outputs=outputs,
            also=also,
        )

    def _bare(self) -> Piece:
        """Returns an empty piece."""
        progress, now = self._mirror.progress, trio.current_time()
        at = now + self._server_s
        return Piece(now, progress.position, progress.own, server_clock=at)


async def read_head(client: Client, keys: Keys, writer: str) -> ViewHead | None:
    """Returns the head of a writer's last view, None without one in a form known here.

    Raises Unreadable, and what the client raises.
    """
    # Unlike GET, this answers nothing if others made it a key of another type: a new view heals it.
    [content] = await client.mget([keys.view(writer)])
    return None if content is None else ViewHead.read(content)


async def read_pieces(
    client: Client, keys: Keys, writer: str, head: ViewHead, stats: ViewStats
) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of a view; raises Unreadable if not all of them are there."""
    if head.pieces > MAX_PIECES:
        raise Unreadable(f"the {head.pieces} pieces of a view exceed the limit of {MAX_PIECES}")
    name = keys.pieces(writer, head.number)
    for index in range(head.pieces):
        try:
            found = await client.lrange(name, index, index)
        except WrongTypeError as error:
            raise Unreadable(f"the pieces of a view are no list: {error}") from None
        if not found:
            raise Unreadable(f"piece {index} of a view is not there any more")
        content = next(iter(found))
        if len(content) > MAX_ENTRY_BYTES:
            raise Unreadable(f"a piece of a view is longer than {MAX_ENTRY_BYTES} bytes")
        stats.read_bytes += len(content)
        yield Piece.read(content)
    stats.read += 1
