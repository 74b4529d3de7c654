"""What /metrics says of selections: how they ended, what was chosen, who waits, who is loaded.

Families named dynamo_* are those of Dynamo's router that a service beside the request path can
fill: it sees prompts and choices, not the tokens that come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from kvd.faces.common.rank_metrics import rank_families
from kvd.selection.options import RouterMode
from kvd.selection.service import Selections
from kvd.selection.stats import PHASES, Outcome
from kvd.telemetry.metrics import (
    BUCKETS,
    Family,
    Labels,
    RequestMetrics,
    by_label,
    counter,
    gauge,
    histogram_samples,
)
from kvd_core.selector.choice_counts import (
    CHOICE_PHASES,
    LENGTH_BOUNDS,
    RATE_BOUNDS,
    REGRET_BOUNDS,
    ChoiceCounts,
)

if TYPE_CHECKING:
    from kvd_core.selector.choice_counts import ChoiceSums

MODE_NAMES = {mode.core: str(mode) for mode in RouterMode}
PHASE_NAMES = tuple("whole" if phase is None else str(phase) for phase in PHASES)
CACHING = (0, 1)  # phases whose choices are about what is cached: whole, prefill
SELECT_PATHS = ("/select", "/select_and_reserve")

Key = Literal[
    "choices",
    "prompt_tokens",
    "cached_tokens",
    "effective_tokens",
    "chosen_blocks",
    "best_blocks",
]
# Sums over choices, by phase: name of the family, key in ChoiceSums, help.
SUMS: tuple[tuple[str, Key, str], ...] = (
    ("kvd_selection_choices_total", "choices", "Ranks chosen"),
    ("kvd_selection_prompt_tokens_total", "prompt_tokens", "Tokens of the prompts chosen for"),
    (
        "kvd_selection_cached_tokens_total",
        "cached_tokens",
        "Of these, cached by the rank that was chosen, weighed by tier",
    ),
    (
        "kvd_selection_effective_prefill_tokens_total",
        "effective_tokens",
        "Of these, for it to compute",
    ),
    (
        "kvd_selection_chosen_overlap_blocks_total",
        "chosen_blocks",
        "Prompt blocks cached by the rank that was chosen",
    ),
    (
        "kvd_selection_best_overlap_blocks_total",
        "best_blocks",
        "Prompt blocks cached by whoever cached most of those who could be chosen",
    ),
)


def choice_families(
    selections: Selections, requests: RequestMetrics, most_ranks: int
) -> Iterator[Family | None]:
    """Shows loads rank by rank up to `most_ranks` schedulable ranks; `requests` are the face's."""
    counts, tally = selections.counts, selections.tally
    yield from _ends(counts)
    help = "Requests for both phases that one worker serves for want of a prefill worker"
    yield counter("kvd_selection_fallbacks_total", help, tally.fallbacks)
    help = "Prompts hashed again, as the block size changed while they waited"
    yield counter("kvd_selection_rehashed_total", help, tally.rehashed)
    help = "Selections that wait until a rank is not busy"
    yield gauge("kvd_selection_waiting", help, selections.scheduler.held)
    help = "Time that selections waited, however that ended"
    bounds = [f"{bound:.4f}" for bound in BUCKETS]
    waits = list(histogram_samples(bounds, tally.waits.buckets, tally.waits.sum))
    yield Family("kvd_selection_wait_seconds", "histogram", help, waits)
    yield from _choices([counts.choices(phase) for phase in range(CHOICE_PHASES)])
    yield from _as_on_the_router(counts, requests)
    yield from _ranks(selections, most_ranks)


def _ends(counts: ChoiceCounts) -> Iterator[Family]:
    ended: list[tuple[str, Labels, float]] = [
        ("", (*_kind(mode, phase), ("outcome", Outcome(outcome).name.lower())), number)
        for mode, phase, outcome, number in counts.outcomes()
    ]
    if ended:  # series appear once they are hit
        help = "Selections that have ended, by how"
        yield Family("kvd_selection_decisions_total", "counter", help, ended)
    held = [("", _kind(mode, phase), number) for mode, phase, number in counts.held()]
    if held:
        help = "Selections that had to wait"
        yield Family("kvd_selection_held_total", "counter", help, held)


def _kind(mode: int, phase: int) -> Labels:
    return ("mode", MODE_NAMES[mode]), ("phase", PHASE_NAMES[phase])


def _choices(sums: list[ChoiceSums]) -> Iterator[Family]:
    for name, key, help in SUMS:
        values = {PHASE_NAMES[phase]: one[key] for phase, one in enumerate(sums)}
        yield by_label(name, "counter", help, "phase", values)
    help = "Blocks by which the chosen rank cached less than the one that cached most"
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


def _as_on_the_router(counts: ChoiceCounts, requests: RequestMetrics) -> Iterator[Family]:
    lengths, tokens = counts.lengths()
    prefix = "dynamo_component_router"
    yield counter(f"{prefix}_requests_total", "Selections served", sum(lengths))
    help = "Prompt tokens of selections served"
    samples = list(histogram_samples([str(bound) for bound in LENGTH_BOUNDS], lengths, tokens))
    yield Family(f"{prefix}_input_sequence_tokens", "histogram", help, samples)
    sums = [counts.choices(phase) for phase in CACHING]
    rates = [sum(column) for column in zip(*(one["rates"] for one in sums), strict=True)]
    rates.append(0)  # none is above 1
    samples = list(
        histogram_samples(
            [str(bound) for bound in RATE_BOUNDS], rates, sum(one["rates_sum"] for one in sums)
        )
    )
    help = "Share of the prompt cached by the rank that was chosen"
    yield Family(f"{prefix}_kv_hit_rate", "histogram", help, samples)
    help = "Prompt tokens cached by whoever cached most of those who could be chosen"
    best = sum(one["best_tokens"] for one in sums)
    yield counter(f"{prefix}_kv_best_eligible_cached_prefix_tokens_total", help, best)
    help = "Prompt tokens cached by the rank that was chosen"
    chosen = sum(one["chosen_tokens"] for one in sums)
    yield counter(f"{prefix}_kv_selected_cached_prefix_tokens_total", help, chosen)
    took, seconds = requests.durations(SELECT_PATHS)
    bounds = [f"{bound * 1000:.1f}" for bound in BUCKETS]
    help = "Milliseconds from a request for a selection to its answer, waiting included"
    samples = list(histogram_samples(bounds, took, seconds * 1000))
    yield Family("dynamo_router_overhead_total_ms", "histogram", help, samples)


def _ranks(selections: Selections, most_ranks: int) -> Iterator[Family | None]:
    fleets = sorted(selections.fleets.items())
    number = sum(len(record.ranks) for _, fleet in fleets for record in fleet.workers.values())
    absent = sum(not each.reachable for _, fleet in fleets for each in fleet.absent.values())
    yield gauge("kvd_selection_ranks", "Ranks that can be chosen", number - absent)
    help = "Ranks that cannot, because their event connections are lost"
    yield gauge("kvd_selection_absent_ranks", help, absent)
    if number <= most_ranks:
        ranks = [
            (key, fleet.ledger, worker_id, dp_rank)
            for key, fleet in fleets
            for worker_id, record in sorted(fleet.workers.items())
            for dp_rank in record.ranks
        ]
        names = ("prefill_tokens", "decode_blocks", "rank_requests")
        yield from rank_families(ranks, *(f"kvd_selection_{name}" for name in names))
