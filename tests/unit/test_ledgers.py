"""Ledgers of several faces, and which of them takes a replica's event."""

from __future__ import annotations

from array import array

import pytest

from kvd.faces.slot_tracker import routes as slot_tracker
from kvd.http.messages import Request
from kvd.model import PartitionKey
from kvd.replica_sync.replicas import apply_once
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.wire.lifecycle import Face, Lifecycle, Outcome, Step
from kvd_core.json.scan import BodyScanner

KEY = PartitionKey("m", "default")
FACE = Face.SLOT_TRACKER
BLOCK = 16  # tokens
HASHES = BodyScanner({"sequence_hashes": "i64"}, ())
HASHES.scan(b'{"sequence_hashes":[1,2]}')


def test_ledgers_of_one_place_and_block_size_share_their_loads() -> None:
    ledgers = Ledgers()
    one = ledgers.open(FACE, KEY, BLOCK)
    assert ledgers.open(FACE, KEY, BLOCK).loads is one.loads
    assert ledgers.open(FACE, KEY, 2 * BLOCK).loads is not one.loads
    assert ledgers.open(FACE, PartitionKey("m", "t"), BLOCK).loads is not one.loads
    assert Ledgers().open(FACE, KEY, BLOCK).loads is not one.loads


def test_loads_end_with_their_last_ledger() -> None:
    ledgers = Ledgers()
    one = ledgers.open(FACE, KEY, BLOCK)
    one.loads.on_eased(lambda: None)
    other = ledgers.open(FACE, KEY, BLOCK)
    del one
    assert ledgers.open(FACE, KEY, BLOCK).loads.eased is not None
    del other
    assert ledgers.open(FACE, KEY, BLOCK).loads.eased is None


class Faces:
    """Two faces that share loads; the second one's steps only show in its loads."""

    def __init__(self) -> None:
        ledgers = Ledgers()
        self.first, self.second = SlotTrackers(10.0, ledgers), SlotTrackers(10.0, ledgers)
        self.faces = {Face.SLOT_TRACKER: self.first.apply, Face.SELECTION: self.second.apply}

    def register(self, slots: SlotTrackers, worker: int = 7, block_size: int = BLOCK) -> None:
        slots.register(KEY, worker, block_size, 0, 1)

    def apply(self, step: Step, face: Face | None, worker: int = 7) -> Outcome:
        hashes = array("Q", [1, 2]).tobytes() if step is Step.ADD else b""
        event = Lifecycle(KEY, BLOCK, "r", worker, 0, step, hashes, face=face)
        return apply_once(event, 0.0, self.faces)

    def live(self) -> list[int]:
        return [
            sum(tracker.ledger.stats()["requests"] for tracker in slots.trackers.values())
            for slots in (self.first, self.second)
        ]


@pytest.mark.parametrize(
    "face, live", [(Face.SLOT_TRACKER, [1, 0]), (Face.SELECTION, [0, 1]), (None, [1, 0])]
)
def test_an_event_is_taken_once(face: Face | None, live: list[int]) -> None:
    faces = Faces()
    faces.register(faces.first)
    faces.register(faces.second)
    assert faces.apply(Step.ADD, face) is Outcome.APPLIED
    assert faces.live() == live
    assert faces.apply(Step.ADD, face) is Outcome.DUPLICATE
    assert faces.apply(Step.PREFILL_COMPLETE, face) is Outcome.APPLIED
    assert faces.apply(Step.FREE, face) is Outcome.APPLIED
    assert faces.apply(Step.FREE, face) is Outcome.UNKNOWN_REQUEST
    assert faces.live() == [0, 0]


def test_an_event_ends_nothing_of_the_other_face() -> None:
    faces = Faces()
    faces.register(faces.first)
    faces.register(faces.second)
    assert faces.apply(Step.ADD, Face.SELECTION) is Outcome.APPLIED
    assert faces.apply(Step.FREE, Face.SLOT_TRACKER) is Outcome.UNKNOWN_REQUEST
    assert faces.live() == [0, 1]


@pytest.mark.parametrize("face", [*Face, None])
def test_an_event_is_taken_by_the_face_that_has_the_rank(face: Face | None) -> None:
    faces = Faces()
    assert faces.apply(Step.ADD, face) is Outcome.UNKNOWN_MODEL
    faces.register(faces.first, block_size=2 * BLOCK)
    assert faces.apply(Step.ADD, face) is Outcome.BLOCK_SIZE
    faces.register(faces.second, worker=8)
    assert faces.apply(Step.ADD, face) in (Outcome.BLOCK_SIZE, Outcome.UNKNOWN_WORKER)
    assert faces.apply(Step.ADD, face, worker=8) is Outcome.APPLIED
    assert faces.live() == [0, 1]
    assert faces.apply(Step.FREE, face, worker=8) is Outcome.APPLIED


def test_whoever_waits_hears_of_what_ends() -> None:
    faces = Faces()
    slots, heard = faces.first, []
    faces.register(slots)
    tracker = slots.tracker(*KEY)
    tracker.ledger.loads.on_eased(lambda: heard.append(tracker.ledger.stats()["requests"]))

    def add(name: str) -> None:
        assert slots.add(tracker, name, 7, 0, HASHES, 48, 0.0, None)

    for name in ("a", "b", "c", "r", "d"):
        add(name)
    assert heard == []
    slots.prefill_complete(tracker, "a")
    slots.end(tracker, "a")
    assert faces.apply(Step.FREE, None) is Outcome.APPLIED
    assert heard == [5, 4, 3]
    list(slots.expire(11.0))
    assert heard == [5, 4, 3, 0]
    add("a")
    list(slots.leave(KEY, 7))
    assert heard == [5, 4, 3, 0, 0]


@pytest.mark.parametrize("path", ["/free", "/prefill_complete"])
def test_the_handlers_let_it_be_heard_too(path: str) -> None:
    faces, heard = Faces(), []
    faces.register(faces.first)
    tracker = faces.first.tracker(*KEY)
    assert faces.first.add(tracker, "a", 7, 0, HASHES, 48, 0.0, None)
    (route,) = (each for each in slot_tracker.routes(faces.first) if each.path == path)

    def answered(name: str) -> object:
        body = b'{"model_name":"m","request_id":"%b"}' % name.encode()
        return route.handler(Request("POST", path, b"", [], body))

    tracker.ledger.loads.on_eased(lambda: heard.append(path))
    assert answered("a")
    assert heard == [path]
