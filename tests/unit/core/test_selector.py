"""The selector by example and against its model; "observed" figures are those of Dynamo 1.6.1."""

from __future__ import annotations

import json
import math
import random
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.selection import weighing
from kvd.selection.policies import RouterPolicy
from kvd_core.base.hashing import eagle_hashes, local_hashes, sequence_hashes
from kvd_core.index.prefix_index import IngestStats, PrefixIndex, Worker
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.ledger import ADDED, EXISTS, Ledger
from kvd_core.selector.selector import (
    BUSY,
    MAX_ISL_TOKENS,
    NONE,
    OVERLOADED,
    Candidate,
    Chance,
    KeptStates,
    Pool,
)
from kvd_core.selector.settings import (
    DIRECT,
    KV,
    LEAST_LOADED,
    MAX_WEIGHT,
    RANDOM,
    ROUND_ROBIN,
    Settings,
)
from tests.models.selector_model import (
    ModelPool,
    ModelPrompt,
    ModelRank,
    ModelSettings,
    compact,
    effective_tokens,
    is_busy,
    is_overloaded,
    potential_decode_blocks,
    terms,
    weighted_terms,
)
from tests.models.selector_model import cached_tokens as model_cached_tokens
from tests.support.budget import scaled
from tests.support.chances import assert_drawn
from tests.support.hashes import packed

PROMPT = [2**64 - 1, *range(1, 64)]  # local hashes, which differ from its sequence hashes
ROLLING = sequence_hashes(PROMPT)
DEFAULTS = Settings()
DRAWS = 20_000
CHI_SQUARE_001 = 13.82  # at two degrees of freedom exceeded with probability 0.001


@dataclass
class RankPlan:
    """How many blocks of PROMPT a rank caches on each tier, and the requests that it works on."""

    tiers: tuple[int, int, int, int] = (0, 0, 0, 0)
    requests: list[tuple[int, int, int, bool]] = field(default_factory=list)
    max_num_batched_tokens: int = 0
    total_kv_blocks: int | None = None


class Fleet:
    """Ranks by (worker, dp rank), built by their plans, and their model."""

    def __init__(self, plans: dict[tuple[int, int], RankPlan], block_size: int = 16) -> None:
        self.plans = plans
        self.block_size = block_size
        self.index = PrefixIndex(block_size, IngestStats())
        self.ledger = Ledger()
        self.workers: dict[int, Worker] = {}
        candidates = [self._candidate(place, plan) for place, plan in plans.items()]
        self.pool = Pool(self.index, self.ledger, block_size, candidates)

    def _candidate(self, place: tuple[int, int], plan: RankPlan) -> Candidate:
        worker_id, dp_rank = place
        if worker_id not in self.workers:
            self.workers[worker_id] = self.index.add_worker(worker_id)
        worker = self.workers[worker_id]
        worker.register(dp_rank)
        start = 0
        for tier, count in enumerate(plan.tiers):
            names = PROMPT[start : start + count]
            if names:
                worker.store(dp_rank, names, names, PROMPT[start - 1] if start else None, tier)
            start += count
        rank = self.ledger.add_rank(worker_id, dp_rank)
        for number, (shared, own, tokens, done) in enumerate(plan.requests):
            name = f"{worker_id}/{dp_rank}/{number}"
            booked = ROLLING[:shared] + [rank * 1000 + number * 100 + i for i in range(own)]
            assert self.ledger.add(name, rank, packed(booked), tokens, 0.0) == ADDED
            if done:
                self.ledger.prefill_complete(name)
        return Candidate(
            worker_id, dp_rank, worker, rank, plan.max_num_batched_tokens, plan.total_kv_blocks
        )

    def match(self, blocks: int, isl_tokens: int | None = None, novel: int = 0) -> ModelPool:
        """Asks for the first blocks of PROMPT, followed by `novel` blocks that no rank has."""
        tail = [10**9 + i for i in range(novel)]
        isl = (blocks + novel) * self.block_size if isl_tokens is None else isl_tokens
        self.pool.match(packed(PROMPT[:blocks] + tail), packed(ROLLING[:blocks] + tail), isl)
        prompt = ModelPrompt(isl, blocks + novel, self.block_size)
        ranks = [self._expected(place, blocks) for place in sorted(self.plans)]
        return ModelPool(ranks, prompt)

    def _expected(self, place: tuple[int, int], blocks: int) -> ModelRank:
        plan = self.plans[place]
        device = min(plan.tiers[0], blocks)
        host = min(sum(plan.tiers[:2]), blocks)
        disk = min(sum(plan.tiers), blocks)
        longest = max((shared for shared, *_ in plan.requests), default=0)
        return ModelRank(
            *place,
            device,
            host - device,
            disk - host,
            min(longest, blocks),
            sum(tokens for _, _, tokens, done in plan.requests if not done),
            longest + sum(own for _, own, _, _ in plan.requests),
            len(plan.requests),
            plan.max_num_batched_tokens,
            plan.total_kv_blocks,
            sum(done or tokens == 0 for _, _, tokens, done in plan.requests),
        )


def one(*tiers: int, block_size: int = 16) -> Fleet:
    return Fleet({(1, 0): RankPlan((*tiers, 0, 0, 0)[:4])}, block_size)  # type: ignore[arg-type]


def loaded(*decode_blocks: int) -> Fleet:
    """Returns workers 1, 2, ... each with a request of so many blocks whose prefill is done."""
    plans = {
        (i, 0): RankPlan(requests=[(0, blocks, 0, True)] if blocks else [])
        for i, blocks in enumerate(decode_blocks, 1)
    }
    return Fleet(plans)


# ---- examples


def test_observed_cost_of_mixed_tiers() -> None:
    fleet = one(2, 1, 2)
    fleet.match(6)
    row = fleet.pool.explained(0, DEFAULTS)
    assert (row.raw_prefill_blocks, row.credit_blocks) == (6.0, 3.25)
    assert (row.prefill_cost, row.decode_cost, row.cost) == (2.75, 6.0, 8.75)


def test_observed_cost_without_prefill_tracking() -> None:
    fleet = one(2, 1, 2)
    fleet.match(6)
    decode = DEFAULTS.replace(track_prefill=False)
    assert fleet.pool.explained(0, decode).cost == 2.75
    # For the decode phase the weight is 0, and the load alone decides.
    assert fleet.pool.explained(0, decode.replace(overlap_weight=0)).cost == 6.0
    assert fleet.pool.explained(0, decode.replace(device_credit=0)).cost == 6.0


def test_credits_never_make_a_cost_negative() -> None:
    fleet = one(6)
    fleet.match(6)
    settings_ = DEFAULTS.replace(track_active_blocks=False, device_credit=3)
    assert fleet.pool.explained(0, settings_).cost == 0
    assert fleet.pool.explained(0, settings_.replace(track_prefill=False)).cost == 0


def test_observed_rounding_of_cached_tokens() -> None:
    fleet = one(1, 1, 1, block_size=5)
    fleet.match(2)
    assert fleet.pool.effective_prefill_tokens(0, DEFAULTS) == 1  # 10 - round(8.75)
    fleet.match(3)
    assert fleet.pool.effective_prefill_tokens(0, DEFAULTS) == 5
    fleet.match(3, isl_tokens=3)
    assert fleet.pool.effective_prefill_tokens(0, DEFAULTS) == 0


def test_halves_are_rounded_away_from_zero() -> None:
    fleet = one(0, 2, block_size=5)
    fleet.match(2)
    assert fleet.pool.explained(0, DEFAULTS).cached_tokens == 8  # of 7.5
    assert fleet.pool.explained(0, DEFAULTS.replace(host_credit=0.25)).cached_tokens == 3


def test_documented_selection_example() -> None:
    """With both tier credits at 1 the result is 384 tokens; the default credits make it 416."""
    fleet = Fleet({(1, 0): RankPlan((4, 2, 2, 0)), (1, 1): RankPlan((2, 0, 0, 0))})
    fleet.match(8, isl_tokens=512)
    whole = DEFAULTS.replace(host_credit=1, disk_credit=1)
    members = json.loads(b"{" + fleet.pool.render_choice(0, whole) + b"}")
    assert members == {
        "overlap": {
            "longest_matched": 128,
            "gpu": 64,
            "dp": {"0": 64, "1": 32},
            "cpu": 96,
            "disk": 128,
        },
        "effective_prefill_tokens": 384,
        "potential_decode_blocks": 32,
    }
    assert fleet.pool.effective_prefill_tokens(0, DEFAULTS) == 416


def test_guide_example() -> None:
    fleet = Fleet(
        {
            (1, 0): RankPlan((2, 0, 0, 0), [(0, 5, 0, True)]),
            (2, 0): RankPlan((5, 0, 0, 0)),
            (3, 0): RankPlan((8, 0, 0, 0), [(0, 4, 0, True)]),
        }
    )
    fleet.pool.match(packed(PROMPT[:10]), packed(ROLLING[:5]), 160)
    rows = fleet.pool.explain(DEFAULTS)
    assert [(row.prefill_cost, row.decode_cost) for row in rows] == [(8, 10), (5, 5), (2, 9)]
    assert [row.cost for row in rows] == [18, 10, 11]
    assert fleet.pool.choose(DEFAULTS, None, 0) == 1


def test_credit_changes_the_choice_and_not_the_tokens() -> None:
    fleet = one(4)
    fleet.match(6)
    half = DEFAULTS.replace(device_credit=0.5)
    assert fleet.pool.explained(0, half).cost == 4 + 6
    assert fleet.pool.effective_prefill_tokens(0, half) == 32
    assert fleet.pool.effective_prefill_tokens(0, DEFAULTS.replace(overlap_weight=0)) == 32


def test_observed_decay_of_the_device_credit() -> None:
    """The credit falls with what a rank prefills beyond the eligible rank that prefills least."""
    plans = {
        (worker_id, 0): RankPlan(tiers, [(0, 1, tokens, False)])
        for worker_id, tiers, tokens in (
            (1, (0, 0, 0, 0), 41),
            (2, (5, 2, 2, 0), 101),
            (3, (0, 0, 0, 0), 13),
            (4, (0, 0, 0, 0), 160),
        )
    }
    fleet = Fleet(plans)
    fleet.match(9, isl_tokens=150)
    decay = DEFAULTS.replace(credit_decay=0.7)
    for workers, cost in (
        ([1, 2, 3, 4], 20.0773916967509),
        ([1, 2], 19.72710396039604),
        ([2, 4], 18.6875),
        ([2], 18.6875),
    ):
        mask = fleet.pool.mask(workers)
        assert fleet.pool.choose(decay, mask, 0) == 1
        assert fleet.pool.explained(1, decay, mask).cost == cost
    # Without prefill tracking there is no load to decay with.
    for settings_ in (decay.replace(track_prefill=False), DEFAULTS.replace(track_prefill=False)):
        assert fleet.pool.explained(1, settings_).cost == 3.0


def test_decay_sends_prompts_to_idle_ranks() -> None:
    plans = {
        (1, 0): RankPlan((8, 0, 0, 0), [(0, 0, 112, False)]),
        (2, 0): RankPlan((2, 0, 0, 0)),
    }
    fleet = Fleet(plans)
    fleet.match(8)
    assert fleet.pool.choose(DEFAULTS, None, 0) == 1
    assert [row.cost for row in fleet.pool.explain(DEFAULTS)] == [15.0, 14.0]
    generous = DEFAULTS.replace(device_credit=1.5)
    assert fleet.pool.choose(generous, None, 0) == 0
    assert fleet.pool.choose(generous.replace(credit_decay=1), None, 0) == 1


def test_cached_blocks_beyond_the_prompt_count_as_prompt() -> None:
    fleet = one(4)
    fleet.match(4, isl_tokens=10)
    assert fleet.pool.explained(0, DEFAULTS).raw_prefill_blocks == 4.0
    assert fleet.pool.effective_prefill_tokens(0, DEFAULTS) == 0


def test_weight_times_prefill_with_a_partial_block() -> None:
    fleet = one()
    fleet.match(5, isl_tokens=83)
    row = fleet.pool.explained(0, DEFAULTS.replace(overlap_weight=2.5))
    assert row.cost == 17.96875  # observed: the decode term has the full blocks,
    assert fleet.pool.render_choice(0, DEFAULTS).endswith(b',"potential_decode_blocks":6')


def test_blocks_in_use_are_shared() -> None:
    fleet = Fleet({(1, 0): RankPlan(requests=[(3, 2, 160, False)]), (2, 0): RankPlan()})
    fleet.match(5)
    first, second = fleet.pool.explain(DEFAULTS)
    assert (first.live_blocks, first.active_decode_blocks, first.decode_cost) == (3, 5, 7)
    assert (second.live_blocks, second.decode_cost) == (0, 5)
    assert first.active_prefill_tokens == 160
    fleet.ledger.prefill_complete("1/0/0")
    fleet.match(5)
    assert fleet.pool.explained(0, DEFAULTS).active_prefill_tokens == 0


# ---- choosing


def test_least_cost_and_ties() -> None:
    fleet = loaded(0, 7, 0, 0)
    fleet.match(1)
    check_chances(fleet.pool, DEFAULTS, {0: 1 / 3, 2: 1 / 3, 3: 1 / 3})


def test_observed_chances_at_a_temperature() -> None:
    fleet = loaded(1, 11, 31)
    fleet.match(0, isl_tokens=16)
    assert [row.cost for row in fleet.pool.explain(DEFAULTS)] == [2, 12, 32]
    likelihoods = [1, math.exp(-10 / 30 / 0.5), math.exp(-1 / 0.5)]
    chances = [likelihood / sum(likelihoods) for likelihood in likelihoods]
    assert [round(chance, 3) for chance in chances] == [0.607, 0.311, 0.082]
    check_chances(fleet.pool, DEFAULTS.replace(temperature=0.5), dict(enumerate(chances)))


def test_equal_costs_at_a_temperature_are_uniform() -> None:
    fleet = loaded(0, 0, 0)
    fleet.match(1)
    chances = {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}
    check_chances(fleet.pool, DEFAULTS.replace(temperature=0.5), chances)


@pytest.mark.parametrize("seed", range(6))
def test_any_fleet_is_drawn_from_by_the_formula(seed: int) -> None:
    rng = random.Random(seed)
    tiers, requests = (0, 0, 1, 4), (0, 3, 40)
    plans = {
        (worker, rank): RankPlan(
            (rng.choice(tiers), rng.choice(tiers), rng.choice(tiers), 0),
            [(rng.randrange(9), rng.choice(requests), rng.choice((0, 500)), rng.random() < 0.5)],
        )
        for worker in range(rng.randint(2, 5))
        for rank in range(rng.randint(1, 3))
    }
    fleet = Fleet(plans)
    fleet.match(rng.randrange(1, 20))
    temperature = rng.choice((0.1, 0.4, 1.0, 3.0))
    costs = [row.cost for row in fleet.pool.explain(DEFAULTS)]
    assert min(costs) < max(costs)
    spread = max(costs) - min(costs)
    odds = [math.exp(-(cost - min(costs)) / spread / temperature) for cost in costs]
    warm = DEFAULTS.replace(temperature=temperature)
    drawn = Counter(fleet.pool.choose(warm, None, rng.getrandbits(64)) for _ in range(DRAWS))
    assert_drawn(drawn, {i: each / sum(odds) for i, each in enumerate(odds)})


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
@pytest.mark.parametrize("random_", [0, 2**64 - 1])
def test_a_low_temperature_takes_the_lowest(temperature: float, random_: int) -> None:
    fleet = loaded(9, 3, 8)
    fleet.match(1)
    assert fleet.pool.choose(DEFAULTS.replace(temperature=temperature), None, random_) == 1


def check_chances(pool: Pool, settings_: Settings, chances: dict[int, float]) -> None:
    """Checks that candidates are drawn as often as they should be; the seed is fixed."""
    rng = random.Random(7)
    drawn = Counter(pool.choose(settings_, None, rng.getrandbits(64)) for _ in range(DRAWS))
    assert set(drawn) == set(chances)
    statistic = sum((drawn[i] - DRAWS * p) ** 2 / (DRAWS * p) for i, p in chances.items())
    assert statistic < CHI_SQUARE_001, drawn


def test_modes() -> None:
    fleet = loaded(9, 1, 5, 3)
    fleet.match(1)
    turns = DEFAULTS.replace(mode=ROUND_ROBIN)
    assert [fleet.pool.choose(turns, None, 0) for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [fleet.pool.choose(turns, b"\1\0\1\0", 0) for _ in range(3)] == [2, 0, 2]
    other = turns.replace(line=1)
    assert [fleet.pool.choose(other, None, 0) for _ in range(5)] == [0, 1, 2, 3, 0]
    assert fleet.pool.choose(turns, None, 0) == 3
    with pytest.raises(ValueError, match="no such line of turns"):
        turns.replace(line=2)
    any_ = DEFAULTS.replace(mode=RANDOM)
    assert {fleet.pool.choose(any_, None, i << 60) for i in range(16)} == {0, 1, 2, 3}
    fleet.ledger.free("3/0/0")
    fleet.match(1)
    least = DEFAULTS.replace(mode=LEAST_LOADED)
    assert fleet.pool.choose(least, None, 0) == 2
    assert fleet.pool.choose(DEFAULTS, None, 0) == 2
    assert {fleet.pool.choose(least, b"\1\1\0\1", i << 60) for i in range(16)} == {0, 1, 3}


def test_the_last_token_is_computed_with_its_block() -> None:
    plans = {
        (1, 0): RankPlan(tiers=(4, 0, 0)),
        (2, 0): RankPlan(tiers=(2, 1, 1)),
        (3, 0): RankPlan(tiers=(3, 0, 0)),
    }
    fleet = Fleet(plans)
    settings_ = DEFAULTS.replace(last_token=True)
    for isl_tokens, to_compute in ((64, [16, 20, 16]), (65, [1, 17, 17])):
        fleet.match(4, isl_tokens)
        effective = [fleet.pool.effective_prefill_tokens(at, settings_) for at in range(3)]
        assert effective == to_compute
    fleet.match(4)  # cached whole: a rank that has all of it is no better than one without the end
    costs = [row.cost for row in fleet.pool.explain(settings_)]
    assert costs[0] == costs[2] and fleet.pool.explain(DEFAULTS)[0].cost < costs[0]
    fleet.match(0, 0)
    assert fleet.pool.effective_prefill_tokens(0, settings_) == 0


def test_masks() -> None:
    fleet = loaded(0, 5, 9)
    fleet.match(1)
    assert fleet.pool.mask([2, 3, 77]) == b"\0\1\1"
    assert fleet.pool.choose(DEFAULTS, fleet.pool.mask([2, 3]), 0) == 1
    assert fleet.pool.choose(DEFAULTS, fleet.pool.mask([77]), 0) == NONE
    with pytest.raises(ValueError, match="one byte for each"):
        fleet.pool.choose(DEFAULTS, b"\1", 0)
    assert Pool(None, Ledger(), 16).choose(DEFAULTS, None, 0) == NONE


def test_direct() -> None:
    fleet = Fleet({(7, 3): RankPlan(), (1, 0): RankPlan(), (7, 1): RankPlan()})
    assert [each[:2] for each in fleet.pool.candidates] == [(1, 0), (7, 1), (7, 3)]
    assert [fleet.pool.find(*place) for place in ((1, 0), (7, 1), (7, 3))] == [0, 1, 2]
    assert [fleet.pool.find(*place) for place in ((0, 0), (1, 1), (7, 2), (9, 0))] == [None] * 4
    assert fleet.pool.mask([7, 8, 2**64 - 1]) == b"\0\1\1"
    assert fleet.pool.mask([7, 1], 1) == b"\0\1\0"
    assert fleet.pool.mask([7], 2) == b"\0\0\0"


def busy_fleet(*tokens: int, batch: int = 100) -> Fleet:
    plans = {
        (i, 0): RankPlan(requests=[(0, 1, count, False)], max_num_batched_tokens=batch)
        for i, count in enumerate(tokens, 1)
    }
    return Fleet(plans)


def test_observed_edge_of_the_queue_threshold() -> None:
    queueing = DEFAULTS.replace(queue_threshold=1.0)
    fleet = busy_fleet(100)
    fleet.match(1)
    assert fleet.pool.choose(queueing, None, 0) == 0
    fleet = busy_fleet(101)
    fleet.match(1)
    assert fleet.pool.choose(queueing, None, 0) == BUSY
    assert fleet.pool.choose(DEFAULTS, None, 0) == 0
    assert fleet.pool.choose(queueing.replace(queue_threshold=0), None, 0) == BUSY


def test_a_rank_without_a_batch_size_is_never_busy() -> None:
    for batch in (0, 2**64 - 1):
        fleet = busy_fleet(10**6, batch=batch)
        fleet.match(1)
        assert fleet.pool.choose(DEFAULTS.replace(queue_threshold=0.01), None, 0) == 0


def test_observed_choice_of_a_busy_rank_that_costs_less() -> None:
    """The threshold only decides about waiting. Once one rank is free, cost alone decides."""
    fleet = Fleet(
        {
            (1, 0): RankPlan(requests=[(0, 1, 160, False)], max_num_batched_tokens=100),
            (2, 0): RankPlan(requests=[(0, 100, 0, True)], max_num_batched_tokens=100),
        }
    )
    queueing = DEFAULTS.replace(queue_threshold=1.0)
    fleet.match(1)
    assert [row.busy for row in fleet.pool.explain(queueing)] == [True, False]
    assert fleet.pool.choose(queueing, None, 0) == 0
    assert fleet.pool.explained(0, queueing).cost == 13.0
    assert fleet.pool.choose(queueing, fleet.pool.mask([1]), 0) == BUSY


def test_what_has_changed_since_it_was_remembered() -> None:
    fleet = loaded(0, 5, 9)
    assert fleet.pool.changed() is None
    fleet.pool.remember()
    assert fleet.pool.changed() == b"\0\0\0"
    fleet.ledger.free("3/0/0")
    assert fleet.pool.changed() == fleet.pool.changed() == b"\0\0\1"
    fleet.pool.remember()
    assert fleet.pool.changed() == b"\0\0\0"
    empty = Pool(None, Ledger(), 16)
    assert empty.changed() is None
    empty.remember()
    assert empty.changed() == b""


def test_who_waits_is_asked_again_without_a_prompt() -> None:
    fleet = busy_fleet(101, 300)
    queueing = DEFAULTS.replace(queue_threshold=1.0)
    fleet.match(1)
    assert fleet.pool.refusal(queueing, None) == BUSY
    fleet.ledger.prefill_complete("2/0/0")
    assert fleet.pool.refusal(queueing, None) == 0
    assert fleet.pool.refusal(queueing, b"\1\0") == BUSY
    assert fleet.pool.refusal(queueing, b"\0\0") == NONE
    assert fleet.pool.choose(queueing, None, 0) == 1
    assert fleet.pool.least_prefill_tokens(queueing, b"\0\0") == 16


def test_exceeded_thresholds_are_named() -> None:
    fleet = busy_fleet(50, 150)
    fleet.match(1)
    both = DEFAULTS.replace(active_prefill_tokens_threshold=100, queue_threshold=1.0)
    assert [fleet.pool.exceeded(at, both) for at in range(2)] == [
        [],
        ["active_prefill_tokens_threshold", "queue_threshold"],
    ]
    part = DEFAULTS.replace(active_prefill_tokens_threshold_frac=0.4)
    assert fleet.pool.exceeded(0, part) == ["active_prefill_tokens_threshold_frac"]
    full = DEFAULTS.replace(active_decode_blocks_threshold=0.5)
    held = Fleet({(1, 0): RankPlan(requests=[(0, 6, 0, True)], total_kv_blocks=10)})
    held.match(1)
    assert held.pool.exceeded(0, full) == ["active_decode_blocks_threshold"]


def test_a_session_that_must_leave_changes_no_mask() -> None:
    fleet = loaded(5)
    fleet.match(1)
    wanted = bytes([1])
    assert fleet.pool.stay(DEFAULTS.replace(session_bound=0.1), None, wanted) is None
    assert wanted == b"\1" and wanted[0] == 1  # unchanged: Python shares one such object


def test_busy_thresholds_take_ranks_out() -> None:
    plans = {
        (1, 0): RankPlan(requests=[(0, 8, 50, False)], total_kv_blocks=10),
        (2, 0): RankPlan(requests=[(0, 60, 0, True)], total_kv_blocks=100),
        (3, 0): RankPlan(requests=[(0, 99, 500, False)], max_num_batched_tokens=1000),
    }
    fleet = Fleet(plans)
    fleet.match(1)

    def out(**thresholds: float) -> list[bool]:
        rows = fleet.pool.explain(DEFAULTS.replace(**thresholds))
        return [row.overloaded for row in rows]

    assert out() == [False, False, False]
    assert out(active_decode_blocks_threshold=0.7) == [True, False, False]
    assert out(active_decode_blocks_threshold=0.8) == [False, False, False]
    assert out(active_prefill_tokens_threshold=49) == [True, False, True]
    assert out(active_prefill_tokens_threshold=50) == [False, False, True]
    assert out(active_prefill_tokens_threshold_frac=0.4) == [False, False, True]
    assert out(active_prefill_tokens_threshold_frac=0.5) == [False, False, False]
    strict = DEFAULTS.replace(active_prefill_tokens_threshold=0)
    assert fleet.pool.choose(strict, None, 0) == 1
    assert fleet.pool.choose(strict, fleet.pool.mask([1, 3]), 0) == OVERLOADED
    # Only the remaining ranks decide about waiting.
    waiting = strict.replace(queue_threshold=0.0, active_prefill_tokens_threshold=60)
    assert fleet.pool.choose(waiting, fleet.pool.mask([1, 3]), 0) == 0


# ---- policies: the weighted cost

# Two ranks; the second one caches 3 of 6 blocks of 16 tokens.
COLD = RankPlan(requests=[(0, 4, 0, True)])  # decodes one request of 4 blocks
WARM = RankPlan((3, 0, 0, 0), [(0, 2, 70, False), (0, 3, 0, True), (0, 1, 0, False)])


def policy_costs(fleet: Fleet, policy: RouterPolicy) -> list[float]:
    return [row.cost for row in fleet.pool.explain(DEFAULTS.replace(**policy.row))]


def test_the_costs_of_each_policy_by_hand() -> None:
    fleet = Fleet({(1, 0): COLD, (2, 0): WARM})
    fleet.match(6)
    costs = {policy: policy_costs(fleet, policy) for policy in RouterPolicy}
    # n is 96 and 48, P 0 and 70, D 1 and 2, A 1 and 3.
    assert costs == {
        "dynamo": [6.0 + 10, (70 + 96) / 16 - 3 + 12],
        "kvd": [96 + 96 * 0.07, 48 + 48 * (0.07 * 3) + 0.5 * 70],
        "lmetric": [96 * 2, (70 + 48) * 4],
        "ramjet": [96 + 2048, 48 + 0.25 * 70 + 3 * 2048],
        "ramjet-tuned": [
            96 + 512 * 0.883,
            48 + 512 * 0.883 / 4552 * 70 + 512 * 0.883 * 3,
        ],
    }


def ramjet(ranks: list[ModelRank], alpha: float, cap: int, unit: float) -> list[float]:
    """Returns Ramjet's score as published, for blocks of 512 tokens; the highest is chosen."""
    deepest = max(rank.device for rank in ranks)
    return [
        min(deepest, cap)
        - min(deepest - rank.device, cap)
        - alpha * (rank.requests + rank.prefill_tokens / unit)
        for rank in ranks
    ]


@pytest.mark.parametrize("seed", range(scaled(8)))
def test_ramjet_orders_ranks_as_published(seed: int) -> None:
    rng = random.Random(seed)
    plans = {
        (worker, 0): RankPlan(
            (rng.choice((0, 3, 20, 40, 60)), 0, 0, 0),
            [
                (0, 0, rng.choice((0, 700, 9000)), rng.random() < 0.5)
                for _ in range(rng.randrange(4))
            ],
        )
        for worker in range(5)
    }
    fleet = Fleet(plans, block_size=512)
    ranks = fleet.match(60).ranks
    for policy, numbers in (
        (RouterPolicy.RAMJET, (4.0, 32, 8192.0)),
        (RouterPolicy.RAMJET_TUNED, (0.883, 68, 4552.0)),
    ):
        scores, costs = ramjet(list(ranks), *numbers), policy_costs(fleet, policy)
        # Costs are scores in units of -512 tokens, plus an amount that all ranks have in common.
        common = [cost + 512 * score for cost, score in zip(costs, scores, strict=True)]
        assert common == pytest.approx([common[0]] * 5, abs=1e-6)


def test_what_lies_far_below_the_warmest_counts_as_if_it_were_nearer() -> None:
    plans = {(i, 0): RankPlan((blocks, 0, 0, 0)) for i, blocks in enumerate((9, 6, 2, 0))}
    fleet = Fleet(plans)
    fleet.match(10)
    near = DEFAULTS.replace(weighted=True, saturation=60)
    assert [row.counted_tokens for row in fleet.pool.explain(near)] == [16, 64, 76, 76]
    # The warmest rank is looked for among those that may be chosen.
    mask = fleet.pool.mask([1, 2, 3])
    assert [row.counted_tokens for row in fleet.pool.explain(near, mask)] == [16, 64, 124, 124]
    unmasked = fleet.pool.mask([])
    assert [row.counted_tokens for row in fleet.pool.explain(near, unmasked)] == [16, 64, 128, 160]


def test_equal_weighted_costs_go_by_overlap_then_requests_then_turns() -> None:
    request = (0, 0, 0, True)
    plans = {
        (1, 0): RankPlan((1, 0, 0, 0), [request]),
        (2, 0): RankPlan((4, 0, 0, 0), [request, request]),
        (3, 0): RankPlan((4, 0, 0, 0), [request]),
        (4, 0): RankPlan((4, 0, 0, 0), [request]),
    }
    fleet = Fleet(plans)
    fleet.match(6)
    equal = DEFAULTS.replace(weighted=True, uncached=0)
    random_ = 2**63
    assert [fleet.pool.choose(equal, None, random_) for _ in range(4)] == [2, 3, 2, 3]
    assert [fleet.pool.choose(equal, b"\1\1\0\0", random_) for _ in range(2)] == [1, 1]
    assert fleet.pool.choose(equal, b"\1\0\0\0", random_) == 0
    # Ties and round-robin have separate turns: the latter begins at the first rank.
    turns = DEFAULTS.replace(mode=ROUND_ROBIN)
    assert [fleet.pool.choose(turns, None, 0) for _ in range(2)] == [0, 1]
    assert fleet.pool.choose(equal, None, random_) == 2
    assert fleet.pool.choose(equal.replace(line=1), None, random_) == 2
    other = Pool(fleet.index, fleet.ledger, 16, fleet.pool.candidates)
    other.take_turns(fleet.pool)
    other.match_again(fleet.pool.hold())
    assert other.choose(equal, None, random_) == 3
    assert other.choose(turns, None, 0) == 2


def test_a_renewed_pool_is_one_made_of_the_ranks_that_there_are_now() -> None:
    plans = {
        (worker, rank): RankPlan((worker % 4, rank, 0, 0), [(1, worker % 4, rank, True)])
        for worker in (1, 2, 4, 7, 2**64 - 1)
        for rank in (0, 3)
    }
    fleet = Fleet(plans)
    turns = DEFAULTS.replace(mode=ROUND_ROBIN)
    made = {worker: [] for worker, _ in plans}
    for each in fleet.pool.candidates:
        made[each.worker_id].append(each)
    pools = Pool(fleet.index, fleet.ledger, 16), Pool(fleet.index, fleet.ledger, 16)
    draws = random.Random(1)
    for _ in range(100):
        changes = {
            worker: [
                each._replace(total_kv_blocks=draws.choice((None, 9)))
                for each in draws.choice((made[worker][:1], made[worker], []))
            ]
            for worker in draws.sample(sorted(made), draws.randrange(4))
        }
        staying = [each for each in pools[0].candidates if each.worker_id not in changes]
        renewed = pools[0].renewed(changes)
        anew = Pool(fleet.index, fleet.ledger, 16, staying + list(chain(*changes.values())))
        anew.take_turns(pools[1])
        assert renewed.candidates == anew.candidates
        assert renewed.is_like(anew)
        for pool in (renewed, anew):
            pool.match(packed(PROMPT[:6]), packed(ROLLING[:6]), 96)
        assert renewed.explain(DEFAULTS) == anew.explain(DEFAULTS)
        workers = sorted(made)[: draws.randrange(6)]
        assert renewed.mask(workers) == anew.mask(workers)
        assert [renewed.choose(turns, None, 0) for _ in range(3)] == [
            anew.choose(turns, None, 0) for _ in range(3)
        ]
        for at in range(0, len(renewed), 2):  # this does not outlive a pool
            renewed.set_reachable(at, False)
            renewed.set_heard(at, False)
        pools = renewed, anew


def test_a_renewed_pool_checks_what_has_changed() -> None:
    fleet = Fleet({(1, 0): RankPlan(), (2, 0): RankPlan()})
    one, two = fleet.pool.candidates
    with pytest.raises(KeyError):
        fleet.pool.renewed({1: [one._replace(ledger_rank=7)]})
    with pytest.raises(ValueError, match="comes twice"):
        fleet.pool.renewed({2: [two, two]})
    assert not fleet.pool.is_like(Pool(fleet.index, Ledger(), 16))
    assert not fleet.pool.is_like(Pool(None, fleet.ledger, 16))
    assert not Pool(None, fleet.ledger, 16).is_like(Pool(None, fleet.ledger, 8))


def test_whoever_is_idle_and_long_left_out_takes_from_a_busy_rank() -> None:
    warm = RankPlan((6, 0, 0, 0), [(6, 0, 0, True)] * 8)
    fleet = Fleet({(1, 0): warm, (2, 0): RankPlan(), (3, 0): RankPlan()})
    fleet.match(6)
    bounded = DEFAULTS.replace(weighted=True, uncached=1.0, session_bound=1.177)
    assert [fleet.pool.choose(bounded, None, 0) for _ in range(19)] == [0] * 19
    foretold = fleet.pool.chances(bounded, None)
    assert isinstance(foretold, list)
    assert [each.chance for each in foretold] == [0.0, 1.0, 0.0]
    assert [fleet.pool.choose(bounded, None, 0) for _ in range(4)] == [1, 2, 0, 0]
    # Where sessions have no bound, the cost alone decides, however long that goes on.
    unbounded = bounded.replace(session_bound=None)
    assert [fleet.pool.choose(unbounded, None, 0) for _ in range(100)] == [0] * 100


@pytest.mark.parametrize(
    ("requests", "in_use", "blocks", "chosen"),
    [
        (3, 6, 0, 0),  # the mean plus 1 is 3
        (4, 6, 0, 2),  # 3.67
        (4, 6, 3, 2),
        (4, 6, 4, 0),  # more than half of the 6
        (4, 5, 0, 0),  # the sixth is of this conversation alone
        (4, 0, 0, 0),
    ],
)
def test_an_idle_rank_takes_from_a_busy_one_what_its_prompts_share(
    requests: int, in_use: int, blocks: int, chosen: int
) -> None:
    busy = [(in_use, 0, 0, True)] * requests
    warm, idle = RankPlan((6, 0, 0, 0), busy), RankPlan((blocks, 0, 0, 0))
    fleet = Fleet({(1, 0): warm, (2, 0): RankPlan(requests=busy), (3, 0): idle})
    fleet.match(6)
    bounded = DEFAULTS.replace(weighted=True, uncached=1.0, session_bound=1.177)
    assert [fleet.pool.choose(bounded, None, 0) for _ in range(19)] == [0] * 19
    assert fleet.pool.choose(bounded, None, 0) == chosen


def test_weighted_costs_stay_finite() -> None:
    full = RankPlan(requests=[(0, 40, 2**53, False)] * 3 + [(0, 40, 1, True)] * 3)
    fleet = Fleet({(1, 0): full, (2, 0): full}, block_size=2**31)
    fleet.match(0, MAX_ISL_TOKENS)
    weights = ("uncached", "hold_up", "queued", "per_request", "per_block", "product")
    for saturation in (None, 0, MAX_WEIGHT):
        most = DEFAULTS.replace(
            weighted=True, saturation=saturation, **dict.fromkeys(weights, MAX_WEIGHT)
        )
        assert all(math.isfinite(row.cost) for row in fleet.pool.explain(most))
        assert fleet.pool.choose(most, None, 0) in (0, 1)
        warm = most.replace(temperature=MAX_WEIGHT)
        assert fleet.pool.choose(warm, None, 0, array("d", [2.72, 0.36]).tobytes()) in (0, 1)
    nothing = DEFAULTS.replace(weighted=True, **dict.fromkeys(weights, 0.0))
    assert [row.cost for row in fleet.pool.explain(nothing)] == [0.0, 0.0]


# ---- prompts


def test_token_ids_are_hashed_as_queries_are() -> None:
    tokens = list(range(1000, 1070))
    index, ledger = PrefixIndex(16, IngestStats()), Ledger()
    candidates = []
    for worker_id, lora in ((1, None), (2, "adapter")):
        worker = index.add_worker(worker_id)
        hashes = local_hashes(tokens, 16, lora)
        worker.store(0, hashes[:worker_id], hashes[:worker_id])
        candidates.append(Candidate(worker_id, 0, worker, ledger.add_rank(worker_id, 0)))
    pool = Pool(index, ledger, 16, candidates)
    scanner = BodyScanner(arrays={"token_ids": "u32"})
    scanner.scan(compact({"token_ids": tokens}))
    pool.match_tokens(scanner, 0)
    assert [row.device_blocks for row in pool.explain(DEFAULTS)] == [1, 0]
    held = pool.hold()
    assert held.isl_tokens == 70
    assert held.local_hashes == packed(local_hashes(tokens, 16))
    assert held.sequence_hashes == packed(sequence_hashes(local_hashes(tokens, 16)))
    pool.match_tokens(scanner, 0, "adapter")
    assert [row.device_blocks for row in pool.explain(DEFAULTS)] == [0, 2]
    pool.match_tokens(scanner, 0, None, "salt")
    # These ranks announce no salts, so their unsalted blocks count.
    assert [row.device_blocks for row in pool.explain(DEFAULTS)] == [1, 0]
    salted = local_hashes(tokens, 16, None, "salt")
    assert pool.hold().sequence_hashes == packed(sequence_hashes(salted))
    assert pool.hold().local_hashes == packed(salted)
    pool.match_tokens(scanner, 0, "adapter", "salt", eagle=True)
    pairs = eagle_hashes(tokens, 16, "adapter", "salt")
    assert pool.hold().sequence_hashes == packed(sequence_hashes(pairs))
    scanner.scan(compact({"token_ids": tokens[:64]}))  # the last block lacks its last pair
    pool.match_tokens(scanner, 0, eagle=True)
    assert (pool.blocks, pool.hold().isl_tokens) == (3, 64)
    assert pool.hold().local_hashes == packed(eagle_hashes(tokens[:64], 16))
    scanner.scan(b'{"token_ids":[]}')
    for eagle in (False, True):
        pool.match_tokens(scanner, 0, eagle=eagle)
        assert (pool.hold().isl_tokens, pool.choose(DEFAULTS, b"\0\1", 0)) == (0, 1)


def test_salted_prompts_count_as_in_queries() -> None:
    """Salted blocks count on ranks whose stream announces salts, unsalted ones on the others."""
    tokens = list(range(48))
    index, ledger = PrefixIndex(16, IngestStats()), Ledger()
    candidates = []
    for worker_id, salts in ((1, [None]), (2, [None, "s"])):
        worker = index.add_worker(worker_id)
        worker.register(0)
        stream = worker.stream(0)
        for salt in salts:
            blocks = tokens[: 16 * worker_id] if salt else tokens[:16]
            stream.apply(stored(blocks, salt))
        candidates.append(Candidate(worker_id, 0, worker, ledger.add_rank(worker_id, 0)))
    pool = Pool(index, ledger, 16, candidates)
    scanner = BodyScanner(arrays={"token_ids": "u32"})
    scanner.scan(compact({"token_ids": tokens}))
    for salt, expected in ((None, [1, 1]), ("s", [1, 2]), ("t", [1, 0])):
        pool.match_tokens(scanner, 0, None, salt)
        assert [row.device_blocks for row in pool.explain(DEFAULTS)] == expected
        scores = json.loads(index.query_tokens(scanner, 0, None, salt))["scores"]
        assert [scores[str(each.worker_id)]["0"] // 16 for each in candidates] == expected
    pool.match_tokens(scanner, 0, None, "s")
    held, before = pool.hold(), pool.explain(DEFAULTS)
    pool.match_tokens(scanner, 0)
    pool.match_again(held)
    assert pool.explain(DEFAULTS) == before


def stored(tokens: list[int], salt: str | None) -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": [(100 if salt else 0) + i for i in range(len(tokens) // 16)],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 16,
        "cache_salt": salt,
    }
    return bytes(msgpack.packb([1.0, [event], None]))


def test_a_unique_prompt_shares_nothing() -> None:
    tokens = list(range(64))
    ledger = Ledger()
    pool = Pool(None, ledger, 16, [Candidate(1, 0, None, ledger.add_rank(1, 0))])
    scanner = BodyScanner(arrays={"token_ids": "u32"})
    scanner.scan(compact({"token_ids": tokens}))
    for number in range(2):
        pool.match_tokens(scanner, 0, unique=2**64 - 1 - number * 2**32)
        assert pool.reserve(f"r{number}", 0, 64, 0.0) == ADDED
    assert ledger.load(0) == (128, 8, 2)


def test_a_prompt_outlives_its_pool() -> None:
    fleet = one(3, 1)
    fleet.match(5)
    held, before = fleet.pool.hold(), fleet.pool.explain(DEFAULTS)
    fleet.match(1)
    assert fleet.pool.explain(DEFAULTS) != before
    again = Pool(fleet.index, fleet.ledger, 16, fleet.pool.candidates)
    again.match_again(held)
    assert again.explain(DEFAULTS) == before
    assert held.bytes > 2 * 5 * 8


def test_booking_what_was_looked_at() -> None:
    fleet = one(2)
    fleet.match(5)
    tokens = fleet.pool.effective_prefill_tokens(0, DEFAULTS)
    assert fleet.pool.reserve("r", 0, tokens, 1.0) == ADDED
    assert fleet.ledger.load(0) == (48, 5, 1)
    assert fleet.pool.reserve("r", 0, tokens, 1.0) == EXISTS
    assert fleet.ledger.stats()["refused"]["exists"] == 1
    fleet.match(4, novel=2)
    row = fleet.pool.explained(0, DEFAULTS)
    assert (row.live_blocks, row.potential_decode_blocks) == (4, 7)


def test_a_prompt_has_at_most_so_many_tokens() -> None:
    fleet = one(2)
    with pytest.raises(OverflowError):
        fleet.match(0, MAX_ISL_TOKENS + 1)


def test_long_prompts_leave_no_memory_behind() -> None:
    fleet = one(2)
    fleet.pool.match(b"", bytes(8 * 200_000), 0)
    assert fleet.pool.hold().bytes > 8 * 200_000
    fleet.match(2)
    assert fleet.pool.hold().bytes < 1000


# ---- the pool beside a changing index and ledger


def test_a_cleared_rank_is_found_again() -> None:
    fleet = Fleet({(1, 0): RankPlan((60, 0, 0, 0)), (1, 1): RankPlan((2, 0, 0, 0))})
    # So many blocks that a clear replaces the rank instead of emptying it.
    fleet.workers[1].store(0, list(range(500, 600)), list(range(500, 600)))
    fleet.workers[1].clear(0)
    fleet.match(3)
    assert [row.device_blocks for row in fleet.pool.explain(DEFAULTS)] == [0, 2]
    fleet.workers[1].store(0, PROMPT[:1], PROMPT[:1])
    fleet.match(3)
    assert [row.device_blocks for row in fleet.pool.explain(DEFAULTS)] == [1, 2]
    fleet.workers[1].unregister(1)
    fleet.match(3)
    assert [row.device_blocks for row in fleet.pool.explain(DEFAULTS)] == [1, 0]
    fleet.workers[1].remove()
    fleet.match(3)
    assert [row.device_blocks for row in fleet.pool.explain(DEFAULTS)] == [0, 0]


def test_a_rank_that_left_the_ledger_is_not_chosen() -> None:
    fleet = loaded(0, 5)
    fleet.ledger.remove_ranks(1, [0])
    fleet.match(1)
    assert [row.eligible for row in fleet.pool.explain(DEFAULTS)] == [False, True]
    assert fleet.pool.choose(DEFAULTS, None, 0) == 1
    fleet.ledger.add_rank(9, 0)  # gets the id of the removed rank
    fleet.match(1)
    assert fleet.pool.choose(DEFAULTS, None, 0) == 1
    fleet.ledger.remove_ranks(9, [0])
    fleet.ledger.remove_ranks(2, [0])
    fleet.match(1)
    assert fleet.pool.choose(DEFAULTS, None, 0) == NONE


def test_requests_of_other_ledgers_weigh_and_their_ranks_are_not_chosen() -> None:
    ledger = Ledger()
    other = Ledger(loads=ledger.loads)
    pool = Pool(None, ledger, 16, [Candidate(w, 0, None, ledger.add_rank(w, 0)) for w in (1, 2)])
    rank = other.add_rank(1, 0)
    assert other.add("r", rank, packed([7, 8]), 320, 0.0) == ADDED
    pool.match(packed([5]), packed([7]), 16)
    row = pool.explain(DEFAULTS)[0]
    assert (row.live_blocks, row.active_prefill_tokens, row.active_decode_blocks) == (1, 320, 2)
    assert pool.choose(DEFAULTS, None, 0) == 1
    ledger.remove_ranks(1, [0])  # the other ledger keeps it
    pool.match(packed([5]), packed([7]), 16)
    assert [row.eligible for row in pool.explain(DEFAULTS)] == [False, True]
    with pytest.raises(KeyError):
        pool.reserve("r", 0, 0, 0.0)


def test_wrong_pools_are_refused() -> None:
    fleet = one(1)
    (candidate,) = fleet.pool.candidates
    with pytest.raises(ValueError, match="block size"):
        Pool(fleet.index, fleet.ledger, 8)
    with pytest.raises(ValueError, match="block size"):
        Pool(None, fleet.ledger, 0)
    with pytest.raises(ValueError, match="twice"):
        Pool(fleet.index, fleet.ledger, 16, [candidate, candidate])
    with pytest.raises(KeyError):
        Pool(fleet.index, fleet.ledger, 16, [candidate._replace(ledger_rank=7)])
    with pytest.raises(ValueError, match="not of the pool's index"):
        Pool(None, fleet.ledger, 16, [candidate])
    with pytest.raises(TypeError):
        Pool(fleet.index, fleet.ledger, 16, [candidate._replace(worker="w")])
    with pytest.raises(IndexError):
        fleet.pool.render_choice(1, DEFAULTS)
    with pytest.raises(IndexError):
        fleet.pool.explained(-1, DEFAULTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"overlap_weight": -1},
        {"overlap_weight": float("nan")},
        {"overlap_weight": 2e18},
        {"device_credit": float("inf")},
        {"host_credit": 1.01},
        {"disk_credit": -0.5},
        {"credit_decay": -0.1},
        {"credit_decay": float("nan")},
        {"decode_busy_threshold": -1},
        {"temperature": -1},
        {"queue_threshold": -1},
        {"active_decode_blocks_threshold": -0.1},
        {"active_prefill_tokens_threshold": -1},
        {"active_prefill_tokens_threshold_frac": -1},
        {"uncached": -1},
        {"hold_up": float("nan")},
        {"queued": float("inf")},
        {"per_request": 2e18},
        {"per_block": -0.1},
        {"product": float("nan")},
        {"saturation": -1},
        {"saturation": float("inf")},
        {"mode": 5},
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Settings(**changes)  # type: ignore[arg-type]


def test_settings_are_replaced_by_name() -> None:
    warm = DEFAULTS.replace(temperature=0.5, queue_threshold=2.0)
    assert warm.members["temperature"] == 0.5
    assert warm.replace(queue_threshold=None).members == DEFAULTS.replace(temperature=0.5).members
    assert DEFAULTS.members["mode"] == KV
    with pytest.raises(TypeError):
        DEFAULTS.replace(weight=1)


# ---- against the model

COUNTS = st.sampled_from([0, 0, 1, 2, 5, 20])
REQUESTS = st.tuples(
    st.integers(0, 40),
    st.integers(0, 5),
    st.sampled_from([0, 1, 17, 160, 5000, 2**53]),
    st.booleans(),
)
PLANS = st.builds(
    RankPlan,
    tiers=st.tuples(COUNTS, COUNTS, COUNTS, COUNTS),
    requests=st.lists(REQUESTS, max_size=4),
    max_num_batched_tokens=st.sampled_from([0, 1, 100, 8192, 2**64 - 1]),
    total_kv_blocks=st.sampled_from([None, 0, 1, 40, 10_000]),
)
PLACES = st.tuples(st.sampled_from([0, 1, 2, 2**64 - 1]), st.sampled_from([0, 1, 7, 2**32 - 1]))
UNIT = st.sampled_from([0.0, 0.1, 0.25, 0.75, 1.0]) | st.floats(0, 1)
WEIGHTS = UNIT | st.sampled_from([2.5, 1e18]) | st.floats(0, 100)
THRESHOLDS = st.none() | WEIGHTS
MODEL_SETTINGS = st.builds(
    ModelSettings,
    mode=st.sampled_from([KV, KV, KV, ROUND_ROBIN, RANDOM, LEAST_LOADED, DIRECT]),
    overlap_weight=WEIGHTS,
    device_credit=WEIGHTS,
    host_credit=UNIT,
    disk_credit=UNIT,
    credit_decay=st.sampled_from([0.0, 0.7, 1.0, 1e18]),
    temperature=st.just(0.0) | WEIGHTS,
    active_request_weight=st.sampled_from([0.0, 0.5, 3.0]),
    weighted=st.booleans(),
    uncached=WEIGHTS,
    hold_up=WEIGHTS,
    crowding=WEIGHTS,
    crowding_limit=THRESHOLDS | st.sampled_from([30.0, 300.0]),
    queued=WEIGHTS,
    per_request=WEIGHTS,
    per_block=WEIGHTS,
    product=WEIGHTS,
    saturation=THRESHOLDS | st.sampled_from([300.0, 5000.0]),
    session_bound=THRESHOLDS | st.sampled_from([1.177]),
    track_prefill=st.booleans(),
    track_active_blocks=st.booleans(),
    last_token=st.booleans(),
    queue_threshold=THRESHOLDS,
    active_decode_blocks_threshold=THRESHOLDS,
    active_prefill_tokens_threshold=THRESHOLDS,
    active_prefill_tokens_threshold_frac=THRESHOLDS,
    decode_busy_threshold=THRESHOLDS,
)


@pytest.mark.slow("draws a whole fleet for each example")
@settings(deadline=None, max_examples=scaled(20))
@given(
    plans=st.dictionaries(PLACES, PLANS, min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 5, 16, 64]),
    blocks=st.integers(0, len(PROMPT)),
    novel=st.integers(0, 3),
    isl_tokens=st.none() | st.sampled_from([0, 1, 83, 4096, 2**53]),
    model_settings=MODEL_SETTINGS,
    draws=st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3),
    data=st.data(),
)
def test_selector_equals_model(
    plans: dict[tuple[int, int], RankPlan],
    block_size: int,
    blocks: int,
    novel: int,
    isl_tokens: int | None,
    model_settings: ModelSettings,
    draws: list[int],
    data: st.DataObject,
) -> None:
    fleet = Fleet(plans, block_size)
    model = fleet.match(blocks, isl_tokens, novel)
    chosen_settings = Settings(**asdict(model_settings))
    mask = data.draw(st.none() | st.binary(min_size=len(plans), max_size=len(plans)))
    factor = st.sampled_from([0.0, 1.0, 2.5]) | st.floats(0.36, 2.72)
    likes = data.draw(st.none() | st.lists(factor, min_size=len(plans), max_size=len(plans)))
    factors = None if likes is None else array("d", likes).tobytes()
    check_terms(fleet.pool, model, chosen_settings, model_settings, None)
    check_terms(fleet.pool, model, chosen_settings, model_settings, mask)
    assert fleet.pool.least_prefill_tokens(chosen_settings, None) == min(
        effective_tokens(rank, model_settings, model.prompt) for rank in model.ranks
    )
    assert json.loads(fleet.pool.render_overlaps()) == model.overlap_rows()
    assert json.loads(fleet.pool.render_loads(chosen_settings)) == model.load_rows(model_settings)
    overlaps, loads = fleet.pool.keep_overlaps(), fleet.pool.keep_loads(chosen_settings)
    fleet.match(0, 1, 0)
    assert pieced(overlaps) == model.overlap_rows()
    assert pieced(loads) == model.load_rows(model_settings)
    fleet.match(blocks, isl_tokens, novel)
    check_sums(fleet.pool, chosen_settings, mask, factors)
    for random_ in draws:
        foretold = fleet.pool.chances(chosen_settings, mask, factors)
        chosen = fleet.pool.choose(chosen_settings, mask, random_, factors)
        check_foretold(foretold, chosen, random_)
        assert chosen == model.choose(model_settings, mask, random_, likes)
        assert fleet.pool.refusal(chosen_settings, mask) == min(chosen, 0)
        wanted = bytes(random_ >> at & 1 for at in range(len(plans)))
        stay = fleet.pool.stay(chosen_settings, mask, wanted)
        assert stay == model.stay(model_settings, mask, wanted)
        if chosen >= 0:
            members = fleet.pool.render_choice(chosen, chosen_settings)
            assert b"{" + members + b"}" == compact(model.overlap(chosen, model_settings))


def pieced(rows: KeptStates) -> Any:
    """Returns the rows of an array that is read in pieces of one or two rows."""
    return json.loads(b"[%b]" % b"".join(iter(lambda: rows.read(200), b""))[1:])


def check_sums(pool: Pool, s: Settings, mask: bytes | None, factors: bytes | None) -> None:
    """Checks that terms add up, to the last bit, to the cost by which candidates are chosen."""
    chances = pool.chances(s, mask, factors)
    weights = {} if isinstance(chances, int) else {each.position: each.weight for each in chances}
    for at, row in enumerate(pool.explain(s, mask, factors)):
        total = 0.0
        for term in weighing.terms(row, s):
            total += term.cost
        cost = weighing.cost_of(row, s)
        by_cost = s.members["mode"] in (KV, DIRECT)
        if cost is not None:
            assert total * (row.preference if by_cost else 1.0) == cost
        if at in weights:
            assert weights[at] == cost


def check_foretold(chances: list[Chance] | int, chosen: int, random_: int) -> None:
    """Checks that the chosen rank is the one that the foretold chances give for this number."""
    if isinstance(chances, int):
        assert chosen == chances
        return
    assert sum(each.chance for each in chances) == pytest.approx(1.0)
    possible = [each for each in chances if each.chance > 0]
    (at,) = [at for at, each in enumerate(possible) if each.position == chosen]
    passed = sum(each.chance for each in possible[:at])
    # The candidates divide the range of drawn numbers among them, in their order.
    error = 1e-9
    assert passed - error <= random_ / 2**64 <= passed + possible[at].chance + error


def check_terms(
    pool: Pool, model: ModelPool, s: Settings, model_settings: ModelSettings, mask: bytes | None
) -> None:
    least_prefill = model.least_prefill(model_settings, mask)
    least_uncached = model.least_uncached(model_settings, mask)
    rows = pool.explain(s, mask)
    assert [pool.explained(i, s, mask) for i in range(len(rows))] == rows
    cached = sorted(
        (-blocks, rank.worker_id, rank.dp_rank)
        for rank in model.ranks
        if (blocks := rank.device + rank.host + rank.disk)
    )
    for limit in (0, 2, len(rows)):
        assert pool.deepest(limit) == [(*rank, -less) for less, *rank in cached[:limit]]
    for i, (row, rank) in enumerate(zip(rows, model.ranks, strict=True)):
        assert row[:10] == (
            *(rank.worker_id, rank.dp_rank, rank.device, rank.host, rank.disk, rank.live),
            *(rank.prefill_tokens, rank.decode_blocks, rank.requests, rank.decoding),
        )
        assert row[10:13] == (
            model_cached_tokens(rank, model_settings, model.prompt),
            effective_tokens(rank, model_settings, model.prompt),
            potential_decode_blocks(rank, model.prompt),
        )
        if model_settings.weighted:
            expected = weighted_terms(rank, model_settings, model.prompt, least_uncached)
            assert row[13:26] == (*(0.0, 0.0, 0.0, 0.0), *expected)
        else:
            *dynamo, cost = terms(rank, model_settings, model.prompt, least_prefill)
            requests = model_settings.active_request_weight * rank.requests
            assert row[13:26] == (*dynamo, *(0, 0, 0, 0, 0, requests, 0, 0), cost)
        assert row[26:] == (
            model.keeps_sessions(i, model_settings, mask),
            mask is None or mask[i] != 0,
            is_overloaded(rank, model_settings),
            is_busy(rank, model_settings),
            1.0,
            True,
            True,
        )
