"""Metrics of selections: their outcomes, choices and waits, and the loads of ranks.

Families named dynamo_* are those of Dynamo's router that the selection service can fill. It sees
prompts and choices, but not the engines' answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from kvd.faces.common.rank_metrics import rank_families
from kvd.selection.options import RouterMode
from kvd.selection.service import Selections
from kvd.selection.stats import CACHING, PHASES, SelectionOutcome
from kvd.telemetry.metrics import (
    BREATH,
    BUCKETS,
    Family,
    Labels,
    RequestMetrics,
    by_label,
    counter,
    gauge,
    histogram_samples,
)
from kvd_core.selector.choice_stats import (
    CHOICE_PHASES,
    LENGTH_BOUNDS,
    RATE_BOUNDS,
    REGRET_BOUNDS,
    ChoiceStats,
)

if TYPE_CHECKING:
    from kvd_core.selector.choice_stats import ChoiceSums

MODE_NAMES = {mode.core: str(mode) for mode in RouterMode}
PHASE_NAMES = tuple("whole" if phase is None else str(phase) for phase in PHASES)

# Workers whose ranks are counted between two checkpoints: 0.1 ms.
COUNTED = 16 * BREATH

SELECT_PATHS = ("/select", "/select_and_reserve")

Key = Literal[
    "choices",
    "prompt_tokens",
    "cached_tokens",
    "effective_tokens",
    "chosen_blocks",
    "best_blocks",
]
# Sums over choices, labelled by phase: name of the family, key in ChoiceSums, help.
SUMS: tuple[tuple[str, Key, str], ...] = (
    ("kvd_selection_choices_total", "choices", "Number of ranks chosen"),
    (
        "kvd_selection_prompt_tokens_total",
        "prompt_tokens",
        "Total prompt tokens of the requests with a chosen rank",
    ),
    (
        "kvd_selection_cached_tokens_total",
        "cached_tokens",
        "Total prompt tokens cached by the chosen ranks, weighted by tier",
    ),
    (
        "kvd_selection_effective_prefill_tokens_total",
        "effective_tokens",
        "Total prompt tokens left for the chosen ranks to compute",
    ),
    (
        "kvd_selection_chosen_overlap_blocks_total",
        "chosen_blocks",
        "Total prefix overlap of the chosen ranks, in blocks",
    ),
    (
        "kvd_selection_best_overlap_blocks_total",
        "best_blocks",
        "Total of the largest prefix overlap among the eligible ranks, in blocks",
    ),
)


def choice_families(
    selections: Selections, requests: RequestMetrics, most_ranks: int
) -> Iterator[Family | None]:
    """Yields the families; those of single ranks only while at most `most_ranks` can be chosen.

    `requests` counts the requests of this face.
    """
    choice_stats, stats = selections.choice_stats, selections.stats
    yield from _ends(choice_stats)
    help = "Number of two-phase requests served by one worker for lack of a prefill worker"
    yield counter("kvd_selection_fallbacks_total", help, stats.fallbacks)
    help = "Number of prompts hashed again because the block size changed in the queue"
    yield counter("kvd_selection_rehashed_total", help, stats.rehashed)
    help = "Number of selections queued until a rank is free"
    yield gauge("kvd_selection_waiting", help, selections.scheduler.held)
    help = "Seconds that selections waited in the queue"
    bounds = [f"{bound:.4f}" for bound in BUCKETS]
    waits = list(histogram_samples(bounds, stats.waits.buckets, stats.waits.sum))
    yield Family("kvd_selection_wait_seconds", "histogram", help, waits)
    yield from _choices([choice_stats.choices(phase) for phase in range(CHOICE_PHASES)])
    yield from _as_on_the_router(choice_stats, requests)
    yield from _ranks(selections, most_ranks)


def _ends(choice_stats: ChoiceStats) -> Iterator[Family]:
    ended: list[tuple[str, Labels, float]] = [
        ("", (*_kind(mode, phase), ("outcome", SelectionOutcome(outcome).name.lower())), number)
        for mode, phase, outcome, number in choice_stats.outcomes()
    ]
    if ended:  # there is a series only for combinations that have occurred
        help = "Number of selections ended, by outcome"
        yield Family("kvd_selection_decisions_total", "counter", help, ended)
    held = [("", _kind(mode, phase), number) for mode, phase, number in choice_stats.held()]
    if held:
        help = "Number of selections that were queued"
        yield Family("kvd_selection_held_total", "counter", help, held)


def _kind(mode: int, phase: int) -> Labels:
    return ("mode", MODE_NAMES[mode]), ("phase", PHASE_NAMES[phase])


def _choices(sums: list[ChoiceSums]) -> Iterator[Family]:
    for name, key, help in SUMS:
        values = {PHASE_NAMES[phase]: one[key] for phase, one in enumerate(sums)}
        yield by_label(name, "counter", help, "phase", values)
    help = (
        "Blocks by which the prefix overlap of the chosen rank fell short of the largest among the "
        "eligible ranks"
    )
    bounds = [str(bound) for bound in REGRET_BOUNDS]
    samples = [
        sample
        for phase, one in enumerate(sums)
        for sample in histogram_samples(
            bounds,
            one["regret"],
            one["best_blocks"] - one["chosen_blocks"],
            (("phase", PHASE_NAMES[phase]),),
        )
    ]
    yield Family("kvd_selection_regret_blocks", "histogram", help, samples)


def _as_on_the_router(choice_stats: ChoiceStats, requests: RequestMetrics) -> Iterator[Family]:
    lengths, tokens = choice_stats.lengths()
    prefix = "dynamo_component_router"
    yield counter(f"{prefix}_requests_total", "Number of selections served", sum(lengths))
    help = "Prompt tokens of each selection served"
    samples = list(histogram_samples([str(bound) for bound in LENGTH_BOUNDS], lengths, tokens))
    yield Family(f"{prefix}_input_sequence_tokens", "histogram", help, samples)
    sums = [choice_stats.choices(phase) for phase in CACHING]
    rates = [sum(column) for column in zip(*(one["rates"] for one in sums), strict=True)]
    rates.append(0)  # none is above 1
    samples = list(
        histogram_samples(
            [str(bound) for bound in RATE_BOUNDS], rates, sum(one["rates_sum"] for one in sums)
        )
    )
    help = "Share of the prompt cached by the chosen rank"
    yield Family(f"{prefix}_kv_hit_rate", "histogram", help, samples)
    help = "Total of the largest prefix overlap among the eligible ranks, in tokens"
    best = sum(one["best_tokens"] for one in sums)
    yield counter(f"{prefix}_kv_best_eligible_cached_prefix_tokens_total", help, best)
    help = "Total prefix overlap of the chosen ranks, in tokens"
    chosen = sum(one["chosen_tokens"] for one in sums)
    yield counter(f"{prefix}_kv_selected_cached_prefix_tokens_total", help, chosen)
    took, seconds = requests.durations(SELECT_PATHS)
    bounds = [f"{bound * 1000:.1f}" for bound in BUCKETS]
    help = "Milliseconds from a selection request to its answer, including the time in the queue"
    samples = list(histogram_samples(bounds, took, seconds * 1000))
    yield Family("dynamo_router_overhead_total_ms", "histogram", help, samples)


def _ranks(selections: Selections, most_ranks: int) -> Iterator[Family | None]:
    every = list(selections.candidates.values())
    number = 0
    for one in every:
        for count, record in enumerate(list(one.workers.values()), 1):
            number += len(record.ranks)
            if count % COUNTED == 0:
                yield None
    absent = sum(not each.reachable for one in every for each in one.absent.values())
    yield gauge("kvd_selection_ranks", "Number of ranks that can be chosen", number - absent)
    help = "Number of ranks that cannot be chosen because their event connection is lost"
    yield gauge("kvd_selection_absent_ranks", help, absent)
    if number <= most_ranks:
        ranks = [
            (key, candidates.ledger, worker_id, dp_rank)
            for key, candidates in sorted(selections.candidates.items())
            for worker_id, record in sorted(candidates.workers.items())
            for dp_rank in record.ranks
        ]
        names = ("prefill_tokens", "decode_blocks", "rank_requests")
        yield from rank_families(ranks, *(f"kvd_selection_{name}" for name in names))
