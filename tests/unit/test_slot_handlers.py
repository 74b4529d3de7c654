"""The slot tracker's hot handlers: any body is a step, taken once, or gets a clear error."""

from __future__ import annotations

import json
from array import array
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvd.errors import KvdError
from kvd.faces.slot_tracker import routes as slot_tracker
from kvd.http.messages import Request, Response
from kvd.model import DEFAULT_TENANT, PartitionKey
from kvd.slots.live_requests import Moment
from kvd.slots.trackers import SlotTrackers, Tracker
from kvd.wire.lifecycle import Lifecycle
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES, MAX_TOKENS, Ledger
from tests.support.budget import scaled
from tests.support.json_bodies import bodies, written

Answer = tuple[int, bytes]

OK = b'{"status":"ok"}'

U64_MAX = 2**64 - 1
LONGEST_ID = "é" * (MAX_REQUEST_ID_BYTES // 2)
NOW = 1000.0  # seconds


class Face:
    """Slot trackers with some live requests, and their routes."""

    def __init__(self) -> None:
        self.slots = SlotTrackers(300, clock=lambda: NOW)
        self.published: list[Lifecycle] = []
        self.moments: list[Moment] = []
        for tenant in (DEFAULT_TENANT, "other"):
            self.fill(Tracker(PartitionKey("m", tenant), 16), "a", "b")
        self.fill(Tracker(PartitionKey("full", DEFAULT_TENANT), 16, Ledger(1)), "a")
        heavy = Tracker(PartitionKey("heavy", DEFAULT_TENANT), 16)
        self.fill(heavy, *map(str, range(512)), tokens=MAX_TOKENS)
        self.routes = {route.path: route for route in slot_tracker.routes(self.slots)}

    def fill(self, tracker: Tracker, *names: str, tokens: int = 48) -> None:
        self.slots.trackers[tracker.key] = tracker
        for worker_id in (7, U64_MAX):
            self.slots.register(tracker.key, worker_id, 16, 0, 2)
        for name in names:
            prompt = array("Q", [1, 2, 3]).tobytes()
            tracker.ledger.add(name, tracker.rank(7, 0), prompt, tokens, 0.0)

    def state(self, *, refusals: bool = True) -> tuple[Any, ...]:
        """Returns everything that a request may change, with counts, also those of `refusals`."""
        ledgers = [tracker.ledger for tracker in self.slots.trackers.values()]
        held = [
            (ledger.render_loads(), [ledger.request(name) for name in NAMES]) for ledger in ledgers
        ]
        kept = held, self.slots.ended
        return (*kept, [ledger.stats() for ledger in ledgers]) if refusals else kept

    def answered(self, path: str, body: bytes, *headers: tuple[bytes, bytes]) -> Answer | str:
        """Returns a route's answer, or its refusal, which must have changed nothing."""
        route, before = self.routes[path], self.state()
        try:
            response = route.handler(Request(route.method, path, b"", list(headers), body))
        except KvdError as error:
            assert self.state(refusals=False) == before[:-1]
            return repr(error)
        assert isinstance(response, Response)
        return response.status, cast(bytes, response.body)


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


@settings(max_examples=scaled(10))
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
def test_steps_that_replicas_are_told_of_are_the_same_steps(
    requests: list[tuple[str, bytes]],
) -> None:
    """The handlers take a step themselves unless a replica has to be notified of it."""
    alone, observed, beside = Face(), Face(), Face()
    beside.slots.steps.subscribe(beside.published.append)
    for face in (observed, beside):
        face.slots.moments.subscribe(lambda moment, of=face: of.moments.append(moment))
    for path, body in requests:
        answer = alone.answered(path, body)
        assert answer == observed.answered(path, body) == beside.answered(path, body)
        assert alone.state() == observed.state() == beside.state()
        assert observed.moments == beside.moments
        assert alone.answered("/loads", b"") == beside.answered("/loads", b"")
    for tracker in alone.slots.trackers.values():
        tracker.ledger.verify()


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
    answer = Face().answered(path, with_members(**members))
    assert not isinstance(answer, str)
    assert answer[0] == (201 if path == "/add" else 200)


def test_what_is_booked_is_as_old_as_the_clock_says() -> None:
    face = Face()
    face.answered("/add", with_members())
    booked = face.slots.tracker("m", DEFAULT_TENANT).ledger.request("c")
    assert booked is not None and booked.admitted_at == NOW


def test_a_retry_is_no_second_booking() -> None:
    face, key = Face(), (b"idempotency-key", b"k")
    assert face.answered("/add", with_members(), key) == (201, OK)
    booked = face.state()
    assert face.answered("/add", with_members(), key) == (200, OK)
    assert face.state()[0] == booked[0]
    assert "already exists" in str(face.answered("/add", with_members()))


@pytest.mark.parametrize(
    ("path", "members", "why"),
    [
        ("/add", {"sequence_hashes": "null"}, "Invalid"),
        ("/add", {"worker_id": "-1"}, "worker_id: expected a number from 0 to"),
        ("/add", {"worker_id": "-0"}, "worker_id: expected a whole number"),
        ("/add", {"dp_rank": "4294967296"}, "dp_rank: expected a number from 0 to 4294967295"),
        ("/add", {"new_isl_tokens": "null"}, "new_isl_tokens: expected a whole number"),
        ("/add", {"new_isl_tokens": "1E400"}, "new_isl_tokens: a number out of range"),
        ("/add", {"request_id": "7"}, "request_id: expected a text"),
        ("/add", {"request_id": f'"{LONGEST_ID}x"'}, "request_id: longer than"),
        ("/add", {"request_id": '"a"'}, "request a already exists"),
        ("/add", {"worker_id": "8"}, "worker 8 dp_rank 1 not found"),
        ("/add", {"model_name": '"full"'}, "the limit of live requests is reached"),
        ("/add", {"model_name": '"n"', "dp_rank": "null"}, "dp_rank: expected a whole number"),
        ("/free", {"model_name": '"n"'}, "no slot tracker for model=n tenant_id=default"),
        ("/free", {"tenant_id": '"a"', "routing_group": '"b"'}, "are the same member and differ"),
        ("/prefill_complete", {"request_id": '"z"'}, "request z not found"),
        ("/potential_loads", {"new_isl_tokens": str(MAX_TOKENS + 1)}, "expected a number from 0"),
    ],
)
def test_refusals_say_why(path: str, members: dict[str, str], why: str) -> None:
    answer = Face().answered(path, with_members(**members))
    assert isinstance(answer, str) and why in answer
