"""Faults beyond engines: a full index, lopsided choices, bookings that do not end, replicas."""

from __future__ import annotations

import time
from collections import deque

import zmq

from kvd.diagnosis.choices import ENOUGH_BOOKINGS
from kvd.model import PartitionKey
from kvd.wire import affinity
from kvd.wire.affinity import Bound, Version
from tests.support.patients import Patient, Rank, prompt
from tests.support.ports import find_free_port

MAX_BLOCKS = 8
QUEUE = 10


FLAGS = (  # little room and short deadlines
    f"--index-max-blocks={MAX_BLOCKS}",
    f"--engine-queue-messages={QUEUE}",
    "--request-expiry-s=1",
    "--router-queue-requests=1",
    "--router-queue-s=0.2",
)


def test_the_index_is_full(patient: Patient) -> None:
    rank = Rank(patient.rank())
    rank.serve(prompt(1, blocks=MAX_BLOCKS + 4))
    found = patient.finds("index_full", "index")
    assert "index_max_blocks is 8" in found["evidence"]
    assert found["remedy"].startswith("index_max_blocks = 16")


def test_events_come_faster_than_they_fit(patient: Patient) -> None:
    rank = Rank(patient.rank())
    rank.serve(prompt(1))

    def burst() -> list[dict[str, str]]:
        for _ in range(100 * QUEUE):
            rank.publish([{"type": "AllBlocksCleared", "medium": "CPU"}])
        return [each for each in patient.findings() if each["name"] == "queue_full"]

    found = next(filter(None, (burst() for _ in range(50))))
    assert "batches found no room" in found[0]["evidence"]


def book(patient: Patient, number: int, **members: object) -> str:
    """Books a prompt, and returns the id of its reservation."""
    body = {"model_name": "m", "token_ids": prompt(number), **members}
    return str(patient.post("selection", "/select_and_reserve", body)["reservation_id"])


def test_one_worker_gets_everything(patient: Patient) -> None:
    for worker_id in (1, 2, 3):
        patient.worker(worker_id, None)
    live: deque[str] = deque()
    for number in range(ENOUGH_BOOKINGS + 20):
        live.append(book(patient, number, allowed_worker_ids=[2]))
        if len(live) > 6:
            patient.clients["selection"].delete(f"/reservations/{live.popleft()}")
    found = patient.finds("load_one_sided", "worker 2 of m/default")
    assert "3 workers can be chosen" in found["evidence"]


def test_thresholds_shut_everybody_out(patient: Patient) -> None:
    patient.worker(1, None)
    low = {"model": "m", "active_prefill_tokens_threshold": 1}
    patient.post("selection", "/busy_threshold", low)
    book(patient, 1)
    patient.post("selection", "/select", {"model_name": "m", "token_ids": prompt(2)}, status=503)
    patient.clients["selection"].delete("/busy_threshold", params={"model_name": "m"})
    assert "1 selection refused" in patient.finds("all_overloaded", "selection")["evidence"]


def test_nobody_frees_requests(patient: Patient) -> None:
    patient.worker(1, None)
    book(patient, 1)
    found = patient.finds("reservations_expire", "selection face")
    assert "request_expiry_s (1)" in found["remedy"]


def test_bookings_of_the_slot_tracker_expire(patient: Patient) -> None:
    key = {"model_name": "m", "worker_id": 1}
    place = {**key, "block_size": 16, "dp_start": 0, "dp_size": 1}
    patient.post("slot-tracker", "/register", place)
    request = {"dp_rank": 0, "request_id": "r", "sequence_hashes": [1], "new_isl_tokens": 16}
    patient.post("slot-tracker", "/add", key | request)
    assert patient.finds("reservations_expire", "slot-tracker face")
    patient.post("slot-tracker", "/unregister", key)


def test_the_queue_of_selections_is_too_short(patient: Patient) -> None:
    patient.worker(1, None, max_num_batched_tokens=16)
    for number in range(3):  # 2 batches of 16 tokens make a rank busy
        body = {"model_name": "m", "token_ids": prompt(number)}
        answer = patient.clients["selection"].post("/select_and_reserve", json=body)
    assert answer.status_code == 503, answer.text
    assert "waited too long" in patient.finds("queue_full", "selection")["evidence"]


def test_a_replica_is_not_there(patient: Patient) -> None:
    endpoint = f"tcp://127.0.0.1:{find_free_port()}"
    patient.post("slot-tracker", "/replica_sync/register_peer", {"endpoint": endpoint})
    found = patient.finds("replica_behind", endpoint, probe=True)
    assert "Connection refused" in found["evidence"]


def test_the_clock_of_a_replica_is_ahead(patient: Patient) -> None:
    patient.worker(1, None)
    replica = patient.socket(zmq.XPUB)
    endpoint = replica.last_endpoint.decode()
    patient.post("selection", "/replica_sync/register_peer", {"endpoint": endpoint})
    while replica.recv() != b"\1" + affinity.TOPIC:
        pass
    version = Version(time.time_ns() + 10**11, 7)
    bound = Bound(PartitionKey("m", "default"), "session", 1, 0, version)
    replica.send_multipart([affinity.TOPIC, affinity.encode(bound)])
    found = patient.finds("clock_skew", "replicas")
    assert "s ahead of this clock" in found["evidence"]
