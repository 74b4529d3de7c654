"""A ledger on a full heap: a call that fails has changed nothing, and succeeds later.

`tests/fuzz/fuzz_ledger.cpp` makes each single request for memory fail.
"""

from __future__ import annotations

import pytest

from kvd_core.ledger.ledger import ADDED, Ledger
from tests.support.little_memory import little_memory

SPARE_BYTES = 4 * 2**20
PROMPTS = 16
BLOCKS = 2**17  # their hashes take a mebibyte


def state(ledger: Ledger) -> tuple[bytes, int, int]:
    stats = ledger.stats()
    return ledger.render_loads(), stats["requests"], stats["blocks"]


def test_what_a_full_heap_refuses_has_changed_nothing() -> None:
    ledger = Ledger()
    empty = ledger.stats()["bytes"]
    rank = ledger.add_rank(1, 0)
    # Each prompt leaves the others in the middle of a node, so a failing add has split one before.
    prompts = [bytes(8 * (3 * at + 1)) + bytes([at + 1]) * 8 * BLOCKS for at in range(PROMPTS)]
    names = [f"r{at}" for at in range(PROMPTS)]
    added, before = 0, state(ledger)
    with little_memory(SPARE_BYTES), pytest.raises(MemoryError):
        for name, prompt in zip(names, prompts, strict=True):
            before = state(ledger)
            assert ledger.add(name, rank, prompt, 1, 0.0) == ADDED
            added += 1
    assert 0 < added < PROMPTS
    ledger.verify()
    assert state(ledger) == before
    for name, prompt in zip(names[added:], prompts[added:], strict=True):
        assert ledger.add(name, rank, prompt, 1, 0.0) == ADDED
    ledger.verify()
    assert ledger.load(rank).requests == PROMPTS
    with little_memory(0):  # freeing requests needs no memory
        assert all(ledger.free(name) for name in names)
    ledger.verify()
    ledger.remove_ranks(1, [0])
    assert ledger.stats()["bytes"] == empty
