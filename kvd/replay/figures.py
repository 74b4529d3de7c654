"""Figures of one replay, and the means of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from math import ceil, nan
from statistics import fmean

from kvd.replay.recording import Recorded, RecordedRequest, ReplayError
from kvd.replay.simulation import ReplayOutcome

LONG_PROMPT = 32_768  # tokens from which prompts of a replay have a figure of their own


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one replay; times are simulated seconds, NaN where there is none."""

    cached: float  # share of all prompt tokens that was cached where they were sent
    ttft_mean: float  # from the arrival to the first token
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    ttft_p90_long: float  # of prompts of LONG_PROMPT tokens or more
    token_interval: float  # between the tokens of a request: the mean of all requests' means
    whole: float  # from the arrival to the last token, mean
    prefilled: float  # tokens that the busiest engine prefilled, divided by the engines' mean


@dataclass(frozen=True, slots=True)
class FigureRow:
    """The name and form in which a figure is shown."""

    name: str  # of the member of Figures
    title: str
    form: str  # how its value is formatted
    more_is_better: bool = False


ROWS = (
    FigureRow("cached", "cached", ".1%", more_is_better=True),
    FigureRow("ttft_mean", "TTFT mean, s", ".2f"),
    FigureRow("ttft_p50", "TTFT p50, s", ".2f"),
    FigureRow("ttft_p90", "TTFT p90, s", ".2f"),
    FigureRow("ttft_p99", "TTFT p99, s", ".2f"),
    FigureRow("ttft_p90_long", "TTFT p90 of ≥ 32k, s", ".2f"),
    FigureRow("token_interval", "per token, s", ".4f"),
    FigureRow("whole", "request, s", ".2f"),
    FigureRow("prefilled", "prefilled, max / mean", ".2f"),
)


def measure(
    outcome: ReplayOutcome, counts: Callable[[RecordedRequest], bool] = lambda request: True
) -> Figures:
    """Returns the figures of the requests that count."""
    jobs = [job for job in outcome.jobs if counts(job.request)]
    if not jobs:
        raise ReplayError("no request falls into the counted windows")
    prefilled = [0] * len(outcome.engines)
    for job, engine in zip(outcome.jobs, outcome.chosen, strict=True):
        if counts(job.request):
            prefilled[engine] += job.request.input_tokens - job.hit_tokens
    return _figures(
        [job.request for job in jobs],
        [job.hit_tokens for job in jobs],
        [job.first_token_s - job.request.arrival_s for job in jobs],
        [
            (job.done_s - job.first_token_s) / (job.request.output_tokens - 1)
            for job in jobs
            if job.request.output_tokens > 1
        ],
        [job.done_s - job.request.arrival_s for job in jobs],
        max(prefilled) / fmean(prefilled) if any(prefilled) else nan,
    )


def measure_recorded(requests: Sequence[RecordedRequest], recorded: Sequence[Recorded]) -> Figures:
    """Returns the figures that a decision log has recorded; its cached tokens are expected ones."""
    known = [each.first_token_s if each.first_token_s is not None else nan for each in recorded]
    intervals = [
        (each.end_s - each.first_token_s) / (request.output_tokens - 1)
        for request, each in zip(requests, recorded, strict=True)
        if each.end_s is not None and each.first_token_s is not None and request.output_tokens > 1
    ]
    return _figures(
        requests,
        [each.cached_tokens for each in recorded],
        known,
        intervals,
        [each.end_s for each in recorded if each.end_s is not None],
        nan,
    )


def _figures(
    requests: Sequence[RecordedRequest],
    cached: Sequence[int],
    first: Sequence[float],
    intervals: Sequence[float],
    whole: Sequence[float],
    prefilled: float,
) -> Figures:
    prompts = [request.input_tokens for request in requests]
    long = [s for s, tokens in zip(first, prompts, strict=True) if tokens >= LONG_PROMPT]
    ranked = sorted(s for s in first if s == s)
    return Figures(
        sum(cached) / sum(prompts) if any(prompts) else nan,
        fmean(ranked) if ranked else nan,
        _percentile(ranked, 50),
        _percentile(ranked, 90),
        _percentile(ranked, 99),
        _percentile(sorted(s for s in long if s == s), 90),
        fmean(intervals) if intervals else nan,
        fmean(whole) if whole else nan,
        prefilled,
    )


def _percentile(ranked: Sequence[float], share: int) -> float:
    """Returns the smallest value that at least `share` percent of the values do not exceed."""
    return ranked[ceil(share * len(ranked) / 100) - 1] if ranked else nan


def means(rounds: Sequence[Figures]) -> Figures:
    return Figures(*(fmean(column) for column in zip(*map(astuple, rounds), strict=True)))


def ratios(rounds: Sequence[Figures], base: Sequence[Figures]) -> list[Figures]:
    """Returns each round's figures divided by those of another policy in the same round."""
    return [
        Figures(
            *(
                own / other if other else nan
                for own, other in zip(astuple(each), astuple(its), strict=True)
            )
        )
        for each, its in zip(rounds, base, strict=True)
    ]
