"""Healthy fleets of many shapes, in one daemon: no face and no command finds a fault."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from examples.engine.caches import BLOCK_SIZE, SglangEngine, VllmEngine
from kvd.cli.main import main
from kvd.diagnosis.choices import ENOUGH_BOOKINGS
from kvd.index.partitions import UNMATCHED_QUESTIONS
from tests.captures.recording import Recording, load
from tests.support.patients import Patient, Rank, prompt


def ask(patient: Patient, tokens: list[int], model: str = "m", **members: object) -> None:
    patient.post("indexer", "/query", {"model_name": model, "token_ids": tokens, **members})


def simulated(patient: Patient) -> None:
    """Two vLLM engines whose prompts are repeated."""
    ranks = [Rank(patient.rank(instance_id=number, replay=True)) for number in (1, 2)]
    for number, rank in enumerate(ranks, 1):
        for each in range(UNMATCHED_QUESTIONS // 2):
            rank.serve(prompt(each))
        patient.until_applied("m", number, 0, rank.seq)
    for each in range(UNMATCHED_QUESTIONS + 20):
        ask(patient, prompt(each))


def with_evictions(patient: Patient) -> None:
    """An SGLang engine whose small cache evicts to host memory and loads again."""
    rank = Rank(patient.rank(), SglangEngine(8, 32))
    for each in range(60):
        rank.serve(prompt(each % 7))
    patient.until_applied("m", 1, 0, rank.seq)


def mixed(patient: Patient) -> None:
    """Engines of two kinds and tenants in one daemon."""
    for number, cache in ((1, VllmEngine(64)), (2, SglangEngine(64, 64))):
        for tenant in ("red", "blue"):
            rank = Rank(patient.rank(instance_id=number, tenant_id=tenant), cache)
            rank.serve(prompt(number + hash(tenant) % 100))


def played(name: str) -> Callable[[Patient], None]:
    """Returns a fleet that sends a real engine's messages, and is asked the recorded questions."""

    def fleet(patient: Patient) -> None:
        recording = load(name)
        for instance, dp_rank in recording.ranks:
            play(patient, recording, instance, dp_rank)
        for question in recording.questions[:200]:
            members = {"lora_name": question.lora_name, "cache_salt": question.cache_salt}
            if not question.items:
                ask(patient, question.tokens, name, **members)

    fleet.__doc__ = name
    return fleet


def play(patient: Patient, recording: Recording, instance: int, dp_rank: int) -> None:
    about = {"model_name": recording.name, "block_size": recording.block_size}
    engine = patient.rank(instance_id=instance, dp_rank=dp_rank, **about)
    messages = [each for each in recording.messages if each.rank == (instance, dp_rank)]
    for each in messages:
        engine.publish({"seq": each.seq, "payload_hex": each.payload.hex()})
    patient.until_applied(recording.name, instance, dp_rank, messages[-1].seq)


def conductor(patient: Patient) -> None:
    """A publisher of the conductor face."""
    rank = Rank(patient.engine())
    described = {
        "endpoint": rank.engine.endpoint("pub"),
        "type": "vLLM",
        "modelname": "m",
        "instance_id": "a",
        "block_size": BLOCK_SIZE,
        "dp_rank": 0,
    }
    patient.post("conductor", "/register", described)
    for each in range(30):
        rank.serve(prompt(each))
    for each in range(30):
        body = {"model": "m", "block_size": BLOCK_SIZE, "token_ids": prompt(each)}
        patient.post("conductor", "/query", body)


def approximate(patient: Patient) -> None:
    """Workers without KV events, which are known only by their bookings."""
    for worker_id in (1, 2, 3):
        patient.worker(worker_id, None)
    serve(patient)


def selected(patient: Patient) -> None:
    """Workers with KV events and two ranks each, over which bookings are spread."""
    for worker_id in (1, 2):
        ranks = [Rank(patient.engine(), dp_rank=dp_rank) for dp_rank in (0, 1)]
        endpoints = {str(at): rank.engine.endpoint("pub") for at, rank in enumerate(ranks)}
        patient.worker(
            worker_id,
            None,
            without_kv_events=None,
            data_parallel_size=2,
            kv_events_endpoints=endpoints,
        )
        for at, rank in enumerate(ranks):
            rank.serve(prompt(10 * worker_id + at))
            patient.until_applied("m", worker_id, at, rank.seq)
    serve(patient)


def serve(patient: Patient) -> None:
    """Books requests and frees them, a few at a time."""
    selection, live = patient.clients["selection"], []
    for each in range(2 * ENOUGH_BOOKINGS):
        body = {"model_name": "m", "token_ids": prompt(each)}
        live.append(patient.post("selection", "/select_and_reserve", body)["reservation_id"])
        if len(live) > 12:
            selection.post(f"/reservations/{live[0]}/prefill_complete")
            selection.delete(f"/reservations/{live.pop(0)}")


def tracked(patient: Patient) -> None:
    """Requests of the slot tracker that are freed."""
    key = {"model_name": "m", "worker_id": 1}
    place = {**key, "block_size": BLOCK_SIZE, "dp_start": 0, "dp_size": 2}
    patient.post("slot-tracker", "/register", place)
    for number in range(20):
        request = {"request_id": f"r{number}", "sequence_hashes": [number], "new_isl_tokens": 16}
        patient.post("slot-tracker", "/add", {**key, "dp_rank": number % 2, **request})
        patient.post("slot-tracker", "/free", {"model_name": "m", "request_id": f"r{number}"})
    patient.post("slot-tracker", "/unregister", key)


def repaired(patient: Patient) -> None:
    """A gap that a replay has filled."""
    rank = Rank(patient.rank(replay=True))
    rank.serve(prompt(1))
    for number in (2, 3, 4):
        rank.publish(rank.cache.serve(prompt(number)), drop=True)
    rank.serve(prompt(5))
    patient.until_applied("m", 1, 0, rank.seq)


def salted(patient: Patient) -> None:
    """Prompts with salts and adapters, in events and in questions, and some without."""
    rank = Rank(patient.rank())
    for each in range(90):
        names = {"extra_keys": [["salt"], None]} if each % 3 == 1 else {}
        rank.serve(prompt(each), **names | ({"lora_name": "french"} if each % 3 == 2 else {}))
    patient.until_applied("m", 1, 0, rank.seq)
    for each in range(90):
        names = {"cache_salt": "salt"} if each % 3 == 1 else {}
        ask(patient, prompt(each), **names | ({"lora_name": "french"} if each % 3 == 2 else {}))


FLEETS = (
    *(simulated, with_evictions, mixed, conductor, approximate, selected, tracked, repaired),
    salted,
    played("vllm-0.33.0-dp4"),
    played("vllm-0.33.0-hybrid"),
    played("vllm-0.33.0-offload-self-fs"),
    played("vllm-0.33.0-ident"),
    played("sglang-0.5.23-hicache-write_through"),
    played("dynamo-mocker-1.6.1-vllm"),
)


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.__doc__)
def test_nothing_is_found(
    patient: Patient, fleet: Callable[[Patient], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet(patient)
    assert patient.findings() == []
    for face in patient.clients:
        assert patient.findings(probe=True, face=face) == []
    binds = [f"--{face}-bind={url.removeprefix('http://')}" for face, url in patient.urls.items()]
    assert main(["doctor", "--json", *binds]) == 0
    assert json.loads(capsys.readouterr().out) == {"findings": []}
