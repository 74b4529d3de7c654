"""A daemon's decision log: from requests over HTTP to a replay of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.cli.main import main
from tests.support import exposition
from tests.support.commands import run_command
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server

# A token id that is easily found in any text, so that the log can be searched for prompts.
FIRST_TOKEN = 123_456_789
MODEL = "m"
REQUESTS = 12


def workers(count: int) -> list[dict[str, object]]:
    return [
        {
            "worker_id": number,
            "model_name": MODEL,
            "endpoint": f"http://worker-{number}:8000",
            "block_size": 16,
            "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{find_free_port()}"},
        }
        for number in range(1, count + 1)
    ]


def test_what_a_daemon_logs_is_replayed(
    tmp_path: Path,
    kvd_process: Callable[..., Server],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "decisions.jsonl"
    environ = {"KVD_DECISION_LOG": str(path)}
    server = kvd_process("--router-policy=kvd", face="select-service", environ=environ)
    with Client(server.base_url) as client:
        for worker in workers(3):
            client.post("/workers", json=worker).raise_for_status()
        for number in range(REQUESTS):
            tokens = [FIRST_TOKEN + at for at in range(1024)] + [number + 1] * 600
            body = {"model_name": MODEL, "token_ids": tokens, "reservation_id": f"of-{number}"}
            if number % 2:  # the scheduler's task serves these
                body |= {"router_config_override": {"overlap_score_weight": 2.0}}
            client.post("/select_and_reserve", json=body).raise_for_status()
            client.post(f"/reservations/of-{number}/prefill_complete").raise_for_status()
            client.post(f"/reservations/of-{number}/output_block", json={}).raise_for_status()
            client.delete(f"/reservations/of-{number}").raise_for_status()
        metrics = exposition.parse(client.get("/metrics").text)
    assert metrics['kvd_decision_log_lines_total{outcome="accepted"}'] == 3 * REQUESTS
    assert server.stop() == 0  # writes the waiting lines
    text = path.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["event"] for row in rows] == ["choice", "prefill_complete", "end"] * REQUESTS
    assert str(FIRST_TOKEN) not in text
    ids = {row["worker_id"] for row in rows if row["event"] == "choice"}
    assert ids <= {1, 2, 3}

    assert main(["replay", str(path), "--rounds", "1", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"- requests: {REQUESTS} in " in printed
    assert "- engines: 3 with 2,000 blocks of 512 tokens" in printed
    assert "1,624 prompt tokens each; one cache without bounds would have had 57.8%" in printed
    assert [line.split(" | ")[0] for line in printed.splitlines() if line.startswith("| ")] == [
        "| policy",
        "| as recorded",
        "| dynamo",
        "| kvd",
        "| by dynamo",
        "| kvd",
    ]


def test_a_log_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    binds = [f"--{face}-bind=off" for face in ("indexer", "slot-tracker", "conductor")]
    binds.append(f"--selection-bind=127.0.0.1:{find_free_port()}")
    path = tmp_path / "none" / "log"
    ended = run_command("serve", *binds, "--decision-log", str(path))
    assert ended.code == 78
    assert f"decision_log: cannot write {path}: No such file or directory" in ended.stderr
