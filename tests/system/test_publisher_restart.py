"""A daemon killed and started again: the conductor's publishers, and whether they are exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.conductor_model import sequence_hashes
from tests.support.engines import BLOCK_SIZE, Engine
from tests.support.kvds import PATIENCE_S, Kvd, engine_of, wait

PROMPT = list(range(3 * BLOCK_SIZE))
HASHES = sequence_hashes(PROMPT, BLOCK_SIZE, 1337)


@pytest.fixture
def kvd(tmp_path: Path) -> Iterator[Kvd]:
    made = Kvd(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


def register(kvd: Kvd, engine: Engine, **members: Any) -> None:
    body = {
        "endpoint": engine.endpoint,
        "type": "vLLM",
        "modelname": "m",
        "block_size": BLOCK_SIZE,
        "instance_id": "a",
        "dp_rank": 0,
    }
    if engine.replay_endpoint is not None:
        body["replay_endpoint"] = engine.replay_endpoint
    assert kvd.post("conductor", "/register", body | members).status_code == 200
    assert engine.subscribed.wait(PATIENCE_S)


def service(kvd: Kvd, instance: str = "a") -> dict[str, Any]:
    rows: list[dict[str, Any]] = kvd.get("conductor", "/services")["services"]
    (row,) = [row for row in rows if row["InstanceID"] == instance]
    return row


def matched(kvd: Kvd, tokens: list[int], instance: str = "a") -> int:
    body = {"model": "m", "block_size": BLOCK_SIZE, "token_ids": tokens}
    rows = kvd.post("conductor", "/query", body).json()["default"]
    return int(rows[instance]["longest_matched"])


def kept(kvd: Kvd) -> None:
    """Waits until a snapshot has the present state."""
    name = 'kvd_state_files_total{content="index"}'
    written = kvd.metric(name)
    wait(lambda: kvd.metric(name) > written + 1)


def standard(kind: str, number: int, **members: Any) -> dict[str, Any]:
    return {"event_type": kind, "event_id": number, "model_name": "m", **members}


def prompt(number: int) -> list[int]:
    return [number] * BLOCK_SIZE * 2


def test_a_publisher_goes_on_where_it_was(kvd: Kvd) -> None:
    """Its replay reaches back to the last applied batch, but not to the first."""
    with engine_of(buffered=6) as engine:
        register(kvd, engine)
        for number in range(10):
            engine.store(prompt(number))
        wait(lambda: service(kvd)["stream"] == "exact" and matched(kvd, prompt(9)))
        kept(kvd)
        kvd.kill()
        engine.store(prompt(77))
        engine.evict(next(iter(engine.cache)))  # the first block of the first prompt
        kvd.start()
        wait(lambda: service(kvd)["stream"] == "exact")
        assert matched(kvd, prompt(5)) == matched(kvd, prompt(77)) == 2 * BLOCK_SIZE
        assert matched(kvd, prompt(0)) == 0
        kvd.stop()


def test_what_a_store_holds_and_what_waits_comes_back(kvd: Kvd) -> None:
    """Without a replay server nothing proves that the store is the same, so it is not exact."""
    with engine_of(replays=False) as store, engine_of() as engine:
        register(kvd, store, type="Mooncake", instance_id="pool")
        register(kvd, engine)
        store.publish([])  # stores number their messages from 1
        named = {"block_size": BLOCK_SIZE, "seq_hashes": HASHES, "medium": "CXL"}
        store.publish([standard("stored", 5, backend_id="disk-7", **named)])
        wait(lambda: service(kvd, "pool")["waiting"] == len(HASHES))
        kept(kvd)
        kvd.kill()
        kvd.start()
        wait(lambda: service(kvd, "pool")["waiting"] == len(HASHES))
        assert service(kvd, "pool")["stream"] in ("recovering", "degraded")
        assert matched(kvd, PROMPT, "pool") == len(PROMPT)  # the prompt explains the hashes
        engine.store(PROMPT)
        wait(lambda: matched(kvd, PROMPT) == len(PROMPT))
        again = standard("removed", 5, backend_id="disk-7", **named)
        store.publish([again])  # stale: event 5 was applied before
        wait(lambda: service(kvd, "pool")["stale"] == 1)
        assert matched(kvd, PROMPT, "pool") == len(PROMPT)
        store.publish([again | {"event_id": 6}])
        wait(lambda: matched(kvd, PROMPT, "pool") == 0)
        kvd.stop()


def test_the_blocks_of_another_process_are_dropped(kvd: Kvd) -> None:
    with engine_of() as engine:
        register(kvd, engine)
        for number in range(5):
            engine.store(prompt(number))
        wait(lambda: matched(kvd, prompt(4)))
        kept(kvd)
        kvd.kill()
        engine.restart()
        for number in range(100, 105):
            engine.store(prompt(number))
        kvd.start()
        wait(lambda: service(kvd)["stream"] == "exact" and matched(kvd, prompt(104)))
        assert [matched(kvd, prompt(number)) for number in range(5)] == [0] * 5
        kvd.stop()


def test_a_publisher_at_another_address_begins_anew(kvd: Kvd, tmp_path: Path) -> None:
    with engine_of() as engine, engine_of() as other:
        register(kvd, engine)
        engine.store(prompt(0))
        wait(lambda: matched(kvd, prompt(0)))
        kept(kvd)
        kvd.stop()
        file = tmp_path / "fleet.toml"
        file.write_text(
            f'[[conductor]]\ninstance_id = "a"\ntype = "vLLM"\nmodelname = "m"\ndp_rank = 0\n'
            f'block_size = {BLOCK_SIZE}\nendpoint = "{other.endpoint}"\n'
        )
        kvd.flags.append(f"--fleet-file={file}")
        kvd.start()
        assert matched(kvd, prompt(0)) == 0
        assert other.subscribed.wait(PATIENCE_S)
        other.store(prompt(1))
        wait(lambda: matched(kvd, prompt(1)))
        kvd.stop()
