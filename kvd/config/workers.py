"""Reads --workers: registrations made before the ports open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvd.config.parsers import U32_MAX, U64_MAX, parse_uint
from kvd.errors import BadRequest
from kvd.model import PartitionKey, RankKey
from kvd.selection.worker_record import WorkerRecord
from kvd.wire.egress import EgressPolicy
from kvd.wire.urls import masked, parse_url


@dataclass(frozen=True, slots=True)
class StaticWorker:
    """A registration made before the ports open."""

    key: RankKey
    endpoint: str
    block_size: int  # tokens per block
    replay_endpoint: str | None = None
    serves_at: str | None = None  # URL, with which it is in the selection service's catalog too


def parse_workers(
    entries: Iterable[str], partition: PartitionKey, block_size: int, outgoing: EgressPolicy
) -> tuple[StaticWorker, ...]:
    """Reads the entries, each a rank of the partition; raises ValueError for the first bad one."""
    workers: dict[RankKey, StaticWorker] = {}
    for entry in entries:
        try:
            instance_id, dp_rank, addresses = _entry(entry, outgoing)
        except (BadRequest, ValueError) as error:
            text, why = masked(entry), masked(str(error))
            raise ValueError(f"entry {text!r}: {why}") from None
        key = RankKey(partition, instance_id, dp_rank)
        if key in workers:
            raise ValueError(f"instance {instance_id} dp_rank {dp_rank} is listed twice")
        endpoint, replay_endpoint, serves_at = addresses
        workers[key] = StaticWorker(key, endpoint, block_size, replay_endpoint, serves_at)
    return tuple(workers.values())


def _entry(
    entry: str, outgoing: EgressPolicy
) -> tuple[int, int, tuple[str, str | None, str | None]]:
    """Splits `id[:rank]=endpoint[;replay endpoint][;URL]`; blanks around the parts do not count.

    No address contains a semicolon.
    """
    name, equals, addresses = (part.strip() for part in entry.partition("="))
    if not equals:
        raise ValueError("expected the form id[:rank]=endpoint")
    endpoint, *others = (part.strip() for part in addresses.split(";"))
    urls = [each for each in others if each.startswith(("http://", "https://"))]
    replays = [each for each in others if each not in urls]
    identity, colon, rank = name.partition(":")
    instance_id = _number("instance id", identity, U64_MAX)
    dp_rank = _number("dp_rank", rank, U32_MAX) if colon else 0
    if len(urls) > 1 or len(replays) > 1:
        raise ValueError("the entry has more than one replay endpoint or more than one URL")
    outgoing.check_bound_endpoint(endpoint)
    for each in replays:
        outgoing.check_replay_endpoint(each)
    for each in urls:
        parse_url(each)
    return instance_id, dp_rank, (endpoint, next(iter(replays), None), next(iter(urls), None))


def _number(what: str, text: str, maximum: int) -> int:
    try:
        return parse_uint(text, maximum)
    except ValueError as error:
        raise ValueError(f"bad {what}: {error}") from None


def catalog_of(workers: tuple[StaticWorker, ...]) -> tuple[WorkerRecord, ...]:
    """Returns the workers with a URL, as records of the selection service.

    Raises ValueError if ranks of an instance do not fit together.
    """
    ranks: dict[int, dict[int, StaticWorker]] = {}
    for one in workers:
        assert isinstance(one.key.instance_id, int)
        ranks.setdefault(one.key.instance_id, {})[one.key.dp_rank] = one
    return tuple(
        _record(worker_id, dict(sorted(each.items())))
        for worker_id, each in ranks.items()
        if any(one.serves_at for one in each.values())
    )


def _record(worker_id: int, ranks: dict[int, StaticWorker]) -> WorkerRecord:
    first, *others = ranks.values()
    for member, name in (("replay_endpoint", "replay endpoint"), ("serves_at", "URL")):
        if any(getattr(one, member) != getattr(first, member) for one in others):
            raise ValueError(f"the ranks of instance {worker_id} differ in their {name}")
    start = min(ranks)
    if max(ranks) - start + 1 != len(ranks):
        raise ValueError(f"the ranks of instance {worker_id} are not consecutive")
    return WorkerRecord(
        worker_id,
        *first.key.partition,
        endpoint=first.serves_at,
        kv_events_endpoints={dp_rank: one.endpoint for dp_rank, one in ranks.items()},
        replay_endpoint=first.replay_endpoint,
        block_size=first.block_size,
        data_parallel_start_rank=start,
        data_parallel_size=len(ranks),
    )
