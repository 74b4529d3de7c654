"""Are the models and tenants that are asked for registered, with all ranks?"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from kvd.diagnosis.evidence import Evidence, ModelEvidence, WorkerEvidence
from kvd.diagnosis.findings import Finding, counted, found, partition_name
from kvd.model import PartitionKey

MOST_NAMED = 4  # registered names, or ranks, that a finding lists


def check_identity(evidence: Evidence) -> Iterator[Finding]:
    """Yields models and tenants that are asked for in vain, and faults of registrations."""
    for subject, why in evidence.fleet_faults.items():
        yield found("fleet_not_applied", subject, why)
    # Workers that cannot be chosen are registered all the same, and have findings of their own.
    registered = evidence.registered.union(worker.key for worker in evidence.workers)
    for key, asked in evidence.unknown.items():
        if key not in registered:
            yield _unknown(key, asked, registered)
    for model in evidence.models:
        yield from _check_ranks(model)
    for shared in evidence.endpoints:
        ranks = [f"worker {each.instance_id} rank {each.dp_rank}" for each in shared.ranks]
        subject = f"{shared.endpoint} of {partition_name(shared.key)}"
        yield found("endpoint_shared", subject, f"{_some(ranks)} are registered with it")
    for worker in evidence.workers:
        yield _unschedulable(worker)


def _unknown(key: PartitionKey, asked: int, registered: Collection[PartitionKey]) -> Finding:
    tenants = sorted(each.tenant_id for each in registered if each.model_name == key.model_name)
    subject, requests = f"model {partition_name(key)}", counted(asked, "request")
    if tenants:
        known = _some(tenants)
        evidence = f"{requests} for tenant {key.tenant_id}; the model has tenants: {known}"
        return found("tenant_mismatch", subject, evidence, known=f"{known}, or {key.tenant_id}")
    known = _some(sorted({each.model_name for each in registered}))
    evidence = f"{requests} for a model that nobody registered; registered: {known or 'none'}"
    if not known:
        return found("model_name_mismatch", subject, evidence, "nobody", known=key.model_name)
    either = f"{known}, or {key.model_name}"
    return found("model_name_mismatch", subject, evidence, "names", known=either)


def _check_ranks(model: ModelEvidence) -> Iterator[Finding]:
    """Yields a finding for each instance with holes in its ranks, whose numbers are consecutive."""
    for instance_id, ranks in model.ranks.items():
        least, most = min(ranks), max(ranks)
        # One rank with a wrong number may lie billions behind the others: only the first are named.
        first = islice((rank for rank in range(least, most) if rank not in ranks), MOST_NAMED)
        missing = _some(list(first), most - least + 1 - len(ranks))
        evidence = f"ranks {_some(sorted(ranks))} are registered, {missing} are not"
        subject = f"worker {instance_id} of {partition_name(model.key)}"
        yield found("rank_missing", subject, evidence, ranks=f"dp_rank {missing}")


def _unschedulable(worker: WorkerEvidence) -> Finding:
    subject = f"worker {worker.worker_id} of {partition_name(worker.key)}"
    evidence = "; ".join(worker.reasons)
    for reason in worker.reasons:
        if reason.startswith("block_size ") and " differs from " in reason:
            _, _, size = reason.removesuffix(" of its model").rpartition(" ")
            fields = {"hint": f'"block_size": {size}', "size": size}
            return found("block_size_mismatch", subject, evidence, **fields)
        if "is required for dp_rank" in reason:
            ranks = "kv_events_endpoints by rank"
            return found("rank_missing", subject, evidence, ranks=ranks)
    return found("worker_unschedulable", subject, evidence)


def _some(values: list[str] | list[int], number: int | None = None) -> str:
    """Returns the first values; `number` is that of all values, unless the list has all."""
    others = (len(values) if number is None else number) - MOST_NAMED
    more = f", and {others} more" if others > 0 else ""
    return ", ".join(map(str, values[:MOST_NAMED])) + more
