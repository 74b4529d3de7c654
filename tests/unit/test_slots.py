"""Slot trackers without a face: workers, bounds, expiry in slices, events to and from replicas."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvd.errors import BadRequest, Conflict, Invalid, KvdError, NotFound, Unavailable
from kvd.faces.common.slices import arrayed
from kvd.faces.slot_tracker.metrics import slot_families
from kvd.model import MAX_PARTITIONS, PartitionKey
from kvd.slots.live_requests import EXPIRY_SLICE, REMOVAL_SLICE
from kvd.slots.trackers import MAX_DP_SIZE, SlotTrackers, Tracker, WorkerRow
from kvd.telemetry.metrics import render
from kvd.wire.lifecycle import Face, Lifecycle, Outcome, Step
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.ledger import MAX_RANKS, MAX_TOKENS, Ledger
from tests.support.exposition import parse

KEY = PartitionKey("m", "default")
BLOCK = 16
EXPIRY_S = 300.0

HASHES = BodyScanner({"sequence_hashes": "i64"}, ())


class Slots(SlotTrackers):
    """Trackers with one worker, 7, with ranks 0 and 1, which keep the events that they publish."""

    def __init__(self) -> None:
        super().__init__(EXPIRY_S)
        self.published: list[Lifecycle] = []
        self.steps.subscribe(self.published.append)
        self.register(KEY, 7, BLOCK, 0, 2)

    def book(
        self,
        name: str,
        *hashes: int,
        worker: int = 7,
        rank: int = 0,
        tokens: int = 48,
        now: float = 0.0,
        key: str | None = None,
    ) -> bool:
        HASHES.scan(json.dumps({"sequence_hashes": hashes}).encode())
        tracker = self.tracker(*KEY)
        return self.add(tracker, name, worker, rank, HASHES, tokens, now, key)

    def requests(self) -> int:
        return sum(t.ledger.stats()["requests"] for t in self.trackers.values())

    def loads(self) -> list[tuple[int, ...]]:
        rows = json.loads(b"".join(arrayed(self.kept_loads(None, None))))
        return [tuple(row.values())[2:] for row in rows]


def packed(*hashes: int) -> bytes:
    return array("Q", (value % 2**64 for value in hashes)).tobytes()


def event(step: Step, name: str, worker: int = 7, rank: int = 0, *hashes: int) -> Lifecycle:
    tokens = 48 if hashes else 0
    place = KEY, BLOCK, name, worker, rank
    return Lifecycle(*place, step, packed(*hashes), tokens, face=Face.SLOT_TRACKER)


def refused(error: type[KvdError]) -> pytest.RaisesExc[KvdError]:
    return pytest.raises(error, check=lambda raised: "\n" not in str(raised))


# ---- workers


def test_a_tracker_lives_from_its_first_worker_to_its_last() -> None:
    slots = Slots()
    slots.register(KEY, 8, BLOCK, 0, 1)
    for worker in (7, 8):
        with refused(Conflict):
            slots.register(KEY, 9, BLOCK + 1, 0, 1)
        list(slots.leave(KEY, worker))
    assert not slots.trackers
    for call in (lambda: slots.tracker(*KEY), lambda: list(slots.leave(KEY, 7))):
        with refused(NotFound):
            call()
    slots.register(KEY, 9, BLOCK + 1, 0, 1)
    assert list(slots.workers(None, None)) == [WorkerRow(KEY, 9, BLOCK + 1, range(1))]


def test_nothing_is_booked_on_a_worker_whose_requests_end_in_slices() -> None:
    slots = Slots()
    slots.register(KEY, 8, BLOCK, 0, 1)
    names = [str(number) for number in range(2 * REMOVAL_SLICE + 1)]
    for number, name in enumerate(names):
        slots.book(name, 1, number, rank=number % 2)
    ledger = slots.tracker(*KEY).ledger
    left = [slots.requests()]
    for _ in slots.leave(KEY, 7):
        left.append(slots.requests())
        ledger.verify()
        assert [row.worker_id for row in slots.workers(None, None)] == [8]
        for refusal in (lambda: slots.book("late", 2), lambda: list(slots.leave(KEY, 7))):
            with refused(NotFound):
                refusal()
        with refused(Conflict):
            slots.register(KEY, 7, BLOCK, 0, 2)
        assert slots.apply(event(Step.ADD, "late", 7, 0, 1), 0.0) is Outcome.UNKNOWN_WORKER
        slots.end(slots.tracker(*KEY), names[-1])  # a client may
        assert slots.book(f"beside {len(left)}", 1, worker=8)
    assert left == [len(names), REMOVAL_SLICE + 1, 1]  # the last one is on worker 8
    assert slots.loads() == [(8, 0, 96, 1)]
    assert {each.request_id for each in slots.published if each.step is Step.FREE} == set(names)
    slots.register(KEY, 7, BLOCK, 0, 2)
    assert slots.loads() == [(7, 0, 0, 0), (7, 1, 0, 0), (8, 0, 96, 1)]
    assert slots.book(names[0], 2)
    ledger.verify()


def test_a_tracker_stays_until_the_last_of_its_workers_has_left() -> None:
    slots = Slots()
    slots.register(KEY, 8, BLOCK, 0, 1)
    for number in range(REMOVAL_SLICE):
        slots.book(str(number), number)
    leaving = slots.leave(KEY, 7)
    next(leaving)
    list(slots.leave(KEY, 8))
    assert not list(slots.workers(None, None))
    with refused(Conflict):
        slots.register(KEY, 9, BLOCK + 1, 0, 1)
    list(leaving)
    slots.register(KEY, 9, BLOCK + 1, 0, 1)
    assert slots.loads() == [(9, 0, 0, 0)]


REGISTRATIONS = {
    "block size, before all else": (KEY, 7, 0, 0, 0, BadRequest),
    "no rank": (KEY, 9, BLOCK, 0, 0, BadRequest),
    "too many ranks": (KEY, 9, BLOCK, 0, MAX_DP_SIZE + 1, BadRequest),
    "ranks beyond 32 bits": (KEY, 9, BLOCK, 2**32 - 2, 2, BadRequest),
    "a range, before the tracker": (KEY, 7, BLOCK + 1, 2**32 - 1, 1, BadRequest),
    "the tracker's block size, before the worker": (KEY, 7, BLOCK + 1, 0, 1, Conflict),
    "the worker": (KEY, 7, BLOCK, 5, 1, Conflict),
    "a new tracker's": (PartitionKey("new", "t"), 7, 0, 0, 1, BadRequest),
}


@pytest.mark.parametrize("kind", REGISTRATIONS)
def test_a_refused_registration_changes_nothing(kind: str) -> None:
    slots = Slots()
    *registration, error = REGISTRATIONS[kind]
    with refused(error):
        slots.register(*registration)  # type: ignore[arg-type]
    assert list(slots.workers(None, None)) == [WorkerRow(KEY, 7, BLOCK, range(2))]
    assert slots.loads() == [(7, 0, 0, 0), (7, 1, 0, 0)]


def test_trackers_have_a_bound() -> None:
    assert SlotTrackers(EXPIRY_S).max_trackers == MAX_PARTITIONS
    bound = 3 * EXPIRY_SLICE
    slots = SlotTrackers(EXPIRY_S, max_trackers=bound)
    for number in range(bound):
        slots.register(PartitionKey("m", str(number)), 7, BLOCK, 0, 1)
    for _ in range(2):
        with refused(Unavailable):
            slots.register(PartitionKey("m", "one more"), 7, BLOCK, 0, 1)
    slots.register(PartitionKey("m", "0"), 8, BLOCK, 0, 1)  # in an existing tracker
    assert slots.refused_trackers == 2
    list(slots.leave(PartitionKey("m", "1"), 7))
    slots.register(PartitionKey("m", "one more"), 7, BLOCK, 0, 1)
    rests = sum(1 for _ in slots.expire(1000.0))
    assert rests == bound // EXPIRY_SLICE


@pytest.mark.slow("reaches the bound")
def test_ranks_have_a_bound() -> None:
    slots = Slots()
    for worker in range(100, 100 + MAX_RANKS // MAX_DP_SIZE - 1):
        slots.register(KEY, worker, BLOCK, 0, MAX_DP_SIZE)
    before = slots.loads()
    with refused(Unavailable):
        slots.register(KEY, 9, BLOCK, 0, MAX_DP_SIZE - 1)
    assert slots.loads() == before
    slots.register(KEY, 9, BLOCK, 0, MAX_DP_SIZE - 2)
    assert slots.tracker(*KEY).ledger.stats()["ranks"] == MAX_RANKS


def test_counters_of_trackers_that_ended_go_on() -> None:
    slots = Slots()
    for name, now in (("freed", 0.0), ("expired", 0.0), ("removed", EXPIRY_S)):
        assert slots.book(name, 1, now=now, key="k")
    assert not slots.book("removed", 1, key="k")
    with refused(Conflict):
        slots.book("removed", 1)
    slots.end(slots.tracker(*KEY), "freed")
    for _ in slots.expire(EXPIRY_S + 1):
        pass
    expected = {"added": 3, "repeated": 1, "freed": 1, "expired": 1, "removed": 0, "exists": 1}
    assert counts(slots) == expected
    list(slots.leave(KEY, 7))
    assert counts(slots) == expected | {"removed": 1}
    slots.register(KEY, 7, BLOCK, 0, 2)
    slots.book("new", 1)
    assert counts(slots) == expected | {"removed": 1, "added": 4}


def counts(slots: Slots) -> dict[str, float]:
    samples = parse(b"".join(render(slot_families(slots, 0))).decode())
    names = ("added", "repeated", "freed", "expired", "removed")
    found = {name: samples[f"kvd_slots_requests_{name}_total"] for name in names}
    return found | {"exists": samples['kvd_slots_refused_total{reason="exists"}']}


def test_a_scrape_survives_what_happens_while_it_rests() -> None:
    slots = Slots()
    for number in range(40):
        slots.register(PartitionKey("m", str(number)), 1, BLOCK, 0, 2)
    whole = sum(1 for _ in slot_families(slots, 1000))
    for rests in range(whole):
        families = slot_families(slots, 1000)
        for _ in range(rests):
            next(families)
        list(slots.leave(PartitionKey("m", "7"), 1))
        list(slots.leave(KEY, 7))
        parse(b"".join(render(families)).decode())
        slots.register(PartitionKey("m", "7"), 1, BLOCK, 0, 2)
        slots.register(KEY, 7, BLOCK, 0, 2)


# ---- requests


def test_refused_requests_have_their_errors() -> None:
    slots = Slots()
    for number in range(512):
        slots.book(str(number), tokens=MAX_TOKENS)
    with refused(Invalid):
        slots.book("x", tokens=1)
    small = Tracker(PartitionKey("small", "default"), BLOCK, Ledger(1))
    slots.trackers[small.key] = small
    slots.register(small.key, 7, BLOCK, 0, 1)
    HASHES.scan(b'{"sequence_hashes":[1]}')
    assert slots.add(small, "a", 7, 0, HASHES, 0, 0.0, None)
    with refused(Unavailable):
        slots.add(small, "b", 7, 0, HASHES, 0, 0.0, None)
    for worker, rank in ((8, 0), (7, 2)):
        with refused(NotFound):
            slots.book("x", worker=worker, rank=rank)
    assert len(slots.published) == 513


# ---- expiry


def steps(slots: Slots, now: float) -> Iterator[int]:
    """Yields how many requests have expired by each pause, and in the end."""
    live = slots.requests()
    for _ in slots.expire(now):
        yield live - slots.requests()
        live = slots.requests()
    yield live - slots.requests()


def test_requests_expire_by_the_time_of_their_admission() -> None:
    slots = Slots()
    for age in range(4):
        slots.book(str(age), age, now=float(age))
    slots.prefill_complete(slots.tracker(*KEY), "0")  # does not renew its age
    slots.published.clear()
    assert sum(steps(slots, EXPIRY_S)) == 0  # requests expire when they are older, not as old
    assert sum(steps(slots, EXPIRY_S + 1.5)) == 2
    assert slots.loads() == [(7, 0, 96, 2), (7, 1, 0, 0)]
    with refused(NotFound):
        slots.prefill_complete(slots.tracker(*KEY), "1")
    assert slots.book("1", 1, now=EXPIRY_S + 2)
    assert sum(steps(slots, EXPIRY_S + 4)) == 2
    assert slots.loads() == [(7, 0, 48, 1), (7, 1, 0, 0)]
    assert [event.step for event in slots.published] == [Step.ADD]  # replicas have their own clocks


@pytest.mark.parametrize("count", [0, 1, EXPIRY_SLICE - 1, EXPIRY_SLICE, 5 * EXPIRY_SLICE + 3])
def test_no_more_than_a_slice_expires_between_two_rests(count: int) -> None:
    slots = Slots()
    for number in range(count):
        slots.book(str(number), number)
    gone = list(steps(slots, EXPIRY_S + 1))
    assert sum(gone) == count
    assert max(gone) <= EXPIRY_SLICE
    assert slots.loads() == [(7, 0, 0, 0), (7, 1, 0, 0)]


def test_trackers_may_end_and_begin_anew_while_expiry_rests() -> None:
    slots = Slots()
    other = PartitionKey("other", "default")
    slots.register(other, 1, BLOCK, 0, 1)
    for number in range(3 * EXPIRY_SLICE):
        slots.book(str(number), number)
    expiring = slots.expire(EXPIRY_S + 1)
    next(expiring)
    list(slots.leave(KEY, 7))
    next(expiring, None)
    assert slots.tracker(*other)
    slots.register(KEY, 7, BLOCK, 0, 2)
    for number in range(EXPIRY_SLICE):
        slots.book(str(number), number, now=EXPIRY_S)
    for _ in expiring:
        list(slots.leave(other, 1))
    assert slots.requests() == EXPIRY_SLICE


def test_a_tracker_that_began_anew_expires_what_is_old() -> None:
    slots = Slots()
    for number in range(2 * EXPIRY_SLICE):
        slots.book(str(number), number)
    expiring = slots.expire(EXPIRY_S + 1)
    next(expiring)
    list(slots.leave(KEY, 7))
    slots.register(KEY, 7, BLOCK, 0, 2)
    slots.book("old", 1, now=0.5)
    slots.book("new", 1, now=EXPIRY_S)
    assert sum(1 for _ in expiring) == 1
    assert slots.requests() == 1


# ---- replicas


def test_replicas_are_told_every_step_that_succeeds_once() -> None:
    slots = Slots()
    tracker = slots.tracker(*KEY)
    slots.book("a", 1, -22, rank=1, key="k")
    slots.book("a", 1, -22, rank=1, key="k")  # a retry
    slots.book("b", tokens=0)
    slots.prefill_complete(tracker, "a")
    slots.prefill_complete(tracker, "a")  # Dynamo announces repetitions, too
    slots.end(tracker, "a")
    slots.end(tracker, "a")
    for faulty in (lambda: slots.prefill_complete(tracker, "a"), lambda: slots.book("b")):
        with pytest.raises(KvdError):
            faulty()
    added = event(Step.ADD, "a", 7, 1, 1, -22)
    completed = event(Step.PREFILL_COMPLETE, "a", 7, 1)
    assert slots.published == [
        added,
        event(Step.ADD, "b"),
        completed,
        completed,
        event(Step.FREE, "a", 7, 1),
    ]


def test_what_came_from_a_replica_is_not_told_on() -> None:
    slots = Slots()
    for step in (Step.ADD, Step.PREFILL_COMPLETE, Step.FREE):
        assert slots.apply(event(step, "a", 7, 0, 1, 2), 0.0) is Outcome.APPLIED
    assert slots.published == []
    assert slots.requests() == 0


def test_who_ends_a_request_tells_whoever_admitted_it() -> None:
    slots = Slots()
    slots.apply(event(Step.ADD, "theirs", 7, 1, 1), 0.0)
    slots.prefill_complete(slots.tracker(*KEY), "theirs")
    slots.end(slots.tracker(*KEY), "theirs")
    assert slots.published == [
        event(Step.PREFILL_COMPLETE, "theirs", 7, 1),
        event(Step.FREE, "theirs", 7, 1),
    ]


def test_unregistering_frees_every_request_of_the_worker_on_replicas() -> None:
    slots = Slots()
    slots.register(KEY, 8, BLOCK, 0, 1)
    slots.book("elsewhere", 1, worker=8)
    slots.book("ours", 1, rank=1)
    slots.apply(event(Step.ADD, "theirs", 7, 0, 1), 0.0)
    slots.published.clear()
    list(slots.leave(KEY, 7))
    assert slots.published == [event(Step.FREE, "theirs", 7, 0), event(Step.FREE, "ours", 7, 1)]
    assert slots.loads() == [(8, 0, 48, 1)]
    list(slots.leave(KEY, 8))
    assert slots.published[2:] == [event(Step.FREE, "elsewhere", 8, 0)]


def test_what_one_replica_has_freed_another_does_not_bring_back() -> None:
    slots = Slots()
    added = replace(event(Step.ADD, "r", 7, 1, 1, 2), router_id=1)
    freed = replace(event(Step.FREE, "r", 7, 1), router_id=2)
    assert slots.apply(freed, 0.0) is Outcome.UNKNOWN_REQUEST
    assert slots.apply(added, 1.0) is Outcome.ENDED
    assert slots.loads() == [(7, 0, 0, 0), (7, 1, 0, 0)]
    assert slots.apply(added, 2.0) is Outcome.APPLIED  # the id may be used again
    assert slots.loads() == [(7, 0, 0, 0), (7, 1, 48, 2)]


def test_a_prefill_that_one_replica_has_completed_another_does_not_begin() -> None:
    slots = Slots()
    completed = replace(event(Step.PREFILL_COMPLETE, "r", 7, 1), router_id=2)
    assert slots.apply(completed, 0.0) is Outcome.UNKNOWN_REQUEST
    added = replace(event(Step.ADD, "r", 7, 1, 1, 2), router_id=1)
    assert slots.apply(added, 1.0) is Outcome.APPLIED
    assert slots.loads() == [(7, 0, 0, 0), (7, 1, 0, 2)]


def test_what_a_client_books_is_booked_whatever_a_replica_has_freed() -> None:
    slots = Slots()
    slots.apply(replace(event(Step.FREE, "r", 7, 0), router_id=2), 0.0)
    slots.book("r", 1, 2)
    assert slots.loads() == [(7, 0, 48, 2), (7, 1, 0, 0)]
    late = replace(event(Step.ADD, "r", 7, 0, 9), router_id=1)
    assert slots.apply(late, 1.0) is Outcome.ENDED
    assert slots.loads() == [(7, 0, 48, 2), (7, 1, 0, 0)]


FITTING = event(Step.ADD, "new", 7, 1, 1, 2)
MISFITS = {
    Outcome.UNKNOWN_MODEL: [
        replace(FITTING, partition=PartitionKey("x", "default")),
        replace(FITTING, partition=PartitionKey("m", "x"), block_size=1, worker_id=9),
    ],
    Outcome.BLOCK_SIZE: [
        replace(FITTING, block_size=BLOCK * 2),
        replace(FITTING, block_size=0, worker_id=9),
    ],
    Outcome.UNKNOWN_WORKER: [replace(FITTING, worker_id=9), replace(FITTING, worker_id=2**64 - 1)],
    Outcome.UNKNOWN_RANK: [replace(FITTING, dp_rank=2), replace(FITTING, dp_rank=2**32 - 1)],
    Outcome.DUPLICATE: [
        event(Step.ADD, "live", 7, 0, 1, 2, 3),
        event(Step.ADD, "live", 7, 1, 9),
    ],
    Outcome.UNKNOWN_REQUEST: [
        event(Step.FREE, "new"),
        event(Step.PREFILL_COMPLETE, "new"),
    ],
    Outcome.OTHER_WORKER: [
        event(Step.FREE, "live", 8),
        event(Step.FREE, "live", 7, 1),
        event(Step.PREFILL_COMPLETE, "live", 7, 1),
    ],
    Outcome.FULL: [replace(FITTING, dp_rank=0, prefill_tokens=MAX_TOKENS)],
}


@pytest.mark.parametrize("outcome", MISFITS)
def test_what_does_not_fit_is_dropped_and_changes_nothing(outcome: Outcome) -> None:
    slots = Slots()
    slots.register(KEY, 8, BLOCK, 0, 1)
    slots.book("live", 1, 2, 3)
    for number in range(511):
        slots.book(str(number), tokens=MAX_TOKENS)
    slots.book("last", tokens=MAX_TOKENS - 48)
    before = slots.loads(), slots.tracker(*KEY).ledger.request("live")
    slots.published.clear()
    for misfit in MISFITS[outcome]:
        assert slots.apply(misfit, 0.0) is outcome
        assert (slots.loads(), slots.tracker(*KEY).ledger.request("live")) == before
    assert slots.apply(FITTING, 0.0) is Outcome.APPLIED
    assert slots.published == []


def test_a_mirrored_request_is_like_any_other() -> None:
    slots = Slots()
    slots.apply(event(Step.ADD, "theirs", 7, 1, 1, 2), 5.0)
    assert slots.loads() == [(7, 0, 0, 0), (7, 1, 48, 2)]
    with refused(Conflict):
        slots.book("theirs", 1, 2, rank=1, key="k")  # a retry key is known where it was given
    slots.apply(event(Step.PREFILL_COMPLETE, "theirs", 7, 1), 6.0)
    assert slots.loads() == [(7, 0, 0, 0), (7, 1, 0, 2)]
    assert sum(steps(slots, EXPIRY_S + 5.5)) == 1  # its age counts from its arrival here
    assert slots.apply(event(Step.FREE, "theirs", 7, 1), 7.0) is Outcome.UNKNOWN_REQUEST
