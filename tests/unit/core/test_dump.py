"""Dumps: merged as Dynamo merges them, restored whole or not at all, written under churn."""

from __future__ import annotations

import json
import random
from itertools import accumulate
from typing import Any

import msgpack
import pytest

from kvd_core.index.prefix_index import FLAWED, NO_ROOM, IngestStats, PrefixIndex, Stream, Worker
from kvd_core.json.scan import BodyScanner
from tests.support.budget import scaled
from tests.support.dumps import (
    binary_of,
    dump_json,
    entry_text,
    event,
    pieces,
    read,
    restored,
    rows,
    text_of,
)
from tests.support.index_pairs import Pair
from tests.support.little_memory import little_memory

BOTH = pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
QUERY = BodyScanner({"token_ids": "u32"}, ())
LONG = 5000  # blocks: several chains of the tree


def make(*worker_ids: int | str) -> tuple[PrefixIndex, list[Worker]]:
    index = PrefixIndex(16, IngestStats())
    return index, [index.add_worker(worker_id) for worker_id in worker_ids]


def dumped(index: PrefixIndex, binary: bool, enough: int = 65536) -> bytes:
    return binary_of(index, enough) if binary else text_of(index, enough)


# ---- writing


def test_a_run_is_one_event_however_long_it_is() -> None:
    index, (one, two) = make(1, 2)
    names, local = list(range(1, LONG + 1)), list(range(LONG))
    one.store(0, names, local)
    two.store(3, names[:3000], local[:3000])
    runs = tuple(zip(names, local, strict=True))
    expected = [("1", 0, "device", None, runs), ("2", 3, "device", None, runs[:3000])]
    assert rows(text_of(index)) == expected
    assert rows(text_of(index, enough=1)) == expected


@BOTH
def test_a_piece_is_little_longer_than_what_is_enough(binary: bool) -> None:
    index, (one,) = make(1)
    one.store(0, [2**64 - 1 - at for at in range(LONG)], [2**64 - 1 - at for at in range(LONG)])
    dump = index.dump(binary=binary)
    while not dump.done:
        assert len(dump.read(1024)) < 8 * 1024


def test_a_fork_ends_the_run_above_it() -> None:
    index, (one, two) = make(1, 2)
    one.store(0, [1, 2, 3, 4], [1, 2, 3, 4])
    two.store(0, [1, 2, 5], [1, 2, 5])
    assert rows(text_of(index)) == [
        ("1", 0, "device", 2, ((3, 3), (4, 4))),
        ("1", 0, "device", None, ((1, 1), (2, 2))),
        ("2", 0, "device", 2, ((5, 5),)),
        ("2", 0, "device", None, ((1, 1), (2, 2))),
    ]


def test_lower_tiers_come_block_by_block() -> None:
    index, (one,) = make(1)
    one.store(0, [1, 2, 3], [1, 2, 3])
    one.store(0, [2, 3], [2, 3], parent=1, tier=1)
    assert rows(text_of(index)) == [
        ("1", 0, "device", None, ((1, 1), (2, 2), (3, 3))),
        ("1", 0, "host_pinned", 1, ((2, 2),)),
        ("1", 0, "host_pinned", 2, ((3, 3),)),
    ]


def test_each_rank_is_dumped_under_its_own_names() -> None:
    index, (one, two) = make(1, 2)
    one.store(0, [1, 2], [7, 8])
    two.store(0, [91, 92], [7, 8])
    assert rows(text_of(index)) == [
        ("1", 0, "device", None, ((1, 7), (2, 8))),
        ("2", 0, "device", None, ((91, 7), (92, 8))),
    ]


@pytest.mark.parametrize("seed", range(scaled(3)))
def test_a_dump_under_churn_misses_nothing_that_stays(seed: int) -> None:
    """Blocks that a rank holds from before the dump until after it are in it, with their names."""
    rng = random.Random(seed)
    index, workers = make(1, 2, 3)
    held: dict[tuple[int, int], dict[int, None]] = {}

    def chained(name: int, local: int) -> int:
        return hash((name, local)) & (2**64 - 1)

    def store() -> None:
        worker = rng.randrange(3)
        known = held.setdefault((worker, 0), {})
        parent = rng.choice(list(known)) if known and rng.random() < 0.8 else None
        local = [rng.randrange(2)] * rng.choice((1, 3, 700, 1500))
        names = list(accumulate(local, chained, initial=parent or 0))[1:]
        workers[worker].store(0, names, local, parent)
        known.update(dict.fromkeys(names))

    def drop() -> None:
        (worker, _), known = rng.choice(list(held.items()))
        for name in rng.sample(list(known), min(len(known), 40)):
            workers[worker].drop(0, [name])
            del known[name]

    for _ in range(12):
        store()
    stayed = {rank: set(known) for rank, known in held.items()}
    text = b""
    for piece in pieces(index.dump(), enough=20_000):
        text += piece
        rng.choice((store, drop, drop))()
        for rank, names in stayed.items():
            names.intersection_update(held[rank])
    index.verify()
    found: dict[str, set[int]] = {}
    for worker, _, _, _, blocks in rows(entry_text(text)):
        found.setdefault(worker, set()).update(name for name, _ in blocks)
    for (worker, _), names in stayed.items():
        assert names <= found.get(str(worker + 1), set())


# ---- reading


@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_what_was_dumped_comes_back(seed: int, binary: bool) -> None:
    pair = Pair(random.Random(seed), stretch=(1, 1, 20)[seed % 3])
    for _ in range(300):
        pair.rng.choice((pair.store, pair.store, pair.drop))()
    (entry,) = read(dumped(pair.index, binary, enough=997), binary, step=1013)
    copy = restored(entry, slice_blocks=7)
    for _ in range(200):
        prompt = [pair.rng.randrange(3) for _ in range(40)]
        # Frequencies may differ: they also count blocks behind a hole, which no rank can use.
        assert copy.match(prompt)[0] == pair.index.match(prompt)[0]


@BOTH
def test_a_rank_may_be_cleared_while_its_names_are_searched(binary: bool) -> None:
    index, (one, two) = make(1, 2)
    one.store(0, list(range(LONG)), list(range(LONG)))
    two.store(0, list(range(LONG, 2 * LONG)), list(range(LONG)))
    dump = index.dump(binary=binary)
    while dump.read(1 << 20) or dump.blocks == 0:  # until a slice only searches
        pass
    two.clear(0)
    while index.sweep(1 << 20):
        pass
    for _ in pieces(dump):
        pass
    assert dump.blocks == LONG


def test_a_dump_goes_on_once_there_is_memory_again() -> None:
    count = 8 * LONG  # the table for a rank's names is larger than a free piece of the heap
    index, (one, two) = make(1, 2)
    one.store(0, list(range(count)), list(range(count)))
    two.store(0, list(range(count, 2 * count)), list(range(count)))
    dump = index.dump(binary=True)
    with little_memory(0), pytest.raises(MemoryError):
        while not dump.done:
            dump.read(1)
    assert dump.blocks == count
    for _ in pieces(dump):
        pass
    assert dump.blocks == 2 * count


def index_of(*events: dict[str, Any]) -> PrefixIndex:
    """Returns an index with blocks of one token, after a stream has applied these events."""
    index = PrefixIndex(1, IngestStats())
    worker = index.add_worker(1)
    worker.register(0)
    apply(worker.stream(0), *events)
    return index


def apply(stream: Stream, *events: dict[str, Any]) -> None:
    assert not stream.apply(msgpack.packb([1.5, list(events), None])) & (FLAWED | NO_ROOM)


def blocks(first: int, last: int, **members: Any) -> dict[str, Any]:
    """Returns an event with stored blocks `first` .. `last`, which continue block `first` - 1."""
    numbers = list(range(first, last + 1))
    return {
        "type": "BlockStored",
        "block_hashes": numbers,
        "parent_block_hash": first - 1 or None,
        "token_ids": numbers,
        "block_size": 1,
        **members,
    }


def score(index: PrefixIndex, last: int, salt: str | None = None) -> int:
    """Returns how many tokens of the prompt 1 .. `last` rank 0 of worker 1 is credited with."""
    QUERY.scan(json.dumps({"token_ids": list(range(1, last + 1))}).encode())
    answer = json.loads(index.query_tokens(QUERY, 0, None, salt))
    return int(answer["scores"].get("1", {}).get("0", 0))


def copied(index: PrefixIndex) -> tuple[PrefixIndex, Stream]:
    """Returns an index restored from a binary dump of this one, and a stream into it."""
    (entry,) = read(binary_of(index, enough=50), True, step=7)
    copy = PrefixIndex(1, IngestStats())
    worker = copy.add_worker(1)
    step = entry.restore()
    while step.apply(copy, [worker], 1):
        pass
    assert step.blocks == entry.blocks
    copy.verify()
    return copy, worker.stream(0)


def test_a_restored_index_takes_the_memory_of_the_one_it_is_of() -> None:
    """The room for names is made at once, exactly for those in the dump."""
    index = PrefixIndex(16, IngestStats())
    numbers = range(1, 1001)
    for worker_id in (1, 2):
        worker = index.add_worker(worker_id)
        worker.store(0, [worker_id << 32 | each for each in numbers], numbers)
        worker.store(0, [worker_id << 32 | each for each in numbers[:900]], numbers[:900], tier=1)
    entries = read(binary_of(index), True)
    (copy,) = map(restored, entries)
    assert copy.stats()["bytes"] == pytest.approx(index.stats()["bytes"], rel=0.01)


WINDOW = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}


def test_cache_groups_come_back_in_the_binary_form() -> None:
    drop = {"type": "BlockRemoved", "block_hashes": [8], "group_idx": 1}
    index = index_of(blocks(1, 9, group_idx=0), blocks(1, 9, **WINDOW), drop)
    copy, stream = copied(index)
    assert [score(one, n) for one in (index, copy) for n in (9, 8, 7)] == [7, 7, 7] * 2
    # The kinds of the groups are known without being announced again.
    apply(stream, {**drop, "block_hashes": [6]})
    assert score(copy, 9) == 5
    apply(stream, blocks(6, 6, group_idx=1), blocks(8, 8, group_idx=1))
    assert score(copy, 9) == 9
    # So is the fact that the engine numbers its groups: its clear leaves offloaded blocks.
    apply(stream, blocks(1, 1, group_idx=0, medium="CPU"), {"type": "AllBlocksCleared"})
    assert score(copy, 9) == 0
    assert copy.stats()["held"] == {"device": 0, "host": 1, "disk": 0, "external": 0}
    copy.verify()


def test_salted_prompts_come_back_in_the_binary_form() -> None:
    salted = {"cache_salt": "s"}
    index = index_of(
        blocks(1, 3, **salted), blocks(4, 5), {**blocks(9, 9), "parent_block_hash": None}
    )
    assert (score(index, 5, "s"), score(index, 5)) == (5, 0)
    copy, stream = copied(index)
    assert (score(copy, 5, "s"), score(copy, 5)) == (5, 0)
    apply(stream, blocks(6, 7))  # below salted blocks, and therefore salted
    assert (score(copy, 7, "s"), score(copy, 7)) == (7, 0)
    assert copied(copy)[0].match([1])[0] == {}
    copy.verify()


def test_names_of_offloaded_blocks_are_kept_where_the_dumped_rank_kept_them() -> None:
    offload = {**blocks(1, 2, medium="CPU"), "token_ids": []}
    removed = {"type": "BlockRemoved", "block_hashes": [2]}
    copy, stream = copied(index_of(blocks(1, 2), offload))
    apply(stream, removed, {**removed, "medium": "CPU"}, {**offload, "block_hashes": [2]})
    assert copy.match([])[0] == {}
    assert copy.stats()["held"]["host"] == 2
    copy.verify()


@BOTH
def test_ids_of_workers_survive(binary: bool) -> None:
    index, workers = make(0, 2**64 - 1, 'pré"fill\\-☃')
    for worker in workers:
        worker.store(2**32 - 1, [2**64 - 1], [2**63])
    (entry,) = read(dumped(index, binary), binary)
    assert entry.workers() == [0, 2**64 - 1, 'pré"fill\\-☃']
    assert entry.block_size == 16
    assert rows(text_of(restored(entry))) == rows(text_of(index))


@BOTH
def test_how_a_dump_is_cut_into_pieces_does_not_matter(binary: bool) -> None:
    index, (one, two) = make(1, "two")
    one.store(0, [1, 2, 3], [1, 2, 3])
    two.store(1, [9], [2**64 - 1], tier=2)
    data = dumped(index, binary)
    for step in (*range(1, 64), *range(64, len(data) + 1, 7)):
        (entry,) = read(data, binary, step)
        assert rows(text_of(restored(entry))) == rows(text_of(index))


def test_lower_tier_events_come_in_any_order() -> None:
    chain = list(range(1, 300))
    events = [event([(n, n)], n - 1 or None, tier="disk") for n in chain]
    events += [event([(1000, 1), (1001, 2)], worker=2)]
    random.Random(5).shuffle(events)
    (entry,) = read(dump_json(*events), False)
    index = restored(entry, slice_blocks=10)
    assert index.match(chain)[0] == {(1, 0): (0, 0, 299), (2, 0): (2, 2, 2)}
    assert index.stats()["parked_now"] == 0


def test_a_child_of_nothing_waits_in_the_index() -> None:
    (entry,) = read(dump_json(event([(5, 5), (6, 6)], parent=4)), False)
    index = restored(entry)
    assert index.stats()["parked_now"] == 2
    assert index.match([5, 6])[0] == {}


def test_unknown_members_and_missing_optional_ones_are_fine() -> None:
    block = {
        "block_hash": -1,
        "tokens_hash": 7,
        "mm_extra_info": {"objects": [[1, "x"]]},
        "new": 1.5,
    }
    stored = {"blocks": [block], "also": [[], {}, None]}
    run = {"event": {"data": {"stored": stored, "x": 1}}, "worker_id": 3, "storage_tier": None}
    body = {
        "m:t": {"events": [run], "extra": {"deep": [1, 2]}, "block_size": 16, "model_name": "m"}
    }
    (entry,) = read(json.dumps(body, indent=1).encode(), False, step=7)
    assert (entry.model_name, entry.tenant_id, entry.key) == ("m", None, "m:t")
    assert rows(text_of(restored(entry))) == [("3", 0, "device", None, ((2**64 - 1, 7),))]


def test_an_empty_dump_is_a_dump() -> None:
    assert read(b" {} ", False) == []
    index, _ = make()
    (entry,) = read(binary_of(index), True)
    assert entry.blocks == 0


# ---- refusals


def changed(path: str, value: Any) -> bytes:
    """Returns a valid dump with the member at a path replaced, or removed if the value is `...`."""
    body: Any = json.loads(dump_json(event([(1, 2)])))
    *above, last = path.split("/")
    at = body
    for step in above:
        at = at[int(step) if isinstance(at, list) else step]
    if value is ...:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(body).encode()


RUN = "m:t/events/0"
STORED = f"{RUN}/event/data/stored"
BLOCK = f"{STORED}/blocks/0"
WRONG = [
    b"",
    b"not json",
    b"[]",
    b'"text"',
    b"null",
    b"17 ",
    b'{"m:t":5}',
    b'{"m:t":[]}',
    b'{"m:t":null}',
    b'{"m:t":{"error":"busy"}}',
    b"{} {}",
    b'{"m:t":{}}',
    b'{"a":{"block_size":16,"events":[]},}',
    b'{"a":{"block_size":16,"block_size":16,"events":[]}}',
    b'{"a":{"block_size":16,"events":[],"events":[]}}',
    b'{"a":{"block_size":16,"events":[1]}}',
    b'{"a":{"block_size":16,"events":[[]]}}',
    b'{"a":{"block_size":016,"events":[]}}',
    b'{"a":{"block_size":16,"events":[],"x":"\\ud800"}}',
    b'{"a":{"block_size":16,"events":[],"x":"\xff"}}',
    b'{"a":{"block_size":16,"events":[],"x":' + b"[" * 100 + b"]" * 100 + b"}}",
    b'{"a":{"block_size":16,"events":[],"x":"' + b"y" * 70_000 + b'"}}',
    b'{"a":{"block_size":16,"events":[],"x":nul}}',
    b'{"a":{"block_size":16,"events":[],"x":-}}',
    *(changed("m:t/block_size", value) for value in (..., None, "16", -1, 1.0, 2**32, [], {})),
    *(changed("m:t/events", value) for value in (..., None, {}, 5)),
    *(changed("m:t/model_name", value) for value in (None, 5, [])),
    *(changed(f"{RUN}/worker_id", value) for value in (..., None, -1, 2**64, 1.5, True, [])),
    *(changed(f"{RUN}/storage_tier", value) for value in ("DEVICE", "tape", 0, {})),
    *(changed(f"{RUN}/event", value) for value in (..., None, [], 1)),
    *(changed(f"{RUN}/event/dp_rank", value) for value in (-1, 2**32, "0", [])),
    *(changed(f"{RUN}/event/data", value) for value in (..., "cleared", {}, {"cleared": {}}, [])),
    *(changed(STORED, value) for value in (..., None, [], "x")),
    *(changed(f"{STORED}/parent_hash", value) for value in ("1", 2**64, -(2**63) - 1, 0.5, [])),
    *(changed(f"{STORED}/blocks", value) for value in (..., None, {}, [1], [[]])),
    *(changed(f"{BLOCK}/block_hash", value) for value in (..., None, "1", 2**64, 1e3, [], {})),
    *(changed(f"{BLOCK}/tokens_hash", value) for value in (..., None, "1", 2**64, False, {})),
]


@pytest.mark.parametrize("step", [1, 1000])
def test_a_wrong_text_is_refused(step: int) -> None:
    for text in WRONG:
        with pytest.raises(ValueError):
            pytest.fail(f"{text!r} was read as {read(text, False, step)}")


@pytest.mark.slow("reads as many dumps as one has bytes")
@BOTH
def test_a_dump_that_breaks_off_is_refused_wherever_it_does(binary: bool) -> None:
    index, (one, two) = make(1, "two")
    one.store(0, [1, 2], [1, 2])
    two.store(0, [1, 3], [1, 3])
    data = dumped(index, binary)
    for end in range(len(data)):
        with pytest.raises(ValueError):
            read(data[:end], binary)
    with pytest.raises(ValueError):
        read(data + b"x", binary)


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_damage_is_refused_or_harmless(seed: int, binary: bool) -> None:
    rng = random.Random(seed)
    index, (one, two) = make(1, "two")
    one.store(0, list(range(50)), list(range(50)))
    two.store(0, [1, 3], [1, 3])
    data = dumped(index, binary)
    for _ in range(scaled(80)):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        try:
            entries = read(bytes(damaged), binary, rng.choice((1, 17, 10_000)))
            workers = [entry.workers() for entry in entries]
        except ValueError:
            continue
        assert all(isinstance(w, int | str) for ids in workers for w in ids)
        for entry in entries:
            restored(entry)


@BOTH
@pytest.mark.parametrize(
    ("limit", "complaint"),
    [
        ("max_blocks", "blocks"),
        ("max_events", "events"),
        ("max_entries", "entries"),
        ("max_ranks", "ranks"),
    ],
)
def test_more_than_the_limits_is_refused(limit: str, complaint: str, binary: bool) -> None:
    index, (one,) = make(1)
    one.store(0, [1, 2, 3], [1, 2, 3])
    one.store(0, [1, 4], [1, 4])
    most = {"max_blocks": 4, "max_events": 3, "max_entries": 1, "max_ranks": 1}[limit]
    data = dumped(index, binary)
    assert read(data, binary, **{limit: most})
    with pytest.raises(ValueError, match=complaint):
        read(data, binary, **{limit: most - 1})


def test_a_worker_of_too_many_ranks_is_refused() -> None:
    events = [event([(1, 1)], dp_rank=rank) for rank in range(4097)]
    assert read(dump_json(*events[1:]), False)
    with pytest.raises(ValueError, match="ranks"):
        read(dump_json(*events), False)


# ---- live events after a restore


def test_an_event_that_is_in_the_dump_already_is_no_second_copy() -> None:
    (entry,) = read(dump_json(event([(1, 1), (2, 2)])), False)
    index = PrefixIndex(16, IngestStats())
    worker = index.add_worker(1)
    assert not entry.restore().apply(index, [worker], 100)
    worker.store(0, [2], [2], parent=1)  # was under way while the dump was written
    worker.drop(0, [2])
    assert index.match([1, 2])[0] == {(1, 0): (1, 1, 1)}
    worker.settled()
    worker.store(0, [2], [2], parent=1)
    worker.store(0, [2], [2], parent=1)  # from now on this is a second copy
    worker.drop(0, [2])
    assert index.match([1, 2])[0] == {(1, 0): (2, 2, 2)}


def test_an_event_that_is_in_the_dump_in_part_has_no_second_copies_either() -> None:
    (entry,) = read(dump_json(event([(1, 1), (2, 2)])), False)
    index = PrefixIndex(16, IngestStats())
    worker = index.add_worker(1)
    assert not entry.restore().apply(index, [worker], 100)
    worker.store(0, [1, 2, 3], [1, 2, 3])
    worker.drop(0, [3])  # happened before the dump was written, so 3 is not in it
    worker.drop(0, [1])
    assert index.match([1, 2])[0] == {}
    worker.settled()
    worker.store(0, [1, 2, 3], [1, 2, 3])
    worker.drop(0, [2])
    assert index.match([1, 2, 3])[0] == {(1, 0): (3, 3, 3)}


def test_blocks_of_a_removed_worker_are_passed_over() -> None:
    (entry,) = read(dump_json(event([(1, 1)]), event([(1, 1)], worker=2)), False)
    index = PrefixIndex(16, IngestStats())
    workers = [index.add_worker(1), index.add_worker(2)]
    workers[0].remove()
    step = entry.restore()
    assert not step.apply(index, workers, 100)
    assert step.blocks == 1
    assert index.match([1])[0] == {(2, 0): (1, 1, 1)}


@pytest.mark.parametrize("together", [True, False], ids=["in one event", "in two"])
def test_a_name_that_stands_for_two_blocks_is_harmless(together: bool) -> None:
    """If engine hashes collide, or an engine lies, the later block gets the name."""
    twice = [(1, 10), (2, 20), (1, 30), (2, 40)]
    events = [event(twice)] if together else [event(twice[:2]), event(twice[2:])]
    index = restored(read(dump_json(*events), False)[0])
    depths, _ = index.match([30, 40])
    assert together or depths == {(1, 0): (2, 2, 2)}
    assert index.match([10, 20])[0].get((1, 0), (0, 0, 0))[0] < 2
