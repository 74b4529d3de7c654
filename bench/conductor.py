"""Compares the conductor's and the indexer's costs in an index, in one process.

    python bench/conductor.py

Prints CPU us of a query on both faces at equal sizes; CPU ns and bytes of a block that a worker
stores, with and without sequence hashes, and of one that a publisher stores; and how long making
the sequence hashes of a large partition takes. Figures are the lowest of several rounds, taken in
turns. Then it prints how long batches hold the loop, and the cost of a hash that no rank of its
instance has announced.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgpack

from kvd.faces.conductor import routes as conductor
from kvd.faces.indexer import routes as indexer
from kvd.http.messages import Request
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.publishers import Publishers
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.wire.envelope import StreamIdentity
from kvd.wire.standard_events import StandardEventStream
from kvd_core.base.hashing import local_hashes, sequence_hashes
from kvd_core.conductor.conductor import Conductor
from kvd_core.index.prefix_index import UNFINISHED, IngestStats, PrefixIndex

BLOCK_SIZE = 16
KEY = PartitionKey("m", "default")
SIZES = ((8, 32, True), (8, 512, True), (64, 128, True), (64, 128, False), (512, 128, True))
ROUNDS = 11
MANY = 1_000_000  # blocks of a partition that gets its first question by hash


def compact(members: dict[str, Any]) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


def lowest(calls: int, *timed: Callable[[], object]) -> list[float]:
    """Returns the CPU seconds of one call of each function, in its fastest round."""
    best = [float("inf")] * len(timed)
    for _ in range(ROUNDS):
        for at, call in enumerate(timed):
            start = time.process_time()
            for _ in range(calls):
                call()
            best[at] = min(best[at], (time.process_time() - start) / calls)
    return best


def queries(workers: int, blocks: int, shared: bool) -> None:
    tokens = [random.randrange(100_000) for _ in range(blocks * BLOCK_SIZE)]
    ours, theirs = State(), State()
    for worker in range(workers):
        n = blocks if shared else worker * blocks // workers + 1
        hashes, content = list(range(1, n + 1)), tokens[: n * BLOCK_SIZE]
        event = ["BlockStored", hashes, None, content, BLOCK_SIZE, None, "GPU"]
        theirs.add_rank(RankKey(KEY, worker, 0), BLOCK_SIZE).apply(msgpack.packb([0, [event]]))
        source = ours.add_source(KEY, BLOCK_SIZE, f"i-{worker}", "", "", 0, store=False)
        source.store(0, 0, "GPU", hashes, content, None, 0)
    routes = indexer.routes(theirs, cast(Registry, None), Peers(), indexer.dumps_bound(1))
    one = {each.path: each.handler for each in routes}
    routes = conductor.routes(ours, cast(Publishers, None))
    other = {each.path: each.handler for each in routes}
    locals_ = local_hashes(tokens, BLOCK_SIZE)
    model, size = {"model_name": "m"}, {"model": "m", "block_size": BLOCK_SIZE}
    bodies = {
        "/query": (compact(model | {"token_ids": tokens}), compact(size | {"token_ids": tokens})),
        "/query_by_hash": (
            compact(model | {"block_hashes": locals_}),
            compact(size | {"seq_hashes": sequence_hashes(locals_)}),
        ),
    }
    for path, (first, second) in bodies.items():
        calls = max(20, 400_000 // (blocks * BLOCK_SIZE + workers * 20))
        asked = [Request("POST", path, b"", [], body) for body in (first, second)]
        took = lowest(calls, partial(one[path], asked[0]), partial(other[path], asked[1]))
        held = "all" if shared else "growing"
        us = [f"{seconds * 1e6:8.1f}" for seconds in took]
        ratio = f"{took[1] / took[0]:.2f}"
        print(f"| {path} | {workers} | {blocks} | {held} | {us[0]} | {us[1]} | {ratio} |")


def ingest() -> None:
    events: list[list[Any]] = [
        [
            "BlockStored",
            list(range(1 + at * 64, 65 + at * 64)),
            None if at % 4 == 0 else at * 64,
            [random.randrange(50_000) for _ in range(64 * BLOCK_SIZE)],
            BLOCK_SIZE,
            None,
            "GPU",
        ]
        for at in range(400)
    ]
    payloads = [msgpack.packb([0, [event]]) for event in events]
    blocks = 400 * 64
    sizes: dict[str, int] = {}

    def fill(name: str, kept: bool) -> None:
        index = PrefixIndex(BLOCK_SIZE, IngestStats())
        part = Conductor(index)
        if kept:
            part.sequence(0)
        stream = index.add_worker(1).stream(0)
        for payload in payloads:
            stream.apply(payload)
        sizes[name] = index.stats()["bytes"] + part.stats()["bytes"]

    def publish() -> None:
        index = PrefixIndex(BLOCK_SIZE, IngestStats())
        source = Conductor(index).add_source("a", "", "", 0, False)
        publication = StandardEventStream(
            source, StreamIdentity("m", "default", BLOCK_SIZE, "", "", 0, False)
        )
        for payload in payloads:
            publication.apply(payload)
        sizes["publisher"] = index.stats()["bytes"]

    def waiting() -> None:
        index = PrefixIndex(BLOCK_SIZE, IngestStats())
        part = Conductor(index)
        source = part.add_source("a", "", "", 0, True)
        for event in events:
            source.store_named(0, None, "CPU", event[1], 0)
        sizes["waiting"] = index.stats()["bytes"] + part.stats()["bytes"]

    timed = {
        "worker": lambda: fill("worker", False),
        "worker, sequence hashes kept": lambda: fill("worker, sequence hashes kept", True),
        "publisher": publish,
        "waiting": waiting,
    }
    for name, took in zip(timed, lowest(1, *timed.values()), strict=True):
        print(f"| {name} | {took / blocks * 1e9:.0f} | {sizes[name] / blocks:.1f} |")


def opening() -> None:
    """Prints how long the first question by hash to a large partition waits."""
    index = PrefixIndex(BLOCK_SIZE, IngestStats())
    worker = index.add_worker(1)
    for first in range(0, MANY, 1000):
        worker.store(0, range(first, first + 1000), [random.getrandbits(64) for _ in range(1000)])
    part = Conductor(index)
    took: list[float] = []
    done = False
    while not done:
        start = time.process_time()
        done = part.sequence(conductor.SEQUENCE_STEPS if took else 0)
        took.append(time.process_time() - start)
    ms = [seconds * 1e3 for seconds in (sum(took), took[0], max(took[1:]))]
    print(f"| {MANY:,} | {ms[0]:.0f} | {ms[1]:.1f} | {len(took) - 1} | {ms[2]:.2f} |")


def hashes(n: int) -> list[int]:
    return [random.getrandbits(63) | 1 << 62 for _ in range(n)]


def long_batches() -> dict[str, bytes]:
    """Returns batches that are nearly as long as allowed."""
    blocks = 17_000
    prompt = [random.randrange(50_000) for _ in range(16 * blocks * BLOCK_SIZE)]
    placed = {"event_type": "stored", "parent_hash": None, "base_block_idx": 0}
    short = 64 * BLOCK_SIZE
    many = [
        placed | {"seq_hashes": hashes(64), "token_ids": prompt[at : at + short]}
        for at in range(0, 1000 * short, short)
    ]
    named = {"event_type": "stored", "seq_hashes": hashes(115_000)}
    one = placed | {"seq_hashes": hashes(blocks), "token_ids": prompt[: blocks * BLOCK_SIZE]}
    by_name = ["BlockStored", hashes(1_600_000), None, [], BLOCK_SIZE, None, "CPU"]
    stored = ["BlockStored", hashes(16 * blocks), None, prompt, BLOCK_SIZE, None, "GPU"]
    text = {"event_type": "stored", "seq_hashes": hashes(12_000)}
    batches = {
        "standard, one event without tokens": [0, [named]],
        "standard, one event with tokens": [0, [one]],
        "standard, events of 64 blocks": [0, many],
        "standard, and empty maps": [0, [{"event_type": "cleared"}, *[{}] * 4_000_000]],
        "an engine's, one event without tokens": [0, [by_name]],
        "an engine's, one event with tokens": [0, [stored]],
    }
    packed = {name: msgpack.packb(batch) for name, batch in batches.items()}
    return packed | {"JSON, one event without tokens": compact({"events": [text]})}


def slices() -> None:
    for name, payload in long_batches().items():
        index = PrefixIndex(BLOCK_SIZE, IngestStats())
        source = Conductor(index).add_source("a", "", "", 0, False)
        stream = StandardEventStream(
            source, StreamIdentity("m", "default", BLOCK_SIZE, "", "", 0, False)
        )
        took: list[float] = []
        shown = UNFINISHED
        while shown == UNFINISHED:
            start = time.process_time()
            shown = stream.advance() if took else stream.apply(payload)
            took.append(time.process_time() - start)
        ms = [f"{1e3 * seconds:.1f}" for seconds in (sorted(took)[-len(took) // 20], max(took))]
        size = f"{len(payload) / 2**20:.1f}"
        print(f"| {name} | {size} | {sum(took) * 1e3:.0f} | {len(took)} | {ms[0]} | {ms[1]} |")


def unknown() -> None:
    """Prints the cost of a store's hashes without tokens that no rank has announced."""
    for ranks in (10, 100, 1000):
        index = PrefixIndex(BLOCK_SIZE, IngestStats())
        part = Conductor(index)
        tokens = [random.randrange(50_000) for _ in range(64 * BLOCK_SIZE)]
        for rank in range(ranks):
            engine = part.add_source(f"i-{rank}", "", "", 0, False)
            engine.store(0, 0, "GPU", hashes(64), tokens, None, 0)
        pool = part.add_source("pool", "", "", 0, True)
        names = hashes(2000)
        start = time.process_time()
        pool.store_named(0, None, "CPU", names, 0)
        print(f"| {ranks} | {(time.process_time() - start) / len(names) * 1e6:.1f} |")


def main() -> None:
    random.seed(1)
    print("| route | instances | blocks | held by | indexer, us | conductor, us | ratio |")
    print("|---|---|---|---|---|---|---|")
    for workers, blocks, shared in SIZES:
        queries(workers, blocks, shared)
    print("\n| blocks told by | ns a block | bytes a block |\n|---|---|---|")
    ingest()
    print("\n| blocks | all, ms | at once, ms | slices | the longest, ms |\n|---|---|---|---|---|")
    opening()
    print("\n| batch | MiB | CPU ms | slices | 19 of 20 below, ms | longest, ms |")
    print("|---|---|---|---|---|---|")
    slices()
    print("\n| ranks | us a hash that none has announced |\n|---|---|")
    unknown()


if __name__ == "__main__":
    main()
