"""The conductor's msgpack dialect, over HTTP: bodies, rows, listings, failures.

The scenarios of tests/conformance check that it tells the same of instances and registrations as
the JSON dialect; here are tests of what only msgpack has.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest

from kvd_core.base.hashing import local_hashes, sequence_hashes
from tests.conformance.failure import wait_until
from tests.support.publishing import Json, Running

PROMPT = list(range(1, 17))
HASHES = sequence_hashes(local_hashes(PROMPT, 4))
REGISTER: Json = {
    "endpoint": "tcp://127.0.0.1:1",
    "type": "vLLM",
    "modelname": "m",
    "instance_id": "e",
    "block_size": 4,
    "dp_rank": 0,
}
QUERY: Json = {"model": "m", "block_size": 4, "token_ids": PROMPT}
BY_HASH: Json = {"model": "m", "block_size": 4, "seq_hashes": HASHES}
UNREGISTER: Json = {"instance_id": "e", "dp_rank": 0}
BODIES = {
    "/register": REGISTER,
    "/query": QUERY,
    "/query_by_hash": BY_HASH,
    "/unregister": UNREGISTER,
}
PROFILE = {
    "strategy": "vllm_v1",
    "algorithm": "sha256_cbor",
    "python_hash_seed": "0",
    "index_projection": "low64_be",
}


def send(
    conductor: Running,
    path: str,
    body: object,
    status: int = 200,
    kind: str = "application/msgpack",
) -> Any:
    content = body if isinstance(body, bytes) else msgpack.packb(body)
    answer = conductor.client.post(path, content=content, headers={"content-type": kind})
    assert answer.headers["content-type"] == "application/msgpack"
    assert answer.status_code == status, msgpack.unpackb(answer.content)
    return msgpack.unpackb(answer.content)


def get(conductor: Running, path: str, accept: str) -> Any:
    answer = conductor.client.get(path, headers={"accept": accept})
    assert answer.headers["content-type"] == "application/msgpack"
    return msgpack.unpackb(answer.content)


def stored(number: int, medium: str, *blocks: int, hashes: list[int] | None = None) -> Json:
    """Returns a message that stores blocks of the prompt, by their hashes alone."""
    event = {
        "event_id": number,
        "event_type": "stored",
        "medium": medium,
        "seq_hashes": [(hashes or HASHES)[block] for block in blocks],
        "base_block_idx": 0,
    }
    return {"seq": number, "batch": [0.5, [event]]}


def bin32(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


# ---- rows


def test_tiers_go_on_where_the_one_above_ends(conductor: Running) -> None:
    """Blocks are on GPU, GPU, host and disk; a rank's host memory counts apart from a store's."""
    engine, pool = conductor.engine(), conductor.engine()
    send(conductor, "/register", REGISTER | {"endpoint": engine.endpoint("pub")})
    conductor.register(pool.endpoint("pub"), type="Mooncake", instance_id="e", dp_rank=0)
    engine.publish(stored(0, "GPU", 0, 1))
    engine.publish(stored(1, "CPU", 2))
    pool.publish(stored(0, "DISK", 0, 3))
    row = {
        "longest_matched": 16,
        "dp": {"0": 8},
        "rank_matches": {"0": {"gpu": 8, "cpu": 12, "disk": 16, "npu": 8, "cpu_local": 12,
                               "cpu_share": 12}},
        "gpu": 8,
        "cpu": 12,
        "disk": 16,
        "npu": 8,
        "cpu_local": 12,
        "cpu_share": 12,
    }  # fmt: skip

    def check() -> str | None:
        found = send(conductor, "/query", QUERY)["instances"]
        return None if found == {"e": row} else str(found)

    wait_until(check, 10.0)
    assert send(conductor, "/query", QUERY | {"token_ids": bin32(*PROMPT)})["instances"]["e"] == row
    assert send(conductor, "/query_by_hash", BY_HASH)["instances"]["e"] == row
    packed = struct.pack("<4Q", *HASHES)
    assert (
        send(conductor, "/query_by_hash", BY_HASH | {"seq_hashes": packed})["instances"]["e"] == row
    )


def test_no_tier_goes_back(conductor: Running) -> None:
    """With the first block in host memory and the second on the GPU, only the first counts."""
    engine = conductor.engine()
    send(conductor, "/register", REGISTER | {"endpoint": engine.endpoint("pub")})
    engine.publish(stored(0, "CPU", 0))
    engine.publish(stored(1, "GPU", 1))
    conductor.until_row("/query", QUERY, {"longest_matched": 8}, "e")
    row = send(conductor, "/query", QUERY)["instances"]["e"]
    assert (row["gpu"], row["cpu"], row["disk"], row["longest_matched"]) == (0, 4, 4, 4)


def test_rows_of_ranks_are_maxima(conductor: Running) -> None:
    for rank, blocks in ((0, 2), (3, 1)):
        engine = conductor.engine()
        where = {"endpoint": engine.endpoint("pub"), "dp_rank": rank}
        send(conductor, "/register", REGISTER | where)
        engine.publish(stored(0, "GPU", *range(blocks)))
    conductor.until_row("/query", QUERY, {"DP": {"0": 8, "3": 4}}, "e")
    row = send(conductor, "/query", QUERY)["instances"]["e"]
    assert (row["dp"], row["gpu"]) == ({"0": 8, "3": 4}, 8)


def test_rows_are_of_the_adapter_s_engines(conductor: Running) -> None:
    """Engines of other adapters, stores and unknown names have no row, rather than zeros."""
    send(conductor, "/register", REGISTER)
    send(conductor, "/register", REGISTER | {"instance_id": "x", "lora_name": "sql"})
    conductor.register("tcp://127.0.0.1:2", type="Mooncake", instance_id="pool")
    assert send(conductor, "/query", QUERY)["instances"].keys() == {"e"}
    assert send(conductor, "/query", QUERY | {"lora_name": "sql"})["instances"].keys() == {"x"}
    for other in ({"tenant_id": "t"}, {"model": "n"}, {"block_size": 8}, {"instance_id": ""},
                  {"instance_id": "nobody"}, {"lora_name": "other"}):  # fmt: skip
        assert send(conductor, "/query", QUERY | other) == {"instances": {}}
    assert send(conductor, "/query", QUERY | {"instance_id": "e"})["instances"].keys() == {"e"}


def test_a_store_serves_every_instance(conductor: Running) -> None:
    """A store needs one registration and one subscription, for any one instance."""
    pool = conductor.engine()
    where = {"endpoint": pool.endpoint("pub"), "type": "Mooncake", "instance_id": "pool"}
    send(conductor, "/register", REGISTER | where)
    for instance in ("e", "f"):
        send(conductor, "/register", REGISTER | {"instance_id": instance})
    pool.publish(stored(0, "CPU", 0, 1))
    for instance in ("e", "f"):
        row = {"longest_matched": 8, "GPU": 0, "CPU": 8, "DISK": 0, "DP": {"0": 0}}
        conductor.until_row("/query", QUERY, row, instance)
    found = send(conductor, "/query", QUERY)["instances"]
    assert {name: (row["cpu"], row["cpu_local"]) for name, row in found.items()} == {
        "e": (8, 0),
        "f": (8, 0),
    }
    assert conductor.post("/query", QUERY)["default"].keys() == {"e", "f"}
    (shown,) = [each for each in conductor.services() if each["serves_all"]]
    assert (shown["InstanceID"], shown["blocks"], shown["matched"] > 0) == ("pool", 2, True)
    pool.wait_subscribed(1, 10.0)
    body = {"instance_id": "pool", "dp_rank": 0}
    assert send(conductor, "/unregister", body)["removed_instances"] == ["pool|default|0"]
    row = send(conductor, "/query", QUERY)["instances"]["e"]
    assert row["longest_matched"] == 0


def test_a_store_for_every_instance_in_json(conductor: Running) -> None:
    """In JSON a store's instance may be `*`, which stands for all; an engine's may not."""
    pool = conductor.engine()
    conductor.register(pool.endpoint("pub"), type="Mooncake", instance_id="*")
    for instance in ("a", "b"):
        conductor.register("tcp://127.0.0.1:1", instance_id=instance)
    pool.publish(stored(0, "CPU", 0, 1))
    for instance in ("a", "b"):
        conductor.until_row("/query", QUERY, {"longest_matched": 8, "CPU": 8}, instance)
    assert conductor.post("/query", QUERY)["default"].keys() == {"a", "b"}
    failure = conductor.post("/register", REGISTER | {"instance_id": "*"}, 400)
    assert (failure["reason"], failure["field"]) == ("invalid_value", "instance_id")
    conductor.post("/unregister", {"instance_id": "*"})
    assert conductor.post("/query", QUERY)["default"]["a"]["longest_matched"] == 0


# ---- which dialect


@pytest.mark.parametrize(
    "kind", ["Application/MsgPack", "application/x-msgpack; v=1", "application/vnd.msgpack"]
)
def test_content_types(conductor: Running, kind: str) -> None:
    assert send(conductor, "/query", QUERY, kind=kind) == {"instances": {}}


def test_json_that_is_announced_as_msgpack(conductor: Running) -> None:
    failure = send(conductor, "/query", b'{"model":"m","block_size":4,"token_ids":[]}', 400)
    assert failure["reason"] == "invalid_msgpack"


@pytest.mark.parametrize(
    ("accept", "packed"),
    [
        ("application/msgpack", True),
        ("application/x-msgpack;q=0.5, application/json;q=0.2", True),
        ("text/html, application/vnd.msgpack; q=0.1", True),
        ("*/*", False),
        ("application/json", False),
        ("application/msgpack, application/json", False),
        ("application/msgpack;q=0", False),
        ("application/msgpack;q=x", False),
    ],
)
def test_accept(conductor: Running, accept: str, packed: bool) -> None:
    for path in ("/services", "/global_view"):
        answer = conductor.client.get(path, headers={"accept": accept})
        kind = "application/msgpack" if packed else "application/json"
        assert answer.headers["content-type"] == kind


def test_listings(conductor: Running) -> None:
    digest = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
    shown_profile = PROFILE | {"root_digest": digest}
    send(conductor, "/register", REGISTER | {"hash_profile": PROFILE, "cache_group": 0})
    conductor.post("/register", REGISTER | {"instance_id": "j", "dp_rank": 1, "lora_name": "sql"})
    listed = get(conductor, "/services", "application/msgpack")
    assert listed["count"] == 2
    assert listed["services"][0] == {
        "Endpoint": "tcp://127.0.0.1:1", "ReplayEndpoint": "", "Type": "vLLM", "ModelName": "m",
        "LoraName": "", "TenantID": "default", "InstanceID": "e", "BlockSize": 4, "DPRank": 0,
        "CacheGroup": 0, "HashProfile": shown_profile,
    }  # fmt: skip
    assert (listed["services"][1]["CacheGroup"], listed["services"][1]["HashProfile"]) == (
        None,
    ) * 2
    more = get(conductor, "/services?verbose=1", "application/msgpack")["services"][0]
    assert (more["status"], more["last_seq"], more["blocks"]) == ("pending", None, 0)
    view = get(conductor, "/global_view", "application/msgpack")
    assert (view["context_count"], len(view["contexts"])) == (2, 2)
    assert view["contexts"][0] == {
        "model_name": "m", "lora_name": "", "block_size": 4, "tenant_id": "default",
        "prefix_count": 0, "hash_profile": shown_profile, "instances": {"e": [0]},
    }  # fmt: skip


# ---- bodies


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x81", b"\x90", b"\x80\x80", b"\x81\x01\x02", b"\x81\xc4\x01a\x02",
     b"\x82\xa1a\x01\xa1a\x01", b"\x81\xa1\xff\x01", b"\xdf\xff\xff\xff\xff",
     b"\x81\xa9token_ids\xdd\xff\xff\xff\xff"],
)  # fmt: skip
def test_what_is_no_map_of_members(conductor: Running, path: str, body: bytes) -> None:
    assert send(conductor, path, body, 400)["reason"] == "invalid_msgpack"


def wrong(path: str, name: str, value: object, reason: str) -> Any:
    return pytest.param(path, name, value, reason, id=f"{path} {name}={value!r:.20}")


@pytest.mark.parametrize(
    ("path", "name", "value", "reason"),
    [
        wrong("/query", "model", 7, "invalid_type"),
        wrong("/query", "model", "", "invalid_value"),
        wrong("/query", "model", b"m", "invalid_type"),
        wrong("/query", "block_size", 0, "out_of_range"),
        wrong("/query", "block_size", 16.5, "invalid_type"),
        wrong("/query", "block_size", True, "invalid_type"),
        wrong("/query", "block_size", 2**64 - 1, "out_of_range"),
        wrong("/query", "token_ids", ["1"], "invalid_type"),
        wrong("/query", "token_ids", [2**31], "out_of_range"),
        wrong("/query", "token_ids", [-(2**31) - 1], "out_of_range"),
        wrong("/query", "token_ids", b"12345", "invalid_value"),
        wrong("/query", "token_ids", None, "invalid_type"),
        wrong("/query", "token_ids", {}, "invalid_type"),
        wrong("/query", "cache_salt", 42, "invalid_type"),
        wrong("/query", "tenant_id", None, "invalid_type"),
        wrong("/query", "lora_name", False, "invalid_type"),
        wrong("/query", "instance_id", 3, "invalid_type"),
        wrong("/query", "python_hash_seed", "0", "unknown_field"),
        wrong("/query", "model_name", "m", "unknown_field"),
        wrong("/query_by_hash", "seq_hashes", [1.5], "invalid_type"),
        wrong("/query_by_hash", "seq_hashes", b"1234", "invalid_value"),
        wrong("/register", "endpoint", "", "invalid_value"),
        wrong("/register", "endpoint", "tcp://*:5557", "invalid_value"),
        wrong("/register", "endpoint", None, "invalid_type"),
        wrong("/register", "modelname", "a\0b", "invalid_value"),
        wrong("/register", "modelname", "x" * 4097, "invalid_value"),
        wrong("/register", "instance_id", "*", "invalid_value"),
        wrong("/register", "dp_rank", -1, "out_of_range"),
        wrong("/register", "dp_rank", 2**31, "out_of_range"),
        wrong("/register", "cache_group", 1, "unsupported"),
        wrong("/register", "additionalsalt", "s", "unknown_field"),
        wrong("/register", "hash_profile", "vllm_v1", "invalid_type"),
        wrong("/register", "hash_profile", PROFILE | {"strategy": "x"}, "invalid_value"),
        wrong("/register", "hash_profile", PROFILE | {"python_hash_seed": "-1"}, "invalid_value"),
        wrong("/unregister", "dp_rank", -1, "invalid_value"),
        wrong("/unregister", "dp_rank", "0", "invalid_value"),
        wrong("/unregister", "type", "vLLM", "unknown_field"),
    ],
)
def test_members_at_fault(
    conductor: Running, path: str, name: str, value: object, reason: str
) -> None:
    failure = send(conductor, path, BODIES[path] | {name: value}, 400)
    assert (failure["reason"], failure["field"]) == (reason, name)
    assert ("index" in failure) is (isinstance(value, list))
    assert conductor.services() == []


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, body in BODIES.items() for name in body]
)
def test_members_that_are_missing(conductor: Running, path: str, name: str) -> None:
    body = {each: value for each, value in BODIES[path].items() if each != name}
    failure = send(conductor, path, body, 400)
    assert failure == {"error": f"{name} is required", "reason": "missing", "field": name}


def test_texts_that_are_no_unicode(conductor: Running) -> None:
    body = b"\x81\xa5model\xa1\xff"
    assert send(conductor, "/query", body, 400)["reason"] == "invalid_type"


def test_tokens_have_32_bits_and_a_sign(conductor: Running) -> None:
    """Negative tokens are those from 2^31 on in the JSON dialect."""
    tokens = [-(2**31), 2**31 - 1, -1, 0]
    engine = conductor.engine()
    send(conductor, "/register", REGISTER | {"endpoint": engine.endpoint("pub")})
    event = ["BlockStored", [1], None, [token % 2**32 for token in tokens], 4, None, "GPU"]
    engine.publish({"seq": 0, "batch": [0.5, [event]]})
    question = QUERY | {"token_ids": [token % 2**32 for token in tokens]}
    conductor.until_row("/query", question, {"GPU": 4}, "e")
    for given in (tokens, bin32(*tokens)):
        found = send(conductor, "/query", QUERY | {"token_ids": given, "cache_salt": None})
        assert found["instances"]["e"]["gpu"] == 4


# ---- registrations


def test_registrations_are_the_same_in_both_dialects(conductor: Running) -> None:
    answer = {"status": "registered successfully", "instance_id": "e"}
    assert send(conductor, "/register", REGISTER) == answer
    assert conductor.post("/register", REGISTER) == answer
    assert len(conductor.services()) == 1
    failure = send(conductor, "/register", REGISTER | {"endpoint": "tcp://127.0.0.1:2"}, 400)
    assert failure["reason"] == "invalid_registration"
    removed = {"status": "unregistered successfully", "removed_instances": ["e|default|0"]}
    assert send(conductor, "/unregister", UNREGISTER) == removed
    failure = send(conductor, "/unregister", UNREGISTER, 404)
    assert failure["reason"] == "not_found"


def test_what_has_no_route_fails_in_the_same_dialect(conductor: Running) -> None:
    assert send(conductor, "/v2/query", {}, 404)["reason"] == "not_found"
    assert send(conductor, "/services", {}, 405)["reason"] == "method_not_allowed"
