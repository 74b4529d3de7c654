"""Cases of the index's rules: ranks that leave, a full index, zero rows, late salts."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest

from kvd_core.base.hashing import local_hash_mm, local_hashes
from kvd_core.index.prefix_index import MAX_BLOCKS, IngestStats, PrefixIndex, Worker
from kvd_core.json.scan import BodyScanner

BLOCK = 4
QUERY = BodyScanner({"token_ids": "u32"}, ())


def make() -> tuple[PrefixIndex, Worker]:
    index = PrefixIndex(BLOCK, IngestStats())
    worker = index.add_worker(1)
    worker.register(0)
    return index, worker


def stored(name: int, token: int, parent: int | None = None, **members: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": parent,
        "token_ids": [token] * BLOCK,
        "block_size": BLOCK,
        **members,
    }


def batch(*events: Any) -> bytes:
    return bytes(msgpack.packb([1.5, list(events), None]))


def scores(index: PrefixIndex, tokens: list[int], salt: str | None = None) -> dict[str, Any]:
    """Returns the scores of a query for blocks that each repeat one token."""
    prompt = [token for token in tokens for _ in range(BLOCK)]
    QUERY.scan(json.dumps({"token_ids": prompt}).encode())
    found: dict[str, Any] = json.loads(index.query_tokens(QUERY, 0, None, salt))["scores"]
    return found


@pytest.mark.parametrize("slice_steps", [3, 50, 400])
def test_a_rank_leaves_chains_that_others_share(slice_steps: int) -> None:
    index = PrefixIndex(BLOCK, IngestStats())
    leaving, staying = index.add_worker(1), index.add_worker(2)
    chains = [[chain * 1000 + i for i in range(100)] for chain in range(4)]
    for number, chain in enumerate(chains):
        leaving.store(0, range(number * 100 + 1, number * 100 + 101), chain)
        staying.store(0, range(number * 100 + 5001, number * 100 + 5041), chain[:40])
        leaving.store(0, [number * 100 + 7], [chain[6]], number * 100 + 6)  # a second copy
        leaving.store(0, [number + 9001], [77], number * 100 + 50)  # a branch
        leaving.store_named(0, [number * 100 + 20], 1)
    leaving.remove()
    late = index.add_worker(3)
    for number in range(40):
        if not index.sweep(slice_steps):
            break
        index.verify()
        chain = chains[number % 4]
        late.store(0, range(number * 100 + 1, number * 100 + 91), chain[:90])
        assert index.match(chain)[0] == {(2, 0): (40, 40, 40), (3, 0): (90, 90, 90)}
        late.clear(0)
    late.remove()
    while index.sweep(slice_steps):
        pass
    index.verify()
    assert all(index.match(chain) == ({(2, 0): (40, 40, 40)}, [1] * 40) for chain in chains)
    stats = index.stats()
    assert (stats["blocks"], stats["chains"], stats["exceptions"]) == (160, 4, 0)


def test_a_slice_does_not_free_more_than_it_says() -> None:
    index, worker = make()
    for chain in range(100):
        first = chain * 1000 + 1
        worker.store(0, range(first, first + 1000), range(first, first + 1000))
    worker.clear(0)
    slices, blocks = 0, index.stats()["blocks"]
    while index.sweep(1000):
        left = index.stats()["blocks"]
        assert blocks - left <= 8 * 1000 + 1000  # a chain is freed whole
        slices, blocks = slices + 1, left
    assert (slices > 10, blocks) == (True, 0)


def test_clear_of_one_tier_keeps_the_others() -> None:
    index, worker = make()
    names = list(range(1, 301))
    worker.store(0, names, names)
    worker.store_named(0, names[:100], 1)
    worker.clear(0, 0)
    assert index.match(names)[0] == {(1, 0): (0, 100, 100)}
    worker.store(0, names[:50], names[:50])
    worker.clear(0, 1)
    index.verify()
    assert index.match(names)[0] == {(1, 0): (50, 50, 50)}


def test_clear_keeps_what_the_stream_has_told() -> None:
    index, worker = make()
    stream = worker.stream(0)
    kind = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    window = {**kind, "kv_cache_spec_sliding_window": BLOCK + 1}
    stream.apply(batch(*(stored(i, i, i - 1 or None, group_idx=0) for i in range(1, 101))))
    stream.apply(batch(*(stored(i, i, i - 1 or None, **window) for i in range(1, 101))))
    assert scores(index, [1, 2]) == {"1": {"0": 8}}
    stream.apply(batch({"type": "AllBlocksCleared"}))
    assert scores(index, [1, 2]) == {}
    stream.apply(batch(stored(1, 1, group_idx=0), stored(2, 2, 1, group_idx=0)))
    assert scores(index, [1, 2]) == {"1": {"0": 0}}  # the window group must hold the last block
    stream.apply(batch(stored(1, 1, **kind), stored(2, 2, 1, **kind)))
    assert scores(index, [1, 2]) == {"1": {"0": 8}}
    index.verify()


def test_a_full_index_refuses_and_counts() -> None:
    counters = IngestStats()
    index = PrefixIndex(BLOCK, counters, max_blocks=4)
    worker = index.add_worker(1)
    stream = worker.stream(0)
    stream.apply(batch(*(stored(name, name) for name in range(1, 7))))
    assert (index.stats()["blocks"], counters.as_dict()["ignored"]["full"]) == (4, 2)
    stream.apply(batch(stored(9, 9, parent=8)))  # would be parked
    assert (index.stats()["parked_now"], counters.as_dict()["ignored"]["full"]) == (0, 3)
    assert not worker.store(0, [7], [7])
    assert not worker.store_named(0, [1], 1, offload=False)
    worker.drop(0, [1, 2])
    assert worker.store_named(0, [3], 1, offload=False) and worker.store(0, [7], [7])
    index.verify()
    assert index.stats()["held"] == {"device": 3, "host": 1, "disk": 0, "external": 0}


def test_a_full_index_remembers_no_names() -> None:
    index = PrefixIndex(BLOCK, IngestStats(), max_blocks=3)
    worker = index.add_worker(1)
    worker.store(0, [1, 2, 3], [1, 2, 3])
    worker.store_named(0, [], 1)  # shows that the rank offloads
    worker.drop(0, [3, 2, 1])
    index.verify()
    assert index.stats()["records"] == 3
    with pytest.raises(ValueError):
        PrefixIndex(BLOCK, IngestStats(), max_blocks=MAX_BLOCKS + 1)


def test_a_rank_without_creditable_blocks_has_no_zero_row() -> None:
    index, worker = make()
    stream = worker.stream(0)
    stream.apply(batch(stored(1, 5)))
    assert scores(index, [6]) == {"1": {"0": 0}}
    stream.apply(batch({**stored(1, 5, medium="CPU"), "token_ids": []}))  # an offload
    assert scores(index, [6]) == {"1": {"0": 0}}
    worker.drop(0, [1], 1)
    worker.drop(0, [1], 0)  # the name, now without a block, is remembered
    assert index.stats()["blocks"] == 1
    assert scores(index, [6]) == {}


@pytest.mark.parametrize("extra_keys", [[None], [["other"]], []])
def test_who_lists_extra_keys_says_salts(extra_keys: list[Any]) -> None:
    """Other engines salt without announcing it; salted questions count their unsalted blocks."""
    index, worker = make()
    stream = worker.stream(0)
    stream.apply(batch(stored(1, 1), stored(2, 2, extra_keys=None)))
    assert scores(index, [1], "s") == {"1": {"0": 4}}
    stream.apply(batch(stored(3, 3, extra_keys=extra_keys)))
    assert scores(index, [1], "s") == scores(index, [2], "s") == {"1": {"0": 0}}
    assert scores(index, [1]) == {"1": {"0": 4}}


def test_salts_of_parked_blocks() -> None:
    index, worker = make()
    stream = worker.stream(0)
    salted = {"cache_salt": "s"}
    stream.apply(batch(stored(3, 3, 2)))  # its prompt's salt is unknown
    stream.apply(batch(stored(12, 3, 11, **salted), stored(13, 4, 12)))  # inherited while parked
    stream.apply(batch(stored(1, 1, **salted), stored(2, 2, 1)))
    stream.apply(batch(stored(11, 2, 1)))
    assert index.stats()["parked_unsalted"] == 1
    assert scores(index, [1, 2, 3, 4], "s") == {"1": {"0": 16}}
    assert scores(index, [1, 2, 3]) == {"1": {"0": 0}}
    index.verify()


def test_salts_take_memory_only_while_blocks_have_them() -> None:
    salted, plain = (PrefixIndex(BLOCK, IngestStats()) for _ in range(2))
    streams = [salted.add_worker(1).stream(0), plain.add_worker(1).stream(0)]
    blocks = 1000

    def extra() -> int:
        return salted.stats()["bytes"] - plain.stats()["bytes"]

    names = list(range(1, blocks + 1))
    event = {**stored(1, 0), "block_hashes": names, "token_ids": list(range(blocks * BLOCK))}
    for stream, salt in zip(streams, ("s", None), strict=True):
        stream.apply(batch({**event, "cache_salt": salt}))
    assert salted.stats()["exceptions"] == blocks
    full = extra()
    assert full < 9 * blocks
    for left in (500, 0):
        for stream in streams:
            stream.apply(batch({"type": "BlockRemoved", "block_hashes": names[left:]}))
        del names[left:]
        assert salted.stats()["exceptions"] == left
        assert extra() <= full * left // blocks + 2048
    assert extra() < 100


def test_offloaded_blocks_stay_what_they_are() -> None:
    """vLLM's connectors announce what they offload without salt, images and adapter."""
    index, worker = make()
    stream = worker.stream(0)
    salted = stored(1, 1, extra_keys=[["s"]]), stored(2, 2, 1)
    adapted = stored(11, 1, lora_name="a", lora_id=7), stored(12, 2, 11, lora_name="a", lora_id=7)
    numbered = stored(21, 1, lora_id=7), stored(22, 2, 21)
    pictured = stored(31, 1, block_mm_infos=[{"mm_objects": [{"mm_hash": 77}]}]), stored(32, 2, 31)
    stream.apply(batch(*salted, *adapted, *numbered, *pictured))
    tokens = [1] * BLOCK + [2] * BLOCK + [3] * BLOCK
    prompts = [
        local_hashes(tokens, BLOCK, None, "s"),
        local_hashes(tokens, BLOCK, "a"),
        local_hashes(tokens, BLOCK, "#7"),
        [local_hash_mm(tokens[:BLOCK], [77]), *local_hashes(tokens[BLOCK:], BLOCK)],
        local_hashes(tokens, BLOCK),
    ]

    def depths() -> list[tuple[int, int, int]]:
        index.verify()
        return [index.match(prompt)[0].get((1, 0), (0, 0, 0)) for prompt in prompts]

    assert depths() == [(2, 2, 2)] * 4 + [(0, 0, 0)]
    for medium in ("CPU", "STORAGE"):
        for first in (1, 11, 21, 31):
            plain = stored(first, 0, medium=medium)
            names = {"block_hashes": [first, first + 1], "token_ids": tokens[: 2 * BLOCK]}
            stream.apply(batch(plain | names, stored(first + 2, 3, first + 1, medium=medium)))
    assert depths() == [(2, 3, 3), (2, 2, 2), (2, 3, 3), (2, 3, 3), (0, 0, 0)]
    removed = {"type": "BlockRemoved", "block_hashes": [1, 11, 21, 31]}
    stream.apply(batch(removed))
    assert depths() == [(0, 3, 3), (0, 2, 2), (0, 3, 3), (0, 3, 3), (0, 0, 0)]
    stream.apply(batch({**stored(9, 9, medium="CPU"), "block_hashes": []}))
    assert depths()[0] == (0, 3, 3)
