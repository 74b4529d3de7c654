"""The Mooncake Conductor Indexer API by its page: section by section, example by example.

The tests send the page's examples unchanged. Where kvd differs from the page, or the page leaves a
point open, the test's name or docstring says so; docs/faces/conductor.md lists these points. More
of each subject: tests/conformance/conductor (scenarios), tests/unit/wire/test_publication.py
(events), tests/unit/core/test_sequences.py (hashes), tests/unit/test_conductor_handlers.py
(bodies).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import xxhash

from kvd.index.partitions import State
from kvd.model import PartitionKey
from kvd.wire.envelope import StreamIdentity
from kvd.wire.standard_events import StandardEventStream
from kvd_core.base.hashing import local_hashes, sequence_hashes
from tests.support.publishing import Json, Running, running_conductor

S = 1337  # the seed of hashes, which the page leaves open
PROMPT = list(range(1, 17))  # four blocks of 4
STANDARD = sequence_hashes(local_hashes(PROMPT, 4))


@pytest.fixture(scope="module")
def conductor_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # The page's engines have a public address, which operators have to allow.
    allowed = "--outgoing-allow=private,1.1.1.1"
    with running_conductor(tmp_path_factory.mktemp("conductor"), allowed) as running:
        yield running


def ask(**members: Any) -> Json:
    return {"model": "m", "block_size": 4, "token_ids": PROMPT} | members


def ask_by_hash(**members: Any) -> Json:
    return {"model": "m", "block_size": 4, "seq_hashes": STANDARD} | members


# ---- Concepts


@pytest.mark.parametrize(
    ("medium", "member"),
    [("gpu", "GPU"), ("cpu", "CPU"), ("disk", "DISK"), ("npu", "NPU"), ("3FS", "3FS")],
)
def test_storage_tiers(conductor: Running, medium: str, member: str) -> None:
    """ "Engines may add other values as new media are supported": each has its own member."""
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    engine.publish(message(0, stored(1, medium=medium)))
    row = {"longest_matched": 16, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 16}} | {member: 16}
    conductor.until_row("/query", ask(), row)


@pytest.mark.parametrize(
    "dimension",
    [{"model": "other"}, {"block_size": 2}, {"cache_salt": "other"}, {"lora_name": "other"},
     {"tenant_id": "other"}],
    ids=lambda dimension: next(iter(dimension)),
)  # fmt: skip
def test_identity_dimensions(conductor: Running, dimension: Json) -> None:
    """Blocks that differ in one dimension are incompatible."""
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    engine.publish(message(0, stored(1)))
    conductor.until_row("/query", ask(), {"longest_matched": 16})
    for path, question in (("/query", ask), ("/query_by_hash", ask_by_hash)):
        answer = conductor.post(path, question(**dimension))
        rows = answer[dimension.get("tenant_id", "default")]
        assert all(row["longest_matched"] == 0 for row in rows.values())


def test_instance_id_and_backend_id_mean_different_things(conductor: Running) -> None:
    """The row is the router's target, the instance, whichever backend owns the blocks."""
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"), instance_id="vllm-prefill-node1")
    engine.publish(message(0, stored(1, backend_id="cache-daemon-7")))
    conductor.until_row("/query", ask(), {"longest_matched": 16}, "vllm-prefill-node1")
    assert conductor.post("/query", ask())["default"].keys() == {"vllm-prefill-node1"}


# ---- Hashing standard


def test_local_and_rolling_hashes() -> None:
    def xxh3(data: bytes) -> int:
        return xxhash.xxh3_64_intdigest(data, S)

    local = [xxh3(struct.pack("<4I", *PROMPT[at : at + 4])) for at in range(0, 16, 4)]
    seq = [local[0]]
    for each in local[1:]:
        seq.append(xxh3(struct.pack("<Q", seq[-1]) + struct.pack("<Q", each)))
    assert (local_hashes(PROMPT, 4), STANDARD) == (local, seq)


def test_equal_prefixes_have_equal_hashes_until_the_first_block_that_differs() -> None:
    other = sequence_hashes(local_hashes([*PROMPT[:8], 99, *PROMPT[9:]], 4))
    assert other[:2] == STANDARD[:2]
    assert not set(other[2:]) & set(STANDARD[2:])


def test_an_engine_with_hashes_of_its_own_provides_tokens(conductor: Running) -> None:
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    engine.publish(message(0, stored(1, seq_hashes=[7, 8, 9, 10], token_ids=PROMPT)))
    conductor.until_row("/query", ask(), {"longest_matched": 16})
    conductor.until_row("/query_by_hash", ask_by_hash(), {"longest_matched": 16})
    conductor.until_row("/query_by_hash", ask_by_hash(seq_hashes=[7, 8]), {"longest_matched": 0})


# ---- POST /register

REGISTER: Json = {
    "endpoint": "tcp://1.1.1.1:5557",
    "replay_endpoint": "tcp://1.1.1.1:5558",
    "type": "vLLM",
    "modelname": "deepseek",
    "lora_name": "sql-adapter",
    "tenant_id": "default",
    "instance_id": "vllm-prefill-node1",
    "block_size": 128,
    "dp_rank": 0,
    "additionalsalt": "w8a8",
}
SHOWN = ("Endpoint", "ReplayEndpoint", "Type", "ModelName", "LoraName", "TenantID", "InstanceID",
         "BlockSize", "DPRank", "AdditionalSalt")  # fmt: skip
OPTIONAL = {"replay_endpoint": "", "lora_name": "", "tenant_id": "default", "additionalsalt": ""}


def test_register(conductor: Running) -> None:
    answer = conductor.post("/register", REGISTER)
    assert answer == {"status": "registered successfully", "instance_id": "vllm-prefill-node1"}
    (shown,) = conductor.services()
    assert [shown[name] for name in SHOWN] == list(REGISTER.values())


@pytest.mark.parametrize("field", REGISTER)
def test_register_s_required_and_optional_fields(conductor: Running, field: str) -> None:
    body = {name: value for name, value in REGISTER.items() if name != field}
    for left_out in (body, body | {field: None}):
        if field not in OPTIONAL:
            failure = conductor.post("/register", left_out, 400)
            assert (failure["reason"], failure["field"]) == ("missing", field)
            continue
        conductor.post("/register", left_out)
        (shown,) = conductor.services()
        assert shown[SHOWN[list(REGISTER).index(field)]] == OPTIONAL[field]


# ---- POST /unregister

UNREGISTER: Json = {
    "type": "vLLM",
    "modelname": "deepseek",
    "lora_name": "sql-adapter",
    "tenant_id": "default",
    "instance_id": "vllm-prefill-node1",
    "block_size": 128,
    "dp_rank": 0,
}


@pytest.mark.parametrize("left_out", ["", "tenant_id"])
def test_unregister(conductor: Running, left_out: str) -> None:
    """The page's body leaves out the salt, so it matches any salt."""
    conductor.post("/register", REGISTER)
    body = {name: value for name, value in UNREGISTER.items() if name != left_out}
    answer = conductor.post("/unregister", body)
    assert answer == {
        "status": "unregistered successfully",
        "removed_instances": ["vllm-prefill-node1|default|0"],
    }
    assert conductor.services() == []
    assert conductor.post("/unregister", body, 404)["reason"] == "not_found"


@pytest.mark.parametrize(
    "other", [{"type": "SGLang"}, {"modelname": "x"}, {"lora_name": "x"}, {"block_size": 64},
              {"instance_id": "x"}, {"tenant_id": "x"}, {"dp_rank": 1}],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_unregister_of_what_is_not_there(conductor: Running, other: Json) -> None:
    """On the page a triple of members decides; here any other given member must match as well."""
    conductor.post("/register", REGISTER)
    conductor.post("/unregister", UNREGISTER | other, 404)
    assert len(conductor.services()) == 1


# ---- POST /query

QUERY: Json = {
    "model": "deepseek",
    "lora_name": "sql-adapter",
    "token_ids": [101, 15, 100, 55, 89],
    "tenant_id": "default",
    "instance_id": "vllm-prefill-node1",
    "block_size": 64,
    "cache_salt": "w8a8",
}
ROW: Json = {
    "longest_matched": 256,
    "GPU": 128,
    "DP": {"0": 128, "1": 256},
    "CPU": 256,
    "DISK": 0,
}
NOTHING: Json = {"longest_matched": 0, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0}


def test_query(conductor: Running) -> None:
    """Five tokens are less than a block of 64: "only complete blocks are considered"."""
    assert conductor.post("/query", QUERY) == {"default": {}}
    conductor.post("/register", REGISTER | {"block_size": 64})
    assert conductor.post("/query", QUERY) == {"default": {"vllm-prefill-node1": NOTHING}}


def test_the_example_answer(conductor: Running) -> None:
    """Rank 0 holds two blocks on the GPU, rank 1 four in host memory.

    Each medium counts by itself: DISK is 0 below CPU 256, so tiers are not cumulative.
    """
    tokens = list(range(1, 257))
    names = [1, 2, 3, 4]
    for rank, medium, n in ((0, "GPU", 2), (1, "CPU", 4)):
        engine = conductor.engine()
        endpoint = {"endpoint": engine.endpoint("pub"), "replay_endpoint": None}
        conductor.post("/register", REGISTER | endpoint | {"block_size": 64, "dp_rank": rank})
        event = ["BlockStored", names[:n], None, tokens[: n * 64], 64, None, medium]
        engine.publish({"seq": 0, "batch": [0.5, [event]]})
    question = QUERY | {"token_ids": [*tokens, *QUERY["token_ids"]]}
    conductor.until_row("/query", question, ROW, "vllm-prefill-node1")
    assert conductor.post("/query", question) == {"default": {"vllm-prefill-node1": ROW}}


@pytest.mark.parametrize("field", QUERY)
def test_query_s_required_and_optional_fields(conductor: Running, field: str) -> None:
    body = {name: value for name, value in QUERY.items() if name != field}
    for left_out in (body, body | {field: None}):
        if field in ("model", "token_ids", "block_size"):
            failure = conductor.post("/query", left_out, 400)
            assert (failure["reason"], failure["field"]) == ("missing", field)
        else:
            assert conductor.post("/query", left_out) == {"default": {}}


def test_lora_id_is_not_used_together_with_lora_name(conductor: Running) -> None:
    failure = conductor.post("/query", QUERY | {"lora_id": 3}, 400)
    assert (failure["reason"], failure["field"]) == ("invalid_value", "lora_id")


def test_one_instance_or_all_of_the_tenant(conductor: Running) -> None:
    """Only instances with the model and block size of the question; others could not serve it."""
    engine = conductor.engine()
    for instance, tenant in (("a", "default"), ("b", "default"), ("c", "other")):
        conductor.register(engine.endpoint("pub"), instance_id=instance, tenant_id=tenant)
    conductor.register(engine.endpoint("pub"), instance_id="d", modelname="other")
    conductor.register(engine.endpoint("pub"), instance_id="e", block_size=8)
    assert conductor.post("/query", ask())["default"].keys() == {"a", "b"}
    assert conductor.post("/query", ask(instance_id="b"))["default"].keys() == {"b"}
    assert conductor.post("/query", ask(tenant_id="other"))["other"].keys() == {"c"}


# ---- POST /query_by_hash

QUERY_BY_HASH: Json = {
    "model": "deepseek",
    "lora_name": "sql-adapter",
    "seq_hashes": [1234567890, 9876543210],
    "tenant_id": "default",
    "instance_id": "vllm-prefill-node1",
    "block_size": 64,
    "cache_salt": "w8a8",
}


@pytest.mark.parametrize("name", ["seq_hashes", "block_hash"])
def test_query_by_hash(conductor: Running, name: str) -> None:
    """`longest_matched = block_size * matched_hash_count`; `block_hash` is the earlier name."""
    engine = conductor.engine()
    endpoint = {"endpoint": engine.endpoint("pub"), "replay_endpoint": None}
    conductor.post("/register", REGISTER | endpoint | {"block_size": 64})
    engine.publish(
        message(
            0, stored(1, model_name=None, block_size=None, seq_hashes=QUERY_BY_HASH["seq_hashes"])
        )
    )
    question = {each: value for each, value in QUERY_BY_HASH.items() if each != "seq_hashes"}
    question[name] = QUERY_BY_HASH["seq_hashes"]
    row = NOTHING | {"longest_matched": 128, "GPU": 128, "DP": {"0": 128}}
    conductor.until_row("/query_by_hash", question, row, "vllm-prefill-node1")
    question[name] = [1234567890, 5, 9876543210]
    row = NOTHING | {"longest_matched": 64, "GPU": 64, "DP": {"0": 64}}
    conductor.until_row("/query_by_hash", question, row, "vllm-prefill-node1")


# ---- KV Events API

ENVELOPE: Json = {
    "event_id": 42,
    "timestamp": 1739145600000,
    "event_type": "stored",
    "model_name": "llama-3.1-8b",
    "block_size": 64,
    "additional_salt": None,
    "lora_name": None,
    "tenant_id": "default",
    "backend_id": "worker-0",
    "medium": "gpu",
    "dp_rank": 0,
}
STORED: Json = ENVELOPE | {
    "seq_hashes": [1234567890, 9876543210, 1122334455],
    "base_block_idx": 5,
    "parent_hash": 9999999999,
    "token_ids": None,
}
REMOVED: Json = ENVELOPE | {
    "event_id": 43,
    "timestamp": 1739145601000,
    "event_type": "removed",
    "seq_hashes": [1122334455],
    "base_block_idx": 7,
}
CLEARED: Json = ENVELOPE | {
    "event_id": 44,
    "timestamp": 1739145602000,
    "event_type": "cleared",
}


def stored(number: int, **members: Any) -> Json:
    """Returns the page's event with the four blocks of PROMPT, from the root."""
    blocks = {"seq_hashes": STANDARD, "base_block_idx": 0, "parent_hash": None}
    usual = {"event_id": number, "model_name": "m", "block_size": 4}
    return STORED | usual | blocks | members


def message(seq: int, *events: Json) -> Json:
    return {"seq": seq, "batch": [1739145600.5, list(events)]}


def test_the_example_events(conductor: Running) -> None:
    """Three blocks are stored at depth 5, the last one is removed, then all are cleared."""
    engine = conductor.engine()
    where = {"modelname": "llama-3.1-8b", "block_size": 64}
    conductor.register(engine.endpoint("pub"), **where)
    before = [11, 12, 13, 14, 9999999999]
    first = STORED | {"event_id": 41, "seq_hashes": before, "base_block_idx": 0}
    engine.publish(message(0, first | {"parent_hash": None}))
    question = {"model": "llama-3.1-8b", "block_size": 64}
    question["seq_hashes"] = [*before, *STORED["seq_hashes"]]
    for seq, event, blocks in ((1, STORED, 8), (2, REMOVED, 7), (3, CLEARED, 0)):
        engine.publish(message(seq, event))
        row = {"longest_matched": 64 * blocks, "GPU": 64 * blocks, "DP": {"0": 64 * blocks}}
        conductor.until_row("/query_by_hash", question, row)
    shown = conductor.until_shown(engine.endpoint("pub"), last_seq=3)
    assert (shown["events"], shown["stale"], shown["event_id_gaps"]) == (4, 0, 0)
    assert (shown["bad_events"], shown["mismatch"], shown["blocks"]) == (0, {}, 0)


class Published:
    """One registered publisher of the page's model, without a socket."""

    def __init__(self, **terms: Any) -> None:
        usual = {"model_name": "llama-3.1-8b", "tenant_id": "default", "block_size": 64,
                 "lora_name": "", "cache_salt": "", "dp_rank": 0, "store": False}  # fmt: skip
        self.terms = StreamIdentity(**(usual | terms))
        state = State()
        key = PartitionKey(self.terms.model_name, self.terms.tenant_id)
        scope = self.terms.lora_name, self.terms.cache_salt
        source = state.add_source(key, 64, "a", *scope, 0, store=self.terms.store)
        self.stream = StandardEventStream(source, self.terms)
        found = state.sized[(*key, 64)].conductor
        assert found is not None
        self.conductor = found

    def publish(self, *events: Any) -> None:
        self.stream.apply(msgpack.packb([0.5, list(events)]))

    def row(self, *hashes: int, **scope: str) -> Json:
        row: Json = self.conductor.match_hashes(hashes, **scope)["a"]
        return row


@pytest.mark.parametrize(
    "name",
    ["timestamp", "model_name", "block_size", "additional_salt", "lora_name", "medium", "dp_rank"],
)
def test_members_that_may_be_null(name: str) -> None:
    """Where an event leaves out a member, the registration's value counts."""
    for event in (STORED | {name: None}, {k: v for k, v in STORED.items() if k != name}):
        publisher = Published()
        publisher.publish(event)
        assert publisher.row(1234567890)["DP"] == {"0": 64}
        assert publisher.row(1234567890)["GPU"] == 64


WRONG_TYPES: list[object] = [1.0, -1, 2**64, True, "gpu", [], {}, b"x"]
RIGHT: dict[str, tuple[object, ...]] = {
    # The values of WRONG_TYPES that are accepted: of the page's type, ignored, or a valid name.
    "event_id": (),
    "timestamp": tuple(map(repr, WRONG_TYPES)),
    "event_type": (),
    "model_name": ("'gpu'",),
    "block_size": (),
    "additional_salt": ("'gpu'",),
    "lora_name": ("'gpu'",),
    "tenant_id": ("'gpu'",),
    "backend_id": ("'gpu'",),
    "medium": ("'gpu'",),
    "dp_rank": (),
    "seq_hashes": ("[]",),
    "base_block_idx": (),
    "parent_hash": ("-1", "b'x'"),  # other forms of 64 bits
    "token_ids": ("[]",),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_member_of_another_type_costs_its_event(name: str) -> None:
    for value in WRONG_TYPES:
        if repr(value) in RIGHT[name]:
            continue
        publisher = Published()
        try:
            publisher.publish(STORED | {name: value}, stored_at_root(43))
        except OverflowError:  # msgpack has no such number
            assert value == 2**64
            continue
        assert publisher.stream.bad.total() == 1, value
        assert publisher.row(1234567890)["longest_matched"] == 0
        assert publisher.row(11)["longest_matched"] == 64


@pytest.mark.parametrize("name", ["lora_name", "backend_id", "medium"])
def test_a_name_with_control_characters_costs_its_event(name: str) -> None:
    publisher = Published()
    publisher.publish(STORED | {name: "a\0b"}, stored_at_root(43))
    assert publisher.stream.bad == {name: 1}
    assert publisher.row(1234567890)["longest_matched"] == 0
    assert publisher.row(11)["longest_matched"] == 64


def stored_at_root(number: int, **members: Any) -> Json:
    at_root = {"base_block_idx": 0, "parent_hash": None, "seq_hashes": [11]}
    return STORED | {"event_id": number} | at_root | members


STREAMS: list[Json] = [
    {"additional_salt": "w8a8"},
    {"lora_name": "sql-adapter"},
    {"backend_id": "worker-1"},
    {"medium": "cpu"},
    {"dp_rank": 1},
]


def scope_of(dimension: Json) -> dict[str, str]:
    """Returns the members that a question needs to find blocks of this stream."""
    names = {"additional_salt": "cache_salt", "lora_name": "lora_name"}
    return {names[name]: value for name, value in dimension.items() if name in names}


@pytest.mark.parametrize("dimension", STREAMS, ids=lambda dimension: next(iter(dimension)))
def test_each_stream_is_numbered_by_itself(dimension: Json) -> None:
    """The registration fixes the other three dimensions: events that differ are not applied."""
    publisher = Published()
    publisher.publish(stored_at_root(42))
    publisher.publish(stored_at_root(7, **dimension))
    publisher.publish(stored_at_root(42))
    assert (publisher.stream.order.stale, publisher.stream.order.gaps) == (1, 0)
    assert publisher.row(11, **scope_of(dimension))["longest_matched"] == 64


@pytest.mark.parametrize(
    "dimension", [{"model_name": "x"}, {"block_size": 128}, {"tenant_id": "x"}],
    ids=lambda dimension: next(iter(dimension)),
)  # fmt: skip
def test_an_event_of_another_registration_is_counted(dimension: Json) -> None:
    publisher = Published()
    publisher.publish(stored_at_root(42, **dimension))
    assert publisher.stream.mismatches == {next(iter(dimension)): 1}
    assert publisher.row(11)["longest_matched"] == 0


def test_events_are_processed_in_order_of_their_numbers() -> None:
    """Missing numbers are counted, but not waited for: nothing could bring them back."""
    publisher = Published()
    removed = {"seq_hashes": [11], "base_block_idx": 0}
    publisher.publish(REMOVED | removed | {"event_id": 43}, stored_at_root(42))
    assert publisher.row(11)["longest_matched"] == 0
    publisher.publish(stored_at_root(46))
    assert publisher.row(11)["longest_matched"] == 64
    assert (publisher.stream.order.gaps, publisher.stream.order.stale) == (1, 0)


@pytest.mark.parametrize(
    ("where", "located"),
    [
        ({"base_block_idx": 0, "parent_hash": None}, True),
        ({"base_block_idx": 0}, True),
        ({"parent_hash": None}, True),
        ({"base_block_idx": 1, "parent_hash": 11}, True),
        ({"parent_hash": 11}, True),
        ({"base_block_idx": 1, "parent_hash": None}, True),
        ({"base_block_idx": 1}, True),
        ({}, False),
    ],
)
def test_base_block_idx_or_parent_hash_must_be_present(where: Json, located: bool) -> None:
    """This holds for blocks with tokens; blocks of hashes alone are located by their hashes."""
    publisher = Published()
    publisher.publish(stored_at_root(41, token_ids=list(range(64, 128))))
    event = {k: v for k, v in STORED.items() if k not in ("base_block_idx", "parent_hash")}
    publisher.publish(event | where | {"seq_hashes": [12], "token_ids": list(range(64))})
    assert publisher.stream.unlocated == (not located)
    assert (publisher.stream.orphans, publisher.stream.conflicts) == (0, 0)


@pytest.mark.parametrize("name", ["base_block_idx", "seq_hashes"])
def test_removed_needs_hashes_and_nothing_else(name: str) -> None:
    publisher = Published()
    publisher.publish(stored_at_root(42))
    event = REMOVED | {"seq_hashes": [11]}
    del event[name]
    publisher.publish(event)
    assert publisher.stream.bad.total() == (name == "seq_hashes")
    assert publisher.row(11)["longest_matched"] == 64 * (name == "seq_hashes")


@pytest.mark.parametrize("dimension", STREAMS, ids=lambda dimension: next(iter(dimension)))
def test_cleared_is_of_its_stream(dimension: Json) -> None:
    publisher = Published()
    publisher.publish(stored_at_root(42), stored_at_root(42, **dimension))
    publisher.publish(CLEARED)
    scope = scope_of(dimension)
    row = publisher.row(11, **scope)
    assert row["longest_matched"] == 64
    assert row["GPU"] == (0 if "medium" in dimension else 64)
    publisher.publish(CLEARED | dimension)
    assert publisher.row(11, **scope)["longest_matched"] == 0


# ---- Compatibility notes


def test_batches_of_vllm_get_what_they_lack_from_the_registration(conductor: Running) -> None:
    engine = conductor.engine()
    endpoint = {"endpoint": engine.endpoint("pub"), "replay_endpoint": None}
    conductor.post("/register", REGISTER | endpoint | {"block_size": 4})
    event = ["BlockStored", [901, 902, 903, 904], None, PROMPT, 4, None, "GPU"]
    engine.publish({"seq": 0, "batch": [0.5, [event]]})
    question = QUERY | {"token_ids": PROMPT, "block_size": 4}
    conductor.until_row("/query", question, {"GPU": 16}, "vllm-prefill-node1")
    engine.publish({"seq": 1, "batch": [0.5, [["BlockRemoved", [903], "GPU"]]]})
    conductor.until_row("/query", question, {"GPU": 8}, "vllm-prefill-node1")
    for other in ({"cache_salt": ""}, {"lora_name": ""}):
        rows = conductor.post("/query", question | other)["default"]
        assert rows["vllm-prefill-node1"]["GPU"] == 0
