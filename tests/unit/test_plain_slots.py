"""Slot requests answered by the lane's own code: the same as by the handlers, whatever the body.

Two equal sets of trackers get the same requests, one of them by the lane's way: its answerer first,
and the handler for what that leaves.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvd.errors import KvdError
from kvd.faces.slot_tracker import routes as slot_tracker
from kvd.faces.slot_tracker.plain import PlainAdd, PlainFree, PlainLoads
from kvd.http.types import Request, Response, Route
from kvd.model import DEFAULT_TENANT, PartitionKey
from kvd.slots.trackers import SlotTrackers, Tracker
from kvd.wire.lifecycle import Lifecycle
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES, MAX_TOKENS, Ledger
from tests.support.json_bodies import bodies, written

Answer = tuple[int, bytes]

U64_MAX = 2**64 - 1
LONGEST_ID = "é" * (MAX_REQUEST_ID_BYTES // 2)
NOW = 1000.0  # seconds


class Face:
    """Slot trackers with some live requests, and their routes."""

    def __init__(self) -> None:
        self.slots = SlotTrackers(expiry_s=300)
        self.told: list[Lifecycle] = []
        for tenant in (DEFAULT_TENANT, "other"):
            self.fill(Tracker(PartitionKey("m", tenant), 16), "a", "b")
        self.fill(Tracker(PartitionKey("full", DEFAULT_TENANT), 16, Ledger(1)), "a")
        heavy = Tracker(PartitionKey("heavy", DEFAULT_TENANT), 16)
        self.fill(heavy, *map(str, range(512)), tokens=MAX_TOKENS)
        self.routes = {route.path: route for route in slot_tracker.routes(self.slots, lambda: NOW)}

    def fill(self, tracker: Tracker, *names: str, tokens: int = 48) -> None:
        self.slots.trackers[tracker.key] = tracker
        for worker_id in (7, U64_MAX):
            self.slots.register(tracker.key, worker_id, 16, 0, 2)
        for name in names:
            prompt = array("Q", [1, 2, 3]).tobytes()
            tracker.ledger.add(name, tracker.rank(7, 0), prompt, tokens, 0.0)

    def state(self) -> Any:
        """Everything that a request may change."""
        return self.slots.ended, [
            (
                tracker.ledger.render_loads(),
                tracker.ledger.stats(),
                [tracker.ledger.request(name) for name in NAMES],
            )
            for tracker in self.slots.trackers.values()
        ]

    def handled(self, path: str, body: bytes) -> Answer | str:
        """Returns what the handler answers, or what it raises."""
        route = self.routes[path]
        handler = cast(Callable[[Request], Response], route.handler)
        try:
            response = handler(Request(route.method, path, b"", [], body))
        except KvdError as error:
            return repr(error)
        return response.status, cast(bytes, response.body)

    def answered(self, path: str, body: bytes) -> Answer | None:
        """Returns what the lane answers; nothing has changed where it does not."""
        answerer = answerer_of(self.routes[path])
        before = self.state()
        answer = answerer(body)
        if answer is None:
            assert self.state() == before
            return None
        return 201 if isinstance(answerer, PlainAdd) else 200, answer


def answerer_of(route: Route) -> Callable[[bytes], bytes | None]:
    assert route.answerer is not None
    return route.answerer


NAMES = ["", "a", "b", "c", "511", "\0", "é", "a/b", LONGEST_ID]
TEXTS = [
    *(json.dumps(text, ensure_ascii=False) for text in (*NAMES, "m", "other", "full", "heavy")),
    *(r'"\u006d"', r'"\u0061"', r'"\ud83d\ude00"', r'"\ud800"', '"a\n"'),
    f'"{LONGEST_ID}x"',
]
NUMBERS = ["0", "1", "7", "-0", "-1", "007", "1.0", "7e0", "1E400", "9" * 400, str(U64_MAX)]
NUMBERS += ["18446744073709551616", "4294967295", "4294967296", str(MAX_TOKENS)]
NUMBERS += [str(MAX_TOKENS + 1)]
HASHES = ["[]", "[1,2,3]", "[1,2,4]", "[-1]", "[9223372036854775807]", "[-9223372036854775808]"]
HASHES += ["[9223372036854775808]", "[1.0]", "[null]", "[-0]", "null", "1", "[1,]"]

MEMBERS = {
    **dict.fromkeys(("model_name", "tenant_id", "routing_group", "request_id"), TEXTS),
    **dict.fromkeys(("worker_id", "dp_rank", "new_isl_tokens"), NUMBERS),
    "sequence_hashes": HASHES,
    "unknown": TEXTS,
}
USUAL = {
    "model_name": '"m"',
    "request_id": '"c"',
    "worker_id": "7",
    "dp_rank": "1",
    "sequence_hashes": "[1,2]",
}
STEPS = ["/add", "/prefill_complete", "/free"]
PATHS = [*STEPS, "/potential_loads"]


LIVES = st.lists(st.tuples(st.sampled_from(PATHS), bodies(USUAL, MEMBERS)), min_size=1, max_size=8)


def with_members(**members: str) -> bytes:
    return written(USUAL | members)


@given(LIVES)
@example([("/add", with_members())] * 2)
@example([("/add", with_members(request_id='"a"')), ("/free", with_members(request_id='"a"'))])
@example([("/add", with_members(model_name='"full"'))])
@example([("/add", with_members(model_name='"heavy"', dp_rank="0", new_isl_tokens="1"))])
@example([("/add", with_members(worker_id="-0")), ("/add", with_members(dp_rank="-0"))])
@example([("/add", with_members(worker_id=str(U64_MAX), new_isl_tokens=str(MAX_TOKENS)))])
@example([("/add", with_members(request_id=f'"{LONGEST_ID}"'))])
@example([("/add", with_members(request_id=f'"{LONGEST_ID}x"'))])
@example([("/add", with_members(tenant_id='"other"', routing_group='"other"'))])
def test_what_is_answered_is_what_the_handler_does(requests: list[tuple[str, bytes]]) -> None:
    short, long = Face(), Face()
    for path, body in requests:
        expected = long.handled(path, body)
        assert (short.answered(path, body) or short.handled(path, body)) == expected
        assert short.state() == long.state()
        loads = answerer_of(short.routes["/loads"])(b"")
        assert (200, loads) == long.handled("/loads", b"")
    for tracker in short.slots.trackers.values():
        tracker.ledger.verify()


@given(LIVES)
def test_where_there_are_replicas_the_handlers_tell_them(
    requests: list[tuple[str, bytes]],
) -> None:
    face = Face()
    face.slots.steps.subscribe(face.told.append)
    for path, body in requests:
        answer = face.answered(path, body)
        assert answer is None or path not in STEPS
    assert not face.told
    assert answerer_of(face.routes["/loads"])(b"") is not None


USUAL_REQUESTS = {
    "add": ("/add", {}),
    "add, in a tenant": ("/add", {"tenant_id": '"other"'}),
    "add, with tokens": ("/add", {"new_isl_tokens": str(MAX_TOKENS)}),
    "add, any id": ("/add", {"request_id": f'"{LONGEST_ID}"'}),
    "add, any worker": ("/add", {"worker_id": str(U64_MAX)}),
    "add, more members": ("/add", {"unknown": '[1,{"a":null}]'}),
    "prefill_complete": ("/prefill_complete", {"request_id": '"a"'}),
    "free": ("/free", {"request_id": '"a"', "tenant_id": '"other"'}),
    "potential_loads": ("/potential_loads", {}),
    "potential_loads, with tokens": ("/potential_loads", {"new_isl_tokens": "48"}),
}


@pytest.mark.parametrize("kind", USUAL_REQUESTS)
def test_usual_requests_are_answered(kind: str) -> None:
    path, members = USUAL_REQUESTS[kind]
    body = with_members(**members)
    answer = Face().answered(path, body)
    assert answer is not None
    assert answer == Face().handled(path, body)


def test_what_is_booked_is_as_old_as_the_clock_says() -> None:
    face = Face()
    assert face.answered("/add", with_members())
    booked = face.slots.tracker("m", DEFAULT_TENANT).ledger.request("c")
    assert booked is not None and booked.admitted_at == NOW


def test_a_scanner_of_other_members_is_a_mistake() -> None:
    known = SlotTrackers(1), DEFAULT_TENANT
    with pytest.raises(ValueError, match="not the fields of such a request"):
        PlainFree(BodyScanner({}, ("model_name", "request_id")), *known)
    with pytest.raises(ValueError, match="not the fields of such a request"):
        PlainAdd(slot_tracker.STEP, *known, lambda: 0.0)
    with pytest.raises(ValueError, match="not the fields of such a request"):
        PlainLoads(slot_tracker.STEP, *known)
