"""The selector beside a live Dynamo: the same fleets, events, bookings and prompts.

Events reach Dynamo over ZMQ and the selector's index as the same bytes; bookings go through
/reservations and into the selector's ledger. KVD_LIVE_CASES sets how many prompts are asked for.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Server, clean_environment, find_free_port

from kvd_core.hashing import local_hashes, sequence_hashes
from kvd_core.index import IngestCounters, PrefixIndex
from kvd_core.ledger import ADDED, Ledger
from kvd_core.selector import BUSY, Candidate, Explained, Pool
from kvd_core.selector_settings import Settings
from tests.conformance.engine import Engine, pack
from tests.conformance.failure import wait_until

CASES = int(os.environ.get("KVD_LIVE_CASES", "300"))
QUESTIONS = 20  # of a fleet
SEEN_WITHIN_S = 10.0
MEDIA = (None, "CPU", "DISK", "EXTERNAL")
LOGGED_COST = re.compile(r"Selected worker .*\blogit=(\S+)")
ANSI = re.compile(r"\x1b\[[0-9;]*m")

Json = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """How both are configured. Weights that are no binary fractions need even block sizes: Dynamo
    adds the tiers in no fixed order, which could decide an exact half."""

    environ: dict[str, str]
    settings: Settings = field(default_factory=Settings)
    block_sizes: tuple[int, ...] = (4, 5, 16)


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
        {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0.7"}, Settings(device_credit=0.7)
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
    "queue": Setup(
        {"DYN_ROUTER_QUEUE_THRESHOLD": "0.5"}, Settings(queue_threshold=0.5), (4, 5, 16)
    ),
}


@pytest.fixture
def selection_peer(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], Server]]:
    """A function that starts Dynamo's selection service with an environment."""
    servers: list[Server] = []

    def start(environ: dict[str, str]) -> Server:
        port = find_free_port()
        # With more threads it loses blocks of engines that share tokens.
        command = [os.environ["KVD_PEER_PYTHON"], "-m", "dynamo.select_service", "--threads", "1"]
        environ = clean_environment(DYN_LOG="info", **environ)
        servers.append(Server([*command, "--port", str(port)], tmp_path, port, environ))
        servers[-1].wait_healthy()
        return servers[-1]

    yield start
    for server in servers:
        server.stop(signal.SIGKILL)


class Twin:
    """One model's fleet, in Dynamo and in the selector."""

    def __init__(self, http: httpx.Client, rng: random.Random, model: str, setup: Setup) -> None:
        self.http = http
        self.rng = rng
        self.model = model
        self.settings = setup.settings
        self.block_size = rng.choice(setup.block_sizes)
        self.index = PrefixIndex(self.block_size, IngestCounters())
        self.ledger = Ledger()
        self.engines: list[Engine] = []
        self.names: dict[int, int] = {}  # sequence hash -> what all engines call the block
        self.families = [self._tokens(self.block_size * 24) for _ in range(3)]
        self.live: list[str] = []
        self.booked = 0
        self.ranks = [rank for i in range(rng.randint(1, 4)) for rank in self._worker(i)]
        self.pool = Pool(self.index, self.ledger, self.block_size, self.ranks)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2**32) for _ in range(count)]

    def post(self, path: str, **members: Any) -> httpx.Response:
        return self.http.post(path, json={"model_name": self.model, **members})

    def _worker(self, number: int) -> list[Candidate]:
        worker_id = self.rng.getrandbits(40)
        first, count = self.rng.choice((0, 0, 5)), self.rng.randint(1, 3)
        batch = self.rng.choice((100, 2000))
        engines = {}
        for dp_rank in range(first, first + count):
            engines[dp_rank] = Engine(f"{number}/{dp_rank}")
            engines[dp_rank].bind()
        self.engines += engines.values()
        response = self.post(
            "/workers",
            worker_id=worker_id,
            endpoint=f"http://worker-{number}:8000",
            block_size=self.block_size,
            data_parallel_start_rank=first,
            data_parallel_size=count,
            max_num_batched_tokens=batch,
            kv_events_endpoints={rank: engine.endpoint("pub") for rank, engine in engines.items()},
        )
        assert response.json()["lifecycle"] == "schedulable", response.text
        worker = self.index.add_worker(worker_id)
        ranks = []
        for dp_rank, engine in engines.items():
            worker.register(dp_rank)
            stream = worker.stream(dp_rank)
            for seq, batch_ in enumerate(self._batches()):
                stream.apply(pack(batch_))
                engine.publish({"seq": seq, "batch": batch_})
            booked = self.ledger.add_rank(worker_id, dp_rank)
            ranks.append(Candidate(worker_id, dp_rank, worker, booked, batch))
        return ranks

    def _batches(self) -> Iterator[list[Any]]:
        """A prefix of some families, tier after tier."""
        for family in self.families:
            if self.rng.random() < 0.3:
                continue
            hashes = sequence_hashes(local_hashes(family, self.block_size))
            start = 0
            for medium in MEDIA:
                count = self.rng.choice((0, 1, 2, 3, 6))
                blocks = [self._name(value) for value in hashes[start : start + count]]
                parent = self._name(hashes[start - 1]) if start else None
                end = start + len(blocks)
                tokens = family[start * self.block_size : end * self.block_size]
                stored = ["BlockStored", blocks, parent, tokens, self.block_size, None, medium]
                if blocks:
                    yield [1.0, [stored], None]
                start = end

    def _name(self, sequence_hash: int) -> int:
        return self.names.setdefault(sequence_hash, len(self.names) + 1)

    def close(self) -> None:
        for worker_id in {rank.worker_id for rank in self.ranks}:
            assert self.http.delete(f"/workers/{worker_id}").status_code == 200
        for engine in self.engines:
            engine.unbind()

    def prompt(self) -> list[int]:
        """A family up to some token, and something new behind it."""
        family = self.rng.choice(self.families)
        known = family[: self.rng.randrange(len(family) + 1)]
        return known + self._tokens(self.rng.choice((0, 1, 7, 40)))

    def look(self, tokens: list[int]) -> Json:
        """Asks the selector; returns the members that ask Dynamo the same."""
        local = local_hashes(tokens, self.block_size)
        rolling = sequence_hashes(local)
        self.pool.look(packed(local), packed(rolling), len(tokens))
        if self.rng.random() < 0.3 or not tokens:
            return {"token_ids": tokens}
        return {
            "block_hashes": signed(local),
            "sequence_hashes": signed(rolling),
            "isl_tokens": len(tokens),
        }

    def change_loads(self) -> None:
        for _ in range(self.rng.randrange(4)):
            self.rng.choice((self._book, self._book, self._complete, self._free))()

    def _book(self) -> None:
        rank = self.rng.choice(self.ranks)
        tokens = self.prompt()
        rolling = sequence_hashes(local_hashes(tokens, self.block_size))
        effective = self.rng.choice((0, len(tokens), self.rng.randrange(len(tokens) + 1)))
        name = f"{self.model}-{self.booked}"
        self.booked += 1
        response = self.post(
            "/reservations",
            selection_id=name,
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            sequence_hashes=signed(rolling),
            isl_tokens=len(tokens),
            effective_prefill_tokens=effective,
        )
        assert response.status_code == 201, response.text
        added = self.ledger.add(name, rank.ledger_rank, packed(rolling), effective, 0.0)
        assert added == ADDED
        self.live.append(name)

    def _complete(self) -> None:
        if self.live:
            name = self.rng.choice(self.live)
            # Without a body: Dynamo does not read it, and may close the connection because of it.
            response = self.http.post(f"/reservations/{name}/prefill_complete")
            assert response.status_code == 200
            assert self.ledger.prefill_complete(name)

    def _free(self) -> None:
        if self.live:
            name = self.live.pop(self.rng.randrange(len(self.live)))
            assert self.http.delete(f"/reservations/{name}").status_code == 200
            assert self.ledger.free(name)

    def wait_seen(self) -> None:
        """Waits until Dynamo has all blocks of all families."""
        for family in self.families:
            members = self.look(family)
            wait_until(lambda m=members: self._compare_overlaps(m), SEEN_WITHIN_S)  # type: ignore[misc]

    def _compare_overlaps(self, members: Json) -> str | None:
        theirs = self.post("/overlap_scores", **members).json()["workers"]
        ours = json.loads(self.pool.render_overlaps())
        return None if theirs == ours else f"{theirs} is not {ours}"

    def ask(self) -> Explained | None:
        """One prompt to both. Returns what the selector knows of the chosen rank, None without."""
        members = self.look(self.prompt())
        self._compare_loads(members)
        ranks = self.rng.sample(self.ranks, self.rng.randint(1, len(self.ranks)))
        allowed = sorted({rank.worker_id for rank in ranks})
        mask = self.pool.mask(allowed)
        if self.pool.choose(self.settings, mask, 0) == BUSY:
            return None  # Dynamo would hold it; what it does then is not the selector's
        answer = self.post("/select", **members, allowed_worker_ids=allowed).json()
        chosen = self.pool.find(answer["worker_id"], answer["dp_rank"])
        assert chosen is not None
        costs = [
            (row.cost, row.worker_id, row.dp_rank)
            for row in self.pool.explain(self.settings, mask)
            if row.eligible
        ]
        row = self.pool.explained(chosen, self.settings)
        assert (row.cost, row.worker_id, row.dp_rank) in costs
        assert row.cost == min(costs)[0], (answer, sorted(costs))
        ours = json.loads(b"{" + self.pool.render_choice(chosen, self.settings) + b"}")
        assert {name: answer[name] for name in ours} == ours
        return row

    def _compare_loads(self, members: Json) -> None:
        theirs = self.post("/potential_loads", **members).json()
        theirs.sort(key=lambda row: (row["worker_id"], row["dp_rank"]))
        assert theirs == json.loads(self.pool.render_loads(self.settings))


def packed(hashes: list[int]) -> bytes:
    return array("Q", hashes).tobytes()


def signed(hashes: list[int]) -> list[int]:
    return [value - 2**64 if value >= 2**63 else value for value in hashes]


@pytest.mark.peer
@pytest.mark.parametrize("name", SETUPS)
def test_dynamo_chooses_the_same(
    name: str, selection_peer: Callable[[dict[str, str]], Server]
) -> None:
    setup = SETUPS[name]
    server = selection_peer(setup.environ)
    rng = random.Random(f"{name} {CASES}")
    costs: list[float] = []
    with httpx.Client(base_url=server.base_url, trust_env=False, timeout=20) as http:
        for fleet in range(max(1, CASES // len(SETUPS) // QUESTIONS)):
            twin = Twin(http, rng, f"model-{fleet}", setup)
            try:
                twin.wait_seen()
                for _ in range(QUESTIONS):
                    twin.change_loads()
                    row = twin.ask()
                    if row is not None:
                        costs.append(row.cost)
            finally:
                twin.close()
    server.wait_until(lambda: len(logged_costs(server)) == len(costs), "done with its log")
    assert logged_costs(server) == costs


def logged_costs(server: Server) -> list[float]:
    text = ANSI.sub("", server.stdout + server.stderr)
    return [float(cost) for cost in LOGGED_COST.findall(text)]
