"""Reports of the outcomes of requests, over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from tests.support.exposition import parse
from tests.support.http_client import Client
from tests.support.processes import Server

PROMPT = list(range(64))


def started(kvd_process: Callable[..., Server], *flags: str) -> Client:
    server = kvd_process("--no-router-use-kv-events", *flags, face="select-service")
    client = Client(server.base_url)
    for worker_id in (1, 2):
        record = {"worker_id": worker_id, "model_name": "m", "block_size": 16}
        given = {
            "endpoint": f"http://e{worker_id}",
            "prefill_tokens_per_s": 1000,
            "decode_step_ms": 5,
        }
        assert client.post("/workers", json=record | given).status_code == 201
    return client


def reserve(client: Client, name: str, **members: Any) -> dict[str, Any]:
    asked = {"model_name": "m", "token_ids": PROMPT, "reservation_id": name, **members}
    answered = client.post("/select_and_reserve", json=asked)
    assert answered.status_code == 200, answered.text
    return dict(answered.json())


def test_reports_are_summed_by_rank_and_model(kvd_process: Callable[..., Server]) -> None:
    with closing(started(kvd_process)) as client:
        first = reserve(client, "a", expected_ttft=True)
        assert first["expected_ttft_s"] == 0.069
        figures = {"prompt_tokens": 64, "cached_tokens": 16, "ttft_ms": 100, "output_tokens": 9}
        assert client.post("/reservations/a/report", json=figures).json() == {"status": "ok"}
        client.post("/reservations/a/prefill_complete")
        client.delete("/reservations/a")
        again = reserve(client, "b", slo_ttft_ms=10)  # predicted to be all cached
        assert again["worker_id"] == first["worker_id"]
        report = client.post(
            "/reservations/b/report", json={"prompt_tokens": 64, "cached_tokens": 0}
        )
        assert report.status_code == 200
        (model,) = client.get("/regret").json()["models"]
        assert (model["reports"], model["cached_tokens"], model["surplus_tokens"]) == (2, 16, 16)
        assert model["expected_cached_tokens"] == model["missing_tokens"] > 0
        assert model["timed"] >= 1
        (rank,) = client.get("/regret").json()["ranks"]
        assert rank["worker_id"] == first["worker_id"]
        metrics = parse(client.get("/metrics").text)
        missing = [value for name, value in metrics.items() if "missing_tokens_total{" in name]
        assert missing == [model["missing_tokens"]]
        (row,) = [row for row in client.get("/workers").json() if row["worker_id"] == 1]
        assert row["speeds"]["0"]["prefill_tokens_per_s"] == 1000
        assert row["speeds"]["0"]["given"] is True


def test_nothing_is_expected_without_prefill_tracking(kvd_process: Callable[..., Server]) -> None:
    with closing(started(kvd_process, "--no-router-track-prefill-tokens")) as client:
        reserve(client, "a")
        figures = {"prompt_tokens": 64, "cached_tokens": 0, "ttft_ms": 100}
        assert client.post("/reservations/a/report", json=figures).json() == {"status": "ok"}
        assert client.get("/regret").json() == {"models": [], "ranks": []}


def test_what_a_report_refuses(kvd_process: Callable[..., Server]) -> None:
    with closing(started(kvd_process)) as client:
        reserve(client, "a")
        for body, status in (
            ({"cached_tokens": 1}, 400),
            ({"cached_tokens": 65, "prompt_tokens": 64}, 400),
            ({"ttft_ms": 0}, 400),
            ({"ttft_ms": -1}, 400),
            ({"ttft_ms": 1e308}, 400),  # infinite sums would be no JSON
            ({"output_tokens": -1}, 422),
            ({"cached_tokens": "1", "prompt_tokens": 2}, 422),
        ):
            assert client.post("/reservations/a/report", json=body).status_code == status, body
        assert client.post("/reservations/x/report", json={}).status_code == 404
        assert client.get("/regret").json() == {"models": [], "ranks": []}
        for name, value in (("slo_ttft_ms", 0), ("slo_ttft_ms", "1"), ("expected_ttft", 1)):
            asked = {"model_name": "m", "token_ids": PROMPT, name: value}
            assert client.post("/select", json=asked).status_code in (400, 422), name
        for speed in (0, 1e-320):  # an infinite time to the first token would be no JSON
            wrong = {"worker_id": 3, "prefill_tokens_per_s": speed}
            assert client.post("/workers", json=wrong).status_code == 422, speed
