"""The selection service and its core beside a live Dynamo: the same fleets, bookings and prompts.

KVD_LIVE_CASES sets the number of prompts.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvd_core.selector.settings import Settings
from tests.support.chances import assert_drawn
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment
from tests.support.twins import Service, Setup, Twin

CASES = int(os.environ.get("KVD_LIVE_CASES", "2100"))
QUESTIONS = 60  # per fleet
DRAWS = 700
LOGGED_COST = re.compile(r"Selected worker .*\blogit=(\S+)")
ANSI = re.compile(r"\x1b\[[0-9;]*m")

SETUPS = {
    "defaults": Setup({}),
    "weight": Setup(
        {
            "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "2.3",
            "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT": "0.6",
            "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT": "0.3",
        },
        Settings(overlap_weight=2.3, host_credit=0.6, disk_credit=0.3),
        (4, 16),
    ),
    "load only": Setup(
        {"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "0"}, Settings(overlap_weight=0), (4, 5, 16)
    ),
    "device credit": Setup(
        {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0.7"},
        Settings(device_credit=0.7),
        override={"overlap_score_credit": 0.7},
    ),
    "credit decay": Setup(
        {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": "1.7"},
        Settings(credit_decay=1.7),
    ),
    "all credits, decay, queue": Setup(
        {
            "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "1.3",
            "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": "0.35",
            "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "2.3",
            "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT": "0.6",
            "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT": "0.3",
            "DYN_ROUTER_QUEUE_THRESHOLD": "0.5",
        },
        Settings(
            device_credit=1.3,
            credit_decay=0.35,
            overlap_weight=2.3,
            host_credit=0.6,
            disk_credit=0.3,
            queue_threshold=0.5,
        ),
        (4, 10, 14),
    ),
    "no prefill": Setup(
        {"DYN_ROUTER_TRACK_PREFILL_TOKENS": "false"}, Settings(track_prefill=False)
    ),
    "decode stage": Setup(
        {
            "DYN_ROUTER_TRACK_PREFILL_TOKENS": "false",
            "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "0",
        },
        Settings(track_prefill=False, overlap_weight=0),
    ),
    "decode busy": Setup(
        {"DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD": "0.5"},
        Settings(decode_busy_threshold=0.5),
    ),
    "queue": Setup(
        {"DYN_ROUTER_QUEUE_THRESHOLD": "0.5"}, Settings(queue_threshold=0.5), (4, 5, 16)
    ),
}

Start = Callable[[dict[str, str]], tuple[Server, Service, Service]]


@pytest.fixture
def services(tmp_path: Path, kvd_process: Callable[..., Server]) -> Iterator[Start]:
    """A function that starts Dynamo and kvd with this environment.

    It returns Dynamo's process, and a connection to each of the two.
    """
    servers: list[Server] = []
    with ExitStack() as stack:

        def start(environ: dict[str, str]) -> tuple[Server, Service, Service]:
            port = find_free_port()
            # With more threads Dynamo loses blocks of engines that share tokens.
            command = [os.environ["KVD_PEER_PYTHON"], "-m", "dynamo.select_service"]
            command += ["--threads", "1", "--port", str(port)]
            theirs = clean_environment(DYN_LOG="info", **environ)
            servers.append(Server(command, tmp_path, port, theirs))
            ours = {"DYN_ROUTER_QUEUE_THRESHOLD": "None", **environ}
            both = servers[-1], kvd_process(face="select-service", environ=ours)
            both[0].wait_healthy()
            first, second = (stack.enter_context(Service(server.port)) for server in both)
            return both[0], first, second

        yield start
    for server in servers:
        server.stop(signal.SIGKILL)


@pytest.mark.peer
@pytest.mark.parametrize("name", SETUPS)
def test_dynamo_chooses_the_same(name: str, services: Start) -> None:
    setup = SETUPS[name]
    server, dynamo, kvd = services(setup.environ)
    rng = random.Random(f"{name} {CASES}")
    costs: list[float] = []
    asked = unique = 0
    for fleet in range(max(1, CASES // len(SETUPS) // QUESTIONS)):
        twin = Twin(dynamo, kvd, rng, f"model-{fleet}", setup)
        try:
            twin.wait_seen()
            for _ in range(QUESTIONS):
                twin.change_loads()
                row = twin.ask()
                asked += 1
                if row is not None:
                    costs.append(row.cost)
        finally:
            twin.close()
        unique += twin.unique
    server.wait_until(lambda: len(logged_costs(server)) == len(costs), "done with its log")
    assert logged_costs(server) == costs
    assert unique > asked / 3  # ties compare little


def logged_costs(server: Server) -> list[float]:
    text = ANSI.sub("", server.stdout + server.stderr)
    return [float(cost) for cost in LOGGED_COST.findall(text)]


@pytest.mark.peer
@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_both_draw_by_the_formula(temperature: float, services: Start) -> None:
    _, dynamo, kvd = services({"DYN_ROUTER_TEMPERATURE": str(temperature)})
    twin = Twin(dynamo, kvd, random.Random(f"chances {temperature}"), "model", Setup({}), 3)
    try:
        twin.wait_seen()
        while len(twin.live) < 3 * len(twin.ranks):
            twin.change_loads()
        members = {"model_name": "model", **twin.lookup_members(twin.prompt())}
        costs = {row[:2]: row.cost for row in twin.pool.explain(Settings())}
        lowest, highest = min(costs.values()), max(costs.values())
        assert lowest < highest
        odds = {
            place: math.exp(-(cost - lowest) / (highest - lowest) / temperature)
            for place, cost in costs.items()
        }
        chances = {place: each / sum(odds.values()) for place, each in odds.items()}
        for service in (dynamo, kvd):
            answers = (service.ask("POST", "/select", members) for _ in range(DRAWS))
            drawn = Counter((answer["worker_id"], answer["dp_rank"]) for answer in answers)
            assert_drawn(drawn, chances)
    finally:
        twin.close()
