"""Walking the tree level by level yields every block and every rank that holds it."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvd_core.index.branches import Branch, branches, holdings
from kvd_core.index.prefix_index import IngestStats, PrefixIndex, Worker
from tests.support.budget import scaled

Place = tuple[int, int]  # node, first hash

LIMIT = 3  # chains of a page; some have more siblings
TIERS = 4


def listed(index: PrefixIndex, above: Place | None = None) -> list[Branch]:
    """Returns all chains below a place, fetched page by page."""
    found: list[Branch] = []
    after, more = None, True
    while more:
        page, more = branches(index, above, after, LIMIT)
        assert len(page) <= LIMIT
        found += page
        after = (page[-1].node, page[-1].first) if page else None
    return found


def walked(index: PrefixIndex) -> list[Branch]:
    """Returns all chains of an index."""
    waiting: list[Place | None] = [None]
    found = []
    while waiting:
        below = listed(index, waiting.pop())
        found += below
        waiting += [(each.node, each.first) for each in below]
    return found


def make_index() -> tuple[PrefixIndex, dict[tuple[int, int], Worker]]:
    index = PrefixIndex(16, IngestStats())
    ranks = {}
    for worker_id in (7, 8, 9):
        worker = index.add_worker(worker_id)
        for dp_rank in (0, 1):
            worker.register(dp_rank)
            ranks[worker_id, dp_rank] = worker
    return index, ranks


@pytest.mark.parametrize("seed", range(scaled(3)))
def test_a_walk_meets_every_block_and_holder_once(seed: int) -> None:
    chance = Random(seed)
    index, ranks = make_index()
    held: dict[tuple[int, int, int], set[tuple[int, ...]]] = {}
    for _ in range(60):
        (worker_id, dp_rank), worker = chance.choice(list(ranks.items()))
        tier = chance.randrange(TIERS)
        prompt = [chance.randrange(4) + 10 * depth for depth in range(chance.randint(1, 6))]
        paths = [tuple(prompt[:end]) for end in range(1, len(prompt) + 1)]
        # A rank's names of blocks, different for each path.
        names = [hash(path) % 2**64 for path in paths]
        worker.store(dp_rank, names, prompt, tier=tier)
        held.setdefault((tier, worker_id, dp_rank), set()).update(paths)
    found = walked(index)
    assert sum(each.blocks for each in found) == index.stats()["blocks"]
    assert len({each.node for each in found}) == len(found) == index.stats()["chains"]
    counted: Counter[object] = Counter()
    for each in found:
        assert each.whole
        assert each.children == len(listed(index, (each.node, each.first)))
        for tier, worker, rank, blocks in each.holders:
            assert blocks <= each.blocks
            counted[tier, worker, rank] += blocks
    assert counted == {place: len(paths) for place, paths in held.items()}
    for (worker_id, dp_rank), worker in ranks.items():
        assert holdings(worker)[dp_rank] == tuple(
            len(held.get((tier, worker_id, dp_rank), ())) for tier in range(TIERS)
        )


def test_siblings_come_newest_first_and_holders_by_tier_and_size() -> None:
    index, ranks = make_index()
    ranks[7, 0].store(0, [1, 2, 3], [1, 2, 3])
    ranks[8, 1].store(1, [1], [1])
    ranks[9, 0].store(0, [1, 2], [1, 2], tier=1)
    ranks[9, 0].store(0, [50], [50])
    ((newer, older), more) = branches(index, None, None, 64)
    assert not more
    assert (newer.first, newer.blocks, newer.holders) == (50, 1, [(0, 9, 0, 1)])
    assert (older.first, older.blocks, older.children) == (1, 3, 0)
    assert older.holders == [(0, 7, 0, 3), (0, 8, 1, 1), (1, 9, 0, 2)]


def test_a_chain_that_has_gone_is_not_found() -> None:
    index, ranks = make_index()
    worker = ranks[7, 0]
    worker.store(0, [1, 2], [1, 2])
    worker.store(0, [1, 3], [1, 3])
    ((top,), _) = branches(index, None, None, 64)
    place = top.node, top.first
    (below, _) = branches(index, place, None, 64)
    assert [each.first for each in below] == [3, 2]
    with pytest.raises(LookupError):  # a chain is not a sibling of those below it
        branches(index, place, place, 64)
    with pytest.raises(LookupError):
        branches(index, (top.node, top.first + 1), None, 64)
    worker.remove()
    while index.sweep(1000):
        pass
    with pytest.raises(LookupError):
        branches(index, place, None, 64)
    assert branches(index, None, None, 64) == ([], False)
    assert holdings(worker) == {}


def test_of_a_chain_with_very_many_holders_some_are_listed() -> None:
    index = PrefixIndex(16, IngestStats())
    worker = index.add_worker(1)
    for dp_rank in range(2500):
        worker.store(dp_rank, [5], [5])
    ((found,), _) = branches(index, None, None, 64)
    assert not found.whole
    assert 1000 < len(found.holders) < 2500
