"""Dumps of indexes, written, read back and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvd_core.conductor.conductor import Conductor, Source
from kvd_core.conductor.kept_holdings import HoldingsDump
from kvd_core.dump.recovery import BINARY_HEAD, DumpReader, StagedEntry, binary_end, binary_entry
from kvd_core.index.prefix_index import Dump, IngestStats, PrefixIndex

BLOCK_SIZE = 16
KEY = "m:t"

Row = tuple[str, int, str, int | None, tuple[tuple[int, int], ...]]


def pieces(dump: Dump, enough: int = 65536) -> Iterator[bytes]:
    while not dump.done:
        yield dump.read(enough)


def entry_text(events: bytes) -> bytes:
    return f'{{{json.dumps(KEY)}:{{"block_size":{BLOCK_SIZE},"events":['.encode() + events + b"]}}"


def text_of(index: PrefixIndex, enough: int = 65536) -> bytes:
    return entry_text(b"".join(pieces(index.dump(), enough)))


def binary_of(index: PrefixIndex, enough: int = 65536) -> bytes:
    dump = index.dump(binary=True)
    runs = b"".join(pieces(dump, enough))
    head = BINARY_HEAD + binary_entry("m", "t", index.block_size)
    return head + runs + binary_end(dump.blocks)


def holdings_of(conductor: Conductor, sources: list[Source | None], enough: int = 65536) -> bytes:
    """Returns a binary dump of what publishers hold."""
    dump = HoldingsDump(conductor, sources)
    records = b""
    while not dump.done:
        records += dump.read(enough)
    head = BINARY_HEAD + binary_entry("m", "t", conductor.index.block_size)
    return head + records + binary_end(dump.blocks)


def rows(text: bytes, key: str = KEY) -> list[Row]:
    """The events of one entry, sorted, without their numbers."""
    return rows_of(json.loads(text)[key]["events"])


def rows_of(events: list[dict[str, Any]]) -> list[Row]:
    return sorted(map(_row, events), key=repr)


def _row(event: dict[str, Any]) -> Row:
    stored = event["event"]["data"]["stored"]
    blocks = tuple((block["block_hash"], block["tokens_hash"]) for block in stored["blocks"])
    return (
        json.dumps(event["worker_id"]),
        event["event"]["dp_rank"],
        event["storage_tier"],
        stored["parent_hash"],
        blocks,
    )


def read(
    data: bytes, binary: bool, step: int = 65536, *, sequences: bool = False, **limits: int
) -> list[StagedEntry]:
    """Reads a dump in pieces of `step` bytes."""
    bounds = {"max_blocks": 2**40, "max_events": 2**40, "max_entries": 100}
    bounds |= {"max_ranks": 100_000, **limits}
    reader = DumpReader(binary, sequences=sequences, **bounds)
    for at in range(0, len(data), step):
        reader.feed(data[at : at + step])
    return reader.finish()


def restored(entry: StagedEntry, slice_blocks: int = 4096) -> PrefixIndex:
    """Returns a fresh index with one entry's blocks."""
    index = PrefixIndex(entry.block_size, IngestStats())
    workers = [index.add_worker(worker_id) for worker_id in entry.workers()]
    step = entry.restore()
    while step.apply(index, workers, slice_blocks):
        pass
    assert step.blocks == entry.blocks
    index.verify()
    return index


def event(
    blocks: list[tuple[int, int]],
    parent: int | None = None,
    worker: int | str = 1,
    dp_rank: int = 0,
    tier: str = "device",
) -> dict[str, Any]:
    """One event as Dynamo's indexer writes it."""
    listed = [{"block_hash": b, "tokens_hash": t, "mm_extra_info": None} for b, t in blocks]
    stored = {"parent_hash": parent, "start_position": None, "blocks": listed}
    return {
        "worker_id": worker,
        "storage_tier": tier,
        "residency_domain": "worker",
        "event": {"event_id": 0, "data": {"stored": stored}, "dp_rank": dp_rank},
    }


def dump_json(*events: dict[str, Any], key: str = KEY, block_size: int = BLOCK_SIZE) -> bytes:
    return json.dumps({key: {"block_size": block_size, "events": list(events)}}).encode()
