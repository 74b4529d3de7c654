"""A stream reports what its batches show, and begins anew after a restart."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest

from kvd_core.base.recent import SIZE, Recent
from kvd_core.index.prefix_index import (
    ALL_TIERS,
    CLEARED,
    FLAWED,
    NEW_RANK,
    UNFINISHED,
    IngestStats,
    PrefixIndex,
)
from kvd_core.json.scan import BodyScanner
from tests.support.applying import apply_whole
from tests.support.dumps import dump_json, event, read, rows, text_of

BLOCK = 4
ALL_CLEARED = {"type": "AllBlocksCleared"}
QUERY = BodyScanner({"token_ids": "u32"}, ())


def stored(name: int, token: int, **members: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": None,
        "token_ids": [token] * BLOCK,
        "block_size": BLOCK,
        **members,
    }


def batch(*events: Any, rank: int | None = None) -> bytes:
    return bytes(msgpack.packb([1.5, list(events), rank]))


class Worker:
    """A worker with two registered ranks, each with its stream."""

    def __init__(self) -> None:
        self.index = PrefixIndex(BLOCK, IngestStats())
        self.worker = self.index.add_worker(1)
        for dp_rank in (0, 1):
            self.worker.register(dp_rank)
        self.streams = [self.worker.stream(dp_rank) for dp_rank in (0, 1)]

    def held(self) -> set[int]:
        """Returns the ranks that hold the block of local hash 1."""
        return {rank for _, rank in self.index.match([1])[0]}

    def scores(self, token: int) -> dict[str, int]:
        """Returns each rank's score for a prompt of one block."""
        QUERY.scan(json.dumps({"token_ids": [token] * BLOCK}).encode())
        answer = json.loads(self.index.query_tokens(QUERY, 0, None, None))
        scores = answer["scores"].get("1", {})
        return {dp_rank: score for dp_rank, score in scores.items() if score}


def test_what_a_dump_brought_is_known_until_batches_speak_for_it() -> None:
    dumped = [event([(1, 1)], dp_rank=rank) for rank in (0, 1, 2)]
    (entry,) = read(dump_json(*dumped, block_size=BLOCK), False)

    def fresh() -> Worker:
        made = Worker()
        assert not made.streams[0].restored()
        entry.restore().apply(made.index, [made.worker], 100)
        return made

    # At number 0 the blocks of its own rank and of unregistered ranks go; other ranks' blocks stay.
    made = fresh()
    first, second = made.streams
    assert first.drop_restored()
    assert not first.drop_restored()
    assert made.held() == {1}
    assert second.restored()
    second.apply(batch())
    assert not second.drop_restored()
    assert made.held() == {1}
    # At a restart the same blocks go, and those of ranks that its batches have named.
    made = fresh()
    made.streams[0].apply(batch())
    assert made.held() == {0, 1, 2}
    made.streams[0].clear()
    assert made.held() == {1}
    # A clear of its own rank leaves another rank that may be the stream's, until that clears.
    made = fresh()
    made.streams[0].apply(batch(ALL_CLEARED))
    assert made.streams[0].restored()
    made.streams[0].apply(batch(ALL_CLEARED, rank=2))
    assert not made.streams[0].restored()
    made.index.verify()


def test_a_batch_goes_on_with_what_it_has_not_told() -> None:
    made = Worker()
    (entry,) = read(dump_json(event([(1, 1), (2, 2)]), block_size=BLOCK), False)
    entry.restore().apply(made.index, [made.worker], 100)
    stream = made.streams[0]
    below = {"parent_block_hash": 2}
    removed = {"type": "BlockRemoved", "block_hashes": [2]}
    assert stream.names_restored(batch(stored(3, 3, **below)))
    assert stream.names_restored(batch(removed))
    assert not stream.names_restored(batch(stored(3, 3, **below), rank=1))
    assert not stream.names_restored(batch(stored(2, 2), stored(3, 3, **below), removed))
    assert not stream.names_restored(batch(stored(4, 4, parent_block_hash=9)))
    assert not stream.names_restored(b"x")
    assert not stream.names_restored(batch(*[removed] * 20_000))  # too long to be searched
    assert stream.restored()


def test_batches_of_two_streams_are_applied_in_turns() -> None:
    batches = [batch(*(stored(n, n) for n in numbers)) for numbers in (range(3000), range(5000))]
    whole, sliced = Worker(), Worker()
    for stream, payload in zip(whole.streams, batches, strict=True):
        apply_whole(stream, payload)
    for stream, payload in zip(sliced.streams, batches, strict=True):
        stream.slice_steps = 100
        assert stream.apply(payload) == UNFINISHED
    left = sliced.streams
    while left:
        left = [stream for stream in left if stream.advance() == UNFINISHED]
    assert rows(text_of(sliced.index)) == rows(text_of(whole.index))


def test_clear_drops_the_ranks_a_stream_has_spoken_for() -> None:
    made = Worker()
    first, second = made.streams
    first.apply(batch(stored(1, 7)))
    first.apply(batch(stored(1, 7), rank=5))
    second.apply(batch(stored(1, 7)))
    assert made.scores(7) == {"0": 4, "1": 4, "5": 4}
    first.clear()
    assert made.scores(7) == {"1": 4}
    while made.index.sweep(1):
        pass
    made.index.verify()
    first.apply(batch(stored(1, 7)))
    assert made.scores(7) == {"0": 4, "1": 4}


def test_ranks_that_only_batches_name_go_with_the_one_they_came_through() -> None:
    made = Worker()
    first, second = made.streams
    first.apply(batch(stored(1, 7)))
    first.apply(batch(stored(1, 7), rank=5))
    second.apply(batch(stored(1, 7), rank=1))
    second.apply(batch(stored(1, 7), rank=6))
    first.apply(batch(stored(2, 8), rank=1))
    made.worker.unregister(0)
    assert made.scores(7) == {"1": 4, "6": 4}
    while made.index.sweep(1):
        pass
    made.index.verify()
    made.worker.unregister(1)
    assert made.worker.ranks() == []


def test_a_cleared_stream_forgets_names() -> None:
    made = Worker()
    first = made.streams[0]
    first.apply(batch(stored(1, 7)))
    first.clear()
    first.apply(batch(stored(1, 8)))
    assert (made.scores(7), made.scores(8)) == ({}, {"0": 4})
    made.index.verify()


def test_clear_of_a_removed_worker_is_an_error() -> None:
    made = Worker()
    made.worker.remove()
    with pytest.raises(RuntimeError):
        made.streams[0].clear()


BAD = {"type": "BlockStored", "block_hashes": "x"}
OTHER = {"type": "Something"}

# Batches behind a first one; what the last one shows, its rank, and the tiers that it has cleared.
OUTCOMES: dict[str, tuple[list[bytes], int, int | None, int]] = {
    "stored": ([batch(stored(2, 8))], 0, 0, 0),
    "nothing in it": ([batch()], 0, 0, 0),
    "an event of another type": ([batch(OTHER)], 0, 0, 0),
    "a medium that is no tier": ([batch(stored(2, 8, medium="TAPE"))], 0, 0, 0),
    "no msgpack": ([b"\xc1\xc1"], FLAWED, None, 0),
    "cut off": ([batch(stored(2, 8), rank=5)[:-8]], FLAWED, None, 0),
    "a bad event among good ones": ([batch(stored(2, 8), BAD, stored(3, 9))], FLAWED, 0, 0),
    "the first of a rank": ([batch(stored(2, 8), rank=5)], NEW_RANK, 5, 0),
    "its own rank named for the first time": ([batch(rank=0)], NEW_RANK, 0, 0),
    "its own rank named again": ([batch(rank=0), batch(rank=0)], 0, 0, 0),
    "cleared": ([batch(ALL_CLEARED)], CLEARED, 0, ALL_TIERS),
    "cleared on one tier": ([batch({**ALL_CLEARED, "medium": "CPU"})], CLEARED, 0, 0b10),
    "cleared on two": (
        [batch(*({**ALL_CLEARED, "medium": medium} for medium in ("GPU", "DISK")))],
        CLEARED,
        0,
        0b101,
    ),
    "cleared on no tier": ([batch({**ALL_CLEARED, "medium": "TAPE"})], 0, 0, 0),
    "cleared where lower tiers stay": (
        [batch(stored(2, 8, group_idx=0), ALL_CLEARED)],
        CLEARED,
        0,
        0b1,
    ),
    "cleared by who knows what engine": ([batch(ALL_CLEARED, rank=5)], CLEARED | NEW_RANK, 5, 0b1),
    "cleared and stored": ([batch(ALL_CLEARED, stored(1, 7))], CLEARED, 0, ALL_TIERS),
    "bad, then cleared": ([batch(BAD, ALL_CLEARED)], CLEARED | FLAWED, 0, ALL_TIERS),
    "cleared, then bad": ([batch(ALL_CLEARED, BAD)], CLEARED | FLAWED, 0, ALL_TIERS),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcome(name: str) -> None:
    batches, shown, rank, cleared = OUTCOMES[name]
    stream = Worker().streams[0]
    assert stream.apply(batch(stored(1, 7))) == NEW_RANK
    for payload in batches:
        outcome = stream.apply(payload)
    assert (outcome, stream.rank(), stream.cleared()) == (shown, rank, cleared)


def test_a_batch_that_breaks_off_may_be_of_any_rank() -> None:
    stream = Worker().streams[0]
    assert stream.apply(batch(stored(1, 7), rank=5)[:-8]) == FLAWED
    assert stream.rank() is None
    assert not stream.names_ranks()
    assert stream.apply(batch(stored(1, 7))) == NEW_RANK
    assert stream.apply(batch(stored(1, 7), rank=5)) == NEW_RANK
    assert stream.names_ranks()
    stream.clear()
    assert not stream.names_ranks()
    assert stream.apply(batch(stored(1, 7), rank=5)) == NEW_RANK


def test_a_flaw_of_a_batch_is_named() -> None:
    stream = Worker().streams[0]
    assert stream.flaw() == ""
    for payload, flaw in (
        (batch(BAD, {**stored(1, 7), "block_size": "x"}), "hashes"),
        (batch(stored(1, 7))[:-8], "truncated"),
        (b"\xc1", "not_msgpack"),
        (batch(OTHER), ""),
    ):
        stream.apply(payload)
        assert stream.flaw() == flaw


def test_recent_batches_are_known() -> None:
    recent = Recent()
    for number in range(2 * SIZE):
        recent.note(number, b"%d" % number)
    for number in range(SIZE, 2 * SIZE):
        assert recent.holds(number, b"%d" % number)
        assert not recent.holds(number, b"x")
        assert not recent.skipped(number)
    assert not recent.holds(SIZE - 1, b"%d" % (SIZE - 1))


@pytest.mark.parametrize(
    ("first", "stop"), [(3, 9), (0, 1), (0, 10 * SIZE), (2**64 - 500, 2**64 - 1)]
)
def test_skipped_numbers_are_known(first: int, stop: int) -> None:
    recent = Recent()
    for number in range(SIZE):
        recent.note(number, b"")
    recent.skip(first, stop)
    recent.note(stop, b"")
    for number in range(max(first, stop - SIZE + 1), stop):
        assert recent.skipped(number)
    assert not recent.skipped(stop)
    recent.skip(stop, stop)
    assert not recent.skipped(stop)


def test_after_a_clear_nothing_came_with_a_dump() -> None:
    """A second copy counts at once, not only after the stream has settled."""
    (entry,) = read(dump_json(event([(1, 1)]), block_size=BLOCK), False)
    made = Worker()
    entry.restore().apply(made.index, [made.worker], 100)
    stream = made.streams[0]
    second = stored(2, 8, parent_block_hash=1)
    removed = {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}
    stream.apply(batch(ALL_CLEARED, stored(1, 7), second, second, removed))
    assert made.index.stats()["held"]["device"] == 2


# ---- blocks offloaded in chunks


def offloaded(*tokens: int, medium: str = "CPU", **members: Any) -> dict[str, Any]:
    """Returns the event of an offloaded chunk, with these tokens from a prompt's beginning."""
    names = [hash(tokens[: n + 1]) % 2**64 for n in range(len(tokens))]
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": [token for token in tokens for _ in range(BLOCK)],
        "block_size": BLOCK,
        "medium": medium,
        "group_idx": 0,
        **members,
    }


def reach(index: PrefixIndex, *tokens: int) -> list[int]:
    """Returns how many blocks of a prompt rank 0 reuses from the device, host and disk."""
    QUERY.scan(json.dumps({"token_ids": [t for t in tokens for _ in range(BLOCK)]}).encode())
    row = json.loads(index.query_tokens(QUERY, 0, None, None))["instances"].get("1", {})
    return [row.get(tier, 0) // BLOCK for tier in ("gpu", "cpu", "disk")]


@pytest.mark.parametrize(
    ("prompt", "blocks"),
    [
        ((1, 2, 3, 4, 5, 6, 7, 8, 9), [0, 8, 8]),
        ((1, 2, 3, 4, 5, 6, 7, 8), [0, 8, 8]),
        ((1, 2, 3, 4, 5, 6, 7), [0, 4, 4]),
        ((1, 2, 3, 4, 5, 6, 70, 80), [0, 4, 4]),
        ((1, 2, 3, 40), [0, 0, 0]),
        ((1, 2, 3), [0, 0, 0]),
    ],
)
def test_of_a_chunk_that_a_prompt_has_in_part_nothing_is_loaded(
    prompt: tuple[int, ...], blocks: list[int]
) -> None:
    made = Worker()
    first, second = offloaded(1, 2, 3, 4), offloaded(1, 2, 3, 4, 5, 6, 7, 8)
    second = {
        **second,
        "block_hashes": second["block_hashes"][4:],
        "parent_block_hash": second["block_hashes"][3],
        "token_ids": second["token_ids"][4 * BLOCK :],
    }
    made.streams[0].apply(batch(first, second))
    assert reach(made.index, *prompt) == blocks
    made.index.verify()


def test_what_the_device_holds_of_a_chunk_counts_beside_the_host() -> None:
    made = Worker()
    made.streams[0].apply(batch(offloaded(1, 2, 3, medium="GPU"), offloaded(1, 2, 3, 4)))
    assert reach(made.index, 1, 2, 3, 4, 5) == [3, 4, 4]
    assert reach(made.index, 1, 2, 30, 4, 5) == [2, 2, 2]
    made.streams[0].apply(batch(offloaded(1, 2, 30, 40, medium="STORAGE")))
    assert reach(made.index, 1, 2, 30, 40, 5) == [2, 2, 4]


def test_blocks_that_come_one_by_one_or_in_any_number_are_loaded_one_by_one() -> None:
    one, several, other = Worker(), Worker(), Worker()
    one.streams[0].apply(batch(offloaded(1), offloaded(2)))
    assert reach(one.index, 1, 2) == [0, 1, 1]
    several.streams[0].apply(batch(offloaded(1, 2, 3, 4)))
    assert reach(several.index, 1, 2) == [0, 0, 0]
    several.streams[0].apply(batch(offloaded(5, 6, 7)))
    assert reach(several.index, 1, 2) == [0, 2, 2]
    # Only vLLM announces chunks like this, and it numbers cache groups.
    other.streams[0].apply(batch(offloaded(1, 2, 3, 4, group_idx=None)))
    assert reach(other.index, 1, 2) == [0, 2, 2]
