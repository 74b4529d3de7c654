"""The conductor's hot handlers: names of members, hashes as texts, clear errors for the rest."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from kvd.errors import KvdError
from kvd.faces.conductor import members
from kvd.faces.conductor import routes as conductor
from kvd.faces.conductor.handlers import FIELDS, HashQueryHandler
from kvd.http.messages import Request, Response
from kvd.index.partitions import State
from kvd.index.publishers import Publishers
from kvd.model import PartitionKey
from kvd_core.conductor.conductor import namespace
from kvd_core.json.scan import AHEAD_BYTES
from tests.models.conductor_model import sequence_hashes

BLOCK_SIZE = 4
TOKENS = list(range(4 * BLOCK_SIZE))
HASHES = sequence_hashes(TOKENS, BLOCK_SIZE, 1337)


def filled_state() -> State:
    state = State()
    for tenant in ("default", "other"):
        for instance in ("a", 'b"'):
            key = PartitionKey("m", tenant)
            source = state.add_source(key, BLOCK_SIZE, instance, "", "", 0, store=False)
            for scope in (("", ""), ("adapter", ""), ("#7", ""), ("", "salt")):
                space = namespace(*scope)
                source.store(0, 0, "GPU", [1, 2, 3], TOKENS[:12], None, space)
                source.store(0, 1, 'X"', [1], TOKENS[:4], None, space)
    return state


STATE = filled_state()
ROUTES = {route.path: route for route in conductor.routes(STATE, cast(Publishers, None))}
QUERIES = ["/query", "/query_by_hash"]

VALUES = st.sampled_from(
    ['"m"', '"other"', '"adapter"', '"salt"', '"a"', '""', "null", "4", "7", "0", "-1", "true",
     "[]", r'"\u006d"', '"é"', "4.0", "4294967296"]
)  # fmt: skip
NUMBERS = st.sampled_from(
    [json.dumps(TOKENS), json.dumps(HASHES), "[]", "[1]", "null", "[-1]", '["1"]', "[1.0]", "{}"]
)
MEMBERS = st.one_of(
    st.tuples(st.sampled_from(["token_ids", *members.HASHES]), NUMBERS),
    st.tuples(st.sampled_from([*FIELDS, "unknown"]), VALUES),
)
USUAL = [
    ("token_ids", json.dumps(TOKENS)),
    ("seq_hashes", json.dumps(HASHES)),
    ("model", '"m"'),
    ("block_size", "4"),
]
BODIES = st.lists(MEMBERS, max_size=4).map(lambda more: body([*USUAL, *more]))


def body(members: list[tuple[str, str]]) -> bytes:
    """Returns a body in which the last one of several members of a name counts."""
    return (
        "{" + ",".join(f'"{name}":{value}' for name, value in dict(members).items()) + "}"
    ).encode()


def asked(path: str, body: bytes, *headers: tuple[bytes, bytes]) -> bytes:
    """Returns the body of a route's answer; raises its refusal."""
    route = ROUTES[path]

    async def ask() -> Response:
        response = route.handler(Request("POST", path, b"", list(headers), body))
        return response if isinstance(response, Response) else await response

    response = trio.run(ask)
    assert response.status == 200
    return cast(bytes, response.body)


@pytest.mark.parametrize("extra", [0, 4 * AHEAD_BYTES])
async def test_the_first_question_by_hash_reads_its_body_in_steps(
    extra: int, nursery: trio.Nursery
) -> None:
    """It waits for sequence hashes, and reads its body once it has them."""
    passes = 0

    async def watch() -> None:
        nonlocal passes
        while True:
            passes += 1
            await trio.lowlevel.checkpoint()

    nursery.start_soon(watch)
    handler = ROUTES["/query_by_hash"].handler
    assert isinstance(handler, HashQueryHandler)
    written = body([*USUAL, ("unknown", "[" + "0," * (extra // 2) + "0]")])
    request = Request("POST", "/query_by_hash", b"", [], written)
    found = await handler.sequenced(request, STATE.sized["m", "default", BLOCK_SIZE].conductor)
    assert (passes >= 4) == (extra > 0)
    assert json.loads(cast(bytes, found.body))["default"]["a"]["longest_matched"] == 12


@given(BODIES)
@example(body(USUAL))
@example(body([*USUAL, ("cache_salt", '"salt"')]))
@example(body([*USUAL, ("instance_id", '"a"')]))
@example(b"{")
def test_every_body_is_answered_or_refused(given: bytes) -> None:
    for path in QUERIES:
        try:
            assert isinstance(json.loads(asked(path, given)), dict)
        except KvdError as error:
            assert error.status == 400
            assert error.details["reason"] in (
                "missing", "invalid_type", "invalid_value", "invalid_json",
            )  # fmt: skip


@pytest.mark.parametrize("path", QUERIES)
def test_usual_queries_are_answered(path: str) -> None:
    row = json.loads(asked(path, body(USUAL)))["default"]['b"']
    assert row == {
        "longest_matched": 12, "GPU": 12, "CPU": 0, "DISK": 0, 'X"': 4, "DP": {"0": 12, "1": 4},
    }  # fmt: skip


def rows(path: str, **members: Any) -> dict[str, Any]:
    usual = {"model": "m", "block_size": 4}
    data = {"token_ids": TOKENS} if path == "/query" else {"seq_hashes": HASHES}
    answered: dict[str, Any] = json.loads(asked(path, json.dumps(usual | data | members).encode()))
    return answered


@pytest.mark.parametrize("path", ["/query", "/query_by_hash"])
def test_members_have_several_names(path: str) -> None:
    salted = rows(path, cache_salt="salt")
    assert salted["default"]["a"]["GPU"] == 12
    for name in ("additional_salt", "additionalsalt"):
        assert (
            rows(path, **{name: "salt"})
            == rows(path, **{name: "salt"}, cache_salt="salt")
            == salted
        )
    assert rows(path, model=None, modelname="m") == rows(path, model_name="m") == rows(path)
    assert rows(path, lora_id=7)["default"]["a"]["GPU"] == 12
    assert rows(path, lora_id=0) == rows(path, lora_id=-1) == rows(path, lora_name="")
    assert rows(path, tenant_id="") == rows(path, tenant_id=None)
    assert rows(path, tenant_id="other").keys() == {"other"}
    assert rows(path, instance_id="a")["default"].keys() == {"a"}
    assert rows(path, instance_id="")["default"].keys() == {"a", 'b"'}


def test_hashes_may_be_texts() -> None:
    usual = rows("/query_by_hash")
    assert rows("/query_by_hash", seq_hashes=[str(each) for each in HASHES]) == usual
    assert rows("/query_by_hash", seq_hashes=[hex(each) for each in HASHES]) == usual
    assert rows("/query_by_hash", seq_hashes=None, block_hashes=HASHES) == usual
    assert rows("/query_by_hash", block_hashes=HASHES) == usual
    signed = [each - 2**64 if each >> 63 else each for each in HASHES]
    assert rows("/query_by_hash", block_hash=signed) == usual


@pytest.mark.parametrize("unknown", ["1", '{"a":1,"a":1}', "1e999", "9" * 5000])
def test_what_is_ignored_is_beside_texts_too(unknown: str) -> None:
    """Hashes as texts are read by other code, which must refuse the same bodies."""
    members = {"model": '"m"', "block_size": str(BLOCK_SIZE), "x": unknown, "x\\u0020": "1"}
    rest = "".join(f',"{name}":{value}' for name, value in members.items()) + ',"x":2}'
    as_texts = json.dumps([str(each) for each in HASHES])
    asks = (f'{{"seq_hashes":{hashes}{rest}'.encode() for hashes in (json.dumps(HASHES), as_texts))
    plain, spelled = (asked("/query_by_hash", each) for each in asks)
    assert plain == spelled


@pytest.mark.parametrize(
    ("more", "why"),
    [('"seq_hashes":["1"]', "duplicate member `seq_hashes`"), ('"block_hash":7', "block_hash: exp"),
     ('"model":"m"', "duplicate member `model`"), ('"block_hash":[2]', "are the same member")],
)  # fmt: skip
def test_what_is_wrong_beside_hashes_as_texts(more: str, why: str) -> None:
    wrong = f'{{"model":"m","block_size":{BLOCK_SIZE},"seq_hashes":["1"],{more}}}'
    with pytest.raises(KvdError, match=why):
        asked("/query_by_hash", wrong.encode())


@pytest.mark.parametrize("name", ["tenant_id", "lora_name", "instance_id", "cache_salt"])
@pytest.mark.parametrize("path", ["/query", "/query_by_hash"])
def test_names_have_a_bound(path: str, name: str) -> None:
    asked(path, body([*USUAL, (name, f'"{"x" * 4096}"')]))
    with pytest.raises(KvdError, match="longer than 4096 bytes"):
        asked(path, body([*USUAL, (name, f'"{"x" * 4097}"')]))


def test_what_is_only_shown_again_has_a_bound() -> None:
    data: dict[str, Any] = {"endpoint": "tcp://a:1", "type": "x", "model": "m", "instance_id": "a"}
    data |= {"block_size": 4, "dp_rank": 0, "hash_profile": {"a": ["x" * 4096]}}
    with pytest.raises(KvdError, match="hash_profile: longer than 4096 bytes"):
        ROUTES["/register"].handler(
            Request("POST", "/register", b"", [], json.dumps(data).encode())
        )


def test_hashes_as_texts_have_a_bound() -> None:
    data = {"model": "m", "block_size": BLOCK_SIZE, "seq_hashes": ["1" * 19] * 13_000}
    with pytest.raises(KvdError, match="expected an integer"):
        asked("/query_by_hash", json.dumps(data).encode())


@pytest.mark.parametrize(
    ("wrong", "reason", "field"),
    [
        ({"model": None}, "missing", "model"),
        ({"model": ""}, "invalid_value", "model"),
        ({"model": 1}, "invalid_type", "model"),
        ({"model_name": "n"}, "invalid_value", "model"),
        ({"block_size": None}, "missing", "block_size"),
        ({"block_size": 0}, "invalid_value", "block_size"),
        ({"block_size": "4"}, "invalid_type", "block_size"),
        ({"block_size": True}, "invalid_type", "block_size"),
        ({"instance_id": 7}, "invalid_type", "instance_id"),
        ({"lora_id": 3, "lora_name": "x"}, "invalid_value", "lora_id"),
        ({"lora_id": "3"}, "invalid_type", "lora_id"),
    ],
)
def test_failures_say_what_is_wrong(wrong: dict[str, Any], reason: str, field: str) -> None:
    given = {"model": "m", "block_size": 4, "token_ids": TOKENS} | wrong
    with pytest.raises(KvdError) as raised:
        asked("/query", json.dumps(given).encode())
    assert raised.value.status == 400
    assert raised.value.details == {"reason": reason, "field": field}
