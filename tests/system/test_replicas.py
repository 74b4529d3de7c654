"""Replicas as processes: one takes the other's state and both follow the same engines.

In tests marked `peer`, a live Dynamo is one of the two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.conformance.engine import Engine
from tests.support import http_client
from tests.support.dumps import Row, rows_of
from tests.support.processes import Server

AT_ONCE = {"KVD_RECOVERY_DELAY_S": "0"}
BLOCK = 4  # tokens
MODEL = "org/model:v1"
Start = Callable[..., Server]


@contextmanager
def engines(count: int) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        made = [Engine(f"e{number}") for number in range(count)]
        for engine in made:
            engine.bind()
            stack.callback(engine.unbind)
        yield made


def post(server: Server, path: str, **members: object) -> httpx.Response:
    return http_client.post(server.base_url + path, json=members)


def get(server: Server, path: str) -> Any:
    return http_client.get(server.base_url + path).json()


def register(server: Server, instance_id: int, engine: Engine, model: str = MODEL) -> None:
    members = {"instance_id": instance_id, "model_name": model, "block_size": BLOCK}
    answer = post(server, "/register", endpoint=engine.endpoint("pub"), **members)
    assert answer.status_code == 201, answer.text


def rows(server: Server, model: str = MODEL) -> list[Row]:
    return rows_of(get(server, "/dump").get(f"{model}:default", {"events": []})["events"])


def stored(path: list[int], start: int = 0, medium: str = "GPU") -> dict[str, object]:
    """Returns an event that stores blocks of `path` from `start` on; block n has four tokens n."""

    def name(length: int) -> int:
        return hash(tuple(path[:length])) & (2**63 - 1)

    return {
        "type": "BlockStored",
        "block_hashes": [name(length + 1) for length in range(start, len(path))],
        "parent_block_hash": name(start) if start else None,
        "token_ids": [block for block in path[start:] for _ in range(BLOCK)],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


class Traffic:
    """Random prompts of several engines, which share prefixes and grow step by step."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._paths: dict[str, list[list[int]]] = {}
        self._sequence: dict[str, int] = {}

    def step(self, engine: Engine) -> None:
        """Publishes one batch: a new prompt, or some blocks below a known one, on some tier."""
        rng, known = self._rng, self._paths.setdefault(engine.name, [])
        base = rng.choice(known) if known and rng.random() < 0.7 else []
        path = base + [rng.randrange(3) for _ in range(rng.choice((1, 2, 6)))]
        events = [stored(path, len(base))]
        if rng.random() < 0.3:
            events.append(stored(path, len(base), rng.choice(("CPU", "DISK"))))
        known.append(path)
        number = self._sequence.get(engine.name, 0)
        self._sequence[engine.name] = number + 1
        engine.publish({"seq": number, "batch": [1.5, events, None]})


def all_equal(servers: list[Server], blocks: int = 1) -> Callable[[], bool]:
    def check() -> bool:
        first, *others = (rows(server) for server in servers)
        return len(first) >= blocks and all(other == first for other in others)

    return check


def test_a_second_replica_takes_the_state_and_follows(kvd_process: Start) -> None:
    traffic = Traffic(1)
    with engines(2) as made:
        first = kvd_process()
        for number, engine in enumerate(made):
            register(first, number, engine)
            for _ in range(20):
                traffic.step(engine)
        first.wait_until(lambda: len(rows(first)) > 20, "filled")
        # The second replica knows the first engine from its start, and the second one never.
        flags = ("--block-size", str(BLOCK), "--model-name", MODEL)
        workers = f"0={made[0].endpoint('pub')}"
        second = kvd_process(
            *flags, "--workers", workers, "--peers", f"http://x.invalid,{first.base_url}/",
            environ=AT_ONCE,
        )  # fmt: skip
        second.wait_until(all_equal([first, second]), "equal")
        made[0].wait_subscribed(2, 10)
        for _ in range(20):
            traffic.step(made[0])
        second.wait_until(all_equal([first, second], blocks=21), "following")
        prompt = {"token_ids": [0] * 16 + [1] * 16, "model_name": MODEL}
        answers = [post(server, "/query", **prompt).json() for server in (first, second)]
        assert answers[0] == answers[1]
        assert get(second, "/peers") == ["http://x.invalid", f"{first.base_url}/"]
        assert [worker["instance_id"] for worker in get(second, "/workers")] == [0]
        gone = {"instance_id": 1, "model_name": MODEL}
        assert post(second, "/unregister", **gone).status_code == 200
        assert post(second, "/unregister", **gone).status_code == 404
        assert {row[0] for row in rows(second)} == {"0"}
        assert "event=recovered" in second.stderr


def test_a_peer_is_asked_once_all_engines_are_connected(kvd_process: Start) -> None:
    """The delay is only the longest wait, as events before the subscriptions are in the dump."""
    traffic = Traffic(2)
    environ = {"KVD_RECOVERY_DELAY_S": "600", "DYN_ROUTER_MIN_INITIAL_WORKERS": "2"}
    with engines(2) as made:
        first = kvd_process()
        for number, engine in enumerate(made):
            register(first, number, engine)
            traffic.step(engine)
        first.wait_until(lambda: len({row[0] for row in rows(first)}) == 2, "filled")
        second = kvd_process("--peers", first.base_url, environ=environ)
        register(second, 0, made[0])
        made[0].wait_subscribed(2, 10)
        made[1].unbind()
        register(second, 1, made[1])
        second.wait_until(lambda: "Connection refused" in str(get(second, "/workers")), "refused")
        assert rows(second) == []
        made[1].bind()
        second.wait_until(all_equal([first, second]), "recovered")


def test_the_gate_opens_when_enough_workers_register(kvd_process: Start) -> None:
    with engines(2) as made:
        server = kvd_process(environ={"DYN_ROUTER_MIN_INITIAL_WORKERS": "2"})
        register(server, 1, made[0])
        Traffic(1).step(made[0])  # waits for kvd's subscription
        assert [worker["status"] for worker in get(server, "/workers")] == ["pending"]
        assert rows(server) == []
        register(server, 2, made[1])
        server.wait_until(lambda: rows(server) != [], "applying what had queued")
        assert "event=ready" in server.stderr


# ---- with the live peer


@pytest.mark.peer
@pytest.mark.parametrize("seed", range(3))
def test_dumps_of_the_same_streams_are_equal_and_recover_each_other(
    seed: int, kvd_process: Start, peer_process: Start
) -> None:
    traffic = Traffic(seed)
    kvd, peer = kvd_process(), peer_process()
    with engines(3) as made:
        for number, engine in enumerate(made):
            register(kvd, number, engine)
            register(peer, number, engine)
            engine.wait_subscribed(2, 10)
        for _ in range(40):
            for engine in made:
                traffic.step(engine)
        kvd.wait_until(all_equal([kvd, peer], blocks=60), "equal to the peer")
        from_peer = kvd_process("--peers", peer.base_url, environ=AT_ONCE)
        from_peer.wait_until(all_equal([kvd, from_peer]), "recovered from the peer")
        # The peer cuts the model's name at its first colon, but has all of the blocks.
        from_kvd = peer_process("--peers", kvd.base_url)
        key, entry = next(iter(get(from_kvd, "/dump").items()))
        assert key == f"{MODEL}:default"
        assert rows_of(entry["events"]) == rows(kvd)
        rng = random.Random(seed)
        for _ in range(50):
            prompt = [block for _ in range(12) for block in [rng.randrange(3)] * BLOCK]
            answers = [scores(server, prompt) for server in (kvd, peer, from_peer)]
            assert answers[0] == answers[1] == answers[2]


def scores(server: Server, prompt: list[int]) -> dict[str, Any]:
    """Returns the credits of an answer, without rows of zeros, which each server may leave out."""
    answer = post(server, "/query", token_ids=prompt, model_name=MODEL).json()
    return {
        name: {key: value for key, value in answer["instances"][name].items() if key != "dp"}
        for name in answer["instances"]
        if answer["instances"][name]["longest_matched"]
    }
