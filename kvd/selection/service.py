"""The selection service as a whole; the package's docstring describes its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.model import PartitionKey
from kvd.platform.descriptors import MAX_WAITING
from kvd.selection.affinity import Affinity
from kvd.selection.candidates import Candidates
from kvd.selection.chooser import RankChooser
from kvd.selection.options import RouterOptions
from kvd.selection.readiness import Readiness
from kvd.selection.regret import Regret
from kvd.selection.replies import Replies
from kvd.selection.reservations import Reservations
from kvd.selection.scheduler import Scheduler
from kvd.selection.speeds import Speeds
from kvd.selection.stats import SelectionStats
from kvd.selection.streams import Streams
from kvd.selection.tuning import Tuning
from kvd.selection.workers import Workers
from kvd.slots.shared_loads import Ledgers
from kvd_core.base.draws import Draws
from kvd_core.ledger.journal import Journal
from kvd_core.ledger.ledger import WHOLE_ROWS_BYTES
from kvd_core.selector.settings import Settings


class Selections:
    """The state of the selection service."""

    def __init__(
        self,
        state: State,
        registry: Registry,
        options: RouterOptions,
        expiry_s: float,
        random: Random,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
        *,
        ledgers: Ledgers | None = None,
        readiness: Readiness | None = None,
        max_waiting: int = MAX_WAITING,
        journal: Journal | None = None,
    ) -> None:
        """Faces that use the same `ledgers` see each other's load.

        Sessions and kept answers are recorded in the `journal`, if there is one. At most
        `max_waiting` selections wait: the process has descriptors for that many clients.
        """
        self.readiness = readiness or Readiness()
        self.options = options
        self.clock = clock
        self.draws = Draws(random)
        self.candidates: dict[PartitionKey, Candidates] = {}
        self.writer_id = random.randrange(1, 2**64)  # names this process to replicas; 0 means none
        self.affinity: Affinity | None = None
        if options.session_affinity_ttl_s is not None:
            ttl_s = options.session_affinity_ttl_s
            self.affinity = Affinity(
                self.candidates,
                ttl_s,
                self.writer_id,
                clock,
                wall_ns,
                options.max_sessions,
                journal,
            )
        self.reservations = Reservations(
            self.candidates,
            expiry_s,
            clock,
            ledgers or Ledgers(),
            self.affinity,
            decays=options.tracks_output_blocks,
            max_retries=options.max_retries,
            journal=journal,
        )
        self.regret = Regret()
        self.speeds = Speeds(self.candidates, clock, self.regret, self.reservations.sample)
        self.reservations.moments.subscribe(self.speeds.observe)
        self._adjusted_at = clock()
        self.stats = SelectionStats()
        self.choice_stats = self.stats.choice_stats
        self.chooser = RankChooser(
            self.candidates, self.draws, clock, registry, self.speeds, self.affinity
        )
        self.scheduler = Scheduler(
            self.candidates,
            options,
            self.reservations,
            self.chooser,
            Replies(self.chooser, options, self.stats),
            clock,
            self.stats,
            max_waiting,
        )
        self.tuning = Tuning(self.candidates, options.settings, self.scheduler.retry_all)
        self.streams = Streams(
            self.candidates, registry, options, clock, self.scheduler.drain_queue
        )
        self.workers = Workers(
            self.candidates,
            state,
            registry,
            options,
            self.reservations,
            self.tuning,
            self.streams,
            self.speeds,
            self._workers_changed,
        )

    def _workers_changed(self) -> None:
        if not self.readiness.enough:
            self.readiness.note(
                sum(len(candidates.workers) for candidates in self.candidates.values())
            )
        self.scheduler.drain_queues()

    def run_due(self, now: float) -> Iterator[None]:
        """Expires bookings, and judges streams again; rests at every yield."""
        self.reservations.sample.adjust(now - self._adjusted_at)
        self._adjusted_at = now
        self.speeds.forget_absent()
        yield from self.reservations.expire(now)
        yield from self.streams.recheck()

    def settings(self, key: PartitionKey) -> Settings:
        """Returns the settings for requests of a model and tenant that override none of them."""
        candidates = self.candidates.get(key)
        return self.options.settings if candidates is None else candidates.settings

    def reload(self, options: RouterOptions, expiry_s: float) -> None:
        """Applies new weights, thresholds, policies, times, and bounds of waiting and partitions.

        Other options stay as they are. Selections that wait keep the weights and thresholds with
        which they came.
        """
        self.options.settings = options.settings
        self.options.queue_policy = options.queue_policy
        self.options.disconnected_s = options.disconnected_s
        self.options.unconnected_s = options.unconnected_s
        self.options.prefill_busy = options.prefill_busy
        self.options.max_held = options.max_held
        self.options.max_wait_s = options.max_wait_s
        self.options.max_partitions = options.max_partitions
        self.reservations.expiry_s = expiry_s
        for candidates in self.candidates.values():
            candidates.queue.reorder(options.queue_policy)
        self.tuning.reload(options.settings)

    def render_loads(self, model_name: str | None, tenant_id: str | None) -> bytes | None:
        """Returns a JSON array of the loads of every model and tenant, sorted; None is any name.

        Returns None if they have so many ranks that it should be rendered in pieces.
        """
        found, room = self.named(model_name, tenant_id), 0
        for candidates in found:
            room += candidates.ledger.rows_bytes()
        if room > WHOLE_ROWS_BYTES:
            return None
        return b"[%b]" % b",".join([candidates.render_loads() for candidates in found])

    def named(self, model_name: str | None, tenant_id: str | None) -> list[Candidates]:
        """Returns the candidates of models and tenants, sorted by these; None is any name."""
        return [
            self.candidates[key]
            for key in sorted(self.candidates)
            if model_name in (None, key.model_name) and tenant_id in (None, key.tenant_id)
        ]
