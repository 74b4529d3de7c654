"""Faults in questions: salts, adapters and tokens that only one side has, wrong server names."""

from __future__ import annotations

from typing import Any

import pytest

from examples.engine.caches import BLOCK_SIZE
from kvd.index.partitions import UNMATCHED_QUESTIONS
from tests.support.patients import Patient, Rank, prompt

SALT = {"extra_keys": [["salt"], None]}  # vLLM's form, with a prompt's first block
BOS = 128_000
PROMPTS = 25


def asked(patient: Patient, count: int = PROMPTS, begin: int = 0, **members: Any) -> None:
    for number in range(begin, begin + count):
        body = {"model_name": "m", "token_ids": prompt(number), **members}
        patient.post("indexer", "/query", body)


def holding(patient: Patient, **members: Any) -> Rank:
    """Returns a rank whose prompts 0 to 24 are in the index."""
    rank = Rank(patient.rank())
    for number in range(PROMPTS):
        rank.serve(prompt(number), **members)
    patient.until_applied("m", 1, 0, rank.seq)
    return rank


def test_only_events_have_salts(patient: Patient) -> None:
    holding(patient, **SALT)
    asked(patient)
    found = patient.finds("salt_one_sided")
    assert found["evidence"] == "25 of 25 prompts in events have a cache salt, none of 25 questions"


def test_only_questions_have_salts(patient: Patient) -> None:
    holding(patient)
    asked(patient, cache_salt="salt")
    found = patient.finds("salt_one_sided")
    assert found["evidence"] == "25 of 25 questions have a cache salt, none of 25 prompts in events"


def test_only_events_have_adapters(patient: Patient) -> None:
    holding(patient, lora_name="french")
    asked(patient)
    assert "none of 25 questions" in patient.finds("adapter_one_sided")["evidence"]


def test_only_selections_have_adapters(patient: Patient) -> None:
    rank = Rank(patient.engine())
    patient.worker(1, rank.engine.endpoint("pub"))
    rank.engine.wait_subscribed(1, 10.0)
    for number in range(PROMPTS):
        rank.serve(prompt(number))
    patient.until_applied("m", 1, 0, rank.seq)
    for number in range(PROMPTS):
        body = {"model_name": "m", "token_ids": prompt(number), "lora_name": "french"}
        patient.post("selection", "/select", body)
    found = patient.finds("adapter_one_sided")
    assert found["evidence"] == "25 of 25 questions have an adapter, none of 25 prompts in events"


def test_prompts_begin_with_another_token(patient: Patient) -> None:
    rank = Rank(patient.rank())
    for number in range(4):
        rank.serve(prompt(number, begin=[BOS]))
    patient.until_applied("m", 1, 0, rank.seq)
    asked(patient, UNMATCHED_QUESTIONS)
    found = patient.finds("tokens_disagree")
    assert f"events with {BOS}" in found["evidence"]
    assert f"0 of {UNMATCHED_QUESTIONS} questions matched any of 8 blocks" in found["evidence"]


def test_prompts_differ_behind_the_first_token(patient: Patient) -> None:
    rank = Rank(patient.rank())
    for number in range(4):
        rank.serve(prompt(number, begin=[BOS]))
    patient.until_applied("m", 1, 0, rank.seq)
    for number in range(UNMATCHED_QUESTIONS):
        tokens = [BOS, BOS, *prompt(number)]
        patient.post("indexer", "/query", {"model_name": "m", "token_ids": tokens})
    assert "compare token_ids" in patient.finds("no_match_ever")["remedy"]


def test_prompts_that_share_nothing_are_no_fault(patient: Patient) -> None:
    rank = Rank(patient.rank())
    rank.serve(prompt(0, begin=[BOS]))
    patient.until_applied("m", 1, 0, rank.seq)
    for number in range(1, UNMATCHED_QUESTIONS + 1):
        tokens = prompt(number, begin=[BOS])
        patient.post("indexer", "/query", {"model_name": "m", "token_ids": tokens})
    patient.finds("no_match_ever")  # no engine has served any of these yet
    rank.serve(tokens)
    patient.until_applied("m", 1, 0, rank.seq)
    assert patient.findings() == []


def test_hashes_by_another_rule(patient: Patient) -> None:
    holding(patient)
    for number in range(UNMATCHED_QUESTIONS):
        body = {"model_name": "m", "block_hashes": [number, number + 1]}
        patient.post("indexer", "/query_by_hash", body)
    found = patient.finds("no_match_ever")
    assert "all were by hash" in found["evidence"] and f"{BLOCK_SIZE} tokens" in found["remedy"]


@pytest.mark.parametrize("face", ["indexer", "selection"])
def test_a_proxy_passes_its_own_name_on(patient: Patient, face: str) -> None:
    client = patient.clients[face]
    for _ in range(3):
        answer = client.get("/workers", headers={"Host": "kv.example:8443"})
        assert answer.status_code == 421
    found = patient.finds("host_refused", face)
    assert "the last for 'kv.example'" in found["evidence"]
    assert found["remedy"].startswith('allowed_hosts = ["kv.example"]')
