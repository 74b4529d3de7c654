"""The queue against a list that is sorted again for every question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.selection.queue import ANYONE, QueuePolicy, SelectionQueue, Urgency, Waiting

FCFS, WSPT = QueuePolicy.FCFS, QueuePolicy.WSPT
RANKS = ("a", "b", "c")


def released(queue: SelectionQueue[str], *stuck: str) -> str:
    queue.wake()
    return "".join(queue.release(lambda entry: ANYONE if entry in stuck else 0))


def filled(policy: QueuePolicy, *urgencies: Urgency) -> SelectionQueue[str]:
    """Returns a queue of entries 0, 1, 2 ... with these urgencies, which came a second apart."""
    queue: SelectionQueue[str] = SelectionQueue(policy)
    for number, urgency in enumerate(urgencies):
        queue.push(None, str(number), urgency, float(number))
    return queue


@pytest.mark.parametrize(
    ("policy", "urgencies", "order"),
    [
        (FCFS, [Urgency()] * 3, "012"),
        (FCFS, [Urgency(), Urgency(priority_jump=0.5), Urgency(priority_jump=5)], "201"),
        (FCFS, [Urgency(priority_jump=-9), Urgency()], "01"),
        (FCFS, [Urgency(), Urgency(strict_priority=1), Urgency(priority_jump=99)], "120"),
        (WSPT, [Urgency(uncached_tokens=n) for n in (300, 100, 200)], "120"),
        (WSPT, [Urgency(uncached_tokens=n) for n in (0, 1, 0)], "012"),
        (WSPT, [Urgency(0, 0, 100), Urgency(0, 1, 150)], "10"),
    ],
)
def test_the_order(policy: QueuePolicy, urgencies: list[Urgency], order: str) -> None:
    assert released(filled(policy, *urgencies)) == order


def test_a_lane_that_cannot_move_blocks_no_other() -> None:
    queue: SelectionQueue[str] = SelectionQueue(FCFS)
    for number, lane in enumerate(["x", "x", None, "y"]):
        queue.push(lane, str(number), Urgency(), float(number))
    assert released(queue, "0") == "23"
    assert queue.waits("x") and not queue.waits("y") and not queue.waits(None)
    assert sorted(queue) == ["0", "1"]


def test_what_is_booked_in_between_is_seen() -> None:
    room = {"a": 1, "b": 2}
    queue: SelectionQueue[str] = SelectionQueue(FCFS)
    for number, lane in enumerate("abab"):
        queue.push(lane, lane, Urgency(), float(number))
    for entry in queue.release(lambda entry: 0 if room[entry] > 0 else ANYONE):
        room[entry] -= 1
    assert room == {"a": 0, "b": 0} and list(queue) == ["a"]


def test_many_that_leave_take_no_room() -> None:
    queue: SelectionQueue[int] = SelectionQueue(FCFS)
    first = queue.push(None, -1, Urgency(), 0.0)
    for number in range(1000):
        assert queue.remove(queue.push(None, number, Urgency(), 1.0))
    assert len(queue._queues[None].heap) <= 2
    assert queue.remove(first) and not queue.remove(first)
    assert len(queue) == 0 and not queue.waits(None)


@dataclass(eq=False)
class Held:
    lane: str | None
    urgency: Urgency
    arrival: int
    waiting: Waiting[Held] | None = None

    def order(self, policy: QueuePolicy) -> Any:
        score = self.urgency.score(policy, float(self.arrival))
        return -self.urgency.strict_priority, -score, self.arrival


URGENCIES = st.builds(
    Urgency, st.integers(0, 2), st.sampled_from([-1.0, 0.0, 0.5, 3.0]), st.integers(0, 3)
)
STEPS = st.one_of(
    st.tuples(st.just("push"), st.sampled_from([None, *RANKS]), URGENCIES),
    st.tuples(st.just("remove"), st.integers(0, 20)),
    st.tuples(st.just("release"), st.dictionaries(st.sampled_from(RANKS), st.integers(1, 3))),
)


@given(st.sampled_from(QueuePolicy), st.lists(STEPS, max_size=40))
def test_any_row_of_steps_goes_as_with_a_sorted_list(
    policy: QueuePolicy, steps: list[tuple[Any, ...]]
) -> None:
    queue: SelectionQueue[Held] = SelectionQueue(policy)
    model: list[Held] = []
    for number, (kind, *rest) in enumerate(steps):
        if kind == "push":
            held = Held(rest[0], rest[1], number)
            held.waiting = queue.push(held.lane, held, held.urgency, float(number))
            model.append(held)
        elif kind == "remove" and model:
            held = model.pop(rest[0] % len(model))
            assert held.waiting is not None and queue.remove(held.waiting)
        elif kind == "release":
            check_release(queue, model, rest[0], policy)
        assert len(queue) == len(model) and set(queue) == set(model)
        assert {held.lane for held in model} == {
            lane for lane in (None, *RANKS) if queue.waits(lane)
        }


def check_release(
    queue: SelectionQueue[Held], model: list[Held], room: dict[str, int], policy: QueuePolicy
) -> None:
    """Releases as much as the ranks have room for; entries in lane None go to any rank."""
    room = dict(room)

    def rank_for(held: Held) -> str | None:
        ranks = RANKS if held.lane is None else (held.lane,)
        return next((rank for rank in ranks if room.get(rank)), None)

    queue.wake()
    for held in queue.release(lambda held: 0 if rank_for(held) is not None else ANYONE):
        model.sort(key=lambda one: one.order(policy))
        assert held is next(one for one in model if rank_for(one) is not None)
        rank = rank_for(held)
        assert rank is not None
        room[rank] -= 1
        model.remove(held)
    assert all(rank_for(held) is None for held in model)


# ---- sleeping entries

MASKS = st.integers(1, 15)  # of four ranks
WAKING = st.lists(
    st.one_of(
        st.tuples(st.just("push"), MASKS, URGENCIES),
        st.tuples(st.just("push"), MASKS, URGENCIES),
        st.tuples(st.just("remove"), st.integers(0, 20)),
        st.tuples(st.just("ease"), st.integers(0, 3), st.integers(1, 2)),
        st.tuples(st.just("load"), st.integers(0, 3)),
        st.tuples(st.just("reorder"), st.sampled_from(QueuePolicy)),
        st.tuples(st.just("turn")),
    ),
    max_size=60,
)


@dataclass(eq=False)
class Sleeper(Held):
    mask: int = 0


@given(st.sampled_from(QueuePolicy), WAKING)
def test_whoever_sleeps_would_have_been_told_to_wait(
    policy: QueuePolicy, steps: list[tuple[Any, ...]]
) -> None:
    """The order is as if all entries were asked again and again for the best one that fits."""
    queue: SelectionQueue[Sleeper] = SelectionQueue(policy)
    model: list[Sleeper] = []
    room = [0] * 4
    changed = 0

    def rank_for(one: Sleeper, room: list[int]) -> int | None:
        return next((rank for rank in range(4) if one.mask >> rank & 1 and room[rank]), None)

    def expected() -> list[Sleeper]:
        left, order = list(room), []
        waiting = sorted(model, key=lambda one: one.order(policy))
        while (
            best := next((one for one in waiting if rank_for(one, left) is not None), None)
        ) is not None:
            rank = rank_for(best, left)
            assert rank is not None
            left[rank] -= 1
            waiting.remove(best)
            order.append(best)
        return order

    def serve(one: Sleeper) -> int:
        rank = rank_for(one, room)
        if rank is None:
            return one.mask
        room[rank] -= 1
        return 0

    for number, (kind, *rest) in enumerate(steps):
        if kind == "push":
            one = Sleeper(str(rest[0]), rest[1], number, mask=rest[0])
            one.waiting = queue.push(one.lane, one, one.urgency, float(number))
            model.append(one)
        elif kind == "remove" and model:
            gone = model.pop(rest[0] % len(model))
            assert gone.waiting is not None and queue.remove(gone.waiting)
        elif kind == "ease":
            room[rest[0]] += rest[1]
            changed |= 1 << rest[0]
        elif kind == "load":
            room[rest[0]] = 0
            changed |= 1 << rest[0]
        elif kind == "reorder":
            policy = rest[0]
            queue.reorder(policy)
        elif kind == "turn":
            wanted = expected()
            queue.wake(changed)
            changed = 0
            assert list(queue.release(serve)) == wanted
            model = [one for one in model if one not in wanted]
        assert set(queue) == set(model)


LANES = 2000


def stuck() -> SelectionQueue[int]:
    queue: SelectionQueue[int] = SelectionQueue(FCFS)
    for number in range(LANES):
        queue.push(number, number, Urgency(), float(number))
    assert list(queue.release(lambda number: 1 << number)) == []
    return queue


def test_only_those_are_asked_for_whom_something_has_changed() -> None:
    queue = stuck()
    asked: list[int] = []

    def serve(number: int) -> int:
        asked.append(number)
        return 1 << number if number == 3 else 0

    assert list(queue.release(serve)) == [] == asked
    queue.wake(1 << 7 | 1 << 3 | 1 << LANES)
    assert list(queue.release(serve)) == [7]
    assert asked == [3, 7]
    queue.push(9, LANES, Urgency(strict_priority=1), 1.0)  # becomes the first of its lane
    queue.push(11, LANES + 1, Urgency(), 2.0 * LANES)  # behind another entry, which sleeps
    assert list(queue.release(serve)) == [LANES, 9]


def test_all_that_are_awake_are_looked_at_in_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = stuck()
    compared = 0

    def before(one: Waiting[int], other: Waiting[int]) -> bool:
        nonlocal compared
        compared += 1
        return one.sort_key < other.sort_key

    monkeypatch.setattr(Waiting, "__lt__", before)
    queue.wake()
    asked: list[int] = []
    assert list(queue.release(lambda number: asked.append(number) or 1)) == []
    assert asked == list(range(LANES))
    assert compared < LANES * 4 * LANES.bit_length()  # comparing each with all would be LANES**2
