"""A plain selection with the rules of `kvd_core/selector/*.pxd`, one candidate after the other.

Floats are computed in the order of the formulas, so they equal the core's to the last bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

KV, ROUND_ROBIN, RANDOM, LEAST_LOADED, DIRECT = range(5)
NONE, BUSY, OVERLOADED = -1, -2, -3


@dataclass(frozen=True)
class ModelRank:
    """A candidate and its state; cached blocks of a tier follow those of the tiers before it."""

    worker_id: int
    dp_rank: int
    device: int = 0
    host: int = 0
    disk: int = 0
    live: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0
    requests: int = 0
    max_num_batched_tokens: int = 0
    total_kv_blocks: int | None = None
    decoding: int = 0


@dataclass(frozen=True)
class ModelSettings:
    mode: int = KV
    overlap_weight: float = 1.0
    device_credit: float = 1.0
    host_credit: float = 0.75
    disk_credit: float = 0.25
    credit_decay: float = 0.0
    active_request_weight: float = 0.0
    policy: str = "dynamo"
    weighted: bool = False
    uncached: float = 1.0
    hold_up: float = 0.0
    crowding: float = 0.0
    crowding_limit: float | None = None
    queued: float = 0.0
    per_request: float = 0.0
    per_block: float = 0.0
    product: float = 0.0
    saturation: float | None = None
    session_bound: float | None = None
    temperature: float = 0.0
    track_prefill: bool = True
    track_active_blocks: bool = True
    last_token: bool = False
    queue_threshold: float | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: float | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    decode_busy_threshold: float | None = None


@dataclass(frozen=True)
class ModelPrompt:
    isl_tokens: int
    blocks: int
    block_size: int


def rounded(value: float) -> int:
    """Rounds a value that is not negative, halves away from zero."""
    return int(value) + (value - int(value) >= 0.5)


def usable(rank: ModelRank, s: ModelSettings, prompt: ModelPrompt) -> tuple[int, int, int]:
    """Returns the cached blocks of each tier, before the last token's block if that is computed."""
    tiers, left = [], max(0, prompt.isl_tokens - 1) // prompt.block_size
    for blocks in (rank.device, rank.host, rank.disk):
        tiers.append(min(blocks, left) if s.last_token else blocks)
        left -= tiers[-1]
    return tiers[0], tiers[1], tiers[2]


def cached_tokens(rank: ModelRank, s: ModelSettings, prompt: ModelPrompt) -> int:
    device, host, disk = usable(rank, s, prompt)
    blocks = device + s.host_credit * host + s.disk_credit * disk
    return rounded(blocks * prompt.block_size)


def effective_tokens(rank: ModelRank, s: ModelSettings, prompt: ModelPrompt) -> int:
    return max(0, prompt.isl_tokens - cached_tokens(rank, s, prompt))


def potential_decode_blocks(rank: ModelRank, prompt: ModelPrompt) -> int:
    return rank.decode_blocks + max(0, prompt.blocks - rank.live)


def started_blocks(prompt: ModelPrompt) -> int:
    return -(-prompt.isl_tokens // prompt.block_size)


def occupied_blocks(rank: ModelRank, prompt: ModelPrompt) -> int:
    return rank.decode_blocks + max(started_blocks(prompt), prompt.blocks) - rank.live


def decayed(
    credit: float, rank: ModelRank, s: ModelSettings, prompt: ModelPrompt, least: int
) -> float:
    """Returns a rank's credit, smaller if it prefills more than `least`, the pool's minimum."""
    if not s.track_prefill or rank.prefill_tokens <= least:
        return credit
    excess = float(rank.prefill_tokens - least) / float(prompt.block_size)
    return credit * (
        1.0 / (1.0 + s.credit_decay * (excess / float(max(1, started_blocks(prompt)))))
    )


def terms(
    rank: ModelRank, s: ModelSettings, prompt: ModelPrompt, least: int
) -> tuple[float, float, float, float, float]:
    """Returns raw prefill blocks, credit, prefill cost, decode cost and the sum of both costs.

    `least` is the smallest number of prefill tokens among the ranks that may be chosen.
    """
    requests = s.active_request_weight * float(rank.requests)
    device_credit = s.device_credit if s.overlap_weight else 0.0
    device, host, disk = usable(rank, s, prompt)
    per_block = decayed(device_credit, rank, s, prompt, least)
    credit = per_block * device + s.host_credit * host + s.disk_credit * disk
    decode = float(potential_decode_blocks(rank, prompt)) if s.track_active_blocks else 0.0
    if s.track_prefill:
        tokens = rank.prefill_tokens + effective_tokens(rank, s, prompt)
        raw = float(tokens + cached_tokens(rank, s, prompt)) / float(prompt.block_size)
        prefill = s.overlap_weight * max(0.0, raw - credit)
        return raw, credit, prefill, decode, prefill + decode + requests
    if device_credit > 0:
        decode = max(0.0, decode - credit)
    return 0.0, credit, 0.0, decode, decode + requests


def weighted_terms(
    rank: ModelRank, s: ModelSettings, prompt: ModelPrompt, least: int
) -> tuple[float, float, float, float, float, float, float, float, float]:
    """Returns the tokens to compute that count, the seven terms, and their sum.

    `least` is the smallest number of tokens to compute among the ranks that may be chosen.
    """
    n = float(effective_tokens(rank, s, prompt))
    if s.saturation is not None:
        n = min(n, least + s.saturation)
    crowded = n if s.crowding_limit is None else min(n, s.crowding_limit)
    queued = float(rank.prefill_tokens) if s.track_prefill else 0.0
    blocks = float(rank.decode_blocks) if s.track_active_blocks else 0.0
    each = (
        s.uncached * n,
        s.uncached * n * (s.hold_up * float(rank.decoding)),
        crowded * (s.crowding * float(rank.requests)),
        s.queued * queued,
        s.per_request * float(rank.requests),
        s.per_block * (blocks * float(prompt.block_size)),
        s.product * (max(1.0, queued + n) * (float(rank.requests) + 1.0)),
    )
    total = 0.0
    for term in each:
        total += term
    return (n, *each, total)


def above(value: int, threshold: float | None, capacity: int | None) -> bool:
    if threshold is None or not capacity:
        return False
    return float(value) > threshold * float(capacity)


def is_busy(rank: ModelRank, s: ModelSettings) -> bool:
    return s.mode != DIRECT and above(
        rank.prefill_tokens, s.queue_threshold, rank.max_num_batched_tokens
    )


def is_overloaded(rank: ModelRank, s: ModelSettings) -> bool:
    tokens, batch = rank.prefill_tokens, rank.max_num_batched_tokens
    return s.mode != DIRECT and (
        above(tokens, s.active_prefill_tokens_threshold, 1)
        or above(tokens, s.active_prefill_tokens_threshold_frac, batch)
        or above(rank.decode_blocks, s.active_decode_blocks_threshold, rank.total_kv_blocks)
    )


class ModelPool:
    """Candidates in ascending order of (worker, dp rank).

    Its lives are too short for a candidate to be left out for long, which the core prevents.
    """

    def __init__(self, ranks: Sequence[ModelRank], prompt: ModelPrompt) -> None:
        self.ranks = ranks
        self.prompt = prompt
        self.turns = [0] * len(ranks)  # when round-robin last chose each rank
        self.rotation = [0] * len(ranks)  # when the weighted cost last chose each rank

    def open(self, s: ModelSettings, eligible: bytes | None) -> list[int]:
        """Returns the ranks that may be chosen; modes other than KV and DIRECT avoid busy ones."""
        allowed = (i for i in range(len(self.ranks)) if eligible is None or eligible[i])
        open_ = [i for i in allowed if not is_overloaded(self.ranks[i], s)]
        idle = [i for i in open_ if not is_busy(self.ranks[i], s)]
        return open_ if s.mode in (KV, DIRECT) or not idle else idle

    def least_prefill(self, s: ModelSettings, eligible: bytes | None) -> int:
        """Returns the smallest number of prefill tokens among the ranks that may be chosen."""
        tokens = (self.ranks[i].prefill_tokens for i in self.open(s, eligible))
        return min(tokens, default=2**64)

    def least_uncached(self, s: ModelSettings, eligible: bytes | None) -> int:
        """Returns the smallest number of tokens to compute among the ranks that may be chosen."""
        tokens = (effective_tokens(self.ranks[i], s, self.prompt) for i in self.open(s, eligible))
        return min(tokens, default=self.prompt.isl_tokens)

    def keeps_sessions(self, i: int, s: ModelSettings, eligible: bytes | None) -> bool:
        """Returns whether a session may stay with a rank despite its load."""
        if s.session_bound is None:
            return True
        counts = [self.ranks[each].requests for each in self.open(s, eligible)]
        mean = float(sum(counts)) / float(len(counts)) if counts else 0.0
        return float(self.ranks[i].requests) <= s.session_bound * (mean + 1.0)

    def stay(self, s: ModelSettings, eligible: bytes | None, wanted: bytes) -> bytes | None:
        """Returns those of `wanted` that a session may stay with, None if there are none."""
        open_ = self.open(s, eligible)
        if not open_ or all(is_busy(self.ranks[i], s) for i in open_):
            return None
        left = bytes(
            wanted[i] != 0 and self.keeps_sessions(i, s, eligible) for i in range(len(self.ranks))
        )
        return left if any(left) else None

    def costs(self, s: ModelSettings, eligible: bytes | None, open_: list[int]) -> list[float]:
        if s.weighted:
            least = self.least_uncached(s, eligible)
            return [weighted_terms(self.ranks[i], s, self.prompt, least)[-1] for i in open_]
        least = self.least_prefill(s, eligible)
        return [terms(self.ranks[i], s, self.prompt, least)[4] for i in open_]

    def in_order(self, i: int, s: ModelSettings) -> tuple[int, int, int]:
        """Returns the key that decides among equal weighted costs; the lowest is chosen."""
        rank = self.ranks[i]
        return effective_tokens(rank, s, self.prompt), rank.requests, self.rotation[i]

    def choose(
        self,
        s: ModelSettings,
        eligible: bytes | None,
        random: int,
        factors: Sequence[float] | None = None,
    ) -> int:
        if not self.ranks or (eligible is not None and not any(eligible)):
            return NONE
        open_ = self.open(s, eligible)
        if not open_:
            return OVERLOADED
        if all(is_busy(self.ranks[i], s) for i in open_):
            return BUSY
        if s.mode == ROUND_ROBIN:
            chosen = min(open_, key=lambda i: self.turns[i])
            self.turns[chosen] = max(self.turns) + 1
            return chosen
        if s.mode == RANDOM:
            return any_of(open_, random)
        if s.mode == LEAST_LOADED:
            values = [float(self.ranks[i].requests) for i in open_]
        else:
            liked = factors or [1.0] * len(self.ranks)
            costs = self.costs(s, eligible, open_)
            values = [cost * liked[i] for cost, i in zip(costs, open_, strict=True)]
            if s.temperature > 0:
                return drawn(open_, values, s.temperature, random)
            if s.weighted:
                ranked = zip(values, open_, strict=True)
                chosen = min((value, *self.in_order(i, s), i) for value, i in ranked)[-1]
                self.rotation[chosen] = max(self.rotation) + 1
                return chosen
        return any_of([i for i, v in zip(open_, values, strict=True) if v == min(values)], random)

    def overlap(self, chosen: int, s: ModelSettings) -> dict[str, object]:
        size = self.prompt.block_size
        ranks = [rank for rank in self.ranks if rank.worker_id == self.ranks[chosen].worker_id]
        disk = max(rank.device + rank.host + rank.disk for rank in ranks)
        chosen_rank, threshold = self.ranks[chosen], s.decode_busy_threshold
        occupied = occupied_blocks(chosen_rank, self.prompt)
        busy: dict[str, object] = {}
        if threshold is not None and (total := chosen_rank.total_kv_blocks) is not None:
            busy = {"decode_busy": float(occupied) > threshold * float(total)}
        return {
            "overlap": {
                "longest_matched": disk * size,
                "gpu": max(rank.device for rank in ranks) * size,
                "dp": {str(rank.dp_rank): rank.device * size for rank in ranks},
                "cpu": max(rank.device + rank.host for rank in ranks) * size,
                "disk": disk * size,
            },
            "effective_prefill_tokens": effective_tokens(chosen_rank, s, self.prompt),
            "potential_decode_blocks": occupied,
            **busy,
        }

    def overlap_rows(self) -> list[dict[str, int | None]]:
        return [
            {
                "worker_id": rank.worker_id,
                "dp_rank": rank.dp_rank,
                "device_blocks": rank.device,
                "host_pinned_blocks": rank.device + rank.host,
                "disk_blocks": rank.device + rank.host + rank.disk,
                "host_pinned_extension_blocks": rank.host,
                "disk_extension_blocks": rank.disk,
                "shared_beyond_device_blocks": None,
            }
            for rank in self.ranks
        ]

    def load_rows(self, s: ModelSettings) -> list[dict[str, int]]:
        rows = []
        for rank in self.ranks:
            added = effective_tokens(rank, s, self.prompt) if s.track_prefill else 0
            rows.append(
                {
                    "worker_id": rank.worker_id,
                    "dp_rank": rank.dp_rank,
                    "potential_prefill_tokens": rank.prefill_tokens + added,
                    "potential_decode_blocks": potential_decode_blocks(rank, self.prompt),
                    "active_requests": rank.requests,
                }
            )
        return rows


def any_of(indices: list[int], random: int) -> int:
    return indices[random * len(indices) >> 64]


def drawn(indices: list[int], costs: list[float], temperature: float, random: int) -> int:
    lo, hi = min(costs), max(costs)
    if lo == hi:
        return any_of(indices, random)
    weights = [math.exp(-((c - lo) / (hi - lo) / temperature)) for c in costs]
    total = 0.0
    for weight in weights:
        total += weight
    target = (random >> 11) * 2.0**-53 * total
    passed, chosen = 0.0, indices[0]
    for index, weight in zip(indices, weights, strict=True):
        if weight:
            chosen = index
            passed += weight
            if passed > target:
                break
    return chosen


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
