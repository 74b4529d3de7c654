"""The replay of bench/policies.py: what its engines do by example, and what always holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from bench.replay.core_router import CoreRouter
from bench.replay.engine import Engine
from bench.replay.simulation import Fleet, Outcome, replay
from bench.replay.summary import measure, row
from bench.replay.trace import BLOCK_SIZE, Prompts, Request, read, reusable_share
from kvd_core.selector.settings import KV, LEAST_LOADED, RANDOM, ROUND_ROBIN, Settings

MODES = {"round-robin": ROUND_ROBIN, "random": RANDOM, "least-loaded": LEAST_LOADED, "kv": KV}
PROMPTS = Prompts()
CHUNK_S = 0.2048  # of a step that prefills
STEP_S = 0.0151  # of one request, without its blocks
BLOCK_S = 0.00001
FLEET = Fleet(engines=3, capacity=60)


class HonestRouter(CoreRouter):
    """Says if the index is ever not what the engines hold."""

    def route(self, request: Request, held: Sequence[int], now: float) -> int:
        chosen = super().route(request, held, now)
        seen = [row.device_blocks for row in self.pool.explain(self.settings)]
        assert seen == list(held)
        return chosen


def conversations(folder: Path) -> Path:
    """Eight conversations in turns: each prompt is the one before and two blocks more."""
    path = folder / "trace.jsonl"
    lines = []
    for turn in range(6):
        for conversation in range(8):
            own = [1 + conversation * 100 + number for number in range(2 * turn + 2)]
            request = {
                "timestamp": turn * 3000 + conversation * 250,
                "input_length": (1 + len(own)) * BLOCK_SIZE + 7,
                "output_length": 5 + conversation,
                "hash_ids": [0, *own, 5000 + turn * 100 + conversation],  # the last is not full
            }
            lines.append(json.dumps(request) + "\n")
    path.write_text("".join(lines))
    return path


def requests(*sizes: tuple[float, int, int, tuple[int, ...]]) -> list[Request]:
    """Requests of these arrivals, prompt and output tokens, and full blocks."""
    return [Request(f"r{number}", *size) for number, size in enumerate(sizes)]


def run(asked: Sequence[Request], mode: str = "kv", fleet: Fleet = FLEET, seed: int = 1) -> Outcome:
    router = HonestRouter(fleet.engines, Settings(mode=MODES[mode]), PROMPTS, seed)
    outcome = replay(asked, fleet, router)
    assert router.ledger.stats()["requests"] == 0
    router.ledger.verify()
    router.index.verify()
    held = router.index.stats()["held"]["device"]
    assert held == sum(len(engine.cache.pins) for engine in outcome.engines)
    return outcome


@pytest.mark.parametrize("mode", MODES)
def test_all_requests_are_served(mode: str, tmp_path: Path) -> None:
    asked = read(conversations(tmp_path))
    outcome = run(asked, mode)
    assert [job.request for job in outcome.jobs] == asked
    for job in outcome.jobs:
        assert job.request.arrival_s <= job.prefill_starts_s < job.first_token_s < job.done_s
        assert 0 <= job.hit_tokens < job.request.input_tokens
        assert job.hit_tokens % BLOCK_SIZE == 0
    computed = sum(job.request.input_tokens - job.hit_tokens for job in outcome.jobs)
    assert computed == sum(engine.prefilled_tokens for engine in outcome.engines)
    assert measure(outcome).hit_share <= reusable_share(asked)
    end = max(job.done_s for job in outcome.jobs)
    for engine in outcome.engines:
        check_idle(engine)
        assert engine.busy_s <= end


def check_idle(engine: Engine) -> None:
    assert engine.live == 0 and engine.cache.anonymous == 0
    assert set(engine.cache.pins.values()) <= {0}
    assert set(engine.cache.idle) == set(engine.cache.pins)
    assert len(engine.cache.pins) <= engine.cache.capacity


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    asked = read(conversations(tmp_path))
    figures = {seed: measure(run(asked, "random", seed=seed)) for seed in (1, 2)}
    assert measure(run(asked, "random", seed=1)) == figures[1] != figures[2]
    assert row("random", [figures[1]]).startswith(f"| random | {figures[1].hit_share:.1%} |")


def test_the_cache_decides_where_prefixes_are_shared(tmp_path: Path) -> None:
    asked = read(conversations(tmp_path))
    shares = {mode: measure(run(asked, mode)).hit_share for mode in MODES}
    assert shares["kv"] > 1.2 * max(shares[mode] for mode in MODES if mode != "kv")


def test_followed_choices_are_judged() -> None:
    router = CoreRouter(2, Settings(), PROMPTS, 1)
    first, second = requests((0.0, 1030, 5, (1, 2)), (0.0, 1030, 5, (3, 4)))
    assert router.follow(first, 0, 0.0)
    assert not router.follow(second, 0, 0.0)
    assert router.ledger.load(0).requests == 2


# ---- one engine, by hand


@cache
def chain(blocks: int, of: int = 0) -> tuple[int, ...]:
    return tuple(range(of * 1000, of * 1000 + blocks))


ONE = Fleet(engines=1, capacity=60)


def test_a_prompt_alone() -> None:
    (job,) = run(requests((1.0, 10_000, 11, chain(19))), fleet=ONE).jobs
    assert job.prefill_starts_s == 1.0
    assert job.first_token_s == pytest.approx(2.0)
    assert job.done_s == pytest.approx(2.0 + 10 * (STEP_S + 20 * BLOCK_S))


def test_a_second_prompt_waits_and_shares_the_steps() -> None:
    asked = requests((0.0, 10_000, 1000, chain(19)), (0.0, 10_000, 1, chain(19, 1)))
    first, second = run(asked, fleet=ONE).jobs
    assert second.prefill_starts_s == first.first_token_s == pytest.approx(1.0)
    # The first has 22 blocks, the second 20. Both go on in the same steps.
    chunks = 1.0 / CHUNK_S
    assert second.first_token_s == second.done_s
    assert second.done_s == pytest.approx(2.0 + chunks * (STEP_S + 42 * BLOCK_S))
    left = 999 - chunks
    assert first.done_s == pytest.approx(second.done_s + left * (STEP_S + 22 * BLOCK_S))


def test_what_is_cached_is_not_computed_again() -> None:
    blocks = chain(10)
    asked = requests((0.0, 5120, 1, blocks), (5.0, 5120, 1, blocks), (9.0, 2000, 1, blocks[:3]))
    jobs = run(asked, fleet=ONE).jobs
    # A prompt that is cached whole has its last block computed, for the output of its last token.
    assert [job.hit_tokens for job in jobs] == [0, 9 * BLOCK_SIZE, 3 * BLOCK_SIZE]
    assert jobs[1].first_token_s == pytest.approx(5.0 + BLOCK_SIZE / 10_000)


def test_the_least_recently_used_leaf_is_evicted() -> None:
    small = Fleet(engines=1, capacity=30)
    asked = requests(
        (0.0, 5130, 1, chain(10)),
        (10.0, 5130, 1, chain(10, 1)),
        (20.0, 5130, 1, chain(10)),  # used again
        (30.0, 8200, 1, chain(16, 2)),  # takes 17 blocks, 7 more than there are
    )
    cache_ = run(asked, fleet=small).engines[0].cache
    assert cache_.held(chain(10)) == 10
    assert cache_.held(chain(10, 1)) == 3
    assert cache_.held(chain(16, 2)) == 16


def test_who_finds_no_room_waits_for_it() -> None:
    small = Fleet(engines=1, capacity=30)
    asked = requests((0.0, 10_000, 500, chain(19)), (0.0, 10_000, 1, chain(19, 1)))
    first, second = run(asked, fleet=small).jobs
    assert second.prefill_starts_s == first.done_s
    with pytest.raises(ValueError, match="needs more blocks than an engine has: 31"):
        run(requests((0.0, 15_600, 1, chain(30))), fleet=small)


def test_arrivals_can_be_compressed(tmp_path: Path) -> None:
    path = conversations(tmp_path)
    assert [request.arrival_s for request in read(path, 3)] == [0.0, 0.25, 0.5]
    assert [request.arrival_s for request in read(path, 3, speed=2.0)] == [0.0, 0.125, 0.25]
