"""What replays have shown: the figures of each, and a table row for all rounds of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import ceil
from statistics import fmean, pstdev

from bench.replay.simulation import Outcome

TITLES = (
    "policy",
    "cached prompt tokens",
    "prefilled tokens, max / mean",
    "busy time, max / mean",
    "live requests, CV",
    "queue wait s: mean, p50, p99",
    "TTFT s: mean, p50, p99",
)


@dataclass(frozen=True)
class Times:
    """Simulated seconds, of all requests."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True)
class Figures:
    """One replay."""

    hit_share: float  # of all prompt tokens, cached where they were sent
    prefilled: float  # tokens of the engine that had most, by the mean
    busy: float  # time of the busiest engine, by the mean
    live_cv: float  # of requests waiting or running, over the engines, the mean of all arrivals
    wait: Times  # from arrival to the start of the prefill
    first_token: Times  # from arrival


def measure(outcome: Outcome) -> Figures:
    jobs = outcome.jobs
    prompt = sum(job.request.input_tokens for job in jobs)
    spreads = [pstdev(live) / fmean(live) for live in outcome.live if any(live)]
    return Figures(
        sum(job.hit_tokens for job in jobs) / prompt,
        _peak([engine.prefilled_tokens for engine in outcome.engines]),
        _peak([engine.busy_s for engine in outcome.engines]),
        fmean(spreads) if spreads else 0.0,
        _times([job.prefill_starts_s - job.request.arrival_s for job in jobs]),
        _times([job.first_token_s - job.request.arrival_s for job in jobs]),
    )


def row(policy: str, rounds: Sequence[Figures]) -> str:
    """Returns a row of means; the share of cached tokens with its range."""
    shares = [each.hit_share for each in rounds]
    span = f" ({min(shares):.1%} to {max(shares):.1%})" if min(shares) < max(shares) else ""
    cells = [
        policy,
        f"{fmean(shares):.1%}{span}",
        f"{fmean(each.prefilled for each in rounds):.3f}",
        f"{fmean(each.busy for each in rounds):.3f}",
        f"{fmean(each.live_cv for each in rounds):.2f}",
        _mean_times([each.wait for each in rounds]),
        _mean_times([each.first_token for each in rounds]),
    ]
    return f"| {' | '.join(cells)} |"


def _peak(values: Sequence[float]) -> float:
    return max(values) / fmean(values)


def _times(values: Sequence[float]) -> Times:
    ranked = sorted(values)
    # The smallest that at least this share of all do not exceed.
    p50, p99 = (ranked[ceil(share * len(ranked) / 100) - 1] for share in (50, 99))
    return Times(fmean(values), p50, p99)


def _mean_times(rounds: Sequence[Times]) -> str:
    means = [fmean(column) for column in zip(*map(astuple, rounds), strict=True)]
    return ", ".join(f"{mean:.2f}" for mean in means)
