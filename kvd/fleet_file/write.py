"""Writes registrations of the faces as rows of a fleet file, the reverse of `parse`.

RegisteredRank, RegisteredWorker, WorkerRecord, ... ──> members of an entry of its table
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from kvd.gateway.dns_names import Wanted
from kvd.index.publishers import Described
from kvd.index.registry import RegisteredRank
from kvd.model import PartitionKey
from kvd.replica_sync.replicas import RegisteredReplica
from kvd.selection.worker_record import WorkerRecord
from kvd.slots.trackers import RegisteredWorker

Members = dict[str, Any]


def of_rank(rank: RegisteredRank) -> Members:
    return {
        **_partition_members(rank.key.partition),
        "instance_id": rank.key.instance_id,
        "dp_rank": rank.key.dp_rank,
        "block_size": rank.block_size,
        **_given(
            endpoint=rank.endpoint,
            replay_endpoint=rank.replay_endpoint,
            curve_server_key=rank.server_key,
        ),
    }


def of_slots(worker: RegisteredWorker) -> Members:
    return {
        **_partition_members(worker.key),
        "worker_id": worker.worker_id,
        "block_size": worker.block_size,
        "dp_start": worker.dp_start,
        "dp_size": worker.dp_size,
    }


def of_worker(record: WorkerRecord) -> Members:
    members = {each.name: getattr(record, each.name) for each in fields(record)}
    return {name: _plain(value) for name, value in members.items() if value not in (None, (), {})}


def of_publisher(described: Described) -> Members:
    return {
        "modelname": described.model_name,
        "tenant_id": described.tenant_id,
        "instance_id": described.instance_id,
        "dp_rank": described.dp_rank,
        "block_size": described.block_size,
        "type": described.type,
        "endpoint": described.endpoint,
        **_given(
            replay_endpoint=described.replay_endpoint,
            curve_server_key=described.server_key,
            lora_name=described.lora_name or None,
            additional_salt=described.salt or None,
        ),
        **dict(described.echoed),
    }


def of_upstream(wanted: Wanted) -> Members:
    return {"url": wanted.url, **({"role": "prefill"} if wanted.prefills else {})}


def of_replica(replica: RegisteredReplica) -> Members:
    return {"endpoint": replica.endpoint, **_given(curve_server_key=replica.server_key)}


MEMBERS_OF: Mapping[str, Callable[[Any], Members]] = {
    "indexer": of_rank,
    "slot_tracker": of_slots,
    "selection": of_worker,
    "conductor": of_publisher,
    "upstream": of_upstream,
    "replica": of_replica,
}


def _partition_members(key: PartitionKey) -> Members:
    return {"model_name": key.model_name, "tenant_id": key.tenant_id}


def _given(**members: str | None) -> Members:
    return {name: value for name, value in members.items() if value is not None}


def _plain(value: object) -> object:
    """Returns a value in types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value
