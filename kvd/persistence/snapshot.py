"""The index in a file: the position of each stream, and a dump of the blocks.

    positions of streams, in slices ───┐
    dump, in slices ───────────────────┼──> index.new ── fsync, rename ──> index
    publishers, the same (holdings.py) ┘
    index ──> checked whole, staged ──> planned ──> blocks ──> streams go on at their positions

Positions are taken before the dump begins. Blocks that are stored after a position may already be
in the dump; the replay from that position announces them again, which does no harm. But a rank or
publisher that has been unregistered meanwhile lacks blocks in the dump, even if it is registered
again. So its position is withdrawn behind the dump. The dump has the binary form of `GET /dump`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import trio

from kvd.index.dumps import binary_dump
from kvd.index.partitions import State
from kvd.index.publishers import Publishers
from kvd.index.registry import KeptPosition, Registry
from kvd.model import PartitionKey, RankKey
from kvd.net.recovery import MAX_RANKS
from kvd.persistence import holdings
from kvd.persistence.directory import NewFile, StateDirectory
from kvd.persistence.frames import (
    Content,
    Damaged,
    Frame,
    Header,
    Reading,
    frame,
    packed,
    unpacked,
)
from kvd.persistence.holdings import NO_ROOM, Holdings, HoldingsReader, unpacked_position
from kvd.wire.losses import with_loss
from kvd.wire.position import NOWHERE
from kvd_core.dump.recovery import DumpReader, StagedEntry

# Kinds of frames.
POSITIONS = ord("K")  # positions of at most SLICE_POSITIONS streams
DUMP = ord("D")  # a piece of the dump

SLICE_POSITIONS = 32  # streams examined between two checkpoints: about 0.3 ms
PIECE_BYTES = 256 * 1024  # bytes of the dump in one frame, read between two checkpoints: 0.5 ms
WRITE_BYTES = 1024 * 1024  # bytes of a snapshot that a thread writes at once
READ_BYTES = 4 * 1024 * 1024  # bytes of a snapshot that a thread reads at once

# Blocks that a snapshot may have: no bound in practice, since an index of this machine had them.
MAX_BLOCKS = 2**40


@dataclass(slots=True)
class Snapshot:
    """A snapshot that was read as a whole, and is not in the index yet."""

    header: Header
    positions: dict[RankKey, KeptPosition] = field(default_factory=dict)
    entries: list[StagedEntry] = field(default_factory=list)
    holdings: Holdings = field(default_factory=Holdings)

    @property
    def blocks(self) -> int:
        """The number of blocks, counted once for each rank and tier, or holder and medium."""
        return sum(entry.blocks for entry in (*self.entries, *self.holdings.entries))

    def note_no_room(self) -> None:
        """Notes that the index has refused blocks of ranks, of which nobody knows."""
        for rank, (endpoint, position) in self.positions.items():
            self.positions[rank] = endpoint, with_loss(position, NO_ROOM)


async def write(
    directory: StateDirectory,
    header: Header,
    state: State,
    registry: Registry,
    publishers: Publishers,
) -> int:
    """Writes a snapshot and returns its size; if it raises OSError, the last snapshot stays.

    Other tasks run meanwhile: the loop is held up for about 0.3 ms at a time.
    """
    to_thread = trio.to_thread.run_sync
    writing = await to_thread(directory.begin, header)
    try:
        waiting: list[tuple[int, bytes]] = []
        size = 0
        for kind, content in chain(
            _contents(state, registry), holdings.contents(state, publishers)
        ):
            if content:
                waiting.append((kind, content))
                size += len(content)
            if size >= WRITE_BYTES:
                await to_thread(_write, writing, waiting)
                waiting, size = [], 0
            await trio.lowlevel.checkpoint()
        await to_thread(_write, writing, waiting)
    except BaseException:
        writing.drop()
        raise
    return await to_thread(writing.finish)


def _write(writing: NewFile, contents: list[tuple[int, bytes]]) -> None:
    for kind, content in contents:
        writing.write(frame(kind, content))


def _contents(state: State, registry: Registry) -> Iterator[tuple[int, bytes]]:
    """Yields the kind and content of each frame; content b"" only lets other tasks run."""
    rows: list[object] = []
    known = list(registry.registrations())
    for registration in known:
        listener = registration.listener
        rows.append((registration.key, listener.endpoint, listener.batches.position()))
        if len(rows) == SLICE_POSITIONS:
            yield POSITIONS, packed(rows)
            rows = []
    yield POSITIONS, packed(rows)
    pieces: list[bytes] = []
    size = 0
    for piece in binary_dump(state):
        pieces.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield DUMP, b"".join(pieces)
            pieces, size = [], 0
        else:
            yield DUMP, b""
    yield DUMP, b"".join(pieces)
    gone = [each for each in known if registry.find(each.key) is not each]
    for start in range(0, len(gone), SLICE_POSITIONS):
        some = gone[start : start + SLICE_POSITIONS]
        yield POSITIONS, packed([(each.key, each.listener.endpoint, NOWHERE) for each in some])


async def read(path: Path) -> Snapshot:
    """Returns a snapshot, checked as a whole; raises OSError and Damaged."""
    reading = await trio.to_thread.run_sync(Reading, path)
    try:
        if reading.header.content is not Content.INDEX:
            raise Damaged(f"it holds {reading.header.content}, not an index")
        snapshot = Snapshot(reading.header)
        reader = DumpReader(
            True,
            max_blocks=MAX_BLOCKS,
            max_events=MAX_BLOCKS,
            max_entries=MAX_RANKS,
            max_ranks=MAX_RANKS,
        )
        held = HoldingsReader(MAX_BLOCKS, MAX_RANKS)
        frames = reading.whole_frames()
        while batch := await trio.to_thread.run_sync(_some, frames):
            for each in batch:
                _take(snapshot, reader, held, each)
                await trio.lowlevel.checkpoint()
        snapshot.entries = reader.finish()
        snapshot.holdings = held.finish()
    except ValueError as error:
        raise Damaged(f"its dump is not understood: {error}") from None
    finally:
        reading.close()
    return snapshot


def _some(frames: Iterator[Frame]) -> list[Frame]:
    """In a thread: returns the next frames, in total READ_BYTES or a little more."""
    found: list[Frame] = []
    size = 0
    for each in frames:
        found.append(each)
        size += len(each.content)
        if size >= READ_BYTES:
            break
    return found


def _take(snapshot: Snapshot, reader: DumpReader, held: HoldingsReader, found: Frame) -> None:
    if found.kind == POSITIONS:
        snapshot.positions.update(_positions(found.content))
    elif found.kind == DUMP:
        reader.feed(found.content)
    elif found.kind in holdings.KINDS:
        held.take(found.kind, found.content)
    else:
        raise Damaged(f"it has a part of the unknown kind {found.kind}")


def _positions(content: bytes) -> Iterator[tuple[RankKey, KeptPosition]]:
    try:
        for (key, instance_id, dp_rank), endpoint, position in unpacked(content):
            rank = RankKey(PartitionKey(*key), instance_id, dp_rank)
            yield rank, (endpoint, unpacked_position(position))
    except (TypeError, ValueError) as error:
        raise Damaged(f"the positions of its streams are not understood: {error}") from None
