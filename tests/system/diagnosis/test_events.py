"""Faults in the events of engines: blocks of another size, no tokens, gaps that nobody fills."""

from __future__ import annotations

import pytest
import zmq

from examples.engine.caches import BLOCK_SIZE
from tests.captures.recording import load
from tests.support.engines import address_of
from tests.support.patients import WITHIN_S, Patient, Rank, prompt
from tests.support.ports import find_free_port

HASHES = [11, 12]


def test_blocks_of_another_size(patient: Patient) -> None:
    rank = Rank(patient.rank(block_size=2 * BLOCK_SIZE))
    rank.serve(prompt(1))
    found = patient.finds("block_size_mismatch")
    assert found["evidence"] == "1 event with blocks of 16 tokens, registered with 32"
    assert '"block_size": 16' in found["remedy"]


def test_a_recorded_engine_with_blocks_of_another_size(patient: Patient) -> None:
    recording = load("vllm-0.33.0-hand")
    engine = patient.rank(model_name="recorded", block_size=2 * recording.block_size)
    for message in recording.messages:
        engine.publish({"seq": message.seq, "payload_hex": message.payload.hex()})
    found = patient.finds("block_size_mismatch", "recorded")
    assert f"blocks of {recording.block_size} tokens" in found["evidence"]


def test_workers_of_one_model_with_blocks_of_two_sizes(patient: Patient) -> None:
    for worker_id, size in ((1, BLOCK_SIZE), (2, 64)):
        patient.worker(worker_id, patient.engine().endpoint("pub"), block_size=size)
    found = patient.finds("block_size_mismatch", "worker 2 of m/default")
    assert found["evidence"] == "block_size 64 differs from 16 of its model"
    assert '"block_size": 16' in found["remedy"]


def test_fewer_tokens_than_hashes(patient: Patient) -> None:
    rank = Rank(patient.rank())
    rank.publish([["BlockStored", HASHES, None, prompt(1, 1), BLOCK_SIZE, None]])
    assert patient.finds("tokens_missing")["subject"] == "worker 1 rank 0 of m/default"


def test_hashes_without_any_tokens(patient: Patient) -> None:
    rank = Rank(patient.rank())
    rank.publish([["BlockStored", HASHES, None, [], BLOCK_SIZE, None]])
    found = patient.finds("tokens_missing")
    assert found["evidence"] == "2 blocks are known by hash alone, and none by its tokens"


def test_blocks_of_another_medium(patient: Patient) -> None:
    rank = Rank(patient.rank())
    rank.serve(prompt(1), medium="SOMEWHERE")
    assert patient.finds("events_ignored")["evidence"] == "all events were ignored: medium 1"


def test_messages_are_lost_and_nobody_can_be_asked(patient: Patient) -> None:
    rank = Rank(patient.rank())
    rank.serve(prompt(1))
    rank.skip(5)
    rank.serve(prompt(2))
    found = patient.finds("messages_lost")
    assert "5 lost batches, in 1 gap over 1 connection (missing 1..5)" in found["evidence"]
    assert "no replay endpoint" in patient.finds("replay_missing")["evidence"]


def test_the_replay_buffer_is_too_short(patient: Patient) -> None:
    rank = Rank(patient.rank(replay=True, buffer=1))
    rank.serve(prompt(1))
    rank.skip(5)
    rank.serve(prompt(2))
    assert "5 lost batches" in patient.finds("replay_too_short")["evidence"]
    assert patient.finds("messages_lost")


def test_the_replay_endpoint_does_not_answer(patient: Patient) -> None:
    engine = patient.rank(replay=True)
    engine.mode = "silent"
    rank = Rank(engine)
    rank.serve(prompt(1))
    rank.skip(5)
    rank.serve(prompt(2))
    assert patient.finds("replay_missing", evidence="went unanswered")


def test_the_replay_endpoint_answers_with_something_else(patient: Patient) -> None:
    server = patient.socket(zmq.ROUTER)
    rank = Rank(patient.rank(replay_endpoint=address_of(server)))
    rank.serve(prompt(1))
    rank.skip(5)
    rank.serve(prompt(2))
    asker, *_ = server.recv_multipart()
    for _ in range(3):
        server.send_multipart([asker, b"", b"who is there?"])
    evidence = patient.finds("replay_missing")["evidence"]
    assert "brought only 3 messages that did not fit" in evidence


def test_nobody_listens_at_the_replay_endpoint_before_it_is_needed(patient: Patient) -> None:
    replay = f"tcp://127.0.0.1:{find_free_port()}"
    rank = Rank(patient.rank(replay_endpoint=replay))
    rank.serve(prompt(1))
    patient.until_applied("m", 1, 0, rank.seq)
    assert (
        f"{replay}: Connection refused" in patient.finds("replay_missing", probe=True)["evidence"]
    )
    assert patient.findings(probe=False) == []


def test_the_replay_endpoint_is_that_of_the_events(patient: Patient) -> None:
    engine = patient.engine()
    patient.register(engine.endpoint("pub"), replay_endpoint=engine.endpoint("pub"))
    rank = Rank(engine)
    rank.serve(prompt(1))
    found = patient.finds("replay_missing", probe=True)
    assert "is a XPUB socket, not ROUTER" in found["evidence"]


def test_a_part_of_the_batches_cannot_be_read(patient: Patient) -> None:
    rank = Rank(patient.rank())
    rank.serve(prompt(1))
    rank.publish([["BlockStored", "no hashes", None, [], BLOCK_SIZE, None]])
    assert "1 of 2 batches" in patient.finds("batches_unreadable")["evidence"]


def test_a_loss_that_no_other_finding_explains(patient: Patient) -> None:
    rank = Rank(patient.rank())
    rank.serve(prompt(1))
    patient.until_applied("m", 1, 0, rank.seq)
    patient.empty()
    rank.engine.wait_unsubscribed(WITHIN_S)
    patient.register(rank.engine.endpoint("pub"))
    rank.engine.wait_subscribed(1, WITHIN_S)
    rank.serve(prompt(2))
    assert patient.finds("stream_degraded")["evidence"] == "registered again"


@pytest.mark.parametrize(
    ("member", "value", "name"),
    [
        ("model_name", "another", "model_name_mismatch"),
        ("tenant_id", "another", "tenant_mismatch"),
        ("block_size", 64, "block_size_mismatch"),
        ("lora_name", "another", "adapter_one_sided"),
        ("additional_salt", "another", "salt_one_sided"),
    ],
)
def test_a_publisher_of_another(patient: Patient, member: str, value: object, name: str) -> None:
    engine = patient.engine()
    described = {
        "endpoint": engine.endpoint("pub"),
        "type": "vLLM",
        "modelname": "m",
        "instance_id": "a",
        "block_size": BLOCK_SIZE,
        "dp_rank": 0,
        "lora_name": "one",
        "additional_salt": "salt",
    }
    patient.post("conductor", "/register", described)
    event = {
        "event_id": 0,
        "event_type": "stored",
        "timestamp": 0,
        "model_name": "m",
        "tenant_id": "default",
        "block_size": BLOCK_SIZE,
        "backend_id": "worker-0",
        "medium": "gpu",
        "dp_rank": 0,
        "seq_hashes": [1],
        "base_block_idx": 0,
        "parent_hash": None,
        "token_ids": None,
    }
    engine.publish({"seq": 0, "batch": [0.0, [{**event, member: value}], 0]})
    assert patient.finds(name)["subject"] == "publisher a rank 0 of m/default"
