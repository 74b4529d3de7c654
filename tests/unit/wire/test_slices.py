"""Long batches, applied slice by slice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter
from typing import Any

import msgpack
import pytest

from kvd.wire.envelope import StreamIdentity
from kvd.wire.event_stream import EventStream
from kvd.wire.kv_events import MAX_CONTAINERS, MAX_EVENT_BYTES, MAX_JSON_BYTES
from kvd.wire.standard_events import StandardEventStream
from kvd_core.conductor.conductor import Conductor
from kvd_core.index.prefix_index import (
    FLAWED,
    NEW_RANK,
    UNFINISHED,
    IngestStats,
    PrefixIndex,
    Stream,
)
from tests.models.conductor_model import sequence_hashes
from tests.support.applying import apply_whole
from tests.support.budget import scaled

SIZE = 2
TOKENS = list(range(100, 116))
STANDARD = sequence_hashes(TOKENS, SIZE, 1337)
SCOPES = (("", ""), ("x", ""), ("", "s"))


class Publishers:
    """Publishers of two instances (two engines and a store), and a worker, in one index."""

    def __init__(self, slice_steps: int) -> None:
        self.index = PrefixIndex(SIZE, IngestStats())
        self.conductor = Conductor(self.index)
        self.streams: list[StandardEventStream | Stream] = []
        for instance, store in (("a", False), ("a", True), ("b", False)):
            source = self.conductor.add_source(instance, "", "", 0, store)
            identity = StreamIdentity("m", "default", SIZE, "", "", 0, store)
            self.streams.append(StandardEventStream(source, identity))
        worker = self.index.add_worker(9)
        worker.register(0)
        self.streams.append(worker.stream(0))
        for stream in self.streams:
            stream.slice_steps = slice_steps

    def state(self) -> dict[str, Any]:
        names = "events orphans mismatches ignored bad unlocated conflicts"
        counted = attrgetter(*names.split(), "order.gaps", "order.stale", "order.beginnings")
        counts = [counted(each) for each in self.streams if isinstance(each, StandardEventStream)]
        rows = [self.conductor.match_tokens(TOKENS, *scope) for scope in SCOPES]
        rows += [self.conductor.match_hashes(STANDARD, *scope) for scope in SCOPES]
        stats = {name: n for name, n in self.index.stats().items() if name != "bytes"}
        self.conductor.sequence(1 << 16)  # drops stale entries, of which a slice may leave some
        waiting = self.conductor.stats()["waiting"]
        return {"counts": counts, "rows": rows, "stats": stats, "waiting": waiting} | (
            self.index.counters.as_dict()
        )


def path(rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(STANDARD))
    return start, rng.randint(start + 1, len(STANDARD))


def standard(rng: random.Random) -> dict[str, Any]:
    start, end = path(rng)
    event: dict[str, Any] = {
        "event_type": rng.choice(("stored", "stored", "stored", "removed", "cleared", "junk")),
        "event_id": rng.choice((None, rng.randrange(40))),
        "medium": rng.choice((None, "gpu", "cpu", "cxl")),
        "dp_rank": rng.choice((None, 0, 1)),
        "additional_salt": rng.choice((None, None, None, "s")),
        "seq_hashes": rng.choice((STANDARD[start:end], [1000 + i for i in range(start, end)])),
    }
    if rng.random() < 0.6:
        event["token_ids"] = TOKENS[start * SIZE : end * SIZE]
        event["parent_hash"] = rng.choice((STANDARD[start - 1], 999 + start)) if start else None
    if rng.random() < 0.05:
        event["seq_hashes"] = rng.choice((None, ["x"], [1.5]))
    return event


def of_engine(rng: random.Random) -> Any:
    start, end = path(rng)
    names = [1000 + i for i in range(start, end)]
    medium = rng.choice((None, "GPU", "CPU"))
    tokens = rng.choice((TOKENS[start * SIZE : end * SIZE], TOKENS[start * SIZE : end * SIZE], []))
    stored = ["BlockStored", names, 999 + start if start else None, tokens, SIZE, None, medium]
    removed = {"type": "BlockRemoved", "block_hashes": names, "medium": medium}
    return rng.choice((stored, stored, removed, ["AllBlocksCleared"], None, ["BlockStored", "x"]))


def payload(rng: random.Random, kinds: tuple[Callable[[random.Random], Any], ...]) -> bytes:
    events = [rng.choice(kinds)(rng) for _ in range(rng.randrange(6))]
    rank = rng.choice((None, 0, 1))
    value = {"events": events, "dp_rank": rank} if rng.random() < 0.5 else [0, events, rank]
    packed: bytes = json.dumps(value).encode() if rng.random() < 0.3 else msgpack.packb(value)
    return packed[: len(packed) - rng.choice((0, 0, 0, 0, 0, 1, 5))]


@pytest.mark.parametrize("seed", range(scaled(8)))
def test_slices_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    whole, sliced = Publishers(2**32 - 1), Publishers(1)
    slices = 0
    for _ in range(40):
        who = rng.randrange(4)
        kinds = (
            (of_engine,)
            if who == 3
            else ((of_engine,), (standard,), (standard, of_engine))[rng.randrange(3)]
        )
        batch = payload(rng, kinds)
        shown = whole.streams[who].apply(batch)
        assert shown != UNFINISHED
        again = sliced.streams[who].apply(batch)
        while again == UNFINISHED:
            slices += 1
            sliced.conductor.verify()
            again = sliced.streams[who].advance()
        assert again == shown
        assert sliced.streams[who].flaw() == whole.streams[who].flaw()
        assert sliced.state() == whole.state()
    sliced.conductor.verify()
    assert slices > 100


def one(store: bool = False) -> tuple[PrefixIndex, Conductor, StandardEventStream]:
    index = PrefixIndex(SIZE, IngestStats())
    conductor = Conductor(index)
    source = conductor.add_source("a", "", "", 0, store)
    return (
        index,
        conductor,
        StandardEventStream(source, StreamIdentity("m", "default", SIZE, "", "", 0, store)),
    )


def stored(hashes: list[int], **members: Any) -> bytes:
    packed: bytes = msgpack.packb([0, [{"event_type": "stored", "seq_hashes": hashes, **members}]])
    return packed


def engine_stored(hashes: list[int], tokens: list[int], parent: int | None = None) -> bytes:
    packed: bytes = msgpack.packb([0, [["BlockStored", hashes, parent, tokens, SIZE, None, "GPU"]]])
    return packed


def as_json(packed: bytes) -> bytes:
    return json.dumps(msgpack.unpackb(packed)).encode()


LONG = range(1, 40_001)
PROMPT = [token % 50_000 for token in range(len(LONG) * SIZE)]


@pytest.mark.parametrize(
    ("batch", "least"),
    [
        (stored(list(LONG)), 30),
        (stored(list(LONG), token_ids=PROMPT, parent_hash=None), 10),
        (engine_stored(list(LONG), []), 30),
        (engine_stored(list(LONG), PROMPT), 5),
        (msgpack.packb([0, [["BlockRemoved", [at]] for at in LONG]]), 3),
        (msgpack.packb([0, [{"event_type": "removed", "seq_hashes": [1]}] * 1000]), 10),
        (as_json(stored(list(LONG), token_ids=PROMPT, parent_hash=None)), 15),
        (as_json(engine_stored(list(LONG), PROMPT)), 10),
    ],
)
def test_a_long_batch_takes_several_slices(batch: bytes, least: int) -> None:
    index, conductor, publication = one()
    slices = 1
    shown = publication.apply(batch)
    while shown == UNFINISHED:
        conductor.match_tokens(TOKENS)  # as questions come in between
        slices += 1
        shown = publication.advance()
    assert (shown, slices >= least) == (0, True)
    index.verify()


def test_a_long_event_of_a_worker_is_several_with_the_same_result() -> None:
    index = PrefixIndex(SIZE, IngestStats())
    stream = index.add_worker(1).stream(0)
    assert stream.apply(engine_stored(list(LONG), PROMPT)) == UNFINISHED
    while stream.advance() == UNFINISHED:
        pass
    assert index.stats()["stored"] == len(LONG)
    # Stored again, in any length, the blocks are refreshed and make no copies.
    for n in (len(LONG), 8193, 8192 * 2 + 1):
        apply_whole(stream, engine_stored(list(LONG[:n]), PROMPT))
    assert index.stats()["copies"] == 0
    apply_whole(stream, engine_stored(list(range(7, 20_007)), PROMPT[:40_000], parent=5_000_000))
    index.verify()


@pytest.mark.parametrize("of", ["worker", "publisher"])
def test_blocks_that_wait_for_a_parent_are_parked_in_slices(of: str) -> None:
    if of == "worker":
        index, stream = a_worker(slice_steps=1)
    else:
        index, _, stream = one()
        stream._engine.slice_steps = 1
    shown = stream.apply(engine_stored(list(LONG[:8192]), PROMPT[: 8192 * SIZE], parent=99_999))
    parked = [0]
    while shown == UNFINISHED:
        parked.append(index.stats()["parked_now"])
        shown = stream.advance()
    parked.append(index.stats()["parked_now"])
    assert (shown & FLAWED, parked[-1]) == (0, 8192)
    assert max(after - before for before, after in pairwise(parked)) <= 512
    index.verify()


def test_what_a_block_sets_off_is_sliced_too() -> None:
    index, conductor, publication = one()
    for at in range(2, 3000):
        tokens = PROMPT[(at - 1) * SIZE : at * SIZE]
        apply_whole(publication, engine_stored([at], tokens, parent=at - 1))
    assert (index.stats()["parked_now"], index.stats()["blocks"]) == (2998, 0)
    assert publication.apply(engine_stored([1], PROMPT[:SIZE])) == UNFINISHED
    assert 0 < index.stats()["parked_now"] < 2998
    assert 0 < conductor.match_tokens(PROMPT)["a"]["longest_matched"] < 3000
    while publication.advance() == UNFINISHED:
        conductor.verify()
    assert (index.stats()["parked_now"], index.stats()["blocks"]) == (0, 2999)


def test_what_is_left_of_that_is_done_by_the_sweep() -> None:
    index, conductor, publication = one()
    for at in range(2, 3000):
        tokens = PROMPT[(at - 1) * SIZE : at * SIZE]
        apply_whole(publication, engine_stored([at], tokens, parent=at - 1))
    assert publication.apply(engine_stored([1], PROMPT[:SIZE])) == UNFINISHED
    del publication
    while index.sweep(1000):
        conductor.verify()
    assert (index.stats()["parked_now"], index.stats()["blocks"]) == (0, 2999)


def parked_worker() -> tuple[PrefixIndex, list[Stream]]:
    """Returns two streams of a worker, whose rank 0 has 2,998 blocks that wait for the first."""
    index = PrefixIndex(SIZE, IngestStats())
    worker = index.add_worker(1)
    streams = [worker.stream(0), worker.stream(1)]
    for at in range(2, 3000):
        tokens = PROMPT[(at - 1) * SIZE : at * SIZE]
        apply_whole(streams[0], engine_stored([at], tokens, parent=at - 1))
    for stream in streams:
        stream.slice_steps = 4_000
    assert streams[0].apply(engine_stored([1], PROMPT[:SIZE])) == UNFINISHED
    stats = index.stats()
    assert 0 < stats["parked_now"] < 2998
    assert stats["blocks"] + stats["parked_now"] == 2999
    return index, streams


@pytest.mark.parametrize("by", ["stream", "another", "sweep"])
def test_what_a_block_of_a_worker_sets_off_is_sliced_too(by: str) -> None:
    index, streams = parked_worker()
    if by == "sweep":
        while index.sweep(1000):
            index.verify()
    else:
        if by == "another":  # a batch of any stream goes on with it
            assert streams[1].apply(engine_stored([5000], PROMPT[:SIZE])) == UNFINISHED
        while streams[by == "another"].advance() == UNFINISHED:
            index.verify()
    stats = index.stats()
    assert (stats["parked_now"], stats["blocks"]) == (0, 2999)
    index.verify()


@pytest.mark.parametrize("ending", ["clear", "removed", "restart"])
def test_blocks_that_still_wait_go_with_their_rank(ending: str) -> None:
    index, streams = parked_worker()
    event = ["AllBlocksCleared"] if ending == "clear" else ["BlockRemoved", [1]]
    if ending == "restart":
        streams[0].clear()
    else:
        apply_whole(streams[1], msgpack.packb([0, [event], 0]))
    while index.sweep(1000):
        index.verify()
    left = index.stats()["blocks"] + index.stats()["parked_now"]
    assert left == (2999 if ending == "removed" else 0)
    index.verify()


def test_names_beyond_the_tokens_are_sliced_in_every_group() -> None:
    index, conductor, publication = one()
    of_group = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    window = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
        "token_ids": PROMPT[:SIZE], "block_size": SIZE, "kv_cache_spec_sliding_window": 8,
    }  # fmt: skip
    first = ["BlockStored", [1], None, PROMPT[:SIZE], SIZE, None, "GPU"]
    apply_whole(publication, msgpack.packb([0, [first, window | of_group]]))
    # An event without a group is about both, and this one has tokens for its first block only.
    n = 40_000
    event = ["BlockStored", list(range(10, 10 + n)), None, PROMPT[:SIZE], SIZE, None, "GPU"]
    going = publication.apply(msgpack.packb([0, [event]]))
    least = index.stats()["parked_now"]
    while going == UNFINISHED:
        going = publication.advance()
        now = index.stats()["parked_now"]
        assert now - least < n // 4
        least = now
    assert index.stats()["parked_now"] == n - 1
    conductor.verify()


@pytest.mark.parametrize(
    "batch", [stored(list(LONG)), engine_stored(list(LONG), PROMPT), engine_stored(list(LONG), [])]
)
@pytest.mark.parametrize("ending", ["clear", "remove", "another"])
def test_the_rest_of_a_batch_goes_with_what_it_was_for(batch: bytes, ending: str) -> None:
    index, conductor, publication = one()
    source = publication._source
    assert publication.apply(batch) == UNFINISHED
    while not index.stats()["blocks"] + index.stats()["parked_now"]:
        assert publication.advance() == UNFINISHED
    if ending == "clear":
        publication.clear()
    elif ending == "remove":
        source.remove_all()
    else:
        assert apply_whole(publication, msgpack.packb([0, [["AllBlocksCleared"]]])) == 0
    if ending != "remove":
        assert publication.advance() == 0
    while index.sweep(10_000):
        pass
    stats = index.stats()
    assert (stats["blocks"], stats["parked_now"]) == (0, 0)
    conductor.verify()


def test_a_rank_that_is_removed_or_cleared_meanwhile_is_found_again() -> None:
    index = PrefixIndex(SIZE, IngestStats())
    worker = index.add_worker(1)
    streams = [worker.stream(0), worker.stream(1)]
    for rank in (0, 1):
        worker.register(rank)
    batch = msgpack.packb([0, [["BlockStored", list(LONG), None, [], SIZE, None, "CPU"]], 0])
    assert streams[1].apply(batch) == UNFINISHED
    worker.unregister(0)
    while index.sweep(10_000):
        pass
    while streams[1].advance() == UNFINISHED:
        index.verify()
    assert 0 < index.stats()["parked_now"] < len(LONG)
    worker.remove()
    with pytest.raises(RuntimeError, match="removed"):
        streams[1].advance()


def test_reading_is_bounded() -> None:
    _, _, publication = one()
    too_long = stored([1], junk=b"x" * MAX_EVENT_BYTES)
    nested = stored([1], junk=[[]] * MAX_CONTAINERS)
    json = b'{"event_type":"stored","seq_hashes":[' + b"1," * (MAX_JSON_BYTES // 2) + b"1]}"
    for at, batch in enumerate((too_long, nested, json), 1):
        assert apply_whole(publication, batch) == FLAWED
        assert publication.bad == {"too_large": at}
    # Claimed lengths without data are refused before memory is taken for them.
    claimed = b"\x92\x00\x91\x81\xaaevent_type" + b"\xdd\x7f\xff\xff\xff" * 99
    assert apply_whole(publication, claimed) == FLAWED
    assert publication.bad == {"too_large": 3, "msgpack": 1}


# ---- a listener's part


def listening(stream: StandardEventStream) -> EventStream:
    listener = EventStream("a", "tcp://127.0.0.1:5557", stream, "tcp://127.0.0.1:5558")
    listener.connecting()
    listener.receiving()
    listener.joined()
    return listener


def test_a_listener_is_recovering_until_the_batch_is_over() -> None:
    index, _, publication = one()
    listener = listening(publication)
    assert listener.take(0, engine_stored([1], PROMPT[:SIZE])) is False
    assert listener.take(1, stored(list(LONG))) is True
    assert (listener.unfinished, listener.catch_up.held) == (1, None)
    assert listener.health(0.0) == "recovering"
    while listener.unfinished is not None:
        listener.batches.advance()
    assert (listener.health(0.0), index.stats()["parked_now"]) == ("exact", len(LONG) - 1)


def test_what_a_long_batch_shows_is_learnt_at_its_end() -> None:
    _, _, publication = one()
    listener = listening(publication)
    batch = msgpack.packb([0, [7, {"event_type": "stored", "seq_hashes": list(LONG)}]])
    assert listener.take(0, batch) is True
    assert listener.stats.flawed == 0
    while listener.unfinished is not None:
        listener.batches.advance()
    assert (listener.stats.flawed, listener.batches.last_flaw) == (1, (0, "event_shape"))


def test_a_held_batch_and_a_replayed_one_may_be_long() -> None:
    index, _, publication = one()
    listener = listening(publication)
    assert listener.take(0, stored([1])) is False
    assert listener.take(2, stored(list(LONG))) is True
    listener.catch_up.judge()
    assert listener.catch_up.take(1, stored(list(range(50_001, 90_001)))) is not None
    assert listener.unfinished == 1
    while listener.unfinished is not None:
        listener.batches.advance()
    assert listener.catch_up.apply_held() == ""
    assert listener.unfinished == 2
    while listener.unfinished is not None:
        listener.batches.advance()
    assert (index.stats()["parked_now"], listener.health(0.0)) == (80_000, "exact")


def test_a_bug_in_a_slice_ends_the_batch() -> None:
    class Broken(StandardEventStream):
        def advance(self) -> int:
            raise ZeroDivisionError

    index = PrefixIndex(SIZE, IngestStats())
    source = Conductor(index).add_source("a", "", "", 0, False)
    stream = Broken(source, StreamIdentity("m", "default", SIZE, "", "", 0, False))
    listener = listening(stream)
    assert listener.take(0, engine_stored([1], PROMPT[:SIZE])) is False
    listener.batches.unfinished = 0
    with pytest.raises(ZeroDivisionError):
        listener.batches.advance()
    assert listener.unfinished is None


MANY = 40_000  # values of a member, which take several slices of SHORT_STEPS
SHORT_STEPS = 400
PORTION = 1 << 20  # kPortionBytes of kvd_core/events/events.hpp
NOWHERE = {"medium": "nowhere"}  # such an event is read and then ignored


def engine_event(kind: str = "Stored", **members: Any) -> dict[str, Any]:
    of_kind = {"type": f"Block{kind}", "block_hashes": [1]}
    if kind == "Stored":
        of_kind |= {"token_ids": [1, 2], "block_size": SIZE}
    return of_kind | members


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def of_members(names: int, *events: Any) -> bytes:
    """Returns a batch in map form with many members."""
    packed: bytes = msgpack.packb({f"m{at}": at for at in range(names)} | {"events": events})
    return packed


def of_events(*events: Any) -> bytes:
    packed: bytes = msgpack.packb([0, events, None])
    return packed


LONG_EVENTS = [
    of_events(engine_event(new=[1] * MANY)),
    of_events(engine_event(new=[[nested(500)] * (MANY // 500)])),
    of_events(engine_event(**{f"m{at}": at for at in range(MANY)})),
    of_events({at: at for at in range(MANY)}),
    of_events(["BlockRemoved", [1], "GPU", *range(MANY)]),
    of_events(["BlockRemoved", [1], "GPU", [None] * MANY]),
    of_events(["New", *range(MANY)]),
    of_events(engine_event("Removed", block_hashes=[1] * MANY, **NOWHERE)),
    of_events(engine_event("Removed", block_hashes=[*range(MANY), "x"])),
    of_events(engine_event("Removed", remaining_copy_counts=[1] * MANY)),
    of_events(engine_event(token_ids=[1] * MANY, **NOWHERE)),
    of_events(engine_event(token_ids=[[1, 2]] * MANY, **NOWHERE)),
    of_events(engine_event(extra_keys=[None] * MANY)),
    of_events(engine_event(extra_keys=[["a"]] * MANY, block_hashes=[1] * MANY, **NOWHERE)),
    of_events(engine_event(lora_name=dict.fromkeys(range(MANY)))),
    of_members(MANY, engine_event(**NOWHERE)),
    msgpack.packb([0, [], None, *range(MANY)]),
    msgpack.packb([0, [], None, list(range(MANY))]),
]


def a_worker(slice_steps: int) -> tuple[PrefixIndex, Stream]:
    index = PrefixIndex(SIZE, IngestStats())
    worker = index.add_worker(1)
    for rank in (0, 5):
        worker.register(rank)
    stream = worker.stream(0)
    stream.slice_steps = slice_steps
    return index, stream


@pytest.mark.parametrize("batch", LONG_EVENTS)
def test_reading_a_long_event_takes_several_slices(batch: bytes) -> None:
    _, stream = a_worker(SHORT_STEPS)
    slices = 1
    shown = stream.apply(batch)
    while shown == UNFINISHED:
        slices += 1
        shown = stream.advance()
    assert slices >= 4


def seen_in(batch: bytes, slice_steps: int) -> object:
    index, stream = a_worker(slice_steps)
    outcome = apply_whole(stream, batch)
    index.verify()
    stats = {name: n for name, n in index.stats().items() if name != "bytes"}
    return outcome, stream.flaw(), stream.rank(), stats, index.counters.as_dict()


@pytest.mark.parametrize("batch", LONG_EVENTS)
def test_slices_of_a_long_event_change_nothing(batch: bytes) -> None:
    assert seen_in(batch, SHORT_STEPS) == seen_in(batch, 2**32 - 1)
    for cut in (1, len(batch) // 3, len(batch) // 2):
        assert seen_in(batch[:-cut], SHORT_STEPS) == seen_in(batch[:-cut], 2**32 - 1)


BEYOND_A_PORTION = [
    engine_event(block_hashes=[at], token_ids=[at, at + 1], new=b"x" * 1000)
    for at in range(2 * PORTION // 1000)
]


@pytest.mark.parametrize("slice_steps", [100, 2**32 - 1])
def test_a_batch_of_several_portions_is_of_the_rank_that_comes_last(slice_steps: int) -> None:
    count = len(BEYOND_A_PORTION)
    index, stream = a_worker(slice_steps)
    assert apply_whole(stream, msgpack.packb([0, BEYOND_A_PORTION, 5])) == NEW_RANK
    assert (stream.rank(), index.stats()["held"]["device"]) == (5, count)
    of_map = {"dp_rank": 0, "events": BEYOND_A_PORTION, "attn_dp_rank": 5}
    index, stream = a_worker(slice_steps)
    assert apply_whole(stream, msgpack.packb(of_map)) == NEW_RANK
    assert (stream.rank(), index.stats()["held"]["device"]) == (5, count)


@pytest.mark.parametrize("slice_steps", [100, 2**32 - 1])
def test_a_batch_of_several_portions_is_refused_for_what_comes_last(slice_steps: int) -> None:
    for batch in ([0, BEYOND_A_PORTION, "no rank"], {"events": BEYOND_A_PORTION, "ts": "no time"}):
        index, stream = a_worker(slice_steps)
        assert apply_whole(stream, msgpack.packb(batch)) == FLAWED
        assert (index.stats()["stored"], sum(index.counters.as_dict()["bad"].values())) == (0, 1)


def test_events_of_earlier_portions_count_where_a_batch_breaks_off() -> None:
    whole = msgpack.packb([0, BEYOND_A_PORTION, 5])
    index, stream = a_worker(100)
    assert apply_whole(stream, whole[: -len(whole) // 4]) == FLAWED
    assert (stream.flaw(), stream.rank()) == ("truncated", None)
    assert len(BEYOND_A_PORTION) // 2 < index.stats()["stored"] < len(BEYOND_A_PORTION)
