"""The ledger's rules by example; figures marked "observed" are those of a live Dynamo 1.6.1."""

from __future__ import annotations

import json
from array import array

import pytest

from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.ledger import (
    ADDED,
    EXISTS,
    FULL,
    MAX_RANKS,
    MAX_REQUEST_ID_BYTES,
    MAX_TOKENS,
    OVERFLOW,
    REPEATED,
    Ledger,
    Loads,
)

LONG = list(range(1, 10_001))  # more blocks than a node of the trie has


def packed(*hashes: int) -> bytes:
    return array("Q", (value % 2**64 for value in hashes)).tobytes()


class Tracker:
    """A ledger with one rank; every step is followed by a check of all invariants."""

    def __init__(self, **limits: int) -> None:
        self.ledger = Ledger(**limits)
        self.rank = self.ledger.add_rank(7, 0)
        self.empty = self.ledger.stats()["bytes"]

    def add(self, name: str, *hashes: int, tokens: int = 0, key: str | None = None) -> int:
        outcome = self.ledger.add(name, self.rank, packed(*hashes), tokens, 0.0, key)
        self.ledger.verify()
        return outcome

    def output(self, name: str, fraction: float | None = None) -> int:
        assert self.ledger.output_block(name, fraction)
        return self.decode()

    def free(self, name: str) -> int:
        assert self.ledger.free(name)
        return self.decode()

    def decode(self) -> int:
        self.ledger.verify()
        return self.ledger.load(self.rank).decode_blocks

    def prefill(self) -> int:
        return self.ledger.load(self.rank).prefill_tokens

    def depth(self, *hashes: int) -> int:
        return self.ledger.depths(packed(*hashes)).get(self.rank, 0)


@pytest.mark.parametrize(
    "prompts, blocks",
    [
        ([[1, 2, 3]], 3),
        ([[1, 2, 3], [1, 2, 3]], 3),
        ([[1, 2, 3], [1, 2, 4, 5]], 5),
        ([[1, 2, 3], [1, 2]], 3),
        ([[]], 0),
        ([[1, 1, 1]], 3),
        ([[1, 2, 1]], 3),
        ([[1, 2, 3], [9, 2, 3]], 6),
        ([[1, 2, 3], [2, 3]], 5),
    ],
)
def test_a_block_is_its_path(prompts: list[list[int]], blocks: int) -> None:
    tracker = Tracker()
    for number, prompt in enumerate(prompts):
        assert tracker.add(str(number), *prompt) == ADDED
    assert tracker.decode() == blocks
    for number in range(len(prompts)):
        tracker.free(str(number))
    assert tracker.decode() == 0
    assert tracker.ledger.stats()["bytes"] == tracker.empty


def test_depth_is_a_live_path_from_the_root() -> None:
    tracker = Tracker()
    tracker.add("a", 1, 2, 3)
    assert tracker.depth(1, 2, 3, 4) == 3
    assert tracker.depth(1, 2) == 2
    assert tracker.depth(1, 9, 3) == 1
    assert tracker.depth(2, 3) == tracker.depth() == 0
    tracker.add("b", 1, 2, 8, 9)
    assert tracker.depth(1, 2, 8) == 3
    tracker.free("a")
    assert tracker.depth(1, 2, 3) == 2


def test_ranks_do_not_share() -> None:
    ledger = Ledger()
    ranks = [ledger.add_rank(worker, dp_rank) for worker in (1, 2) for dp_rank in (0, 1)]
    for number, rank in enumerate(ranks[:3]):
        ledger.add(str(number), rank, packed(*LONG[: 1 + number]), 10, 0.0)
    assert [ledger.load(rank) for rank in ranks] == [(10, 1, 1), (10, 2, 1), (10, 3, 1), (0, 0, 0)]
    assert ledger.depths(packed(1, 2, 3, 4)) == {ranks[0]: 1, ranks[1]: 2, ranks[2]: 3}
    ledger.verify()


def test_prefill_tokens_count_until_completion() -> None:
    tracker = Tracker()
    tracker.add("a", 1, tokens=48)
    tracker.add("b", 1, tokens=5)
    assert tracker.prefill() == 53
    for _ in range(2):
        assert tracker.ledger.prefill_complete("a")
        assert tracker.prefill() == 5
    tracker.free("b")
    assert tracker.prefill() == 0
    assert not tracker.ledger.prefill_complete("b")
    assert not tracker.ledger.free("b")
    tracker.ledger.verify()


def test_what_is_booked_can_be_read() -> None:
    tracker = Tracker()
    tracker.ledger.add("a", tracker.rank, packed(1, 2), 48, 3.5)
    tracker.output("a")
    assert tracker.ledger.request("a") == (7, 0, 2, 48, 48, False, 3.5, 1, None)
    tracker.ledger.prefill_complete("a")
    assert tracker.ledger.request("a") == (7, 0, 2, 0, 48, True, 3.5, 1, None)
    assert tracker.ledger.request("b") is None
    tracker.ledger.add("b", tracker.rank, packed(1), 0, 4.0, None, 100)
    assert tracker.ledger.request("b") == (7, 0, 1, 0, 0, False, 4.0, 0, 100)


# Output blocks


@pytest.mark.parametrize(
    "prompt, outputs, fraction, load",
    [  # all observed; each would be exactly a half, were it not for rounding errors
        (4, 1, 0.1, 0),
        (3, 2, 0.1, 0),
        (2, 3, 0.1, 1),
        (1, 4, 0.1, 1),
        (0, 5, 0.1, 0),
        (4, 1, 0.3, 2),
        (1, 4, 0.3, 1),
        (0, 5, 0.3, 1),
        (4, 1, 0.7, 4),
        (3, 2, 0.7, 3),
        (2, 3, 0.9, 5),
        (0, 1, 0.5, 1),
        (2, 5, 0.5, 4),
    ],
)
def test_halves_round_as_observed(prompt: int, outputs: int, fraction: float, load: int) -> None:
    tracker = Tracker()
    tracker.add("a", *LONG[:prompt])
    for _ in range(outputs - 1):
        tracker.output("a")
    assert tracker.output("a", fraction) == load
    assert tracker.free("a") == 0


def test_a_fraction_replaces_that_before() -> None:
    tracker = Tracker()
    tracker.add("a", 1, 2)
    assert [tracker.output("a", f) for f in (0, None, 1, 0.5)] == [0, 1, 5, 3]
    tracker.add("b")  # a prompt without whole blocks
    assert tracker.output("b", 0.5) == 4


def test_shared_blocks_keep_their_weight() -> None:
    tracker = Tracker()  # steps and figures observed
    tracker.add("a", 1, 2, 3, 4)
    tracker.add("b", 1, 2, 7, 8)
    assert tracker.output("a", 0.0) == 4
    assert tracker.output("b", 0.0) == 2
    assert tracker.free("a") == 2
    assert tracker.free("b") == 0
    tracker.add("c", 1, 2)
    tracker.add("d", 1, 2, 3, 4)
    assert tracker.output("c", 0.0) == 4
    assert tracker.output("d", 0.0) == 2


def test_a_block_keeps_its_fraction_when_it_is_shared_later() -> None:
    tracker = Tracker()
    tracker.add("a", 1, 2, 3, 4)
    assert tracker.output("a", 0.25) == 1
    tracker.add("b", 1, 2, 9)  # splits the run
    assert tracker.decode() == 2
    assert tracker.free("a") == 2  # 0.25 + 0.25 + 1
    assert tracker.output("b", 1.0) == 4
    assert tracker.free("b") == 0


def test_other_ranks_change_nothing_about_a_sum() -> None:
    alone, beside = Tracker(), Tracker()
    other = beside.ledger.add_rank(8, 0)
    for tracker in (alone, beside):
        tracker.add("a", 1, 2, 3, 4, 5)
        tracker.output("a", 0.1)
    for blocks in (2, 4):  # splits a chain that is one stretch for the rank
        beside.ledger.add(str(blocks), other, packed(*range(1, blocks + 1)), 0, 0.0)
    for fraction in (0.3, 0.7, 0.9, 0.1):
        assert alone.output("a", fraction) == beside.output("a", fraction)
    assert alone.free("a") == beside.free("a") == 0


@pytest.mark.parametrize("fraction", [-0.0001, 1.0001, float("nan"), float("inf")])
def test_a_bad_fraction_changes_nothing(fraction: float) -> None:
    tracker = Tracker()
    tracker.add("a", 1, 2)
    with pytest.raises(ValueError):
        tracker.ledger.output_block("a", fraction)
    assert tracker.decode() == 2
    assert not tracker.ledger.output_block("b", 0.5)


# Repeated adds, and bounds


def test_an_id_is_taken_until_it_is_freed() -> None:
    tracker = Tracker()
    tracker.add("a", 1, 2, tokens=5)
    assert tracker.add("a", 1, 2, tokens=5) == EXISTS
    other = tracker.ledger.add_rank(8, 0)
    assert tracker.ledger.add("a", other, packed(9), 1, 0.0) == EXISTS
    assert tracker.ledger.load(other) == (0, 0, 0)
    tracker.free("a")
    assert tracker.ledger.add("a", other, packed(9), 1, 0.0) == ADDED


@pytest.mark.parametrize(
    "key, hashes, tokens, worker, outcome",
    [
        ("k", [1, 2], 5, 7, REPEATED),
        ("other", [1, 2], 5, 7, EXISTS),
        (None, [1, 2], 5, 7, EXISTS),
        ("k", [1], 5, 7, EXISTS),
        ("k", [1, 3], 5, 7, EXISTS),
        ("k", [1, 2, 3], 5, 7, EXISTS),
        ("k", [1, 2], 6, 7, EXISTS),
        ("k", [1, 2], 5, 8, EXISTS),
    ],
)
def test_only_the_very_same_add_is_a_retry(
    key: str | None, hashes: list[int], tokens: int, worker: int, outcome: int
) -> None:
    tracker = Tracker()
    tracker.ledger.add_rank(8, 0)
    tracker.add("a", 1, 2, tokens=5, key="k")
    tracker.add("b", 1, 2, 3)
    rank = tracker.ledger.rank_of(worker, 0)
    assert rank is not None
    before = tracker.ledger.render_loads()
    assert tracker.ledger.add("a", rank, packed(*hashes), tokens, 9.0, key) == outcome
    assert tracker.ledger.render_loads() == before
    tracker.ledger.verify()


def test_an_empty_key_is_none() -> None:
    tracker = Tracker()
    tracker.add("a", key="")
    assert tracker.add("a", key="") == EXISTS


def test_bounds_on_requests_and_blocks() -> None:
    tracker = Tracker(max_requests=3, max_blocks=4)
    assert tracker.add("a", 1, 2, 3) == ADDED
    assert tracker.add("b", 1, 2, 3, 4, 5) == FULL
    assert tracker.add("b", 1, 9, 10) == FULL
    assert tracker.add("b", 1, 9) == ADDED  # shared blocks count once
    assert tracker.add("c", *LONG[:3]) == ADDED
    assert tracker.add("d") == FULL
    assert tracker.ledger.stats()["refused"] == {
        "exists": 0,
        "full": 3,
        "overflow": 0,
        "output_blocks": 0,
    }
    tracker.free("a")
    assert tracker.add("d") == ADDED
    with pytest.raises(ValueError):
        Ledger(max_blocks=2**27 + 1)


def test_bound_on_output_blocks() -> None:
    tracker = Tracker(max_output_blocks=2)
    tracker.add("a")
    assert [tracker.output("a") for _ in range(3)] == [1, 2, 2]
    assert tracker.output("a", 0.5) == 1
    assert tracker.ledger.stats()["refused"]["output_blocks"] == 2


def test_tokens_cannot_overflow() -> None:
    tracker = Tracker()
    assert tracker.add("a", 1, tokens=2**53 + 1) == OVERFLOW
    assert tracker.add("a", 1, tokens=2**64 + 5) == OVERFLOW
    assert tracker.ledger.stats()["requests"] == 0
    for number in range(512):
        name = str(number)
        assert tracker.ledger.add(name, tracker.rank, b"", MAX_TOKENS, 0.0) == ADDED
    assert tracker.prefill() == 2**62
    assert tracker.add("a", 1, tokens=1) == OVERFLOW
    assert tracker.add("a", 1, tokens=0) == ADDED
    with pytest.raises(ValueError):
        tracker.add("b", tokens=-1)
    with pytest.raises(OverflowError):
        tracker.ledger.project(b"", 2**53 + 1)
    assert json.loads(tracker.ledger.project(b"", 2**53)) == [
        {
            "worker_id": 7,
            "dp_rank": 0,
            "potential_prefill_tokens": 2**62 + 2**53,
            "potential_decode_blocks": 1,
            "active_requests": 513,
        }
    ]


def test_ids_are_any_text_of_bounded_size() -> None:
    tracker = Tracker()
    names = ["", "\0", "a:b/c", "é" * (MAX_REQUEST_ID_BYTES // 2), "💥"]
    for name in names:
        assert tracker.add(name, key=name) == ADDED
    for name in ("a" * (MAX_REQUEST_ID_BYTES + 1), "\ud800"):
        with pytest.raises(ValueError):
            tracker.add(name)
        with pytest.raises(ValueError):
            tracker.add("x", key=name)
    assert not tracker.ledger.free("a" * (MAX_REQUEST_ID_BYTES + 1))
    assert tracker.ledger.remove_ranks(7, [0]) == [(name, 0) for name in names]


# Expiry, ranks


def test_expiry_goes_by_admission_in_slices() -> None:
    tracker = Tracker()
    for age in range(6):
        tracker.ledger.add(str(age), tracker.rank, packed(age), 1, float(age))
    tracker.ledger.prefill_complete("0")  # progress does not renew the age
    assert tracker.ledger.oldest() == 0.0
    assert tracker.ledger.expire(0.0, 10) == []
    assert tracker.ledger.expire(4.0, 3) == ["0", "1", "2"]
    assert tracker.ledger.expire(4.0, 3) == ["3"]
    assert tracker.ledger.oldest() == 4.0
    assert tracker.decode() == tracker.prefill() == 2
    assert not tracker.ledger.prefill_complete("0")
    assert tracker.add("0", 1) == ADDED
    assert tracker.ledger.expire(9.0, 10) == ["4", "5", "0"]
    assert tracker.ledger.oldest() is None
    assert tracker.ledger.stats()["expired"] == 7


def test_a_removed_rank_takes_its_requests_along() -> None:
    ledger = Ledger()
    start = ledger.stats()["bytes"]
    ranks = [ledger.add_rank(worker, 3) for worker in range(5)]
    for number in range(10):
        ledger.add(str(number), ranks[number % 5], packed(1, number), 1, 0.0)
    assert ledger.remove_ranks(2, [3]) == [("2", 3), ("7", 3)]
    ledger.verify()
    assert ledger.rank_of(2, 3) is None
    assert ledger.remove_ranks(2, [3]) == []
    with pytest.raises(KeyError):
        ledger.load(ranks[2])
    with pytest.raises(KeyError):
        ledger.add("x", ranks[2], b"", 0, 0.0)
    assert ledger.add_rank(77, 0) == ranks[2]  # ids are used again
    assert ledger.add_rank(1, 3) == ledger.rank_of(1, 3) == ranks[1]
    for worker, rank in [(77, ranks[2]), *((w, r) for w, r in enumerate(ranks) if w != 2)]:
        dp_rank = 0 if worker == 77 else 3
        assert ledger.rank_of(worker, dp_rank) == rank
        ledger.remove_ranks(worker, [dp_rank])
        ledger.verify()
    assert ledger.stats()["bytes"] == start


def test_ranks_of_a_worker_are_added_together_around_those_it_has() -> None:
    loads = Loads()
    ledger, beside = Ledger(loads=loads), Ledger(loads=loads)
    elsewhere = beside.add_rank(7, 3)
    for place in ((6, 2), (7, 0), (7, 4), (7, 9), (8, 3)):
        ledger.add("{}-{}".format(*place), ledger.add_rank(*place), packed(1), 1, 0.0)
    ledger.add_ranks(7, 2, 6)
    ledger.add_ranks(7, 2, 6)  # again: nothing is missing
    ledger.add_ranks(9, 2**32 - 2, 2)
    ledger.add_ranks(1, 0, 0)
    added = [(7, dp_rank) for dp_rank in (0, 2, 3, 4, 5, 6, 7, 9)]
    places = [(6, 2), *added, (8, 3), (9, 2**32 - 2), (9, 2**32 - 1)]
    rows = json.loads(b"[%b]" % ledger.render_loads())
    assert [(row["worker_id"], row["dp_rank"]) for row in rows] == places
    assert [row["active_prefill_tokens"] for row in rows] == [1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0]
    assert len({ledger.rank_of(*place) for place in places}) == len(places)
    assert ledger.rank_of(7, 3) == elsewhere
    ledger.verify()


def test_too_many_ranks_are_not_added_in_part() -> None:
    ledger = Ledger()
    ledger.add_ranks(2, 0, MAX_RANKS - 2)
    with pytest.raises(OverflowError):
        ledger.add_ranks(1, 0, 3)
    with pytest.raises(OverflowError):
        ledger.add_ranks(1, 2**32 - 1, 2)
    assert ledger.stats()["ranks"] == MAX_RANKS - 2 and ledger.rank_of(1, 0) is None
    ledger.add_ranks(2, MAX_RANKS - 3, 3)  # one of which is there
    with pytest.raises(OverflowError):
        ledger.add_rank(1, 0)
    assert ledger.stats()["ranks"] == MAX_RANKS


def test_ranks_of_a_worker_are_removed_together_from_between_others() -> None:
    ledger = Ledger()
    places = [(6, 2), *((7, dp_rank) for dp_rank in range(6)), (8, 0)]
    for place in places:
        ledger.add("{}-{}".format(*place), ledger.add_rank(*place), packed(1), 1, 0.0)
    assert ledger.remove_ranks(7, [0, 1, 3, 9, 2**32 - 1]) == [("7-0", 0), ("7-1", 1), ("7-3", 3)]
    rows = json.loads(b"[%b]" % ledger.render_loads())
    left = [(6, 2), (7, 2), (7, 4), (7, 5), (8, 0)]
    assert [(row["worker_id"], row["dp_rank"]) for row in rows] == left
    ledger.verify()
    assert ledger.remove_ranks(7, []) == ledger.remove_ranks(9, range(3)) == []
    for wrong in ([4, 4], [5, 4]):
        with pytest.raises(ValueError, match="ascend"):
            ledger.remove_ranks(7, wrong)
    assert ledger.stats()["ranks"] == len(left)
    ledger.add_ranks(7, 0, 4)  # around the one that has stayed
    ledger.verify()
    assert ledger.remove_ranks(7, range(6), 2) == [("7-2", 2), ("7-4", 4)]  # in two ranks
    assert ledger.stats()["ranks"] == len(left) + 3 and ledger.request("7-5") is not None
    ledger.verify()
    assert ledger.remove_ranks(7, range(6), 2) == [("7-5", 5)]
    assert ledger.stats()["ranks"] == 2
    ledger.verify()


def test_a_rank_is_removed_in_slices() -> None:
    ledger = Ledger()
    rank, other = ledger.add_rank(1, 0), ledger.add_rank(2, 0)
    for number in range(5):
        ledger.add(str(number), rank, packed(1, number), 1, 0.0)
    ledger.add("other", other, packed(1), 1, 0.0)
    for left, ended in ((3, ["0", "1"]), (1, ["2", "3"])):
        assert ledger.remove_ranks(1, [0], 2) == [(each, 0) for each in ended]
        assert ledger.load(rank).requests == ledger.load(rank).prefill_tokens == left
        ledger.verify()
    assert ledger.remove_ranks(1, [0], 1) == [("4", 0)]
    assert ledger.rank_of(1, 0) == rank  # the slice was full, so more requests might follow
    assert ledger.remove_ranks(1, [0], 1) == []
    assert ledger.rank_of(1, 0) is None and ledger.stats()["requests"] == 1
    ledger.verify()


# Rendering, input


def test_rows_of_the_longest_numbers_fit() -> None:
    ledger = Ledger()
    for dp_rank in (2**32 - 2, 2**32 - 1):
        rank = ledger.add_rank(2**64 - 1, dp_rank)
        for request in range(512):
            outcome = ledger.add(f"{dp_rank}-{request}", rank, packed(request), MAX_TOKENS, 0.0)
            assert outcome == ADDED
    # A debug build checks that rows stay within the room that was made for them.
    rows = json.loads(b"[%b]" % ledger.render_loads(b'"x":0,'))
    assert [row["active_prefill_tokens"] for row in rows] == [512 * MAX_TOKENS] * 2
    rows = json.loads(ledger.project(packed(*LONG), MAX_TOKENS))
    assert [row["potential_prefill_tokens"] for row in rows] == [513 * MAX_TOKENS] * 2


def test_rows_are_sorted_numerically() -> None:
    ledger = Ledger()
    assert ledger.render_loads(b'"model_name":"m",') == b""
    assert ledger.project(b"", 0) == b"[]"
    for worker, dp_rank in ((10, 0), (2**64 - 1, 2**32 - 1), (9, 1), (9, 0)):
        rank = ledger.add_rank(worker, dp_rank)
        ledger.add(f"{worker}-{dp_rank}", rank, packed(1, 2, worker), 48, 0.0)
    text = ledger.render_loads(b'"model_name":"m","tenant_id":"t",')
    assert text.startswith(
        b'{"model_name":"m","tenant_id":"t","worker_id":9,"dp_rank":0,'
        b'"active_prefill_tokens":48,"active_decode_blocks":3},{'
    )
    order = [(row["worker_id"], row["dp_rank"]) for row in json.loads(b"[" + text + b"]")]
    assert order == [(9, 0), (9, 1), (10, 0), (2**64 - 1, 2**32 - 1)]
    assert ledger.project(packed(1, 2, 9, 4), 16).startswith(
        b'[{"worker_id":9,"dp_rank":0,"potential_prefill_tokens":64,'
        b'"potential_decode_blocks":4,"active_requests":1},{'
    )


@pytest.mark.parametrize("enough", [1, 300, 10**6])
def test_kept_rows_are_those_of_their_moment(enough: int) -> None:
    ledger, prefix = Ledger(), b'"model_name":"m",'
    for worker in range(30):
        rank = ledger.add_rank(worker, worker * 7)
        ledger.add(f"{worker}", rank, packed(1, worker), 16 * worker, 0.0)
    loads, projection = ledger.render_loads(prefix), ledger.project(packed(1, 5), 48)
    kept = ledger.keep_loads(prefix), ledger.keep_projection(packed(1, 5), 48)
    first = [rows.read(enough) for rows in kept]
    ledger.free("3")
    ledger.remove_ranks(7, [49])
    ledger.add_rank(3, 22)
    for rows, begun, whole in zip(kept, first, (loads, projection[1:-1]), strict=True):
        pieces = [begun, *iter(lambda rows=rows: rows.read(enough), b"")]
        assert b"".join(pieces) == b"," + whole
        assert all(enough <= len(piece) < enough + 200 for piece in pieces[:-1])
        assert rows.read(enough) == b""
    assert Ledger().keep_loads().read(enough) == b""
    with pytest.raises(OverflowError):
        ledger.keep_projection(b"", MAX_TOKENS + 1)


def test_hashes_come_straight_from_a_body() -> None:
    scanner = BodyScanner(arrays={"sequence_hashes": "hash64"}, fields=("n",))
    tracker = Tracker()
    scanner.scan(b'{"sequence_hashes":[1,-22,18446744073709551615]}')
    assert tracker.ledger.add("a", tracker.rank, scanner, 0, 0.0) == ADDED
    assert tracker.depth(1, -22, -1) == 3
    assert json.loads(tracker.ledger.project(scanner, 0))[0]["potential_decode_blocks"] == 3
    scanner.scan(b"{}")
    assert tracker.ledger.add("b", tracker.rank, scanner, 0, 0.0) == ADDED
    assert tracker.decode() == 3


@pytest.mark.parametrize(
    "hashes", [[1, 2], b"1234567", None, BodyScanner(arrays={"token_ids": "u32"})]
)
def test_other_hashes_are_refused(hashes: object) -> None:
    tracker = Tracker()
    with pytest.raises(TypeError):
        tracker.ledger.add("a", tracker.rank, hashes, 0, 0.0)
    with pytest.raises(TypeError):
        tracker.ledger.project(hashes, 0)


# Structure


def test_churn_at_branches_leaves_no_fragments() -> None:
    tracker = Tracker()
    tracker.add("long", *LONG[:500])
    for length in range(499, 0, -7):
        tracker.add("branch", *LONG[:length], 77_777)
        tracker.add("end", *LONG[:length])
        tracker.free("branch")
        tracker.free("end")
    assert tracker.ledger.stats()["nodes"] == 1
    tracker.output("long", 0.5)
    tracker.add("end", *LONG[:100])
    tracker.output("long", 0.25)  # changes only the blocks behind the shared ones
    tracker.free("end")
    assert tracker.ledger.stats()["nodes"] == 2
    tracker.output("long", 0.25)
    assert tracker.ledger.stats()["nodes"] == 1


def test_long_prompts_are_cut_and_joined() -> None:
    tracker = Tracker()
    tracker.add("long", *LONG)
    nodes = tracker.ledger.stats()["nodes"]
    assert nodes == 3
    for length in (1, 4095, 4096, 4097, 5000, 7096, 9999, 10_000):
        assert tracker.add("other", *LONG[:length], 77_777) == ADDED
        assert tracker.decode() == len(LONG) + 1
        assert tracker.depth(*LONG) == len(LONG)
        tracker.free("other")
        assert tracker.ledger.stats()["nodes"] <= nodes
    assert tracker.free("long") == 0
    assert tracker.ledger.stats()["bytes"] == tracker.empty


def test_thousands_of_ranks_share_a_prompt() -> None:
    ledger = Ledger()
    ranks = [ledger.add_rank(worker, 0) for worker in range(2000)]
    before = ledger.stats()["bytes"]
    for rank in ranks:
        ledger.add(str(rank), rank, packed(*LONG[:300], 50_000 + rank), 1, 0.0)
    ledger.verify()
    assert ledger.stats()["nodes"] == 2001
    assert ledger.stats()["blocks"] == 2300
    depths = ledger.depths(packed(*LONG[:300], 50_007))
    assert depths == {rank: 301 if rank == 7 else 300 for rank in ranks}
    for rank in ranks:
        ledger.free(str(rank))
    ledger.verify()
    assert ledger.stats()["bytes"] == before


# ---- ledgers that share their loads


class Shared:
    """Two ledgers over the same loads, with a common rank and one of their own each."""

    def __init__(self) -> None:
        loads = Loads()
        self.one, self.other = Ledger(loads=loads), Ledger(loads=loads)
        self.common = self.one.add_rank(7, 0)
        assert self.other.add_rank(7, 0) == self.common
        self.ones, self.others = self.one.add_rank(1, 0), self.other.add_rank(2, 0)

    def book(self, ledger: Ledger, name: str, rank: int, *hashes: int, tokens: int = 0) -> int:
        outcome = ledger.add(name, rank, packed(*hashes), tokens, 0.0)
        self.verify()
        return outcome

    def verify(self) -> None:
        self.one.verify()
        self.other.verify()


def test_what_one_books_weighs_on_the_ranks_of_all() -> None:
    shared = Shared()
    shared.book(shared.one, "r1", shared.common, 1, 2, 3, tokens=48)
    shared.book(shared.other, "r2", shared.common, 1, 2, 4, tokens=16)
    assert shared.one.load(shared.common) == shared.other.load(shared.common) == (64, 4, 2)
    assert shared.other.depths(packed(1, 2, 3)) == {shared.common: 3}
    assert shared.one.output_block("r1", 0.5)  # of its blocks only 3 is not shared
    assert shared.other.load(shared.common).decode_blocks == 4  # 1, 2, 4, half a 3, half a block
    assert shared.one.free("r1")
    shared.verify()
    assert shared.one.load(shared.common) == shared.other.load(shared.common) == (16, 3, 1)


def test_each_lists_and_finds_its_own() -> None:
    shared = Shared()
    shared.book(shared.one, "r1", shared.common, 1)
    shared.book(shared.one, "r2", shared.ones, 1)
    assert [row["worker_id"] for row in json.loads(b"[%b]" % shared.one.render_loads())] == [1, 7]
    rows = json.loads(shared.other.project(packed(1), 0))
    assert [(row["worker_id"], row["potential_decode_blocks"]) for row in rows] == [(2, 1), (7, 1)]
    assert shared.other.rank_of(1, 0) is shared.other.request("r1") is None
    assert shared.other.depths(packed(1)) == {shared.common: 1}
    assert not shared.other.free("r1") and not shared.other.prefill_complete("r1")
    assert not shared.other.output_block("r1")
    with pytest.raises(KeyError):
        shared.other.load(shared.ones)
    with pytest.raises(KeyError):
        shared.book(shared.other, "r3", shared.ones)
    assert shared.other.stats()["requests"] == 0 and shared.other.stats()["ranks"] == 2
    assert shared.one.stats()["added"] == 2 and shared.other.stats()["added"] == 0


def test_an_id_names_one_request_in_each() -> None:
    shared = Shared()
    assert shared.book(shared.one, "r", shared.common, 1, 2) == ADDED
    assert shared.book(shared.other, "r", shared.common, 3) == ADDED
    assert shared.book(shared.one, "r", shared.common, 3) == EXISTS
    assert shared.one.free("r")
    live = shared.other.request("r")
    assert live is not None and live.blocks == 1
    assert shared.other.load(shared.common) == (0, 1, 1)


def test_a_rank_stays_for_those_who_have_it() -> None:
    shared = Shared()
    shared.book(shared.one, "r1", shared.common, 1, 2)
    shared.book(shared.other, "r2", shared.common, 1, 3)
    assert shared.one.remove_ranks(7, [0]) == [("r1", 0)]
    shared.verify()
    assert shared.other.load(shared.common) == (0, 2, 1)
    assert shared.one.rank_of(7, 0) is None
    assert shared.one.add_rank(7, 0) == shared.common  # it comes back with the requests there
    assert shared.one.load(shared.common) == (0, 2, 1)
    assert shared.one.remove_ranks(7, [0]) == []
    assert shared.other.remove_ranks(7, [0]) == [("r2", 0)]
    shared.verify()


def test_each_expires_its_own() -> None:
    shared = Shared()
    for ledger in (shared.one, shared.other):
        shared.book(ledger, "r", shared.common, 1)
    assert shared.one.expire(1.0, 10) == ["r"]
    assert shared.one.oldest() is None and shared.other.oldest() == 0.0
    assert shared.one.stats()["expired"] == 1 and shared.other.stats()["expired"] == 0


def test_loads_stay_while_thousands_of_ranks_come() -> None:
    loads = Loads()
    ledgers = Ledger(loads=loads), Ledger(loads=loads)
    for ledger in ledgers:
        assert ledger.add("r", ledger.add_rank(9, 0), packed(1, 2), 5, 0.0) == ADDED
    for worker_id in range(8, 0, -1):
        for ledger in ledgers:
            ledger.add_ranks(worker_id, 0, 1024)
            assert ledger.load(ledger.rank_of(9, 0)) == (10, 2, 2)
            ledger.verify()


def test_a_ledger_that_is_dropped_weighs_nothing() -> None:
    shared = Shared()
    shared.book(shared.one, "r1", shared.common, 1, 2, tokens=5)
    shared.book(shared.other, "r2", shared.common, 1)
    shared.one = Ledger()
    shared.verify()
    assert shared.other.load(shared.common) == (0, 1, 1)
    assert shared.other.stats()["blocks"] == 1


def test_only_so_many_ledgers_have_ranks() -> None:
    loads = Loads()
    ledgers = [Ledger(loads=loads) for _ in range(9)]
    for ledger in ledgers[:8]:
        ledger.add_rank(1, 0)
    with pytest.raises(RuntimeError, match="too many ledgers"):
        ledgers[8].add_rank(1, 0)
    ledgers[3].remove_ranks(1, [0])
    assert ledgers[8].add_rank(1, 0) == 0
    ledgers[8].verify()
