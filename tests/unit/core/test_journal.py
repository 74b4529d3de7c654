"""A ledger's records of its requests are enough to book them again."""

from __future__ import annotations

from random import Random

import pytest

from kvd_core.ledger.journal import BOOKED, ENDED, Booked, Journal, OtherRecord, Stepped, read
from kvd_core.ledger.ledger import ADDED, Ledger
from tests.support.budget import scaled
from tests.support.hashes import packed

LIMIT = 1 << 24


class Recorded:
    """A ledger of two ranks whose steps are recorded."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.journal = Journal(limit)
        self.ledger = Ledger()
        self.ranks = [self.ledger.add_rank(7, dp_rank) for dp_rank in (0, 1)]
        self.ledger.record_in(3, self.journal)

    def add(self, name: str, hashes: list[int], rank: int = 0, key: str | None = None) -> None:
        at = float(len(name))
        outcome = self.ledger.add(name, self.ranks[rank], packed(hashes), 48, at, key, 99)
        assert outcome == ADDED


def test_each_step_is_recorded_as_it_is_taken() -> None:
    one = Recorded()
    one.add("chat-17", [1, 2, 3], rank=1, key="again")
    one.ledger.prefill_complete("chat-17")
    one.ledger.prefill_complete("chat-17")  # changes nothing
    one.ledger.output_block("chat-17", None)
    one.ledger.output_block("chat-17", 0.25)
    one.ledger.free("chat-17")
    booked, *steps = read(one.journal.take())
    assert booked == Booked(
        3, "chat-17", "again", 7, 1, 48, 7.0, 99, 0, 0, 1.0, False, packed([1, 2, 3])
    )
    assert [(step.kind, step.fraction) for step in steps if isinstance(step, Stepped)] == [
        (ord("P"), None),
        (ord("O"), None),
        (ord("O"), 0.25),
        (ENDED, None),
    ]
    assert {(step[1], step[2]) for step in steps} == {(3, "chat-17")}
    assert len(one.journal) == 0


def test_what_ends_with_its_rank_or_by_age_is_recorded() -> None:
    one = Recorded()
    one.add("a", [1])
    one.add("bb", [1], rank=1)
    one.journal.take()
    one.ledger.expire(2.0, 10)
    one.ledger.remove_ranks(7, [1])
    assert [step[:3] for step in read(one.journal.take())] == [(ENDED, 3, "a"), (ENDED, 3, "bb")]


def test_refused_requests_are_not_recorded() -> None:
    one = Recorded()
    one.add("a", [1])
    one.journal.take()
    assert one.ledger.add("a", one.ranks[0], packed([2]), 1, 0.0) != ADDED
    assert one.ledger.free("b") is False
    assert one.journal.take() == b""


def test_the_end_of_a_ledger_is_no_end_of_its_requests() -> None:
    one = Recorded()
    one.add("a", [1])
    one.journal.take()
    del one.ledger
    assert one.journal.take() == b""


def test_what_finds_no_room_is_dropped_whole_and_counted() -> None:
    one = Recorded(limit=100)
    one.add("a", [1])
    one.add("b", [1])  # 70 bytes and more each
    assert one.journal.dropped == 1
    assert [each.request_id for each in read(one.journal.take()) if isinstance(each, Booked)] == [
        "a"
    ]
    one.ledger.free("b")
    assert [each.kind for each in read(one.journal.take()) if isinstance(each, Stepped)] == [ENDED]


def test_records_of_others_stand_among_them() -> None:
    journal = Journal(LIMIT)
    assert journal.put(ord("x"), b"anything")
    assert list(read(journal.take())) == [OtherRecord(ord("x"), b"anything")]
    assert not Journal(8).put(ord("x"), b"anything")


@pytest.mark.parametrize(
    "records",
    [
        b"\1",
        b"\0\0\0\0",
        b"\5\0\0\0E\0\0",
        b"\1\0\0\0E",
        b"\10\0\0\0E\0\0\0\0\1\0a!",
        b"\x10\0\0\0B" + bytes(15),
    ],
)
def test_what_is_no_record_is_refused(records: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        list(read(records))


def test_an_export_tells_of_all_that_lives_throughout() -> None:
    """Requests come and go between its slices; each one that stays is exported once."""
    one = Recorded()
    for number in range(300):
        one.add(f"stays-{number}", [1, 2, number + 10])
    one.ledger.prefill_complete("stays-5")
    exported: list[str] = []
    after: int | None = 0
    rounds = 0
    other = Journal(LIMIT)
    while after is not None:
        after = one.ledger.export(other, after, 1000)
        exported += [each.request_id for each in read(other.take()) if isinstance(each, Booked)]
        one.add(f"comes-{rounds}", [rounds + 1000])
        if rounds:
            one.ledger.free(f"comes-{rounds - 1}")
        rounds += 1
    stays = [name for name in exported if name.startswith("stays")]
    assert sorted(stays) == sorted(f"stays-{number}" for number in range(300))
    assert rounds > 10


def test_an_export_into_a_full_journal_says_so() -> None:
    one = Recorded()
    one.add("a", [1, 2, 3])
    with pytest.raises(MemoryError, match="full"):
        one.ledger.export(Journal(8), 0, 1000)


@pytest.mark.parametrize("seed", range(scaled(12)))
def test_a_ledger_that_is_booked_again_from_its_records_is_the_same(seed: int) -> None:
    random = Random(seed)
    one = Recorded()
    lives: dict[str, Booked] = {}
    for number in range(200):
        _random_step(random, one, number)
    exported = Journal(LIMIT)
    assert one.ledger.export(exported, 0, LIMIT) is None
    lives = {each.request_id: each for each in read(exported.take()) if isinstance(each, Booked)}
    again = Ledger()
    ranks = [again.add_rank(7, dp_rank) for dp_rank in (0, 1)]
    for booked in sorted(lives.values(), key=lambda each: each.admitted_at):
        _book_again(again, ranks, booked)
    again.verify()
    assert again.stats()["requests"] == one.ledger.stats()["requests"]
    for name in lives:
        assert again.request(name) == one.ledger.request(name)
    ours = [one.ledger.load(rank) for rank in one.ranks]
    theirs = [again.load(rank) for rank in ranks]
    for mine, copy in zip(ours, theirs, strict=True):
        assert (mine.prefill_tokens, mine.requests) == (copy.prefill_tokens, copy.requests)


def _random_step(random: Random, one: Recorded, number: int) -> None:
    live = f"r{random.randrange(20)}"
    match random.randrange(6):
        case 0 | 1:
            prompt = [random.randrange(3) for _ in range(random.randrange(6))]
            rank = one.ranks[random.randrange(2)]
            one.ledger.add(live, rank, packed(prompt), random.randrange(50), float(number))
        case 2:
            one.ledger.prefill_complete(live)
        case 3:
            one.ledger.output_block(live, random.choice([None, 0.5, 0.0]))
        case _:
            one.ledger.free(live)


def _book_again(ledger: Ledger, ranks: list[int], booked: Booked) -> None:
    rank = ranks[booked.dp_rank]
    content = booked.hashes, booked.tokens, booked.admitted_at, booked.key
    assert ledger.add(booked.request_id, rank, *content, booked.expected_output_tokens) == ADDED
    if booked.prefill_complete:
        ledger.prefill_complete(booked.request_id)
    for number in range(1, booked.output_blocks + 1):
        fraction = booked.fraction if number == booked.decayed_blocks else None
        ledger.output_block(booked.request_id, fraction)


def test_kinds_are_letters_that_differ() -> None:
    assert len({BOOKED, ENDED, ord("P"), ord("O")}) == 4
