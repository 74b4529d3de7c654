"""Takes the state of a peer when the daemon starts.

    for each peer, in the order given:
      fetch /dump ──> DumpReader ──> plan ──────────> restore, slice by slice ──> done
        │ unreachable, broken,        │ refused whole
        │ itself, or empty            │
        └──────── the next ───────────┘

Nothing of a dump takes effect before all of it has been received and checked.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import trio

from kvd.errors import KvdError
from kvd.index.partitions import State
from kvd.index.publishers import Publishers
from kvd.index.registry import Registry
from kvd.index.restore import bring_in, planned_of
from kvd.net.dialing import Dialer
from kvd.net.fetch import FetchError, FetchLimits, Headers, Sink, fetch
from kvd.telemetry.logs import get_logger
from kvd.wire.dump import BINARY_DUMP, INSTANCE_HEADER, JSON_DUMP, RECOVERING_HEADER
from kvd.wire.event_stream import EventStream, StreamHealth
from kvd_core.dump.recovery import DumpReader, StagedEntry

ACCEPT = BINARY_DUMP + b", " + JSON_DUMP + b";q=0.5"

# Ranks that a dump may contain, some 200 bytes of memory each. The largest fleets have some
# thousand; an answer has a row for each rank that matches.
MAX_RANKS = 65_536

# Time of a healthy stream after which a restored instance counts as confirmed: its first batch has
# triggered the replay of all earlier ones, and queued messages are applied in milliseconds.
CONFIRMED_AFTER_S = 10.0
CONFIRM_EVERY_S = 1.0  # pause between two checks of restored instances

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveryLimits(FetchLimits):
    """Limits of the time and size of a peer's dump."""

    # A block takes 16 bytes while staged and ~54 in the index: 4 GiB in all. There may be as many
    # runs of blocks, 56 bytes each while staged, since lower tiers have one run per block.
    blocks: int = 64 * 1024 * 1024


class RecoveryOutcome(StrEnum):
    """The outcome of an attempt to take one peer's state."""

    RECOVERED = "recovered"
    EMPTY = "empty"  # the dump is empty, or the peer is still recovering itself
    SELF = "self"
    UNREACHABLE = "unreachable"  # or the peer broke off, or violated HTTP
    REFUSED = "refused"  # malformed, beyond the limits, or in conflict with registrations


@dataclass(slots=True)
class RecoveryStats:
    """Counts of the recovery at the start; plain numbers for metrics."""

    attempts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RecoveryOutcome, 0))
    blocks: int = 0
    seconds: float = 0.0

    def note(self, blocks: int) -> None:
        """Notes how many blocks have been stored so far."""
        self.blocks = blocks


class _Passed(Exception):
    """The peer is skipped although nothing went wrong: it has nothing to recover from."""

    def __init__(self, attempt: RecoveryOutcome) -> None:
        super().__init__(attempt)
        self.attempt = attempt


async def recover(
    state: State,
    peers: Sequence[str],
    stats: RecoveryStats,
    limits: RecoveryLimits | None = None,
    *,
    token: bytes = b"",
    dialer: Dialer | None = None,
    again_at: float = -math.inf,
) -> str | None:
    """Takes the state of the first peer that has one; returns its URL, None if no peer has any.

    Requests carry the bearer `token`, if there is one. If no peer has anything before `again_at`
    (monotonic), all are asked again then: they may have started together with this process.
    """

    async def ask_all() -> str | None:
        for url in peers:
            attempt = await _attempt(
                state, url, stats, limits or RecoveryLimits(), dialer or Dialer(), token
            )
            stats.attempts[attempt] += 1
            if attempt is RecoveryOutcome.RECOVERED:
                return url
        return None

    state.begin_recovery()
    started = trio.current_time()
    try:
        url = await ask_all()
        if url is None and trio.current_time() < again_at:
            await trio.sleep_until(again_at)
            url = await ask_all()
    finally:
        state.end_recovery()
    if url is not None:
        stats.seconds = trio.current_time() - started
        log.info("recovered", peer=url, blocks=stats.blocks, seconds=stats.seconds)
    return url


async def _attempt(
    state: State,
    url: str,
    stats: RecoveryStats,
    limits: RecoveryLimits,
    dialer: Dialer,
    token: bytes,
) -> RecoveryOutcome:
    try:
        entries = await _dump_of(url, state, limits, dialer, token)
        planned = await planned_of(state, entries)
        if not planned:
            raise _Passed(RecoveryOutcome.EMPTY)
    except _Passed as passed:
        log.info("peer_dump_empty", peer=url, why=passed.attempt)
        return passed.attempt
    except FetchError as error:
        log.warning("peer_unreachable", peer=url, error=str(error))
        return RecoveryOutcome.UNREACHABLE
    except (ValueError, KvdError) as error:
        log.warning("peer_dump_refused", peer=url, error=str(error))
        return RecoveryOutcome.REFUSED
    await bring_in(state, planned, stats.note)
    return RecoveryOutcome.RECOVERED


async def _dump_of(
    url: str, state: State, limits: RecoveryLimits, dialer: Dialer, token: bytes
) -> list[StagedEntry]:
    """Returns a peer's whole dump; raises ValueError for an answer that is not one."""
    reader: DumpReader | None = None

    def begin(headers: Headers) -> Sink:
        nonlocal reader
        if headers.get(INSTANCE_HEADER) == state.instance_id.encode():
            raise _Passed(RecoveryOutcome.SELF)
        if RECOVERING_HEADER in headers:
            raise _Passed(RecoveryOutcome.EMPTY)
        reader = _reader(headers, limits.blocks, state.max_partitions)
        return reader.feed

    await fetch(url.rstrip("/") + "/dump", ACCEPT, limits, begin, dialer, token=token)
    assert reader is not None  # without it, fetch has raised
    return reader.finish()


def _reader(headers: Headers, max_blocks: int, max_entries: int) -> DumpReader:
    media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return DumpReader(
        media == BINARY_DUMP,
        max_blocks=max_blocks,
        max_events=max_blocks,
        max_entries=max_entries,
        max_ranks=MAX_RANKS,
    )


async def confirm_restored(state: State, registry: Registry, publishers: Publishers) -> None:
    """Confirms each restored instance once its stream has been healthy long enough.

    Returns after the last one.
    """
    heard = _HeardSince()
    while state.unconfirmed or publishers.unsettled:
        await trio.sleep(CONFIRM_EVERY_S)
        now = trio.current_time()
        for registration in list(registry.registrations()):
            instance = registration.key.partition, registration.key.instance_id
            if instance in state.unconfirmed and heard.is_long(
                instance, registration.listener, now
            ):
                state.confirm(*instance)
        for key, publisher in list(publishers.unsettled.items()):
            if heard.is_long(key, publisher.listener, now):
                publishers.settle(key)


class _HeardSince:
    """Since when streams have been healthy without a break."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}

    def is_long(self, key: Hashable, listener: EventStream, now: float) -> bool:
        if not _is_heard(listener, now):
            self._since[key] = now
        return now - self._since.setdefault(key, now) >= CONFIRMED_AFTER_S


def _is_heard(listener: EventStream, now: float) -> bool:
    """Returns whether a batch has come over the present connection and no replay is under way."""
    known = listener.health(now) in (StreamHealth.EXACT, StreamHealth.DEGRADED)
    return known and not listener.batches.may_lack_batches and listener.connected
