"""Families of /metrics about the speeds of ranks and the expected outcomes of choices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvd.faces.common.rank_metrics import rank_labels
from kvd.selection.regret import Account, Rank
from kvd.selection.service import Selections
from kvd.telemetry.metrics import BREATH, Family, by_label, counter


def speed_families(selections: Selections, most_ranks: int) -> Iterator[Family | None]:
    """Yields the families; those of single ranks only while there are at most `most_ranks`."""
    help = "Number of choices with a limit on the time to the first token, by outcome"
    name = "kvd_selection_slo_choices_total"
    yield by_label(name, "counter", help, "outcome", selections.stats.slo)
    help = "Number of observed requests forgotten at the limit"
    yield counter("kvd_selection_observed_forgotten_total", help, selections.speeds.forgotten)
    help = "Number of reports left out of the accounts of ranks at their limit"
    yield counter("kvd_selection_regret_unplaced_total", help, selections.regret.unplaced)
    if len(selections.regret.accounts) <= most_ranks:
        yield from _accounts(list(selections.regret.rows()))
    speeds = selections.speeds
    every = (
        (key, record.worker_id, dp_rank)
        for key, candidates in selections.candidates.items()
        for record in candidates.workers.values()
        for dp_rank in record.ranks
    )
    ranks = list(islice(every, most_ranks + 1))
    if len(ranks) > most_ranks:
        return
    found = []
    for number, rank in enumerate(ranks, 1):
        if speed := speeds.prefill(rank):  # may fit the rank's line anew, hence the pauses
            found.append((rank_labels(*rank), speed))
        if number % BREATH == 0:
            yield None
    help = "Prompt tokens a second that a rank computes, as learned or given"
    rows = [("", labels, 1.0 / speed.token_s) for labels, speed in found]
    yield Family("kvd_selection_prefill_tokens_per_second", "gauge", help, rows)
    help = "Confidence in the speed of a rank, from 0 to 1"
    rows = [("", labels, speed.confidence) for labels, speed in found]
    yield Family("kvd_selection_speed_confidence", "gauge", help, rows)


SUMS = (
    ("reports", "reports", "Number of requests whose cached tokens were reported"),
    (
        "expected_cached_tokens",
        "expected_cached_tokens",
        "Total cached tokens expected of the reported requests",
    ),
    ("cached_tokens", "reported_cached_tokens", "Total cached tokens that clients reported"),
    ("missing_tokens", "missing_tokens", "Total tokens expected to be cached that were not cached"),
    ("surplus_tokens", "surplus_tokens", "Total tokens that were cached unexpectedly"),
    ("timed", "timed_requests", "Number of requests with an expected time to the first token"),
    (
        "expected_ttft_s",
        "expected_ttft_seconds",
        "Total time to the first token expected of timed requests",
    ),
    ("ttft_s", "ttft_seconds", "Total time to the first token of the timed requests"),
)


def _accounts(accounts: list[tuple[Rank, Account]]) -> Iterator[Family]:
    for attribute, name, help in SUMS:
        rows = [("", rank_labels(*rank), getattr(account, attribute)) for rank, account in accounts]
        yield Family(f"kvd_selection_{name}_total", "counter", help, rows)
