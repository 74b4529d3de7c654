"""Reads the fleet file, which registers a fleet without calls: TOML, an array of tables a face.

    [[indexer]]                     # the members of POST /register there
    instance_id = 1
    model_name = "llama"
    block_size = 16
    endpoint = "tcp://10.0.0.5:5557"

    [[slot_tracker]]                # of POST /register there
    [[selection]]                   # of POST /workers
    [[policy]]                      # of POST /policy
    [[conductor]]                   # of POST /register there
    [[upstream]]                    # of POST /upstreams, and names (dns:NAME:PORT)
    [[replica]]                     # of POST /replica_sync/register_peer

The readers of these calls' bodies also read the entries. Nothing here waits or uses a clock; `rows`
touches nothing that is shared, so that it may run in a thread of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.config import toml
from kvd.config.parsers import nearest
from kvd.errors import KvdError
from kvd.faces.common import registration as replica
from kvd.faces.conductor import registration as conductor
from kvd.faces.gateway import registration as gateway
from kvd.faces.indexer import registration as indexer
from kvd.faces.selection import members as tuning
from kvd.faces.selection import records as selection
from kvd.faces.slot_tracker import registration as slot_tracker
from kvd.gateway.dns_names import Wanted
from kvd.index.publishers import Described
from kvd.index.registry import RegisteredRank
from kvd.replica_sync.replicas import RegisteredReplica
from kvd.selection.worker_record import WorkerRecord
from kvd.wire.curve import check_server_key
from kvd.wire.egress import EgressPolicy
from kvd.wire.urls import parse_upstream

# Longest fleet file: it has room for 40,000 ranks, twice as many as can be listened to.
MAX_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FleetFileEntry:
    """One entry of the file, as its face has read it."""

    table: str
    number: int  # in its table, from 1
    key: Hashable  # what distinguishes it from all others of its table
    wanted: Any  # what the face registers: a RegisteredRank, a WorkerRecord, ...

    def __str__(self) -> str:
        return _entry_name(self.table, self.number)


@dataclass(frozen=True, slots=True)
class FleetFileRow:
    """One entry of the file as it is written."""

    table: str
    number: int
    members: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """The members of one table's entries, and their readers."""

    subject: str  # what there can be only one entry about, as `key` distinguishes it
    members: tuple[str, ...]
    read: Callable[[bytes], Any]
    key: Callable[[Any], Hashable]
    check: Callable[[Any, EgressPolicy], None]


def _check_listened(wanted: RegisteredRank | Described, outgoing: EgressPolicy) -> None:
    outgoing.check_bound_endpoint(wanted.endpoint)
    if wanted.replay_endpoint is not None:
        outgoing.check_replay_endpoint(wanted.replay_endpoint)
    check_server_key(wanted.server_key)


def _check_worker(wanted: WorkerRecord, outgoing: EgressPolicy) -> None:
    for endpoint in (wanted.kv_events_endpoint, *wanted.kv_events_endpoints.values()):
        if endpoint:
            outgoing.check_bound_endpoint(endpoint)
    if wanted.replay_endpoint:
        outgoing.check_replay_endpoint(wanted.replay_endpoint)
    check_server_key(wanted.curve_server_key)


def _check_replica(wanted: RegisteredReplica, outgoing: EgressPolicy) -> None:
    outgoing.check_bound_endpoint(wanted.endpoint)
    check_server_key(wanted.server_key)


def _upstream_key(wanted: Wanted) -> Hashable:
    """Returns the key of an engine, or of a name of engines, however its URL is written."""
    if wanted.name is not None:
        return wanted.url
    target = parse_upstream(wanted.url)
    return target.tls, target.authority


TABLES = {
    "indexer": Table(
        "instance and rank",
        indexer.REGISTERED,
        indexer.read_rank,
        lambda wanted: wanted.key,
        _check_listened,
    ),
    "slot_tracker": Table(
        "worker",
        slot_tracker.REGISTERED,
        slot_tracker.read_worker,
        lambda wanted: (wanted.key, wanted.worker_id),
        lambda wanted, outgoing: None,
    ),
    "selection": Table(
        "worker",
        selection.REGISTERED,
        selection.read_worker,
        lambda wanted: wanted.worker_id,
        _check_worker,
    ),
    "policy": Table(
        "model and tenant",
        tuning.TUNED_POLICY,
        tuning.read_policy,
        lambda wanted: wanted.key,
        lambda wanted, outgoing: None,
    ),
    "conductor": Table(
        "publisher",
        conductor.REGISTERED,
        conductor.read_publisher,
        lambda wanted: wanted.key,
        _check_listened,
    ),
    "upstream": Table(
        "engine",
        gateway.REGISTERED,
        gateway.read_upstream,
        _upstream_key,
        lambda wanted, outgoing: None,  # each address is judged when it is connected to
    ),
    "replica": Table(
        "replica",
        replica.REGISTERED,
        replica.read_replica,
        lambda wanted: wanted.endpoint,
        _check_replica,
    ),
}


def load(path: Path, outgoing: EgressPolicy) -> list[FleetFileEntry]:
    """Returns the entries of a file; raises OSError, and ValueError that names what is wrong."""
    return list(entries(rows(read(path)), outgoing))


def read(path: Path) -> bytes:
    """Returns the bytes of a file; raises OSError, and ValueError beyond MAX_BYTES."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"the file is longer than {MAX_BYTES} bytes")
    return data


def rows(data: bytes) -> list[FleetFileRow]:
    """Returns the entries as they are written; ValueError names a table that is not valid."""
    return list(_rows(toml.parse(data)))


def _rows(document: dict[str, Any]) -> Iterator[FleetFileRow]:
    for table, listed in document.items():
        if table not in TABLES:
            raise ValueError(_no_such("table", table, TABLES))
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise ValueError(f"{table}: expected [[{table}]]")
        for number, members in enumerate(listed, 1):
            yield FleetFileRow(table, number, members)


def entries(written: list[FleetFileRow], outgoing: EgressPolicy) -> Iterator[FleetFileEntry]:
    """Yields the entries as their faces read them; ValueError names table, entry and member."""
    seen: dict[tuple[str, Hashable], FleetFileEntry] = {}
    for row in written:
        try:
            entry = _entry(row, outgoing)
        except (KvdError, ValueError, TypeError) as error:
            raise ValueError(f"{_entry_name(row.table, row.number)}: {error}") from None
        other = seen.setdefault((entry.table, entry.key), entry)
        if other is not entry:
            subject = TABLES[entry.table].subject
            raise ValueError(f"{entry} is for the same {subject} as entry {other.number}")
        yield entry


def _entry(row: FleetFileRow, outgoing: EgressPolicy) -> FleetFileEntry:
    table = TABLES[row.table]
    for name in row.members:
        if name not in table.members:
            raise ValueError(_no_such("member", name, table.members))
    try:
        body = json.dumps(row.members, allow_nan=False).encode()
    except TypeError:
        raise ValueError("a member cannot be a date or a time") from None
    except ValueError:
        raise ValueError("a number cannot be nan or inf") from None
    except RecursionError:
        raise ValueError("tables are nested too deeply") from None
    wanted = table.read(body)
    table.check(wanted, outgoing)
    return FleetFileEntry(row.table, row.number, table.key(wanted), wanted)


def _entry_name(table: str, number: int) -> str:
    return f"{table}, entry {number}"


def _no_such(what: str, name: str, known: Iterable[str]) -> str:
    like = nearest(name, known)
    return f"{name}: no such {what}" + (f"; {like}?" if like else "")
