"""The selection service's hot handlers: their immediate answers are those of the scheduler.

Two equal selection services get the same requests, one of them in a form that leaves all selections
to its scheduler.
"""

from __future__ import annotations

import json
from array import array
from random import Random
from typing import Any, cast
from urllib.parse import quote_from_bytes
from uuid import UUID

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvd.errors import KvdError
from kvd.faces.selection.routes import selection_routes
from kvd.http.messages import Request, Response
from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.model import DEFAULT_TENANT, PartitionKey
from kvd.selection.candidates import schedulable
from kvd.selection.options import THRESHOLDS, RouterOptions
from kvd.selection.policies import RouterPolicy
from kvd.selection.requests import QueuedRequest, SelectRequest
from kvd.selection.service import Selections
from kvd.selection.worker_record import DEFAULT_MODEL, Role, WorkerRecord
from kvd.slots.live_requests import Moment
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.wire.lifecycle import Lifecycle
from kvd_core.base.draws import Draws
from kvd_core.base.hashing import sequence_hashes
from kvd_core.json.scan import MAX_NESTED_BYTES
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES, MAX_TOKENS, Ledger
from kvd_core.selector.choice_stats import CHOICE_PHASES
from kvd_core.selector.selector import Pool
from kvd_core.selector.settings import DIRECT, KV, LEAST_LOADED, RANDOM, ROUND_ROBIN, Settings
from tests.support.budget import scaled
from tests.support.idle_listeners import IdleListeners
from tests.support.json_bodies import bodies, written

Answer = tuple[int, bytes]

OK = b'{"status":"ok"}'

U64_MAX = 2**64 - 1
BLOCK = 4  # tokens
LONGEST_ID = "é" * (MAX_REQUEST_ID_BYTES // 2)
NOW = 1000.0  # seconds
MODELS = ("m", "busy", "over", "full", "gone", DEFAULT_MODEL, "roles")
M = PartitionKey("m", DEFAULT_TENANT)
CACHED = [1, 2, 3]  # local hashes, on some ranks

SELECT, RESERVE = "POST /select", "POST /select_and_reserve"
COMPLETE = "POST /reservations/{reservation_id}/prefill_complete"
FREE = "DELETE /reservations/{reservation_id}"
PROJECT, LOADS = "POST /potential_loads", "GET /loads"
OUTPUT = "POST /reservations/{reservation_id}/output_block"
SHOW = "GET /reservations/{reservation_id}"
TENANTS = st.sampled_from([DEFAULT_TENANT, "other"])


class Face:
    """A selection service with some live reservations, and its routes."""

    def __init__(
        self, mode: int = KV, *, max_held: int = 0, temperature: float = 0.0, **more: Any
    ) -> None:
        weighing = Settings(
            mode=mode,
            temperature=temperature,
            queue_threshold=2.0,
            active_prefill_tokens_threshold=10_000,
            credit_decay=1.0,
            decode_busy_threshold=0.5,
        )
        options = RouterOptions(weighing, max_held=max_held, **more)
        state = State()
        registry = Registry(state, IdleListeners())
        clocks = (lambda: NOW), (lambda: int(NOW * 1e9))
        ledgers = Ledgers()
        self.slots = SlotTrackers(300, ledgers)
        self.selections = Selections(
            state, registry, options, 300, Random(7), *clocks, ledgers=ledgers
        )
        self.published: list[Lifecycle] = []
        self.moments: list[Moment] = []
        trio.run(self._fill)
        routes = selection_routes(self.selections)
        self.routes = {f"{route.method} {route.path}": route for route in routes}

    async def _fill(self) -> None:
        places = [(model, DEFAULT_TENANT) for model in MODELS] + [("m", "other")]
        for number, (model, tenant) in enumerate(places):
            for worker_id in (number, U64_MAX - number):
                await self.selections.workers.put(worker(worker_id, model, tenant))
        for worker_id in (MODELS.index("gone"), U64_MAX - MODELS.index("gone")):
            await self.selections.workers.delete(worker_id)
        for candidates in self.selections.candidates.values():
            for row in candidates.pool.candidates[1:]:
                if row.worker is not None:
                    row.worker.store(row.dp_rank, sequence_hashes(CACHED), CACHED)
        full = self.selections.candidates[PartitionKey("full", DEFAULT_TENANT)]
        full.ledger = Ledger(1)
        for record in list(full.workers.values()):
            full.leave(record)
            full.join(record)
        self.reserve("m", "a", 16)
        self.reserve("m", "b", 16)
        self.reserve("full", "filler", 16)
        for dp_rank in (0, 1):
            for worker_id in (1, U64_MAX - 1):
                self.reserve("busy", f"busy {worker_id} {dp_rank}", 300, (worker_id, dp_rank))
            for worker_id in (2, U64_MAX - 2):
                self.reserve("over", f"over {worker_id} {dp_rank}", 10_001, (worker_id, dp_rank))

    def reserve(
        self, model: str, reservation_id: str, tokens: int, rank: tuple[int, int] | None = None
    ) -> None:
        key = PartitionKey(model, DEFAULT_TENANT)
        rank = rank or schedulable(self.selections.candidates, key).pool.candidates[0][:2]
        self.selections.reservations.reserve_on_rank(
            key, reservation_id, rank, look, tokens, predicts=False
        )

    def state(self) -> Any:
        """Returns everything that a request may change."""
        live = {
            name: candidates.key
            for name, candidates in self.selections.reservations.owner_of.items()
        }
        return (live, self.counted()), [
            (
                candidates.render_loads(),
                candidates.ledger.stats(),
                {name: candidates.ledger.request(name) for name in live},
            )
            for candidates in self.selections.candidates.values()
        ]

    def counted(self) -> Any:
        """Returns the counters that /metrics shows."""
        stats = self.selections.stats
        sums = [stats.choice_stats.choices(phase) for phase in range(CHOICE_PHASES)]
        ends = list(stats.choice_stats.outcomes()), list(stats.choice_stats.held()), stats.fallbacks
        return ends, stats.choice_stats.lengths(), sums

    def sessions(self) -> Any:
        """Returns the bindings of sessions, and the predictions."""
        affinity, candidates = self.selections.affinity, self.selections.candidates
        held = [affinity and affinity.sessions.find((M, session), NOW) for session in IDS]
        bound = [each and (each.worker_id, each.dp_rank, each.leases) for each in held]
        return bound, [candidates.predicted() for candidates in candidates.values()]

    def change(self, kind: str, what: Any) -> None:
        """Does something that operators, engines or the slot tracker do between requests."""
        selections = self.selections
        try:
            if kind == "tune":
                selections.tuning.change(("m", None), what)
            elif kind == "put":
                trio.run(selections.workers.put, worker(*what))
            elif kind == "delete":
                trio.run(selections.workers.delete, what)
            elif kind == "track":
                self.slots.register(M, what, BLOCK, 0, 2)
            else:
                tracker = self.slots.tracker(*M)
                rank = tracker.rank(what, 1)
                tracker.ledger.add("t", rank, array("Q", [5, 6]).tobytes(), 9, NOW)
        except KvdError:
            pass

    def answered(self, name: str, given: bytes, *headers: tuple[bytes, bytes]) -> Answer | str:
        """Returns a route's answer, or the name of its refusal; none of these requests waits."""
        route = self.routes[name]
        body, captured = (b"", given) if "{" in name else (given, b"")
        try:
            answer = route.handler(
                Request(route.method, route.path, b"", list(headers), body, captured)
            )
        except KvdError as error:
            return repr(error)
        assert isinstance(answer, Response)
        return answer.status, cast(bytes, answer.body)

    def scheduled(self, name: str, given: bytes) -> Answer | str:
        """Does the same, with selections changed by `unusual` so that the scheduler serves them."""
        return self.answered(name, unusual(given) if name in (SELECT, RESERVE) else given)


def unusual(body: bytes) -> bytes:
    """Returns a body of the same meaning that only the scheduler serves."""
    try:
        members = json.loads(body)
    except ValueError:
        return body
    if not isinstance(members, dict) or not members:
        return body
    return body[: body.rindex(b"}")] + b',"nvext":{}}'


def worker(worker_id: int, model: str, tenant: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id,
        model,
        tenant,
        endpoint=f'http://worker-{worker_id}/"é"',
        kv_events_endpoints={0: "tcp://127.0.0.1:1", 1: "tcp://127.0.0.1:2"},
        block_size=BLOCK,
        data_parallel_size=2,
        role=Role.PREFILL if model == "roles" and worker_id < U64_MAX // 2 else None,
        max_num_batched_tokens=100 if model == "busy" else 100_000,
    )


def look(pool: Pool) -> None:
    pool.match(b"", b"", 1)


IDS = ["", "a", "b", "c", "\x7f", "é", "a b", "filler", LONGEST_ID]
TEXTS = [
    *(json.dumps(text, ensure_ascii=False) for text in (*IDS, *MODELS, "other")),
    *(r'"\u006d"', r'"\u0061"', r'"\ud83d\ude00"', r'"\ud800"', '"a\n"'),
    f'"{LONGEST_ID}x"',
]
NUMBERS = ["0", "1", "12", "-0", "-1", "007", "1.0", "7e0", "1E400", "9" * 5000, str(U64_MAX)]
NUMBERS += ["18446744073709551616", "4294967295", "4294967296", str(MAX_TOKENS)]
NUMBERS += [str(MAX_TOKENS + 1)]
ARRAYS = ["[]", "[1,2,3]", "[1,2,4]", "[1,2,3,4,5,6,7,8,9]", "[-1,2,3]", "[4294967296]"]
ARRAYS += ["[9223372036854775808]", "[1.0]", "[null]", "[-0]", "null", "1", "[1,]"]
MEMBERS = {
    **dict.fromkeys(("model_name", "tenant_id", "routing_group", "selection_id"), TEXTS),
    **dict.fromkeys(("reservation_id", "lora_name", "cache_salt", "unknown"), TEXTS),
    "session_id": TEXTS,
    **dict.fromkeys(("isl_tokens", "expected_output_tokens", "strict_priority"), NUMBERS),
    "priority_jump": ["0", "1.5"],
    **dict.fromkeys(("block_hashes", "sequence_hashes", "token_ids"), ARRAYS),
    "router_config_override": ['{"overlap_score_weight":0}', '{"router_temperature":"x"}'],
    "pinned_worker": ['{"worker_id":0,"dp_rank":1}'],
    "affinity_target": ['{"worker_id":0}'],
    "allowed_worker_ids": ["[0]", "[1,"],
    "routing_constraints": ['{"required_taints":["x"]}'],
    "explain": [],
    "phase": ['"prefill"', '"decode"', '"both"'],
    "router_policy": ['"kvd"', '"dynamo"', '"x"'],
}
USUAL = {
    "model_name": '"m"',
    "block_hashes": "[1,2,3]",
    "sequence_hashes": "[5,6,7]",
    "isl_tokens": "14",
}
NAMES = [SELECT, RESERVE, PROJECT]


def usual(**members: str) -> bytes:
    return written(USUAL | members)


SEGMENTS = [quote_from_bytes(name.encode()).encode() for name in IDS if name]
SEGMENTS += [b"\xff", "é".encode(), b"c:prefill"]
QUESTIONS = st.tuples(st.sampled_from(NAMES), bodies(USUAL, MEMBERS))
STEPS = st.tuples(st.sampled_from([COMPLETE, FREE]), st.sampled_from(SEGMENTS))
LIVES = st.lists(st.one_of(QUESTIONS, STEPS), min_size=1, max_size=8)
MODES = st.sampled_from([KV, ROUND_ROBIN, RANDOM, LEAST_LOADED, DIRECT])
BOOKED = usual(reservation_id='"c"')
BOTH = usual(model_name='"roles"', phase='"both"', reservation_id='"c"')


@pytest.mark.slow("two services live through each example")
@settings(max_examples=scaled(8))
@given(LIVES, MODES)
@example([(RESERVE, BOOKED), (RESERVE, BOOKED), (COMPLETE, b"c"), (FREE, b"c"), (FREE, b"c")], KV)
@example([(RESERVE, usual()), (SELECT, usual()), (RESERVE, usual())], KV)
@example([(SELECT, usual(explain="true")), (SELECT, usual())], ROUND_ROBIN)
@example([(RESERVE, usual(model_name='"full"')), (RESERVE, BOOKED)] * 2, ROUND_ROBIN)
@example([(RESERVE, usual(model_name='"busy"')), (RESERVE, usual())], RANDOM)
@example([(SELECT, usual(model_name='"over"')), (SELECT, usual())], RANDOM)
@example([(SELECT, usual(model_name='"gone"')), (SELECT, usual())], RANDOM)
@example([(SELECT, usual(selection_id='"é"')), (SELECT, usual(selection_id='"\x7f"'))], KV)
@example([(RESERVE, usual(reservation_id=f'"{LONGEST_ID}"'))], KV)
@example([(RESERVE, usual(reservation_id=f'"{LONGEST_ID}x"'))], KV)
@example([(RESERVE, usual(isl_tokens=str(MAX_TOKENS)))], KV)
@example([(SELECT, usual(token_ids="[1,2,3,4,5,6,7,8,9]", cache_salt='"s"', lora_name='"l"'))], KV)
@example([(SELECT, usual(tenant_id='"other"', routing_group='"other"'))], KV)
@example([(SELECT, usual(model_name='"roles"'))] * 4, ROUND_ROBIN)
@example([(RESERVE, BOTH), (COMPLETE, b"c"), (COMPLETE, b"c"), (FREE, b"c")], KV)
@example([(RESERVE, BOTH), (FREE, b"c:prefill"), (COMPLETE, b"c"), (FREE, b"c")], RANDOM)
@example([(RESERVE, BOTH), (FREE, b"c"), (FREE, b"c:prefill")], LEAST_LOADED)
def test_what_is_served_at_once_is_what_the_scheduler_serves(
    requests: list[tuple[str, bytes]], mode: int
) -> None:
    short, long = Face(mode), Face(mode)
    for name, body in requests:
        assert short.answered(name, body) == long.scheduled(name, body)
        assert short.state() == long.state()
        assert short.answered(LOADS, b"") == long.answered(LOADS, b"")
    assert short.selections.draws.next() == long.selections.draws.next()
    for candidates in short.selections.candidates.values():
        candidates.ledger.verify()


@pytest.mark.slow("two services live through each example")
@settings(max_examples=scaled(8))
@given(LIVES)
def test_with_sessions_and_predictions_too(requests: list[tuple[str, bytes]]) -> None:
    more = {"session_affinity_ttl_s": 10, "predicted_ttl_s": 10.0}
    short, long = Face(**more), Face(**more)
    for name, body in requests:
        assert short.answered(name, body) == long.scheduled(name, body)
        assert short.state() == long.state()
        assert short.sessions() == long.sessions()
    assert short.selections.draws.next() == long.selections.draws.next()


CHANGES = st.one_of(
    st.tuples(
        st.just("tune"),
        st.one_of(
            MODES.map(lambda mode: {"mode": mode}),
            st.sampled_from(RouterPolicy).map(lambda policy: policy.row),
            st.sampled_from([0, 7, None]).map(lambda tokens: {THRESHOLDS[1]: tokens}),
        ),
    ),
    st.tuples(st.just("put"), st.tuples(st.sampled_from([0, 50]), st.just("m"), TENANTS)),
    st.tuples(st.just("delete"), st.sampled_from([0, U64_MAX, 50])),
    st.tuples(st.just("track"), st.sampled_from([0, 50])),
    st.tuples(st.just("add"), st.sampled_from([0, 50])),
)
OPTIONS = st.fixed_dictionaries(
    {"mode": MODES, "temperature": st.sampled_from([0.0, 0.5])},
    optional={
        "session_affinity_ttl_s": st.just(10),
        "predicted_ttl_s": st.just(10.0),
        "assumes_kv_reuse": st.just(False),
        "tracks_output_blocks": st.just(True),
    },
)
MORE_STEPS = st.tuples(st.sampled_from([OUTPUT, SHOW]), st.sampled_from(SEGMENTS))
MORE = st.lists(st.one_of(QUESTIONS, STEPS, MORE_STEPS, CHANGES), min_size=1, max_size=12)


@pytest.mark.slow("two services live through each example")
@settings(max_examples=scaled(8))
@given(MORE, OPTIONS)
@example([("put", (50, "m", DEFAULT_TENANT)), (RESERVE, BOOKED), (FREE, b"c")], {"mode": KV})
@example([("track", 0), ("add", 0), (SELECT, usual()), (PROJECT, usual())], {"mode": KV})
def test_with_all_options_and_changes_too(
    steps: list[tuple[str, Any]], options: dict[str, Any]
) -> None:
    short, long = Face(**options), Face(**options)
    for name, what in steps:
        if name not in long.routes:
            short.change(name, what)
            long.change(name, what)
        else:
            assert short.answered(name, what) == long.scheduled(name, what)
        assert short.state() == long.state()
        assert short.sessions() == long.sessions()
        assert short.answered(LOADS, b"") == long.answered(LOADS, b"")
    assert short.selections.draws.next() == long.selections.draws.next()
    for candidates in short.selections.candidates.values():
        candidates.ledger.verify()


@pytest.mark.slow("three services live through each example")
@settings(max_examples=scaled(8))
@given(LIVES)
def test_steps_that_others_are_told_of_are_the_same_steps(
    requests: list[tuple[str, bytes]],
) -> None:
    alone, observed, beside = Face(), Face(), Face()
    beside.selections.reservations.steps.subscribe(beside.published.append)
    for face in (observed, beside):
        moments = face.selections.reservations.moments
        moments.subscribe(lambda moment, of=face: of.moments.append(moment))
    for name, body in requests:
        answer = alone.answered(name, body)
        assert answer == observed.answered(name, body) == beside.answered(name, body)
        assert alone.state() == observed.state() == beside.state()
        assert observed.moments == beside.moments


TOKENS = {"model_name": '"m"', "token_ids": "[1,2,3,4,5,6,7,8,9]"}
USUAL_REQUESTS = {
    "select": (SELECT, usual()),
    "select, with an id": (SELECT, usual(selection_id='"s"')),
    "select, in a tenant": (SELECT, usual(tenant_id='"other"')),
    "select, of the default model": (SELECT, usual(model_name='"default"')),
    "select, by tokens": (SELECT, written(TOKENS)),
    "select, by tokens, salted": (SELECT, written(TOKENS | {"cache_salt": '"s"'})),
    "select, with nulls": (SELECT, usual(lora_name="null", router_config_override="null")),
    "select, of a session": (SELECT, usual(session_id='"s"')),
    "select, with null arrays": (SELECT, usual(token_ids="null")),
    "select, by tokens, with null arrays": (SELECT, written(TOKENS | {"block_hashes": "null"})),
    "reserve, of a session": (RESERVE, usual(session_id='"s"')),
    "reserve, with output": (RESERVE, usual(expected_output_tokens="4294967295")),
    "select, with output": (SELECT, usual(expected_output_tokens="100")),
    "reserve": (RESERVE, usual()),
    "reserve, by tokens": (RESERVE, written(TOKENS)),
    "reserve, any id": (RESERVE, usual(reservation_id=f'"{LONGEST_ID}"')),
    "prefill_complete": (COMPLETE, b"a"),
    "free": (FREE, b"b"),
    "potential_loads": (PROJECT, usual()),
    "potential_loads, by tokens": (PROJECT, written(TOKENS)),
    "loads": (LOADS, b""),
    "select, beside prefill workers": (SELECT, usual(model_name='"roles"')),
}


@pytest.mark.parametrize("kind", USUAL_REQUESTS)
def test_usual_requests_are_answered(kind: str) -> None:
    answer = Face().answered(*USUAL_REQUESTS[kind])
    assert answer == Face().scheduled(*USUAL_REQUESTS[kind])
    assert not isinstance(answer, str) and answer[0] == 200


def test_who_comes_behind_others_waits() -> None:
    face = Face(max_held=1)
    place = PartitionKey("busy", DEFAULT_TENANT)
    ask = SelectRequest(place, face.selections.options.settings)
    held = face.selections.scheduler.select(ask, look)
    assert isinstance(held, QueuedRequest)
    busy = [name for name, key in face.state()[0][0].items() if key == place]
    face.selections.candidates[place].ledger.prefill_complete(busy[0])
    assert "the limit of 1 waiting selections is reached" in str(
        face.answered(SELECT, usual(model_name='"busy"', isl_tokens="12"))
    )
    assert face.answered(SELECT, usual()) and face.answered(FREE, b"a") == (200, OK)
    assert held.answer is None
    assert face.answered(COMPLETE, busy[0].encode()) == (200, OK)
    assert isinstance(held.answer, bytes)


def test_a_selection_for_busy_workers_is_awaited() -> None:
    face = Face(max_held=1)
    route = face.routes[SELECT]
    body = usual(model_name='"busy"')
    waiting = cast(Any, route.handler(Request("POST", "/select", b"", [], body)))
    assert not isinstance(waiting, Response) and face.selections.scheduler.held == 1
    waiting.close()


def test_a_retry_gets_the_kept_answer() -> None:
    face, key = Face(), (b"idempotency-key", b"k")
    first = face.answered(RESERVE, usual(), key)
    booked = face.state()[1]
    assert face.answered(RESERVE, usual(), key) == first
    assert face.state()[1] == booked
    assert face.answered(RESERVE, usual()) != first


def test_sessions_that_are_followed_stay_on_their_ranks() -> None:
    face = Face(session_affinity_ttl_s=10)
    place = []
    for _ in range(3):
        status, answer = face.answered(RESERVE, usual(session_id='"b"'))
        assert status == 200
        members = json.loads(answer)
        place.append((members["worker_id"], members["dp_rank"]))
    assert len(set(place)) == 1
    bound = face.sessions()[0][IDS.index("b")]
    assert bound[:2] == place[0]
    assert face.answered(FREE, members["reservation_id"].encode()) == (200, OK)
    assert face.sessions()[0][IDS.index("b")] != bound


def test_predictions_are_made_of_what_is_booked_at_once() -> None:
    face = Face(predicted_ttl_s=10.0)
    path = [*CACHED, 4]  # only 4 is predicted, as events have announced the others
    hashes = {"block_hashes": str(path), "sequence_hashes": str(list(sequence_hashes(path)))}
    status, _ = face.answered(RESERVE, usual(**hashes, isl_tokens="16"))
    assert status == 200
    assert face.selections.candidates[M].predicted() == 1


def test_what_is_booked_is_as_old_as_the_clock_says() -> None:
    face = Face()
    assert face.answered(RESERVE, BOOKED)
    booked = face.selections.reservations.owner_of["c"].ledger.request("c")
    assert booked is not None and booked.admitted_at == NOW


TOO_LONG = "[" + "1," * (MAX_NESTED_BYTES // 2) + "1]"


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        (SELECT, b"{", "the body is not valid JSON"),
        (SELECT, usual(model_name="null"), "model_name: expected a text"),
        (SELECT, usual(model_name='"gone"'), "no schedulable workers for model=gone"),
        (SELECT, usual(block_hashes="null"), "block_hashes is required, or token_ids"),
        (SELECT, usual(sequence_hashes="null"), "sequence_hashes is required, or token_ids"),
        (SELECT, usual(isl_tokens="null"), "isl_tokens is required, or token_ids"),
        (SELECT, usual(isl_tokens="0"), "isl_tokens must be greater than 0"),
        (SELECT, usual(token_ids="[1]", isl_tokens='"8"'), "isl_tokens: expected a whole number"),
        (SELECT, usual(block_hashes="[1]"), "block_hashes length 1 must match"),
        (SELECT, usual(expected_output_tokens="-1"), "expected_output_tokens: expected a number"),
        (SELECT, usual(strict_priority='"x"'), "strict_priority: expected a whole number"),
        (SELECT, usual(selection_id="7"), "selection_id: expected a text"),
        (SELECT, usual(explain="7"), "explain: expected true or false"),
        (
            SELECT,
            usual(allowed_worker_ids="[1,-1]"),
            "allowed_worker_ids: expected a number from 0",
        ),
        (SELECT, usual(allowed_worker_ids="[true]"), "allowed_worker_ids: expected a whole number"),
        (
            SELECT,
            usual(allowed_worker_ids=TOO_LONG),
            "allowed_worker_ids: longer than 131072 bytes",
        ),
        (SELECT, usual(router_config_override=TOO_LONG), "router_config_override: longer than"),
        (SELECT, usual(model_name=TOO_LONG), "model_name: longer than"),
        (SELECT, usual(model_name='"over"'), "all workers are overloaded"),
        (RESERVE, usual(reservation_id='"a"'), "reservation a already exists"),
        (RESERVE, usual(reservation_id=f'"{LONGEST_ID}x"'), "reservation_id: longer than"),
        (RESERVE, usual(advisory="true"), "advisory: an advisory request cannot book"),
        (RESERVE, usual(model_name='"full"'), "the limit of live reservations is reached"),
        (COMPLETE, b"z", "reservation z not found"),
        (FREE, b"z", "reservation z not found"),
        (FREE, b"%ff", "the path is not UTF-8"),
        (PROJECT, usual(router_config_override="7"), "router_config_override: expected an object"),
    ],
)
def test_refusals_say_why(name: str, given: bytes, why: str) -> None:
    assert why in str(Face().answered(name, given))


def test_numbers_are_those_of_their_source() -> None:
    draws, source = Draws(Random(1)), Random(1)
    expected = memoryview(source.randbytes(8 * 512) + source.randbytes(8 * 512)).cast("Q")
    assert [draws.next() for _ in range(1024)] == list(expected)


def test_ids_are_uuids_and_differ() -> None:
    draws = Draws(Random(1))
    ids = [draws.uuid() for _ in range(1000)]
    assert all(str(UUID(each)) == each and UUID(each).version == 4 for each in ids)
    assert len(set(ids)) == 1000
