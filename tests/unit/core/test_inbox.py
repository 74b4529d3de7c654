"""The inbox keeps messages as a plain model of it does."""

from __future__ import annotations

import random

import pytest

from kvd_core.zmq.drain import COPIED_AT_ONCE, Inbox, InboxSpace

FOREVER_NS = 10**12
BLOCK = 64 * 1024


def cost(payload: bytes) -> int:
    return 16 + (len(payload) + 7) // 8 * 8


def taken(inbox: Inbox, most: int = 1_000_000) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    inbox.drain(lambda seq, payload: found.append((seq, payload)), most, FOREVER_NS, b"", None)
    return found


class Model:
    """An inbox as a list, which must behave the same."""

    def __init__(self, space: dict[str, int], messages: int, size: int) -> None:
        self.space = space
        self.bounds = messages, size
        self.waiting: list[tuple[int, bytes]] = []
        self.popped = self.dropped = 0
        self.sealed = 0  # messages at positions below it stay
        self.hole = False
        self.first = 0

    @property
    def pushed(self) -> int:
        return self.popped + len(self.waiting)

    def size(self) -> int:
        return sum(cost(payload) for _, payload in self.waiting)

    def fits(self, messages: int, size: int) -> bool:
        own = len(self.waiting) + messages, self.size() + size
        everybody = self.space["messages"] + messages, self.space["size"] + size
        bounds = (*self.bounds, self.space["max_messages"], self.space["max_size"])
        return all(
            not bound or count <= bound
            for bound, count in zip(bounds, (*own, *everybody), strict=True)
        )

    def add(self, sign: int, payload: bytes) -> None:
        self.space["messages"] += sign
        self.space["size"] += sign * cost(payload)

    def push(self, seq: int, payload: bytes) -> None:
        if not self.fits(1, cost(payload)):
            self.dropped += 1
            may_go = self.waiting and self.pushed > self.sealed
            freed = cost(self.waiting[-1][1]) if may_go else 0
            if not may_go or not (cost(payload) <= freed or self.fits(0, cost(payload) - freed)):
                self.hole = True
                return
            self.add(-1, self.waiting.pop()[1])
        self.first = min(self.first, self.pushed)
        self.waiting.append((seq, payload))
        self.add(1, payload)
        self.hole = False

    def pop(self) -> tuple[int, bytes]:
        found = self.waiting.pop(0)
        self.popped += 1
        self.add(-1, found[1])
        return found


@pytest.mark.parametrize("seed", range(40))
def test_it_does_what_the_model_does(seed: int) -> None:
    chance = random.Random(seed)
    bounds = [chance.choice((0, 3, 20, 200)), chance.choice((0, 500, 20_000, 300_000))]
    limits = chance.choice((0, 5, 60)), chance.choice((0, 1_000, 100_000))
    space = {"messages": 0, "size": 0, "max_messages": limits[0], "max_size": limits[1]}
    real = InboxSpace(*limits)
    pairs = [(Inbox(real, *bounds), Model(space, *bounds)) for _ in range(3)]
    for step in range(1500):
        inbox, model = chance.choice(pairs)
        action = chance.random()
        if action < 0.6:
            size = chance.choice((0, 1, 7, 8, 100, 1000, 40_000, BLOCK - 16, BLOCK, 200_000))
            payload = chance.randbytes(8) * (size // 8) + b"x" * (size % 8)
            inbox.push(step, payload)
            model.push(step, payload)
        elif action < 0.9:
            most = chance.randrange(1, 6)
            expected = [model.pop() for _ in range(min(most, len(model.waiting)))]
            assert taken(inbox, most) == expected
        elif action < 0.95:
            inbox.seal()
            model.sealed = model.pushed
        elif action < 0.99:
            inbox.begin()
            model.first = model.pushed
        else:
            inbox.clear()
            while model.waiting:
                model.pop()
        counters = inbox.pushed, inbox.popped, inbox.messages, inbox.size_bytes, inbox.dropped
        assert counters == (
            model.pushed,
            model.popped,
            len(model.waiting),
            model.size(),
            model.dropped,
        )
        assert (inbox.has_hole, inbox.first) == (model.hole, model.first)
        assert (real.messages, real.size_bytes) == (space["messages"], space["size"])


def test_what_is_kept_is_a_beginning_without_holes_and_the_end() -> None:
    inbox = Inbox(InboxSpace(), max_messages=5)
    for seq in range(100):
        inbox.push(seq, b"%d" % seq)
    assert [seq for seq, _ in taken(inbox)] == [0, 1, 2, 3, 99]
    assert inbox.dropped == 95


def test_what_was_sealed_stays() -> None:
    inbox = Inbox(InboxSpace(), max_messages=2)
    inbox.push(0, b"")
    inbox.push(1, b"")
    inbox.seal()
    inbox.push(2, b"")
    assert inbox.has_hole
    assert [seq for seq, _ in taken(inbox)] == [0, 1]


def test_one_stream_leaves_others_their_part_of_the_space() -> None:
    """A stream whose own bound is below that of all streams cannot take all of the space."""
    space = InboxSpace(max_bytes=10_000)
    loud, quiet = Inbox(space, max_bytes=6_000), Inbox(space, max_bytes=6_000)
    for seq in range(1000):
        loud.push(seq, bytes(84))
    quiet.push(0, bytes(84))
    assert (loud.messages, quiet.messages, quiet.has_hole) == (57, 1, False)
    assert space.size_bytes == loud.size_bytes + quiet.size_bytes == 58 * 104


def test_memory_comes_back_with_the_inbox() -> None:
    space = InboxSpace()
    inbox = Inbox(space)
    for seq in range(1000):
        inbox.push(seq, bytes(1000))
    del inbox
    assert (space.messages, space.size_bytes) == (0, 0)


LONG = bytes(range(251)) * (3 * COPIED_AT_ONCE // 251)  # copied in three steps


def test_a_long_message_is_copied_in_steps() -> None:
    inbox = Inbox(InboxSpace())
    for seq, payload in ((1, b"before"), (2, LONG), (3, b"behind")):
        inbox.push(seq, payload)
    steps = [taken(inbox) for _ in range(4)]
    assert steps == [[(1, b"before")], [], [], [(2, LONG), (3, b"behind")]]


def test_a_message_copied_in_part_keeps_its_place() -> None:
    inbox = Inbox(InboxSpace(), 1)
    inbox.push(1, LONG)
    assert taken(inbox) == []
    inbox.push(2, b"no room")
    assert inbox.dropped == 1
    assert [taken(inbox) for _ in range(3)] == [[], [], [(1, LONG)]]


def test_a_message_copied_in_part_may_be_dropped() -> None:
    inbox, other = Inbox(InboxSpace()), LONG[::-1]
    inbox.push(1, LONG)
    assert taken(inbox) == []
    inbox.clear()
    inbox.push(2, other)
    assert [taken(inbox) for _ in range(4)] == [[], [], [], [(2, other)]]
