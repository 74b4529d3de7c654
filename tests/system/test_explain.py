"""POST /explain of a running daemon, and `kvd explain`: which worker is chosen, and why."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from examples.engine.caches import BLOCK_SIZE
from kvd.cli.main import main
from kvd.faces.explain.answers import MAX_CANDIDATES
from tests.conformance.failure import show, wait_until
from tests.support.budget import scaled
from tests.support.documented import documented
from tests.support.gateways import gateway_of
from tests.support.patients import FACES, WITHIN_S, Patient, Rank, prompt, running_patient
from tests.support.ports import find_free_port
from tests.support.processes import Server

Capture = pytest.CaptureFixture[str]
Json = dict[str, Any]

SALT = {"extra_keys": [["salt"], None]}  # vLLM's form, with a prompt's first block


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("kvd")
        server, urls = stack.enter_context(running_patient(folder, "--router-policy=kvd"))
        yield Patient(server, urls, stack)


@pytest.fixture
def patient(opened: Patient) -> Iterator[Patient]:
    yield opened
    opened.empty()


@pytest.fixture
def binds(opened: Patient) -> list[str]:
    return [f"--{face}-bind={url.removeprefix('http://')}" for face, url in opened.urls.items()]


def ranks(patient: Patient, *worker_ids: int) -> list[Rank]:
    """Returns engines that are workers of the selection service and have a subscriber."""
    made = []
    for worker_id in worker_ids:
        engine = patient.engine()
        patient.worker(worker_id, engine.endpoint("pub"))
        engine.wait_subscribed(1, WITHIN_S)
        made.append(Rank(engine))
    return made


def explained(patient: Patient, face: str = "selection", **body: Any) -> Json:
    answer = patient.clients[face].post("/explain", json={"model_name": "m", **body})
    assert answer.status_code == 200, answer.text
    assert documented(face).untrue(answer) is None
    found: Json = answer.json()
    return found


def candidates(found: Json) -> dict[str, Json]:
    (choice,) = found["choices"]
    return {each["worker_id"]: each for each in choice["candidates"]}


def wait_blocks(patient: Patient, tokens: list[int], worker: str, blocks: int, **body: Any) -> Json:
    """Waits until a worker caches this many blocks of a prompt; returns the explanation."""
    last: list[Json] = []

    def check() -> str | None:
        last[:] = [explained(patient, token_ids=tokens, **body)]
        held = candidates(last[0])[worker]["blocks"]
        return None if held == blocks else show(last[0])

    wait_until(check, WITHIN_S)
    return last[0]


def test_a_choice_is_explained_as_it_is_made(patient: Patient) -> None:
    one, two = ranks(patient, 1, 2)
    tokens = prompt(1, 4)
    one.serve(tokens)
    two.serve(tokens[: 2 * BLOCK_SIZE])
    wait_blocks(patient, tokens, "2", 2)
    found = wait_blocks(patient, tokens, "1", 4)
    (choice,) = found["choices"]
    assert (choice["by"], choice["router_policy"], choice["unit"]) == ("cost", "kvd", "tokens")
    assert (found["blocks"], found["block_size"]) == (4, BLOCK_SIZE)
    assert choice["refusal"] is None and choice["chosen"]["chance"] == 1.0
    asked = {"model_name": "m", "token_ids": tokens}
    chosen = patient.post("selection", "/select", asked | {"explain": True})
    assert choice["chosen"]["worker_id"] == str(chosen["worker_id"]) == "1"
    costs = {str(each["worker_id"]): each["cost"] for each in chosen["candidates"]}
    rows = candidates(found)
    assert {name: row["cost"] for name, row in rows.items()} == costs
    for row in rows.values():
        assert sum(term["cost"] for term in row["terms"]) * row["preference"] == row["cost"]
    assert choice["runner_up"]["worker_id"] == "2"
    assert choice["runner_up"]["behind"] == costs["2"] - costs["1"]
    assert rows["1"]["ended"]["why"] == "end_of_prompt"
    assert rows["2"]["ended"]["why"] == "never_stored"
    assert rows["2"]["tiers"] == [
        {"tier": "device", "from": 0, "to": 2, "why": "never_stored", "age_s": None}
    ]
    for face in FACES:
        assert explained(patient, face, token_ids=tokens)["choices"] == found["choices"]


def test_each_phase_is_explained(patient: Patient) -> None:
    """Under any policy, decode goes to a rank with the fewest blocks in use."""
    for worker_id, role in enumerate(("prefill", "decode", "decode"), 1):
        patient.worker(worker_id, None, role=role)
    asked, tokens = {"model_name": "m", "token_ids": prompt(11, 3)}, prompt(12, 3)
    booked = patient.post("selection", "/select_and_reserve", asked)
    prefill, decode = explained(patient, token_ids=tokens, phase="both")["choices"]
    assert (prefill["phase"], prefill["unit"]) == ("prefill", "tokens")
    assert prefill["chosen"]["worker_id"] == "1"
    assert (decode["phase"], decode["unit"]) == ("decode", "blocks")
    assert decode["chosen"]["worker_id"] in {"2", "3"} - {str(booked["worker_id"])}
    for each in (prefill, decode):
        assert (each["by"], each["router_policy"]) == ("cost", "kvd")
        for row in each["candidates"]:
            assert sum(term["cost"] for term in row["terms"]) == row["cost"]
    (alone,) = explained(patient, token_ids=tokens, phase="decode")["choices"]
    assert alone == decode


def a_question(chance: Random) -> Json:
    """Returns a random question: a prompt like others, and members on which a choice depends."""
    found: Json = {"token_ids": prompt(13, 3)[: chance.randrange(3 * BLOCK_SIZE)]}
    found["token_ids"] += [chance.randrange(3) for _ in range(chance.randrange(40))]
    drawn = {
        "cache_salt": ["a", "b"],
        "lora_name": ["tuned"],
        "is_eagle": [True],
        "phase": ["prefill", "decode", "both"],
        "router_policy": ["dynamo", "kvd", "kvd,queued=0.3", "lmetric", "ramjet"],
        "allowed_worker_ids": [[1, 2], [2, 3, 9]],
        "pinned_worker": [{"worker_id": 2, "dp_rank": 0}],
        "slo_ttft_ms": [100.0],
        "router_config_override": [{"router_mode": "least-loaded"}, {"overlap_score_credit": 0.5}],
    }
    chosen = {name: chance.choice(ways) for name, ways in drawn.items() if chance.random() < 0.25}
    return {"model_name": "m", **found, **chosen}


def test_whatever_is_asked_is_explained_as_it_is_chosen(patient: Patient) -> None:
    chance = Random(1)
    for worker_id, role in enumerate(("both", "prefill", "decode"), 1):
        patient.worker(worker_id, None, role=role)
    (engine,) = ranks(patient, 4)
    engine.serve(prompt(13, 3))
    wait_blocks(patient, prompt(13, 3), "4", 3)
    for number in range(scaled(24)):
        asked = a_question(chance)
        answer = patient.clients["selection"].post("/explain", json=asked)
        select = patient.clients["selection"].post("/select", json=asked)  # it may use up a turn
        assert answer.status_code == 200, (asked, answer.text)
        choices = answer.json()["choices"]
        for each in choices:
            for row in each["candidates"]:
                assert sum(term["cost"] for term in row["terms"]) * row["preference"] == row["cost"]
        rows = {row["worker_id"]: row for row in choices[-1]["candidates"]}  # of decode
        if select.status_code == 200:
            chance_of = rows[str(select.json()["worker_id"])]["chance"]
            assert chance_of > 0, asked
            assert sum(row["chance"] or 0 for row in rows.values()) == pytest.approx(1)
        else:
            assert choices[-1]["chosen"] is None, (asked, select.text)
        booking = {**asked, "reservation_id": f"random-{number}"}
        patient.clients["selection"].post("/select_and_reserve", json=booking)


def test_nothing_is_booked_drawn_or_counted(patient: Patient) -> None:
    ranks(patient, 1, 2)
    tokens = prompt(2, 3)
    before = patient.clients["selection"].get("/loads").json()
    asked = {"model_name": "m", "token_ids": tokens, "router_policy": "dynamo"}
    policy = {"router_config_override": {"router_temperature": 1.0}}
    (choice,) = explained(patient, token_ids=tokens, router_policy="dynamo", **policy)["choices"]
    assert [each["chance"] for each in choice["candidates"]] == [0.5, 0.5]
    assert patient.clients["selection"].get("/loads").json() == before
    turns = {"router_config_override": {"router_mode": "round-robin"}}
    first = explained(patient, token_ids=tokens, **turns)["choices"][0]
    assert (first["by"], first["unit"], first["chosen"]["cost"]) == ("turns", None, None)
    assert explained(patient, token_ids=tokens, **turns)["choices"][0] == first
    served = patient.post("selection", "/select", asked | turns)
    assert str(served["worker_id"]) == first["chosen"]["worker_id"]
    unknown = {"model_name": "mistyped", "token_ids": tokens}
    assert patient.clients["indexer"].post("/explain", json=unknown).status_code == 404
    found = patient.clients["indexer"].get("/diagnose").json()["findings"]
    assert "model_name_mismatch" not in [each["name"] for each in found]


def test_what_was_evicted_cleared_and_stored_again(patient: Patient) -> None:
    (one,) = ranks(patient, 1)
    tokens = prompt(3, 4)
    stored = one.cache.serve(tokens)
    one.publish(stored)
    wait_blocks(patient, tokens, "1", 4)
    hashes = [name for each in stored for name in each["block_hashes"]]
    one.publish([{"type": "BlockRemoved", "block_hashes": hashes[2:], "medium": "GPU"}])
    found = wait_blocks(patient, tokens, "1", 2)
    row = candidates(found)["1"]
    assert (row["ended"]["why"], row["ended"]["tier"], row["ended"]["at_block"]) == (
        *("evicted", "device", 2),
    )
    assert 0 <= row["ended"]["age_s"] < WITHIN_S
    assert [(each["kind"], each["from"], each["to"]) for each in found["timeline"]] == [
        ("stored", 0, 4),
        ("evicted", 2, 4),
    ]
    one.publish([{"type": "AllBlocksCleared"}])
    found = wait_blocks(patient, tokens, "1", 0)
    assert candidates(found)["1"]["ended"]["why"] == "cleared"
    assert found["timeline"][-1]["kind"] == "cleared"
    assert found["chronicle"]["changes"] >= 4 and found["chronicle"]["overwritten"] == 0


def test_the_same_tokens_under_another_salt_or_adapter(patient: Patient) -> None:
    salted, adapted = ranks(patient, 1, 2)
    tokens = prompt(4, 2)
    salted.serve(tokens, **SALT)
    adapted.serve(tokens, lora_name="tuned")
    wait_blocks(patient, tokens, "1", 2, cache_salt="salt")
    wait_blocks(patient, tokens, "2", 2, lora_name="tuned")
    rows = candidates(explained(patient, token_ids=tokens))
    assert [
        (rows[name]["ended"]["why"], rows[name]["ended"]["elsewhere_blocks"]) for name in "12"
    ] == [
        ("other_salt", 2),
        ("other_adapter", 2),
    ]


def test_an_adapter_and_a_salt_together(patient: Patient) -> None:
    """Both add to the seed of hashes, and in half of all cases the sum exceeds 64 bits."""
    (one,) = ranks(patient, 1)
    for number in range(8):
        tokens = prompt(20 + number, 2)
        one.serve(tokens, lora_name="tuned", extra_keys=[[f"salt-{number}"], None])
        both = {"lora_name": "tuned", "cache_salt": f"salt-{number}"}
        found = wait_blocks(patient, tokens, "1", 2, **both)
        assert candidates(found)["1"]["ended"]["why"] == "end_of_prompt"
        row = candidates(explained(patient, token_ids=tokens, lora_name="tuned"))["1"]
        assert (row["blocks"], row["ended"]["why"]) == (0, "other_salt")
        assert row["ended"]["elsewhere_blocks"] == 2


def test_a_live_request_is_explained_by_its_id(patient: Patient) -> None:
    one, _ = ranks(patient, 1, 2)
    tokens = prompt(6, 5)
    one.serve(tokens[: 3 * BLOCK_SIZE])
    wait_blocks(patient, tokens, "1", 3)
    asked = {"model_name": "m", "token_ids": tokens, "reservation_id": "r-1"}
    booked = patient.post("selection", "/select_and_reserve", asked)
    found = explained(patient, request_id="r-1")
    assert found["blocks"] == 5
    assert {name: found["request"][name] for name in ("request_id", "worker_id", "blocks")} == {
        "request_id": "r-1",
        "worker_id": str(booked["worker_id"]),
        "blocks": 5,
    }
    rows = candidates(found)
    assert rows["1"]["blocks"] == 3 and rows["2"]["blocks"] == 0
    assert rows["1"]["ended"]["why"] == "unknown"  # no index knows its next block
    assert rows["2"]["ended"]["why"] == "never_stored"
    for face in FACES:
        asked_by_page = patient.clients[face].get("/explain", params={"request_id": "r-1"})
        assert asked_by_page.json()["choices"] == found["choices"]
        assert documented(face).untrue(asked_by_page) is None
    answer = patient.clients["selection"].get("/explain")
    assert (answer.status_code, answer.json()["error"]) == (
        *(400, "the parameter `request_id` is missing"),
    )
    patient.clients["selection"].delete("/reservations/r-1")
    answer = patient.clients["selection"].post("/explain", json={"request_id": "r-1"})
    assert answer.status_code == 404


def test_an_index_without_a_selection_says_what_it_holds(patient: Patient) -> None:
    rank = Rank(patient.rank())
    tokens = prompt(7, 3)
    rank.serve(tokens[: 2 * BLOCK_SIZE])
    found = wait_blocks(patient, tokens, "1", 2)
    (choice,) = found["choices"]
    assert (choice["refusal"], choice["chosen"], choice["by"]) == ("no_selection", None, None)
    assert choice["candidates"][0]["ended"]["why"] == "never_stored"


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_stream_that_has_missed_events_is_told(
    patient: Patient, binds: list[str], capsys: Capture, tmp_path: Path, is_chosen: bool
) -> None:
    (rank,) = ranks(patient, 1) if is_chosen else (Rank(patient.rank()),)
    tokens = prompt(14, 2)
    rank.serve(tokens)
    wait_blocks(patient, tokens, "1", 2)
    (tmp_path / "prompt").write_text(" ".join(map(str, tokens)))
    command = ["explain", str(tmp_path / "prompt"), "--model-name=m", *binds]
    assert main(command) == 0
    assert "its stream is" not in capsys.readouterr().out
    rank.skip(1)
    rank.serve(prompt(15))
    patient.until_applied("m", 1, 0, rank.seq)
    assert candidates(explained(patient, token_ids=tokens))["1"]["stream"] == "degraded"
    assert main(command) == 0
    assert "all of it; its stream is degraded" in capsys.readouterr().out


def test_the_same_tokens_for_another_tenant(patient: Patient) -> None:
    rank, _ = Rank(patient.rank()), patient.rank(tenant_id="t")
    tokens = prompt(10, 2)
    rank.serve(tokens)
    wait_blocks(patient, tokens, "1", 2)
    ended = candidates(explained(patient, token_ids=tokens, tenant_id="t"))["1"]["ended"]
    assert (ended["why"], ended["elsewhere_blocks"]) == ("other_tenant", 2)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "block_hashes is required, or token_ids"),
        ({"token_ids": [1, 2], "request_id": "x"}, 400, "request_id: a request or a prompt"),
        (
            {"request_id": "never"},
            404,
            "no live request never: one that has ended is explained by its prompt",
        ),
        ({"request_id": 5}, 422, "request_id: expected a text"),
        ({"token_ids": "text"}, 422, "token_ids"),
        ({"token_ids": [1], "model_name": "unheard"}, 404, "no indexer for model=unheard"),
        ({"token_ids": [1], "router_policy": "best"}, 422, "router_policy: expected one of"),
    ],
)
def test_wrong_bodies(patient: Patient, body: Json, status: int, message: str) -> None:
    for face in FACES:
        answer = patient.clients[face].post("/explain", json=body)
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]
        assert documented(face).untrue(answer) is None
    answer = patient.clients["selection"].post(
        "/explain", content=b"{", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400


# ---- the command


def test_the_command_shows_tables(
    patient: Patient, binds: list[str], capsys: Capture, tmp_path: Path
) -> None:
    one, _ = ranks(patient, 1, 2)
    tokens = prompt(8, 3)
    one.serve(tokens)
    wait_blocks(patient, tokens, "1", 3)
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(tokens))
    assert main(["explain", str(file), "--model-name=m", *binds]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0] == f"3 blocks of {BLOCK_SIZE} tokens, model m, tenant default"
    assert lines[2] == "by cost, policy kvd, costs in tokens"
    assert lines[3].startswith("chosen: 1:0; runner-up: 2:0, ")
    assert lines[4].split() == ["rank", "chance", "cost", "terms", "cached", "why", "no", "more"]
    assert "3 of 3 (device 3)" in shown and "all of it" in shown
    assert "block 0: never stored" in shown
    assert (
        "\nwhat happened to these blocks (changes recorded: " in shown and "blocks 0 to 3" in shown
    )
    assert main(["explain", str(file), "--model-name=m", "--json", *binds]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["chosen"]["worker_id"] == "1"


def test_the_command_says_how_many_candidates_it_leaves_out(
    patient: Patient, binds: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker_id in range(1, MAX_CANDIDATES + 4):
        patient.worker(worker_id, None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 2 3"))
    assert main(["explain", "-", "--model-name=m", *binds]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-3] == "and 3 more" and shown[-4].startswith(f"{MAX_CANDIDATES}:0 ")
    assert shown[-1].startswith("nothing is recorded of these blocks (changes recorded: ")


def test_the_command_reads_prompts_in_three_forms(
    patient: Patient,
    binds: list[str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks(patient, 1)
    for text in ("1 2\n3, 4", "[1,2,3,4]", '{"token_ids": [1,2,3,4], "model_name": "m"}'):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["explain", "-", "--model-name=m", "--json", *binds]) == 0
        assert json.loads(capsys.readouterr().out)["model_name"] == "m"


def test_the_command_explains_a_request(
    patient: Patient, binds: list[str], capsys: Capture
) -> None:
    ranks(patient, 1)
    asked = {"model_name": "m", "token_ids": prompt(9), "reservation_id": "r-2"}
    patient.post("selection", "/select_and_reserve", asked)
    assert main(["explain", "--request=r-2", *binds]) == 0
    assert "request r-2, booked on 1:0" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(
    patient: Patient, binds: list[str], capsys: Capture, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    for text, message in (
        ("one two", "a prompt is token ids"),
        ("1" * 5000, "a prompt is token ids"),
        ("[1, 2", "the prompt is not JSON"),
        ("[" * 100_000, "the prompt is not JSON"),
        ('{"token_ids": []}', "tenant_id=default; --model-name names the model of the prompt"),
        ('{"token_ids": [], "model_name": "n"}', "no indexer for model=n tenant_id=default\n"),
    ):
        wrong.write_text(text)
        assert main(["explain", str(wrong), *binds]) == 1
        assert message in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "none"), *binds]) == 1
    assert "cannot read" in capsys.readouterr().err
    for unnamed in ([], [""]):
        assert main(["explain", *unnamed, *binds]) == 1
        assert "name a file with a prompt" in capsys.readouterr().err
    nowhere = [f"--{face}-bind=127.0.0.1:{find_free_port()}" for face in FACES]
    wrong.write_text("1 2 3")
    assert main(["explain", str(wrong), *nowhere]) == 2
    assert "kvd does not answer: indexer" in capsys.readouterr().err


async def test_a_gateway_says_what_is_wrong(
    kvd_process: Callable[..., Server], capsys: Capture
) -> None:
    """The command reads the gateway's errors, which have the form of OpenAI's."""
    away = f"http://127.0.0.1:{find_free_port()}"
    async with gateway_of(kvd_process, [away], count=0) as client:
        off = [f"--{face}-bind=off" for face in FACES]
        bind = f"--gateway-bind={client.http.base_url.netloc.decode()}"
        assert main(["explain", "--request=r-1", *off, bind]) == 1
        assert capsys.readouterr().err.startswith("kvd: no live request r-1: ")
