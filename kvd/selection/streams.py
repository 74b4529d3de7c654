"""Judges ranks by their event connections, so that no rank is chosen whose engine has gone.

    EventStream ── joined, lost ──> Registry.links ──> Streams ──> Candidates.absent, the pool

    connection of a rank's stream    its cached blocks  the rank is chosen
    made, or paused by request       count              yes
    lost                             do not count       yes, for `disconnected_s`
    lost for longer                  do not count       no
    never made                       count              yes, or for `unconnected_s` if that is set

1. Each rank is judged by itself, whatever the other ranks of its worker do.
2. A rank can be chosen again in the step that restores its connection; the pool stays the same.
3. Whenever a rank goes or comes back, the selections that wait are tried again.

A connection is evidence that the engine runs, since engines publish from the process that serves. A
connection that was never made is no evidence that the engine is down: its address may be wrong, or
a firewall may block it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.selection.candidates import Absence, Candidates
from kvd.selection.options import RouterOptions
from kvd.selection.worker_record import WorkerRecord
from kvd.wire.event_stream import EventStream
from kvd.wire.stream_link import ListenerStatus

CHECK_SLICE = 64  # ranks with a faulty connection examined between two checkpoints


class Streams:
    """Judges the ranks of all workers."""

    def __init__(
        self,
        candidates: Mapping[PartitionKey, Candidates],
        registry: Registry,
        options: RouterOptions,
        clock: Callable[[], float],
        on_change: Callable[[Candidates], None],
    ) -> None:
        """Calls `on_change` when a rank stops or starts to be choosable."""
        self._candidates = candidates
        self._registry = registry
        self._options = options
        self._clock = clock
        self._on_change = on_change
        registry.links.subscribe(self.judge)

    def judge(self, key: RankKey) -> None:
        """Judges a rank by the present state of its connection, unless no candidate has it."""
        candidates = self._candidates.get(key.partition)
        if candidates is None or not isinstance(key.instance_id, int):
            return
        rank = key.instance_id, key.dp_rank
        if not candidates.has_rank(*rank):
            return
        before = candidates.absent.get(rank)
        after = self._absence(self._registry.find_listener(key), before)
        candidates.note_absence(rank, after)
        if (before is None or before.reachable) != (after is None or after.reachable):
            self._on_change(candidates)

    def judge_joined(self, candidates: Candidates, record: WorkerRecord) -> None:
        """Judges all ranks of a worker that has just joined; waiting selections do not know it."""
        found = self._registry.registrations_of(record.key, record.worker_id, record.ranks)
        for dp_rank, registration in found:
            absence = self._absence(registration.listener, None)
            if absence is not None:
                candidates.note_absence((record.worker_id, dp_rank), absence)

    def _absence(self, listener: EventStream | None, known: Absence | None) -> Absence | None:
        """Returns the fault of a connection, None if it is sound."""
        if listener is None or listener.connected or listener.status is ListenerStatus.PAUSED:
            return None
        heard = listener.link.disconnected_since is None  # never connected: nothing was lost
        limit_s = self._options.unconnected_s if heard else self._options.disconnected_s
        if limit_s is None:
            return None
        since = listener.link.disconnected_since
        if since is None:
            since = self._clock() if known is None else known.since
        return Absence(since, heard, reachable=self._clock() - since <= limit_s)

    def recheck(self) -> Iterator[None]:
        """Judges the ranks with faulty connections again; rests at every yield."""
        checked = 0
        for candidates in list(self._candidates.values()):
            for worker_id, dp_rank in list(candidates.absent):
                self.judge(RankKey(candidates.key, worker_id, dp_rank))
                checked += 1
                if checked % CHECK_SLICE == 0:
                    yield

    def reasons(self, key: PartitionKey, worker_id: int) -> dict[int, str]:
        """Returns the faults of a worker's connections, by dp rank."""
        candidates = self._candidates.get(key)
        if candidates is None or not candidates.absent:
            return {}
        record = candidates.workers.get(worker_id)
        ranks = () if record is None else record.ranks
        absences = {dp_rank: candidates.absent.get((worker_id, dp_rank)) for dp_rank in ranks}
        return {
            dp_rank: self._reason(RankKey(key, worker_id, dp_rank), absence)
            for dp_rank, absence in absences.items()
            if absence is not None
        }

    def _reason(self, key: RankKey, absence: Absence) -> str:
        for_s = max(0, round(self._clock() - absence.since))
        what = (
            f"has not been connected for {for_s} s" if absence.heard else f"was lost {for_s} s ago"
        )
        listener = self._registry.find_listener(key)
        error = None if listener is None else listener.link.last_error
        why = f": {error}" if error else ""
        return f"the event connection of dp_rank {key.dp_rank} {what}{why}"
