"""Workers that a daemon is given at its start: replays, and the selection service's catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.engine import Engine
from tests.conformance.failure import show, wait_until
from tests.support import http_client
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.running import running, running_kvd

WITHIN_S = 20.0
TOKENS = list(range(8))


def batch(seq: int, tokens: list[int], **more: Any) -> dict[str, Any]:
    stored = ["BlockStored", [seq + 1], None, tokens, 4, None]
    return {"seq": seq, "batch": [0.0, [stored], 0], **more}


@pytest.mark.parametrize("face", ["serve", "select-service"])
def test_a_worker_of_the_command_line_is_replayed_and_selected(tmp_path: Path, face: str) -> None:
    engine = Engine("e")
    engine.bind(replay=True)
    where = f"{engine.endpoint('pub')};{engine.endpoint('replay')};http://w:8000"
    flags = [f"--workers=1={where}", "--block-size=4", "--model-name=m"]
    port, ports = find_free_port(), [find_free_port() for _ in range(3)]
    if face == "serve":
        others = zip(("indexer", "slot-tracker", "conductor"), ports, strict=True)
        flags += [f"--{name}-bind=127.0.0.1:{each}" for name, each in others]
        started = running(tmp_path, port, "serve", f"--selection-bind=127.0.0.1:{port}", *flags)
    else:
        started = running_kvd(tmp_path, *flags, face=face)
    try:
        with (
            started as server,
            Client(server.base_url) as client,
        ):
            engine.wait_subscribed(1, WITHIN_S)
            engine.publish(batch(0, TOKENS[:4], drop=True))  # only a replay brings it
            engine.publish(batch(1, TOKENS[4:]))
            (row,) = client.get("/workers").json()
            assert (row["worker_id"], row["lifecycle"]) == (1, "schedulable")
            assert row["replay_endpoint"] == engine.endpoint("replay")

            def is_exact() -> str | None:
                (row,) = client.get("/workers").json()
                rank = row["listeners"]["0"]
                return None if (rank["stream"], rank.get("last_seq")) == ("exact", 1) else show(row)

            wait_until(is_exact, WITHIN_S)
            body = {"model_name": "m", "token_ids": TOKENS[:4]}
            selected = client.post("/select", json=body).json()
            assert (selected["worker_id"], selected["endpoint"]) == (1, "http://w:8000")
            if face == "serve":
                url = f"http://127.0.0.1:{ports[0]}/query"
                scores = http_client.post(url, json=body).json()["scores"]
                assert scores == {"1": {"0": 4}}
    finally:
        engine.unbind()
