"""Holdings of the conductor's publishers in a snapshot: stream positions and blocks.

    positions, numbers of events ─ in slices ┐
    blocks of each conductor's holders ──────┴──> frames of the snapshot
    frames ──> staged ──> matched with registered publishers ──> blocks ──> publishers go on

A publisher is found again by its key and address. The holdings of publishers that are not found are
left out; these are replayed from their beginning. Inside a dump a publisher is known by its index
among the publishers of its model, tenant and block size (kvd_core/conductor/kept_holdings.hpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import trio

from kvd.index.dumps import SLICE_BYTES
from kvd.index.partitions import SizedKey, State
from kvd.index.publishers import Publisher, PublisherKey, Publishers
from kvd.persistence.frames import Damaged, packed, unpacked
from kvd.wire.event_order import KeptStream
from kvd.wire.losses import with_loss
from kvd.wire.position import NOWHERE, KeptLosses, StreamPosition
from kvd.wire.standard_events import KeptPublication
from kvd_core.conductor.kept_holdings import HoldingsDump, HoldingsRestore
from kvd_core.dump.recovery import BINARY_HEAD, DumpReader, StagedEntry, binary_end, binary_entry

# Kinds of frames.
PUBLISHERS = ord("P")  # positions of at most SLICE_PUBLISHERS publishers
NUMBERS = ord("N")  # event numbers in at most SLICE_STREAMS streams of one publisher
HOLDINGS = ord("B")  # a piece of the dump
KINDS = (PUBLISHERS, NUMBERS, HOLDINGS)

# The loss of a stream of a snapshot that the index has not taken whole.
NO_ROOM = "the index had no room for its snapshot"

SLICE_PUBLISHERS = 16  # publishers examined between two checkpoints: about 0.2 ms
SLICE_STREAMS = 256  # streams of one publisher examined between two checkpoints
SLICE_STEPS = 4096  # steps of 0.1 us in which blocks are restored between two checkpoints


@dataclass(slots=True)
class KeptPublisher:
    """A publisher in the state in which another process left it."""

    key: PublisherKey
    endpoint: str
    position: StreamPosition
    publication: KeptPublication
    streams: list[KeptStream] = field(default_factory=list)  # of its events


@dataclass(slots=True)
class Holdings:
    """All publishers' holdings in a snapshot."""

    publishers: list[KeptPublisher] = field(default_factory=list)
    entries: list[StagedEntry] = field(default_factory=list)


# ---- writing


def contents(state: State, publishers: Publishers) -> Iterator[tuple[int, bytes]]:
    """Yields the kind and content of each frame; content b"" only lets other tasks run."""
    known = list(publishers)
    rows: list[object] = []
    for number, each in enumerate(known):
        rows.append(_row(each, each.listener.batches.position()))
        if len(rows) == SLICE_PUBLISHERS:
            yield PUBLISHERS, packed(rows)
            rows = []
        streams = each.publication.order.kept()
        while some := list(islice(streams, SLICE_STREAMS)):
            yield NUMBERS, packed((number, some))
    if rows:
        yield PUBLISHERS, packed(rows)
    groups: dict[SizedKey, list[Publisher]] = {}
    for each in known:
        groups.setdefault(_sized(each.described.key), []).append(each)
    blocks = 0
    for number, (sized, members) in enumerate(groups.items()):
        yield HOLDINGS, (b"" if number else BINARY_HEAD) + binary_entry(*sized)
        partition = state.sized.get(sized)
        if partition is None or not partition.sources:  # all its publishers have left meanwhile
            continue
        dump = HoldingsDump(partition.conductor, [each.source for each in members])
        while not dump.done:
            yield HOLDINGS, dump.read(SLICE_BYTES)
        blocks += dump.blocks
    if groups:
        yield HOLDINGS, binary_end(blocks)
    gone = [each for each in known if publishers.find(each.described.key) is not each]
    for start in range(0, len(gone), SLICE_PUBLISHERS):
        part = gone[start : start + SLICE_PUBLISHERS]
        yield PUBLISHERS, packed([_row(each, NOWHERE) for each in part])


def _row(publisher: Publisher, position: StreamPosition) -> object:
    return (
        publisher.described.key,
        publisher.listener.endpoint,
        position,
        publisher.publication.kept(),
    )


def _sized(key: PublisherKey) -> SizedKey:
    return (*key.partition, key.block_size)


# ---- reading


class HoldingsReader:
    """Reads the frames of one snapshot. Raises Damaged and ValueError on impossible content."""

    def __init__(self, max_blocks: int, max_ranks: int) -> None:
        self._found = Holdings()
        self._positions: dict[PublisherKey, int] = {}  # where each is in `_found.publishers`
        self._numbers: dict[int, list[KeptStream]] = {}  # by publisher
        self._dump: DumpReader | None = None
        self._limits = max_blocks, max_ranks

    def take(self, kind: int, content: bytes) -> None:
        if kind == HOLDINGS:
            self._feed(content)
            return
        try:
            if kind == PUBLISHERS:
                for each in map(_publisher, unpacked(content)):
                    self._take_publisher(each)
            else:
                number, streams = unpacked(content)
                self._numbers.setdefault(number, []).extend(map(_stream, streams))
        except (TypeError, ValueError) as error:
            raise Damaged(f"its publishers are not understood: {error}") from None

    def finish(self) -> Holdings:
        """Returns the holdings; raises if they are not complete."""
        for number, streams in self._numbers.items():
            if not 0 <= number < len(self._found.publishers):
                raise Damaged(f"it has no publisher {number}")
            self._found.publishers[number].streams = streams
        if self._dump is not None:
            self._found.entries = self._dump.finish()
        return self._found

    def _take_publisher(self, kept: KeptPublisher) -> None:
        """Takes a publisher; if it comes again, its position has been withdrawn."""
        publishers = self._found.publishers
        at = self._positions.setdefault(kept.key, len(publishers))
        publishers[at : at + 1] = [kept]

    def _feed(self, content: bytes) -> None:
        if self._dump is None:
            blocks, ranks = self._limits
            self._dump = DumpReader(
                True,
                max_blocks=blocks,
                max_events=blocks,
                max_entries=ranks,
                max_ranks=ranks,
                sequences=True,
            )
        self._dump.feed(content)


def _publisher(row: Any) -> KeptPublisher:
    key, endpoint, position, publication = row
    backends, highest = publication
    return KeptPublisher(
        PublisherKey(*key),
        endpoint,
        unpacked_position(position),
        KeptPublication(backends, highest),
    )


def unpacked_position(fields: Any) -> StreamPosition:
    """Returns the position of a stream from its fields; raises TypeError and ValueError."""
    expected, digests, publisher, (why, heard, named, lacking, since) = fields
    losses = KeptLosses(why, heard, named, [(of, tiers) for of, tiers in lacking], since)
    return StreamPosition(expected, digests, publisher, losses)


def _stream(row: Any) -> KeptStream:
    (lora_name, cache_salt, backend, medium, rank), first, last, marks = row
    return KeptStream((lora_name, cache_salt, backend, medium, rank), first, last, marks)


# ---- restoring


class Restoring:
    """Gives publishers back their holdings, except to those that leave meanwhile.

    The constructor plans and changes nothing; it raises ValueError on impossible holdings. No
    message of a publisher may have arrived yet.
    """

    def __init__(self, state: State, publishers: Publishers, holdings: Holdings) -> None:
        self._publishers = publishers
        self._budget = state.budget
        self._kept: list[tuple[KeptPublisher, Publisher]] = []
        groups: dict[SizedKey, list[Publisher | None]] = {}
        for each in holdings.publishers:
            found = publishers.find_to_resume(each.key, each.endpoint, each.position)
            groups.setdefault(_sized(each.key), []).append(found)
            if found is not None:
                self._kept.append((each, found))
        self._restores: list[HoldingsRestore] = []
        for entry in holdings.entries:
            model_name, tenant_id = entry.model_name, entry.tenant_id
            assert model_name is not None and tenant_id is not None  # the binary form has both
            sized = model_name, tenant_id, entry.block_size
            partition = state.sized.get(sized)
            resumed = groups.get(sized, [])
            if partition is not None and any(resumed):
                sources = [None if publisher is None else publisher.source for publisher in resumed]
                self._restores.append(HoldingsRestore(entry, partition.conductor, sources))

    async def run(self, note: Callable[[int], None]) -> None:
        """Restores the holdings, and lets other tasks run; calls `note` with the blocks so far."""
        stored, refused = 0, self._budget.refused
        for restore in self._restores:
            while restore.apply(SLICE_STEPS):
                note(stored + restore.blocks)
                await trio.lowlevel.checkpoint()
            stored += restore.blocks
        note(stored)
        is_whole = self._budget.refused == refused
        for kept, publisher in self._kept:
            position = kept.position if is_whole else with_loss(kept.position, NO_ROOM)
            self._publishers.take_over(publisher, position, kept.publication, kept.streams)
            await trio.lowlevel.checkpoint()
