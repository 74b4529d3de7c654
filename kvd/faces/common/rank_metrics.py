"""The load of each rank in /metrics, while there are few enough ranks.

The number of ranks is bounded because labels of these metrics hold names that clients chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvd.model import PartitionKey
from kvd.telemetry.metrics import BREATH, Family, Labels
from kvd_core.ledger.ledger import Ledger, Load

Rank = tuple[PartitionKey, Ledger, int, int]  # worker id, dp rank


def rank_families(
    ranks: Iterable[Rank], tokens_name: str, blocks_name: str, requests_name: str
) -> Iterator[Family | None]:
    loads: list[tuple[Labels, Load]] = []
    for number, (key, ledger, worker_id, dp_rank) in enumerate(ranks, 1):
        rank = ledger.rank_of(worker_id, dp_rank)
        if rank is not None:  # None: removed while the scrape paused at a `yield None`
            loads.append((rank_labels(key, worker_id, dp_rank), ledger.load(rank)))
        if number % BREATH == 0:
            yield None
    help = "Number of prompt tokens that a rank has yet to process"
    tokens = [("", labels, load.prefill_tokens) for labels, load in loads]
    yield Family(tokens_name, "gauge", help, tokens)
    help = "Number of distinct blocks of a rank's live requests"
    blocks = [("", labels, load.decode_blocks) for labels, load in loads]
    yield Family(blocks_name, "gauge", help, blocks)
    help = "Number of live requests of a rank"
    requests = [("", labels, load.requests) for labels, load in loads]
    yield Family(requests_name, "gauge", help, requests)


def rank_labels(key: PartitionKey, worker_id: int, dp_rank: int) -> Labels:
    """Returns the labels of a metric of one rank."""
    return (
        ("model_name", key.model_name),
        ("tenant_id", key.tenant_id),
        ("worker_id", str(worker_id)),
        ("dp_rank", str(dp_rank)),
    )
