"""Faults in names: models, tenants and ranks that are asked for but registered differently."""

from __future__ import annotations

from examples.engine.caches import BLOCK_SIZE
from tests.support.patients import Patient, Rank, prompt


def test_questions_for_another_name_of_the_model(patient: Patient) -> None:
    patient.rank(model_name="Meta-Llama-3-8B")
    body = {"model_name": "llama-3-8b", "token_ids": prompt(1)}
    for _ in range(3):
        patient.post("indexer", "/query", body, status=404)
    found = patient.finds("model_name_mismatch", "llama-3-8b/default")
    assert found["evidence"].startswith("3 requests for a model that nobody registered")
    assert "Meta-Llama-3-8B" in found["remedy"]


def test_selections_for_another_name_of_the_model(patient: Patient) -> None:
    patient.worker(1, None, model_name="big")
    body = {"model_name": "bigger", "token_ids": prompt(1)}
    patient.post("selection", "/select", body, status=503)
    assert "big" in patient.finds("model_name_mismatch", "bigger/default")["remedy"]


def test_selections_for_a_model_whose_worker_cannot_be_chosen(patient: Patient) -> None:
    worker = {"worker_id": 1, "model_name": "unheard", "endpoint": "http://127.0.0.1:1"}
    patient.post("selection", "/workers", {**worker, "block_size": BLOCK_SIZE}, status=201)
    body = {"model_name": "unheard", "token_ids": prompt(1)}
    patient.post("selection", "/select", body, status=503)
    assert patient.finds("rank_missing", "worker 1 of unheard/default")
    about = [each["name"] for each in patient.findings() if "unheard" in each["subject"]]
    assert about == ["rank_missing"]


def test_bookings_for_another_name_of_the_model(patient: Patient) -> None:
    body = {
        "model_name": "booked",
        "request_id": "r",
        "worker_id": 1,
        "dp_rank": 0,
        "sequence_hashes": [1],
        "new_isl_tokens": BLOCK_SIZE,
    }
    patient.post("slot-tracker", "/add", body, status=404)
    assert patient.finds("model_name_mismatch", "booked/default")


def test_questions_for_another_tenant(patient: Patient) -> None:
    patient.rank(tenant_id="blue")
    body = {"model_name": "m", "tenant_id": "green", "token_ids": prompt(1)}
    patient.post("indexer", "/query", body, status=404)
    found = patient.finds("tenant_mismatch", "m/green")
    assert found["evidence"] == "1 request for tenant green; the model has tenants: blue"


def test_a_rank_between_others_is_not_registered(patient: Patient) -> None:
    for dp_rank in (0, 1, 3):
        Rank(patient.rank(dp_rank=dp_rank), dp_rank=dp_rank).serve(prompt(1))
    found = patient.finds("rank_missing")
    assert found["evidence"] == "ranks 0, 1, 3 are registered, 2 are not"
    assert found["remedy"].endswith("dp_rank 2")


def test_two_workers_have_one_address(patient: Patient) -> None:
    engine = patient.rank()
    patient.register(engine.endpoint("pub"), instance_id=2)
    patient.register(engine.endpoint("pub"), instance_id=1, model_name="of another model")
    found = patient.finds("endpoint_shared")
    assert found["subject"] == f"{engine.endpoint('pub')} of m/default"
    assert found["evidence"] == "worker 1 rank 0, worker 2 rank 0 are registered with it"
    assert [each["name"] for each in patient.findings()].count("endpoint_shared") == 1


def test_a_worker_of_two_ranks_has_one_address(patient: Patient) -> None:
    endpoints = {"0": patient.engine().endpoint("pub")}
    patient.worker(
        1, None, without_kv_events=None, data_parallel_size=2, kv_events_endpoints=endpoints
    )
    found = patient.finds("rank_missing", "worker 1 of m/default")
    assert found["evidence"] == "kv_events endpoint is required for dp_rank 1"


def test_a_worker_without_an_address(patient: Patient) -> None:
    patient.worker(1, patient.engine().endpoint("pub"), endpoint=None)
    assert patient.finds("worker_unschedulable")["evidence"] == "endpoint is required"
