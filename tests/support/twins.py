"""One fleet three times: in Dynamo's selection service, in kvd's, and in the selector's core.

Events reach both services over ZMQ and the core's index as the same bytes; bookings go over HTTP
and into the core's ledger. The core says what every choice costs.
"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvd_core.base.hashing import local_hashes, sequence_hashes
from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from kvd_core.ledger.ledger import ADDED, Ledger
from kvd_core.selector.selector import BUSY, Candidate, Explained, Pool
from kvd_core.selector.settings import Settings
from tests.conformance.engine import SUBSCRIPTION_WITHIN_S, Engine, pack
from tests.conformance.failure import wait_until
from tests.support.hashes import packed

SEEN_WITHIN_S = 10.0
MEDIA = (None, "CPU", "DISK", "EXTERNAL")
FRACTIONS = (None, None, 0.0, 0.25, 0.5, 1.0)  # sums of these are exact, in any order
COMPARED = (
    "worker_id",
    "dp_rank",
    "overlap",
    "effective_prefill_tokens",
    "potential_decode_blocks",
    "decode_busy",  # not in every answer
)

Json = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """The configuration of all three. Weights that are no binary fractions need even block sizes:
    Dynamo adds the tiers in no fixed order, so rounding could decide an exact half."""

    environ: dict[str, str]
    settings: Settings = field(default_factory=Settings)
    block_sizes: tuple[int, ...] = (4, 5, 16)
    override: Json = field(default_factory=dict)  # of requests to kvd, in place of variables


class Service:
    """A kept connection to a selection service; httpx would take most of the tests' time."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, method: str, path: str, body: Json | None = None) -> Any:
        """Returns the members of an answer, which must be a success."""
        # Dynamo does not read a body that it does not need, and may then close the connection.
        headers = {} if body is None else {"Content-Type": "application/json"}
        self._http.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._http.getresponse()
        answer = response.read()
        assert 200 <= response.status < 300, (method, path, body, response.status, answer)
        return json.loads(answer)


class Twin:
    """One model's fleet; `dynamo` and `kvd` are the services."""

    def __init__(
        self,
        dynamo: Service,
        kvd: Service,
        rng: random.Random,
        model: str,
        setup: Setup,
        workers: int | None = None,
    ) -> None:
        self.dynamo = dynamo
        self.kvd = kvd
        self.rng = rng
        self.model = model
        self.setup = setup
        self.block_size = rng.choice(setup.block_sizes)
        self.index = PrefixIndex(self.block_size, IngestStats())
        self.ledger = Ledger()
        self.engines: list[Engine] = []
        self.names: dict[int, int] = {}  # sequence hash -> what all engines call the block
        self.families = [self._tokens(self.block_size * 24) for _ in range(3)]
        self.live: list[str] = []
        self.booked = 0
        self.unique = 0  # questions with a single cheapest rank
        self.ranks = [rank for i in range(workers or rng.randint(1, 4)) for rank in self._worker(i)]
        self.pool = Pool(self.index, self.ledger, self.block_size, self.ranks)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2**32) for _ in range(count)]

    def both(self, method: str, path: str, **members: Any) -> tuple[Any, Any]:
        """Asks both services the same; without members there is no body."""
        body = {"model_name": self.model, **members} if members else None
        return self.dynamo.ask(method, path, body), self.kvd.ask(method, path, body)

    def _worker(self, number: int) -> list[Candidate]:
        worker_id = self.rng.getrandbits(40)
        first, count = self.rng.choice((0, 0, 5)), self.rng.randint(1, 3)
        batch, total = self.rng.choice((100, 2000)), self.rng.choice((None, 30, 200))
        engines = {}
        for dp_rank in range(first, first + count):
            engines[dp_rank] = Engine(f"{number}/{dp_rank}")
            engines[dp_rank].bind()
        self.engines += engines.values()
        for answer in self.both(
            "POST",
            "/workers",
            worker_id=worker_id,
            endpoint=f"http://worker-{number}:8000",
            block_size=self.block_size,
            data_parallel_start_rank=first,
            data_parallel_size=count,
            max_num_batched_tokens=batch,
            total_kv_blocks=total,
            kv_events_endpoints={rank: engine.endpoint("pub") for rank, engine in engines.items()},
        ):
            assert answer["lifecycle"] == "schedulable", answer
        worker = self.index.add_worker(worker_id)
        ranks = []
        for dp_rank, engine in engines.items():
            worker.register(dp_rank)
            stream = worker.stream(dp_rank)
            engine.wait_subscribed(2, SUBSCRIPTION_WITHIN_S)
            for seq, batch_ in enumerate(self._batches()):
                stream.apply(pack(batch_))
                engine.publish({"seq": seq, "batch": batch_})
            booked = self.ledger.add_rank(worker_id, dp_rank)
            ranks.append(Candidate(worker_id, dp_rank, worker, booked, batch, total))
        return ranks

    def _batches(self) -> Iterator[list[Any]]:
        """Yields batches that store a prefix of some families, tier after tier."""
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
            self.both("DELETE", f"/workers/{worker_id}")
        for engine in self.engines:
            engine.unbind()

    def prompt(self) -> list[int]:
        """Returns a family up to some token, and something new behind it."""
        family = self.rng.choice(self.families)
        known = family[: self.rng.randrange(len(family) + 1)]
        return known + self._tokens(self.rng.choice((0, 1, 7, 40)))

    def lookup_members(self, tokens: list[int]) -> Json:
        """Matches a prompt in the core; returns the members that ask a service for the same."""
        local = local_hashes(tokens, self.block_size)
        rolling = sequence_hashes(local)
        self.pool.match(packed(local), packed(rolling), len(tokens))
        if self.rng.random() < 0.3 or not tokens:
            return {"token_ids": tokens}
        return {
            "block_hashes": signed(local),
            "sequence_hashes": signed(rolling),
            "isl_tokens": len(tokens),
        }

    def wait_seen(self) -> None:
        """Waits until both services have all blocks of all families."""
        for family in self.families:
            members = self.lookup_members(family)
            wait_until(lambda m=members: self._compare_overlaps(m), SEEN_WITHIN_S)  # type: ignore[misc]

    def _compare_overlaps(self, members: Json) -> str | None:
        ours = json.loads(self.pool.render_overlaps())
        theirs = [each["workers"] for each in self.both("POST", "/overlap_scores", **members)]
        return None if theirs == [ours, ours] else f"{theirs} is not {ours}"

    # ---- what runs

    def change_loads(self) -> None:
        kinds = self._book, self._book, self._complete, self._free, self._output
        for _ in range(self.rng.randrange(5)):
            self.rng.choice(kinds)()

    def new_name(self) -> str:
        self.booked += 1
        return f"{self.model}-{self.booked}"

    def _book(self) -> None:
        tokens = self.prompt()
        rolling = sequence_hashes(local_hashes(tokens, self.block_size))
        effective = self.rng.choice((0, len(tokens), self.rng.randrange(len(tokens) + 1)))
        self.book(self.rng.choice(self.ranks), rolling, len(tokens), effective)

    def book(self, rank: Candidate, rolling: list[int], isl_tokens: int, effective: int) -> None:
        name = self.new_name()
        place = {"worker_id": rank.worker_id, "dp_rank": rank.dp_rank}
        prompt = {"sequence_hashes": signed(rolling), "isl_tokens": isl_tokens}
        tokens = {"effective_prefill_tokens": effective}
        self.both("POST", "/reservations", selection_id=name, **place, **prompt, **tokens)
        self.booked_in_core(name, rank, rolling, effective)

    def booked_in_core(self, name: str, rank: Candidate, rolling: list[int], tokens: int) -> None:
        assert self.ledger.add(name, rank.ledger_rank, packed(rolling), tokens, 0.0) == ADDED
        self.live.append(name)

    def _complete(self) -> None:
        if self.live:
            name = self.rng.choice(self.live)
            self.both("POST", f"/reservations/{name}/prefill_complete")
            assert self.ledger.prefill_complete(name)

    def _output(self) -> None:
        if self.live:
            name, fraction = self.rng.choice(self.live), self.rng.choice(FRACTIONS)
            for _ in range(self.rng.randint(1, 3)):
                self.both("POST", f"/reservations/{name}/output_block", decay_fraction=fraction)
                assert self.ledger.output_block(name, fraction)

    def _free(self) -> None:
        if self.live:
            name = self.live.pop(self.rng.randrange(len(self.live)))
            self.both("DELETE", f"/reservations/{name}")
            assert self.ledger.free(name)

    # ---- questions

    def ask(self) -> Explained | None:
        """Asks all three about a prompt; returns the core's row of the chosen rank, if any."""
        tokens = self.prompt()
        members = self.lookup_members(tokens)
        self._compare_loads(members)
        ranks = self.rng.sample(self.ranks, self.rng.randint(1, len(self.ranks)))
        allowed = sorted({rank.worker_id for rank in ranks})
        settings, override = self._settings()
        mask = self.pool.mask(allowed)
        if self.pool.choose(settings, mask, 0) == BUSY:
            return None  # both would hold it, which is not the selector's part
        members |= {"allowed_worker_ids": allowed, "router_config_override": override}
        rows = [row for row in self.pool.explain(settings, mask) if row.eligible]
        lowest = min(row.cost for row in rows)
        cheapest = [row for row in rows if row.cost == lowest]
        self.unique += len(cheapest) == 1
        chosen = self._chosen(tokens, members, settings, mask, len(cheapest) == 1)
        assert chosen[:2] in [row[:2] for row in cheapest], (chosen, rows)
        return chosen

    def _settings(self) -> tuple[Settings, Json]:
        """Returns the settings of this question, and its override of the configured ones."""
        if self.rng.random() < 0.8:
            return self.setup.settings, {}
        tracks = self.rng.random() < 0.5
        return self.setup.settings.replace(track_prefill=tracks), {"track_prefill_tokens": tracks}

    def _chosen(
        self, tokens: list[int], members: Json, settings: Settings, mask: bytes, only_one: bool
    ) -> Explained:
        """Has both choose, and perhaps book; returns the chosen rank.

        kvd must choose as Dynamo does if `only_one` rank is the cheapest; else it is pinned to it.
        """
        reserves, name = self.rng.random() < 0.3, self.new_name()
        path = "/select_and_reserve" if reserves else "/select"
        ids = {"selection_id": name, "reservation_id": name} if reserves else {}
        body = {"model_name": self.model, **members, **ids}
        theirs = self.dynamo.ask("POST", path, body)
        at = self.pool.find(theirs["worker_id"], theirs["dp_rank"])
        assert at is not None, theirs
        rank = self.pool.candidates[at]
        override = {**self.setup.override, **members["router_config_override"]}
        if not only_one:  # kvd may take any of them, so pin this one, even if it is busy
            body |= {"pinned_worker": {"worker_id": rank.worker_id, "dp_rank": rank.dp_rank}}
            override |= {"router_mode": "direct"}
        body |= {"router_config_override": override}
        ours = self.kvd.ask("POST", path, body)
        expected = json.loads(b"{" + self.pool.render_choice(at, settings) + b"}")
        expected |= {"worker_id": rank.worker_id, "dp_rank": rank.dp_rank}
        for answer in (theirs, ours):
            compared = {member: answer[member] for member in COMPARED if member in answer}
            assert compared == expected, answer
        row = self.pool.explained(at, settings, mask)
        if reserves:
            rolling = sequence_hashes(local_hashes(tokens, self.block_size))
            counted = row.effective_prefill_tokens if settings.members["track_prefill"] else 0
            self.booked_in_core(name, rank, rolling, counted)
        return row

    def _compare_loads(self, members: Json) -> None:
        ours = json.loads(self.pool.render_loads(self.setup.settings))
        for rows in self.both("POST", "/potential_loads", **members):
            rows.sort(key=lambda row: (row["worker_id"], row["dp_rank"]))
            assert rows == ours


def signed(hashes: list[int]) -> list[int]:
    return [value - 2**64 if value >= 2**63 else value for value in hashes]
