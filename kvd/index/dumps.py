"""Writes the index as a dump, piece by piece, in JSON or in binary."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvd.index.partitions import Partition, State
from kvd_core.dump.recovery import BINARY_HEAD, binary_end, binary_entry

# Bytes of a binary dump, or of another long answer, written between two checkpoints. Queries wait
# for one slice.
SLICE_BYTES = 8 * 1024

# The same of a dump in text, of which sending 8 KiB takes longer than writing them: with pieces of
# that size a dump of a million blocks takes 0.46 s of CPU. Beside dumps that Python reads
# (bench/tails.py dump) queries then take 48 us at p50, and 13 to 21 with these.
TEXT_BYTES = 22 * 1024


def text_dump(state: State) -> Iterator[bytes]:
    """Yields a dump in Dynamo's form, with further members that name each partition."""
    separator = b"{"
    written: set[str] = set()
    for partition, events in state.dump():
        yield separator + _dump_head(partition, written)
        while not events.done:
            yield events.read(TEXT_BYTES)
        yield b"]}"
        separator = b","
    yield b"{}" if separator == b"{" else b"}"


def binary_dump(state: State) -> Iterator[bytes]:
    """Yields a dump in the form of `kvd_core/dump/binary.hpp`."""
    blocks = 0
    yield BINARY_HEAD
    for partition, runs in state.dump(binary=True):
        yield binary_entry(*partition.key, partition.block_size)
        while not runs.done:
            yield runs.read(SLICE_BYTES)
        blocks += runs.blocks
    yield binary_end(blocks)


def _dump_head(partition: Partition, written: set[str]) -> bytes:
    """Opens one partition's entry under a name that no earlier entry has.

    The usual name `model:tenant` does not distinguish model `a:b` of tenant `c` from model `a` of
    tenant `b:c`, and a reader would keep only one of two equal names. The members always
    distinguish them.
    """
    key = partition.key
    name = str(key)
    while name in written:
        name += "'"
    written.add(name)
    head = {
        "model_name": key.model_name,
        "tenant_id": key.tenant_id,
        "block_size": partition.block_size,
    }
    return f'{json.dumps(name)}:{json.dumps(head)[:-1]},"events":['.encode()
