"""The selection service: which rank should serve a prompt, and what is booked on it.

    Selections
      ├ entries: worker id ──> record, lifecycle, reasons          the catalog, as clients see it
      ├ fleets: (model, tenant) ──> Fleet
      │                              ├ pool     kvd_core: the ranks that can be chosen
      │                              ├ ledger   kvd_core: their live requests
      │                              └ queue    selections that wait, all their ranks being busy
      └ live: reservation id ──> Fleet                              ids are unique service-wide

Listeners of KV events are those of the registry, shared with the other faces. Changes of the
catalog are made one after the other and may wait for listeners to end; everything else is one
atomic step: between choosing a rank and booking it nothing is awaited.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio

from kvd.catalog import Lifecycle, WorkerRecord
from kvd.errors import BadRequest, Conflict, Invalid, KvdError, NotFound, Unavailable
from kvd.model import PartitionKey, RankKey
from kvd.registry import Registry
from kvd.scheduling.options import RouterOptions
from kvd.scheduling.predictions import Predictions
from kvd.scheduling.queue import SelectionQueue, Urgency, Waiting
from kvd.slots import apply_to
from kvd.state import State
from kvd.wire.lifecycle import Lifecycle as Event
from kvd.wire.lifecycle import Outcome, Step
from kvd_core import ledger, selector
from kvd_core.draws import Draws
from kvd_core.hashing import sequence_hashes
from kvd_core.ledger import Ledger
from kvd_core.selector import Candidate, Pool, Prompt
from kvd_core.selector_settings import Settings

OWNER = "selection"  # of its registrations

MAX_FLEETS = 16_384  # models and tenants, as elsewhere
MAX_WORKERS = 65_536
EXPIRY_SLICE = 64  # requests expired between two rests

Look = Callable[[Pool], None]  # puts a prompt before a pool


@dataclass(frozen=True, slots=True)
class Entry:
    """A worker of the catalog."""

    record: WorkerRecord
    reasons: list[str]  # why it cannot be scheduled

    @property
    def lifecycle(self) -> Lifecycle:
        return Lifecycle.INCOMPLETE if self.reasons else Lifecycle.SCHEDULABLE


@dataclass(frozen=True, slots=True)
class Constraints:
    """Who may serve a request; also the lane it waits in."""

    allowed: frozenset[int] | None = None
    pinned: tuple[int, int] | None = None  # worker, dp rank
    taints: frozenset[str] = frozenset()

    def admits(self, record: WorkerRecord, dp_rank: int) -> bool:
        return (
            (self.allowed is None or record.worker_id in self.allowed)
            and self.pinned in (None, (record.worker_id, dp_rank))
            and self.taints.issubset(record.taints)
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """One selection, beside its prompt."""

    key: PartitionKey
    settings: Settings
    selection_id: str | None = None
    reservation_id: str | None = None  # set: the selection is booked under it
    constraints: Constraints | None = None
    affinity: tuple[int, int | None] | None = None  # worker, dp rank, if they can be chosen
    strict_priority: int = 0
    priority_jump: float = 0.0
    expected_output_tokens: int | None = None
    lora_name: str | None = None
    explain: bool = False


@dataclass(slots=True, eq=False)
class Held:
    """A selection that waits; `done` is set with its answer, or its failure."""

    ask: Ask
    prompt: Prompt
    done: trio.Event = field(default_factory=trio.Event)
    answer: bytes | KvdError | None = None
    waiting: Waiting[Held] | None = None

    def settle(self, answer: bytes | KvdError) -> None:
        self.answer = answer
        self.done.set()


class Fleet:
    """The schedulable workers of one model and tenant."""

    def __init__(self, key: PartitionKey, options: RouterOptions, state: State) -> None:
        self.key = key
        self._state = state
        self.ledger = Ledger()
        self.workers: dict[int, WorkerRecord] = {}
        self.queue: SelectionQueue[Held] = SelectionQueue(options.queue_policy)
        self._pool: Pool | None = None
        self._silent: int | None = None
        # By candidate, once needed: the members of an answer that say who was chosen, as JSON.
        self.pieces: list[bytes | None] = []
        self.place = json.dumps(key._asdict(), separators=(",", ":")).encode()[:-1]  # unclosed
        self.predictions: Predictions[tuple[int, int]] | None = None  # without KV events
        if not options.uses_kv_events:
            self.predictions = Predictions(
                options.ttl_s, options.max_tree_size, options.prune_target_ratio
            )

    @property
    def block_size(self) -> int | None:
        """Tokens per block of its workers; None without any."""
        return next((record.block_size for record in self.workers.values()), None)

    def changed(self, silent: int | None = None) -> None:
        """Says that the workers, or what they cache in, have changed.

        The worker `silent` counts as caching nothing until the next change.
        """
        self._pool = None
        self._silent = silent

    @property
    def pool(self) -> Pool:
        """The ranks there are now; O(ranks log ranks) after a change, once for many of them."""
        if self._pool is None:
            self._pool = self._make_pool()
            self.pieces = [None] * len(self._pool)
        return self._pool

    def _make_pool(self) -> Pool:
        block_size = self.block_size
        if block_size is None:
            return Pool(None, self.ledger, 1)
        partition = self._state.partitions.get(self.key)
        known = {} if partition is None else partition.workers
        candidates = [
            Candidate(
                record.worker_id,
                dp_rank,
                None if record.worker_id == self._silent else known.get(record.worker_id),
                self.ledger.add_rank(record.worker_id, dp_rank),
                record.max_num_batched_tokens or 0,
                record.total_kv_blocks or 0,
            )
            for record in self.workers.values()
            for dp_rank in record.ranks
        ]
        index = None if partition is None else partition.index
        return Pool(index, self.ledger, block_size, candidates)

    def piece(self, chosen: int) -> bytes:
        """Returns the members that name a candidate in an answer, a comma behind them."""
        piece = self.pieces[chosen]
        if piece is None:
            candidate = self.pool.candidates[chosen]
            record = self.workers[candidate.worker_id]
            members = {
                "model_name": self.key.model_name,
                "tenant_id": self.key.tenant_id,
                "worker_id": record.worker_id,
                "dp_rank": candidate.dp_rank,
                "endpoint": record.endpoint,
                "block_size": record.block_size,
            }
            piece = self.pieces[chosen] = _members(members)
        return piece

    def render_loads(self) -> bytes:
        """Returns a JSON object of what its ranks work on, and what waits."""
        waiting = [held.prompt.isl_tokens for held in self.queue]
        return b'%b,"loads":%b,"pending_count":%d,"pending_isl_tokens":%d}' % (
            self.place,
            self.ledger.project(b"", 0),
            len(waiting),
            sum(waiting),
        )

    def eligible(self, constraints: Constraints | None) -> bytes | None:
        """Returns the pool's mask of the ranks that may serve a request; None: all of them."""
        if constraints is None:
            return None
        return bytes(
            constraints.admits(self.workers[each.worker_id], each.dp_rank)
            for each in self.pool.candidates
        )

    def targets(self, affinity: tuple[int, int | None], eligible: bytes | None) -> bytes | None:
        """Narrows a mask to what a request would like best; None if none of that may serve it."""
        worker_id, dp_rank = affinity
        mask = bytes(
            each.worker_id == worker_id
            and dp_rank in (None, each.dp_rank)
            and (eligible is None or eligible[at] != 0)
            for at, each in enumerate(self.pool.candidates)
        )
        return mask if any(mask) else None


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
    ) -> None:
        self.options = options
        self.entries: dict[int, Entry] = {}
        self.fleets: dict[PartitionKey, Fleet] = {}
        self.live: dict[str, Fleet] = {}
        self.publish: Callable[[Event], None] | None = None  # told of every booking, if set
        self.held = 0
        self.refused_held = 0  # at the bound
        # Predicted blocks are nobody else's business.
        self.state = state if options.uses_kv_events else State()
        self._registry = registry
        self._expiry_s = expiry_s
        self.draws = Draws(random)
        self.clock = clock
        self._changing = trio.Lock()
        self._stopping = False

    # ---- the catalog

    async def put(self, record: WorkerRecord) -> Entry:
        """Describes a worker anew. Raises Conflict if a schedulable one would not be any more."""
        async with self._changing:
            known = self.entries.get(record.worker_id)
            entry = self._judged(record)
            if known is not None and not known.reasons and entry.reasons:
                raise Conflict(
                    f"worker {record.worker_id} is schedulable and would not be: "
                    + "; ".join(entry.reasons)
                )
            self._check_room([record])
            entry = await self._replace(known, entry)
            self._turn_all()
            return entry

    async def patch(self, worker_id: int, change: Callable[[WorkerRecord], WorkerRecord]) -> Entry:
        """Changes what is said of a worker; it may become incomplete. Raises NotFound."""
        async with self._changing:
            known = self._entry(worker_id)
            entry = await self._replace(known, self._judged(change(known.record)))
            self._turn_all()
            return entry

    async def delete(self, worker_id: int) -> Entry:
        """Forgets a worker with its bookings and blocks; returns what was known of it."""
        async with self._changing:
            known = self._entry(worker_id)
            await self._replace(known, None)
            self._turn_all()
            return known

    async def put_all(self, key: PartitionKey, records: list[WorkerRecord]) -> list[Entry]:
        """Makes these the workers of a model and tenant; all of them must be schedulable.

        Those that stay serve all the while, unless the block size changes. Raises Invalid, or
        what `_check_join` does; nothing has changed then.
        """
        async with self._changing:
            fleet = self.fleets.get(key)
            replaced = fleet is not None and fleet.block_size not in (
                None,
                *(record.block_size for record in records),
            )
            self._check_all(records, fleet if replaced else None)
            named = {record.worker_id for record in records}
            old = [entry for entry in self.entries.values() if entry.record.key == key]
            if replaced:  # blocks of two sizes cannot be in one index, for no moment
                for entry in old:
                    await self._replace(entry, None)
            entries = [
                await self._replace(self.entries.get(record.worker_id), Entry(record, []))
                for record in records
            ]
            for entry in old:
                if entry.record.worker_id not in named and not replaced:
                    await self._replace(entry, None)
            self._turn_all()
            return entries

    def _check_all(self, records: list[WorkerRecord], gone: Fleet | None) -> None:
        """Raises what keeps any of the records from being scheduled, once a fleet has gone."""
        sizes = {record.block_size for record in records}
        for record in records:
            reasons = record.reasons(record.block_size, uses_events=self.options.uses_kv_events)
            if len(sizes) > 1:
                reasons.append("the workers' block sizes differ")
            if reasons:
                raise Invalid(f"worker {record.worker_id}: " + "; ".join(reasons))
        self._check_room(records)
        leaving = {record.worker_id for record in records}
        if gone is not None:
            leaving |= gone.workers.keys()
        self._check_join(records, leaving)

    def _check_room(self, records: list[WorkerRecord]) -> None:
        new = {record.worker_id for record in records} - self.entries.keys()
        if len(self.entries) + len(new) > MAX_WORKERS:
            raise Unavailable(f"there are {MAX_WORKERS} workers already")

    def listed(self, model_name: str | None, tenant_id: str | None) -> list[Entry]:
        """Returns the workers of a model and tenant, None for any, sorted."""
        found = [
            entry
            for entry in self.entries.values()
            if model_name in (None, entry.record.model_name)
            and tenant_id in (None, entry.record.tenant_id)
        ]
        return sorted(found, key=lambda entry: (entry.record.key, entry.record.worker_id))

    def _entry(self, worker_id: int) -> Entry:
        entry = self.entries.get(worker_id)
        if entry is None:
            raise NotFound(f"worker {worker_id} not found")
        return entry

    def _judged(self, record: WorkerRecord) -> Entry:
        fleet = self.fleets.get(record.key)
        size = None
        if fleet is not None and fleet.workers.keys() - {record.worker_id}:
            size = fleet.block_size
        reasons = record.reasons(size, uses_events=self.options.uses_kv_events)
        if not reasons:
            try:
                self._check_join([record], {record.worker_id})
            except KvdError as error:
                reasons.append(str(error))
        return Entry(record, reasons)

    def _check_join(self, records: list[WorkerRecord], leaving: set[int]) -> None:
        """Raises what `_join` would for workers of one fleet, once what these have has gone.

        That is Unavailable at a bound, and Conflict with what another face has registered.
        """
        if not records:
            return
        key, block_size = records[0].key, records[0].block_size
        fleet = self.fleets.get(key)
        if fleet is None and len(self.fleets) >= MAX_FLEETS:
            raise Unavailable(f"there are {MAX_FLEETS} models and tenants already")
        ranks = sum(len(record.ranks) for record in records)
        if fleet is not None:
            staying = [one for id_, one in fleet.workers.items() if id_ not in leaving]
            ranks += sum(len(record.ranks) for record in staying)
        if ranks > ledger.MAX_RANKS:
            raise Unavailable(f"there would be more than {ledger.MAX_RANKS} ranks")
        if self.options.uses_kv_events and block_size is not None:
            addresses: dict[tuple[int | str, int], tuple[str, str | None]] = {
                (record.worker_id, dp_rank): (endpoint, record.replay_endpoint)
                for record in records
                for dp_rank in record.ranks
                if (endpoint := record.events_endpoint(dp_rank)) is not None
            }
            self._registry.check(key, addresses, block_size, OWNER, leaving)

    async def _replace(self, old: Entry | None, new: Entry | None) -> Entry:
        """Takes a worker out of its fleet as far as it changes, and puts it in anew.

        That is one step, after the listeners that it has no more have ended. Those that wait are
        not looked at.
        """
        before = None if old is None or old.reasons else old.record
        after = None if new is None or new.reasons else new.record
        # Shielded: a client that goes away must not leave half a worker behind.
        with trio.CancelScope(shield=True):
            if before is not None:
                await self._fall_silent(before, after)
                self._leave(before, after)
            if after is not None:
                try:
                    self._join(after)
                except KvdError as error:  # another face was faster
                    await self._fall_silent(after, None)
                    self._leave(after, None)
                    new = Entry(after, [str(error)])
        if new is not None:
            self.entries[new.record.worker_id] = new
        elif old is not None:
            del self.entries[old.record.worker_id]
        return new or old  # type: ignore[return-value]

    async def _fall_silent(self, record: WorkerRecord, after: WorkerRecord | None) -> None:
        """Returns when the listeners have ended that a worker has and will not have."""
        leaving = [
            dp_rank
            for dp_rank, heard in self._registry.heard(
                record.key, record.worker_id, record.ranks, OWNER
            ).items()
            if not (_stays(record, after, dp_rank) and heard == _addresses(after, dp_rank))
        ]
        fleet = self.fleets.get(record.key)
        if leaving and fleet is not None:
            # Until it leaves it can be selected; what it caches goes with the listeners.
            fleet.changed(silent=record.worker_id)
        for dp_rank in leaving:
            await self._registry.unregister(record.worker_id, *record.key, dp_rank, OWNER)

    def _leave(self, record: WorkerRecord, after: WorkerRecord | None) -> None:
        """Removes a worker from its fleet, and the bookings of ranks that it will not have."""
        fleet = self.fleets.get(record.key)
        if fleet is None:
            return
        fleet.workers.pop(record.worker_id, None)
        fleet.changed()
        leaving = [each for each in record.ranks if not _stays(record, after, each)]
        if fleet.predictions is not None:
            fleet.predictions.forget({(record.worker_id, dp_rank) for dp_rank in leaving})
        for dp_rank in leaving:
            self._drop_rank(fleet, record, dp_rank)

    def _drop_rank(self, fleet: Fleet, record: WorkerRecord, dp_rank: int) -> None:
        rank = fleet.ledger.rank_of(record.worker_id, dp_rank)
        if rank is None:
            return
        if fleet.predictions is not None:
            self.state.remove_rank(RankKey(record.key, record.worker_id, dp_rank))
        for reservation_id in fleet.ledger.remove_rank(rank):
            self.live.pop(reservation_id, None)
            self._tell(fleet, record, reservation_id, dp_rank, Step.FREE)

    def _join(self, record: WorkerRecord) -> None:
        """Listens to a worker's ranks and makes them selectable; raises what `register` does."""
        if record.key not in self.fleets:
            if len(self.fleets) >= MAX_FLEETS:
                raise Unavailable(f"there are {MAX_FLEETS} models and tenants already")
            self.fleets[record.key] = Fleet(record.key, self.options, self.state)
        fleet = self.fleets[record.key]
        if self.options.uses_kv_events:
            heard = self._registry.heard(record.key, record.worker_id, record.ranks, OWNER)
            for dp_rank in record.ranks:
                rank = RankKey(record.key, record.worker_id, dp_rank)
                endpoint, replay = _addresses(record, dp_rank)
                if dp_rank not in heard and endpoint is not None and record.block_size is not None:
                    self._registry.register(rank, endpoint, record.block_size, replay, OWNER)
        elif record.block_size is not None:
            for dp_rank in record.ranks:
                if fleet.ledger.rank_of(record.worker_id, dp_rank) is None:
                    rank = RankKey(record.key, record.worker_id, dp_rank)
                    self.state.add_rank(rank, record.block_size)
        for dp_rank in record.ranks:
            fleet.ledger.add_rank(record.worker_id, dp_rank)
        fleet.workers[record.worker_id] = record
        fleet.changed()

    # ---- selections

    def fleet(self, key: PartitionKey) -> Fleet:
        """Returns a fleet with someone to select; raises Unavailable."""
        fleet = self.fleets.get(key)
        if fleet is None or not fleet.workers:
            raise Unavailable(
                f"no schedulable workers for model={key.model_name} tenant_id={key.tenant_id}"
            )
        return fleet

    def select(self, ask: Ask, look: Look) -> bytes | Held:
        """Selects, and books if asked to; returns the answer, or the selection held.

        Raises Unavailable without anyone eligible or with all of them overloaded, BadRequest for
        constraints that contradict each other, Conflict on a reservation id that lives.
        """
        fleet = self.fleet(ask.key)
        constraints = ask.constraints
        if constraints is not None and constraints.pinned is not None:
            worker_id = constraints.pinned[0]
            if constraints.allowed is not None and worker_id not in constraints.allowed:
                raise BadRequest(f"pinned worker {worker_id} is not in allowed worker set")
        self._check_new(ask.reservation_id)  # before it waits for that
        look(fleet.pool)
        if not fleet.queue.waits(constraints):
            answer = self._choose(fleet, ask)
            if answer is not None:
                return answer
        return self._hold(fleet, ask)

    async def wait(self, held: Held) -> bytes:
        """Returns the answer of a selection that is held, once there is one; raises as `select`.

        Whatever ends the wait, the selection is in no queue afterwards.
        """
        try:
            with trio.move_on_after(self.options.max_wait_s):
                await held.done.wait()
        finally:
            assert held.waiting is not None
            self.fleets[held.ask.key].queue.remove(held.waiting)
            self.held -= 1
        if held.answer is None:
            raise Unavailable("all workers are busy", retry_after_s=1)
        if isinstance(held.answer, KvdError):
            raise held.answer
        return held.answer

    def _hold(self, fleet: Fleet, ask: Ask) -> Held:
        if self._stopping:
            raise Unavailable("the service is stopping")
        if self.held >= self.options.max_held:
            self.refused_held += 1
            raise Unavailable(f"{self.held} selections wait already", retry_after_s=1)
        held = Held(ask, fleet.pool.hold())
        least = min(
            fleet.pool.effective_prefill_tokens(at, ask.settings) for at in range(len(fleet.pool))
        )
        urgency = Urgency(ask.strict_priority, ask.priority_jump, least)
        held.waiting = fleet.queue.push(ask.constraints, held, urgency, self.clock())
        self.held += 1
        return held

    def _choose(self, fleet: Fleet, ask: Ask) -> bytes | None:
        """Chooses for the prompt that the pool has looked at; None if all are busy."""
        self._check_new(ask.reservation_id)
        eligible = fleet.eligible(ask.constraints)
        chosen = selector.NONE
        if ask.affinity is not None and (wanted := fleet.targets(ask.affinity, eligible)):
            chosen = fleet.pool.choose(ask.settings, wanted, self.draws.next())
        if chosen < 0:  # who is liked best is not waited for
            chosen = fleet.pool.choose(ask.settings, eligible, self.draws.next())
        if chosen == selector.BUSY:
            return None
        if chosen == selector.NONE:
            raise Unavailable("no endpoints available to route work")
        if chosen == selector.OVERLOADED:
            raise Unavailable("all workers are overloaded", retry_after_s=1)
        if ask.reservation_id is not None:
            self._book(fleet, ask, chosen, ask.reservation_id)
        return self._answer(fleet, ask, chosen)

    def _check_new(self, reservation_id: str | None) -> None:
        if reservation_id is not None and reservation_id in self.live:
            raise Conflict(f"reservation {reservation_id} already exists")

    def _book(self, fleet: Fleet, ask: Ask, chosen: int, reservation_id: str) -> None:
        pool = fleet.pool
        tokens = 0
        if ask.settings.members["track_prefill"]:
            tokens = pool.effective_prefill_tokens(chosen, ask.settings)
        _admitted(pool.book(reservation_id, chosen, tokens, self.clock()), reservation_id)
        self.live[reservation_id] = fleet
        self._predict(fleet, pool.candidates[chosen])
        if self.publish is not None:
            candidate = pool.candidates[chosen]
            record = fleet.workers[candidate.worker_id]
            hashes = pool.hold().sequence_hashes
            extra = ask.expected_output_tokens, ask.lora_name
            place = fleet, record, reservation_id, candidate.dp_rank
            self._tell(*place, Step.ADD, hashes, tokens, *extra)

    def _answer(self, fleet: Fleet, ask: Ask, chosen: int) -> bytes:
        named: dict[str, Any] = {}
        if ask.selection_id is not None:
            named["selection_id"] = ask.selection_id
        if ask.reservation_id is not None:
            named["reservation_id"] = ask.reservation_id
        members = fleet.piece(chosen)
        if ask.explain:
            rows = fleet.pool.explain(ask.settings, fleet.eligible(ask.constraints))
            members += _members({"candidates": [row._asdict() for row in rows]})
        return fleet.pool.render_answer(b"{" + _members(named), members, chosen, ask.settings)

    def stop(self) -> None:
        """Answers those that wait, now and from now on, that nobody will serve them."""
        self._stopping = True
        self._turn_all()

    # ---- what moves those that wait

    def _turn_all(self) -> None:
        if self.held:
            for fleet in self.fleets.values():
                self._turn(fleet)

    def _turn(self, fleet: Fleet) -> None:
        """Serves the selections that can be served now, in their order."""
        if len(fleet.queue):
            for _ in fleet.queue.release(lambda held: self._serve(fleet, held)):
                pass

    def _serve(self, fleet: Fleet, held: Held) -> bool:
        try:
            if self._stopping:
                raise Unavailable("the service is stopping")
            if not fleet.workers:
                raise Unavailable("no schedulable workers are available")
            fleet.pool.look_again(held.prompt)
            answer = self._choose(fleet, held.ask)
        except KvdError as error:
            held.settle(error)
            return True
        if answer is None:
            return False
        held.settle(answer)
        return True

    # ---- reservations

    def reserve(
        self,
        key: PartitionKey,
        reservation_id: str,
        rank: tuple[int, int],
        look: Look,
        tokens: int,
        *,
        predicts: bool,
    ) -> WorkerRecord:
        """Books a prompt on a rank that was selected before; returns its worker.

        `predicts` says that the prompt is known by its local hashes too.

        Raises Unavailable without a fleet, NotFound for a rank it does not have, Conflict on an
        id that lives.
        """
        fleet = self.fleet(key)
        worker_id, dp_rank = rank
        candidate = fleet.pool.find(worker_id, dp_rank)
        if candidate is None:
            raise NotFound(f"worker {worker_id} dp_rank {dp_rank} is not schedulable")
        self._check_new(reservation_id)
        look(fleet.pool)
        outcome = fleet.pool.book(reservation_id, candidate, tokens, self.clock())
        _admitted(outcome, reservation_id)
        self.live[reservation_id] = fleet
        if predicts:
            self._predict(fleet, fleet.pool.candidates[candidate])
        record = fleet.workers[worker_id]
        if self.publish is not None:
            hashes = fleet.pool.hold().sequence_hashes
            self._tell(fleet, record, reservation_id, dp_rank, Step.ADD, hashes, tokens)
        return record

    def _predict(self, fleet: Fleet, candidate: Candidate) -> None:
        """Stores the prompt that the pool has looked at as cached, where nobody tells."""
        if fleet.predictions is None or candidate.worker is None:
            return
        locals_ = array("Q", fleet.pool.hold().local_hashes)
        names = sequence_hashes(locals_)
        rank = candidate.worker_id, candidate.dp_rank
        known = fleet.predictions.add(rank, names, self.clock())
        if known < len(names):
            parent = names[known - 1] if known else None
            candidate.worker.store(candidate.dp_rank, names[known:], locals_[known:], parent)

    def _forget_predictions(self, fleet: Fleet, now: float) -> bool:
        """Forgets some predictions that are too old or too many; True while there may be more."""
        if fleet.predictions is None:
            return False
        gone = fleet.predictions.outdated(now, EXPIRY_SLICE)
        workers = self.state.partitions[fleet.key].workers if gone else {}
        for (worker_id, dp_rank), name in gone:
            workers[worker_id].drop(dp_rank, [name])
        return len(gone) == EXPIRY_SLICE

    def new_reservation_id(self) -> str:
        """Returns an id nobody has."""
        return self.draws.uuid()

    def random_u64(self) -> int:
        return self.draws.next()

    def prefill_complete(self, reservation_id: str) -> None:
        """Ends the prefill of a reservation, once or again; raises NotFound."""
        fleet = self._fleet_of(reservation_id)
        fleet.ledger.prefill_complete(reservation_id)
        self._tell_step(fleet, reservation_id, Step.PREFILL_COMPLETE)
        self._turn(fleet)

    def output_block(self, reservation_id: str, fraction: float | None) -> None:
        """Adds an output block to a reservation; raises NotFound."""
        self._fleet_of(reservation_id).ledger.output_block(reservation_id, fraction)

    def free(self, reservation_id: str) -> None:
        """Ends a reservation; raises NotFound."""
        fleet = self._fleet_of(reservation_id)
        self._tell_step(fleet, reservation_id, Step.FREE)
        fleet.ledger.free(reservation_id)
        del self.live[reservation_id]
        self._turn(fleet)

    def expire(self, now: float) -> Iterator[None]:
        """Drops what is older than the expiry age; rests at every yield. Replicas do the same."""
        for fleet in list(self.fleets.values()):
            while self._forget_predictions(fleet, now):
                yield
            while expired := fleet.ledger.expire(now - self._expiry_s, EXPIRY_SLICE):
                for reservation_id in expired:
                    self.live.pop(reservation_id, None)
                self._turn(fleet)
                yield

    def render_loads(self, model_name: str | None, tenant_id: str | None) -> bytes:
        """Returns a JSON array of what every fleet works on, sorted; None is any."""
        rows = (
            fleet.render_loads()
            for key, fleet in sorted(self.fleets.items())
            if model_name in (None, key.model_name) and tenant_id in (None, key.tenant_id)
        )
        return b"[%b]" % b",".join(rows)

    def _fleet_of(self, reservation_id: str) -> Fleet:
        fleet = self.live.get(reservation_id)
        if fleet is None:
            raise NotFound(f"reservation {reservation_id} not found")
        return fleet

    # ---- replicas

    def apply(self, event: Event, now: float) -> Outcome:
        """Takes a step that a replica tells of; changes nothing unless it is APPLIED."""
        fleet = self.fleets.get(event.partition)
        if fleet is None or not fleet.workers:
            return Outcome.UNKNOWN_MODEL
        if fleet.block_size != event.block_size:
            return Outcome.BLOCK_SIZE
        if event.worker_id not in fleet.workers:
            return Outcome.UNKNOWN_WORKER
        rank = fleet.ledger.rank_of(event.worker_id, event.dp_rank)
        if rank is None:
            return Outcome.UNKNOWN_RANK
        if event.step is Step.ADD and event.request_id in self.live:
            return Outcome.DUPLICATE
        outcome = apply_to(fleet.ledger, rank, event, now)
        if outcome is not Outcome.APPLIED:
            return outcome
        if event.step is Step.ADD:
            self.live[event.request_id] = fleet
            return outcome
        if event.step is Step.FREE:
            del self.live[event.request_id]
        self._turn(fleet)
        return outcome

    def _tell_step(self, fleet: Fleet, reservation_id: str, step: Step) -> None:
        live = None if self.publish is None else fleet.ledger.request(reservation_id)
        if live is not None:
            record = fleet.workers[live.worker_id]
            self._tell(fleet, record, reservation_id, live.dp_rank, step)

    def _tell(
        self,
        fleet: Fleet,
        record: WorkerRecord,
        reservation_id: str,
        dp_rank: int,
        step: Step,
        *content: Any,
    ) -> None:
        if self.publish is not None:
            where = fleet.key, record.block_size or 0, reservation_id, record.worker_id, dp_rank
            self.publish(Event(*where, step, *content))


def _stays(record: WorkerRecord, after: WorkerRecord | None, dp_rank: int) -> bool:
    """Says whether a worker's rank keeps its bookings when it is described anew."""
    return (
        after is not None
        and (after.key, after.block_size) == (record.key, record.block_size)
        and dp_rank in after.ranks
    )


def _addresses(record: WorkerRecord | None, dp_rank: int) -> tuple[str | None, str | None]:
    """Returns where a rank's events come from, and where they are replayed."""
    if record is None:
        return None, None
    return record.events_endpoint(dp_rank), record.replay_endpoint


def _members(members: dict[str, Any]) -> bytes:
    """Renders members of an object, each with a comma behind it."""
    text = json.dumps(members, separators=(",", ":")).encode()
    return text[1:-1] + b"," if members else b""


def _admitted(outcome: int, reservation_id: str) -> None:
    """Raises what a booking's outcome means to clients."""
    if outcome == ledger.EXISTS:
        raise Conflict(f"reservation {reservation_id} already exists")
    if outcome == ledger.OVERFLOW:
        raise Invalid("isl_tokens: more than the rank can count")
    if outcome != ledger.ADDED:
        raise Unavailable("there is no room for another live reservation")
