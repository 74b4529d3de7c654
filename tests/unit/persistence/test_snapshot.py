"""Where others run while a snapshot is gathered."""

from __future__ import annotations

import msgpack

from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.persistence.snapshot import _contents
from tests.support.applying import apply_whole
from tests.support.idle_listeners import IdleListeners

KEY = PartitionKey("m", "default")
BLOCKS = 20_000
NAMES_A_SLICE = 4096 // 3  # that a dump looks through, see kvd_core/dump/dump.hpp


def test_others_run_while_names_are_looked_through() -> None:
    """Two ranks call the same blocks something else, as vLLM's engines do."""
    state = State()
    for rank in (0, 1):
        hashes = list(range(1 + rank * BLOCKS, 1 + (rank + 1) * BLOCKS))
        event = ["BlockStored", hashes, None, list(range(BLOCKS)), 1, None]
        stream = state.add_rank(RankKey(KEY, 1, rank), 1)
        apply_whole(stream, msgpack.packb([0.0, [event], rank]))
    written = [len(content) for _, content in _contents(state, Registry(state, IdleListeners()))]
    assert sum(written) > 2 * BLOCKS * 16
    assert written.count(0) > BLOCKS // NAMES_A_SLICE
