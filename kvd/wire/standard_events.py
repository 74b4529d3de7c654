"""Applies one registered publisher's events to the index.

    payload ── read_batch ──> events ─┬─ standard: check the envelope, order, place the blocks
                                      └─ engine's own: decoded in the core, then placed alike
                                             │
                                             v
                            kvd_core.conductor.conductor.Source: store, store_named, remove, clear

The registration supplies members that an event leaves out. An event that contradicts it belongs to
another registration: several may listen to one publisher, and each takes its own events and counts
the others.

A long payload is applied in slices: `apply` returns UNFINISHED, and so does `advance` until it is
done. Long work is a generator here, which yields when the steps of its slice are used up. A
slice ends between two events, or inside an event between two parts of fixed length, so that the
result does not depend on the slices. The core slices batches of engines' own events itself.

No clock, no sockets, no logging.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple, TypeVar

from kvd.wire import kv_events
from kvd.wire.envelope import (
    CLEARED,
    CPU,
    GPU,
    REMOVED,
    Envelopes,
    Foreign,
    StandardEvent,
    StreamIdentity,
)
from kvd.wire.event_order import EventOrder, KeptStream, put_in_order
from kvd.wire.kv_events import MARK, U32_MAX, Event, RawEvent
from kvd_core.conductor.conductor import Source
from kvd_core.index.prefix_index import FLAWED, NO_ROOM, SLICE_STEPS, UNFINISHED, Slice

# Costs in steps of 0.1 us, and the lengths of the parts between two checks of the budget.
_STEPS_AN_EVENT = 200  # reading its envelope and finding its position in its stream
_BYTES_A_STEP = 4  # reading an event
_JSON_BYTES_A_PART, _JSON_BYTES_A_STEP = 32_768, 6
_HASHES_A_PART, _STEPS_A_HASH = 4096, 2  # reading hashes
_TOKENS_A_PART, _TOKENS_A_STEP = 16_384, 2
_BLOCKS_A_PART, _STEPS_A_BLOCK = 2048, 8  # storing blocks with tokens; long events are divided
_NAMES_A_PART = 64  # storing blocks without tokens; the core counts the steps
_REMOVALS_A_PART, _STEPS_A_REMOVAL = 1024, 5

# A publisher that holds nothing is reported as unused after so many events that were foreign or
# ignored, if these are this share of all its events: an engine may begin with a clear.
UNUSED_EVENTS, UNUSED_SHARE = 16, 15 / 16

_Slices = Generator[None, None, None]  # yields where a slice ends
_NOTHING: Iterator[None] = iter(())

_Value = TypeVar("_Value")
# A standard event, the error of a bad or foreign one, or an engine's own event.
_Event = StandardEvent | ValueError | Foreign | RawEvent


class KeptPublication(NamedTuple):
    """The part of a publisher's stream that a process hands over to its successor."""

    backends: dict[str, int]  # numbers of backends by name; holders are identified by them
    highest: int  # `event_id`


class StandardEventStream:
    """One publisher's events, applied for one registration; the `BatchSink` of its listener."""

    def __init__(self, source: Source, identity: StreamIdentity) -> None:
        self._source = source
        self._identity = identity
        self._envelopes = Envelopes(identity)
        self.order = EventOrder()
        self._engine = source.engine_events(identity.lora_name, identity.cache_salt)
        self._flaw = ""
        self._full = 0  # events of earlier payloads that the index had no room for
        self.slice_steps = SLICE_STEPS  # steps of 0.1 us that a call may take, roughly
        self._slice = Slice(0)  # the slice under way
        self._rest = _NOTHING  # the rest of the payload that is being applied

        self._events = 0  # standard events
        self._mismatches: Counter[str] = Counter()  # other registrations' events, by member
        self._bad: Counter[str] = Counter()  # events and payloads, by fault
        self._ignored: Counter[str] = Counter()  # events understood and without effect, by reason
        self._stored = 0  # events, or parts of events, that stored something
        # `_useless` and `_all_stored` at the last `clear`, for `misfit`.
        self._useless_before: Counter[str] = Counter()
        self._stored_before = 0
        self._orphans = 0  # events set aside because their parent is not known
        self.unlocated = 0  # events with tokens, but without their position in a prompt
        self.conflicts = 0  # events whose base_block_idx contradicts their parent

    # ---- counts of all events, standard ones and engines' own

    @property
    def events(self) -> int:
        return self._events + int(self._engine.stats()["events"])

    @property
    def orphans(self) -> int:
        """Events set aside because their parent was not known."""
        return self._orphans + int(self._engine.stats()["parked"])

    @property
    def mismatches(self) -> Counter[str]:
        """Events that belong to other registrations, by the member that differs."""
        return +(self._mismatches + Counter(self._engine.stats()["mismatches"]))

    @property
    def ignored(self) -> Counter[str]:
        """Events that were understood and had no effect, by reason."""
        return +(self._ignored + Counter(self._engine.stats()["ignored"]))

    @property
    def bad(self) -> Counter[str]:
        """Events and payloads that could not be read, by fault."""
        return +(self._bad + Counter(self._engine.stats()["bad"]))

    def outcomes(self) -> dict[str, int]:
        """Events that were not simply applied, counted by their outcome; takes 3 us."""
        engine = self._engine.stats()
        return {
            "mismatch": self._mismatches.total() + sum(engine["mismatches"].values()),
            "bad": self._bad.total() + sum(engine["bad"].values()),
            "ignored": self._ignored.total() + sum(engine["ignored"].values()),
            "stale": self.order.stale,
            "orphan": self._orphans + int(engine["parked"]),
            "unlocated": self.unlocated,
        }

    def unused(self) -> str:
        """Returns why the index holds nothing of a publisher that sends events, "" if it does."""
        reasons = self._useless()
        count, events = reasons.total(), self.events
        held = self._source.stats()
        if held["blocks"] + held["waiting"] or count < max(UNUSED_EVENTS, UNUSED_SHARE * events):
            return ""
        return f"{events} events stored nothing: they were foreign or ignored ({_listed(reasons)})"

    def _useless(self) -> Counter[str]:
        return self.mismatches + self.ignored

    def _all_stored(self) -> int:
        return self._stored + int(self._engine.stats()["stored"])

    # ---- a listener's stream

    def apply(self, payload: bytes) -> int:
        if not payload:
            return 0  # a heartbeat or a barrier: only its number matters
        if kv_events.is_json(payload):
            self._rest = self._apply_json(payload)
        elif MARK in payload:
            self._rest = self._apply(payload)
        else:  # no standard event: the core applies it without Python objects
            applied = self._engine.apply(payload)
            if applied:
                self._rest = _NOTHING
                self._flaw = self._engine.flaw()
                return self._shown()
            self._rest = self._finish_engine(payload, applied)
        return self.advance()

    def advance(self) -> int:
        self._slice = Slice(self.slice_steps)
        for _ in self._rest:
            return UNFINISHED
        self._rest = _NOTHING
        return self._shown()

    def _shown(self) -> int:
        """Returns the bits that `apply` owes its caller once a payload is applied."""
        shown: int = FLAWED if self._flaw else 0
        full = self._ignored["full"] + self._engine.full()
        if full != self._full:
            self._full = full
            shown |= NO_ROOM
        return shown

    def _apply_json(self, payload: bytes) -> _Slices:
        self._flaw = ""
        try:
            packed = yield from self._repack(payload)
        except ValueError as error:
            self._note_bad(str(error))
            return
        if MARK in packed:
            yield from self._apply(packed)
        else:
            yield from self._finish_engine(packed, self._engine.apply(packed))

    def _repack(self, payload: bytes) -> Generator[None, None, bytes]:
        """Returns a payload of JSON as msgpack."""
        text = kv_events.json_text(payload)
        while text.read(_JSON_BYTES_A_PART):
            if self._is_spent(_JSON_BYTES_A_PART // _JSON_BYTES_A_STEP):
                yield
        return text.packed()

    def _finish_engine(self, payload: bytes, applied: bool | None) -> _Slices:
        while applied is None:
            yield
            applied = self._engine.advance()
        self._flaw = self._engine.flaw()
        if not applied:  # the core did not read it: its form may be one that only `_apply` reads
            yield from self._apply(payload)

    def _apply(self, payload: bytes) -> _Slices:
        self._flaw = ""
        if self._envelopes.has_many_backends:
            self._source.drop_idle()
            self._envelopes.forget_backends({backend for backend, _ in self._source.holders()})
        try:
            batch = kv_events.read_batch(payload)
        except ValueError as error:
            self._note_bad(str(error))
            return
        if batch.beyond:
            self._bad["too_many"] += batch.beyond
            self._flaw = "too_many"
        if self._is_spent(len(payload) // _BYTES_A_STEP):
            yield
        events: list[_Event] = []
        for each in batch.events:
            events.append(self._read(each, batch.rank))
            if self._is_spent(_STEPS_AN_EVENT + len(each.packed) // _BYTES_A_STEP):
                yield
        if len(events) > 1:
            put_in_order(events)
        for event in events:
            yield from self._take_or_count(event, batch.rank)
            if self._is_spent(_STEPS_AN_EVENT):
                yield

    def _is_spent(self, steps: int) -> bool:
        """Takes steps off the slice; returns whether none is left."""
        return self._slice.take(steps)

    def _take_or_count(self, event: _Event, rank: int | None) -> _Slices:
        try:
            yield from self._take(event, rank)
        except Foreign as error:
            self._mismatches[str(error)] += 1
            self.order.saw(error.event_id)
        except UnicodeError:
            self._note_bad("text")
        except ValueError as error:
            self._note_bad(str(error))
        except (OverflowError, TypeError):
            self._note_bad("value")

    def flaw(self) -> str:
        return self._flaw

    def rank(self) -> None:
        """Returns None: the stream carries many ranks and backends, so a loss concerns them all."""

    def names_ranks(self) -> bool:
        return True

    def cleared(self) -> int:
        return 0

    def clear(self) -> None:
        """Drops all blocks and numbers of the publisher, which was restarted."""
        self._rest = _NOTHING
        for backend, rank in self._source.holders():
            self._source.clear(backend, rank)
        self.order.clear()
        self._engine.forget()
        self._useless_before, self._stored_before = self._useless(), self._all_stored()

    def kept(self) -> KeptPublication:
        """Returns the state for another process, except for the streams of `order`."""
        return KeptPublication(self._envelopes.kept(), self.order.highest)

    def take_over(self, kept: KeptPublication, streams: Iterable[KeptStream]) -> None:
        """Goes on where another process was; called before the first event."""
        self._envelopes.take_over(kept.backends)
        self.order.take_over(kept.highest, streams)

    def settled(self) -> None:
        """Notes that the publisher has passed its restored position."""
        self._source.settled()

    def restored(self) -> bool:
        return False

    def names_restored(self, payload: bytes) -> bool:
        return False

    def drop_restored(self) -> bool:
        return False

    def misfit(self) -> str:
        if self._all_stored() != self._stored_before:
            return ""
        reasons = self._useless() - self._useless_before
        if not reasons:
            return ""
        fate = "foreign or ignored" if reasons.keys() & self.mismatches else "ignored"
        return f"all events were {fate}: {_listed(reasons)}"

    # ---- order

    def _read(self, event: RawEvent, batch_rank: int | None) -> _Event:
        try:
            read = kv_events.read_event(event)
            return read if isinstance(read, RawEvent) else self._envelopes.read(read, batch_rank)
        except (ValueError, Foreign) as error:
            return error

    def _forget_backend(self, gone: int) -> None:
        for backend, rank in self._source.holders():
            if backend == gone:
                self._source.clear(backend, rank)
        self.order.forget(gone)

    # ---- standard events

    def _take(self, event: _Event, batch_rank: int | None) -> _Slices:
        if isinstance(event, RawEvent):
            yield from self._take_engine(event, batch_rank)
            return
        self._events += 1
        if not isinstance(event, StandardEvent):
            raise event
        apply = yield from self._understand(event)
        if self.order.is_next(event):
            yield from apply
            return
        anew = self.order.begins_anew(event)
        if anew:
            self._forget_backend(event.backend)
            for each in anew:
                self.order.is_next(each)
                yield from (yield from self._understand(each))

    def _understand(self, event: StandardEvent) -> Generator[None, None, _Slices]:
        """Returns a generator that applies the event; raises ValueError first for a bad event."""
        if event.kind == CLEARED:
            return self._clear(event)
        listed = kv_events.hashes(event.event)
        hashes: list[int] = []
        for at in range(0, len(listed), _HASHES_A_PART):
            part = _part(listed, at, _HASHES_A_PART)
            hashes += map(kv_events.hash_of, part)
            if self._is_spent(_STEPS_A_HASH * len(part)):
                yield
        kv_events.number(event.event, "base_block_idx", U32_MAX)
        if event.kind == REMOVED:
            return self._remove(event, hashes)
        tokens = kv_events.tokens(event.event)
        for at in range(0, len(tokens or ()), _TOKENS_A_PART):
            ids = _part(tokens or [], at, _TOKENS_A_PART)
            kv_events.check_tokens(ids)
            if self._is_spent(len(ids) // _TOKENS_A_STEP):
                yield
        parent = self._parent(event.event)
        return self._store(event, hashes, tokens, parent)

    def _parent(self, event: Event) -> int | None:
        value = event.get("parent_hash")
        return None if value is None else kv_events.hash_of(value)

    def _store(
        self, event: StandardEvent, hashes: list[int], tokens: list[int] | None, parent: int | None
    ) -> _Slices:
        if not hashes:
            self._ignored["object_key"] += 1
            return
        medium = event.medium or (CPU if self._identity.store else GPU)
        depth = event.event.get("base_block_idx")
        if depth == 0 and parent is not None:
            self.conflicts += 1
        if tokens is None:
            yield from self._store_names(event, medium, hashes)
        elif parent is None and not {"base_block_idx", "parent_hash"} & event.event.keys():
            self.unlocated += 1
        elif parent is None and depth:
            # The blocks before it are unknown: the first block is stored by its hash alone, and the
            # others as its successors.
            yield from self._store_names(event, medium, hashes[:1])
            if len(hashes) > 1:
                tokens = tokens[self._identity.block_size :]
                yield from self._store_blocks(event, medium, hashes[1:], tokens, hashes[0])
        else:
            yield from self._store_blocks(event, medium, hashes, tokens, parent)

    def _store_names(self, event: StandardEvent, medium: str, hashes: list[int]) -> _Slices:
        # An object's name covers the adapter and salt of its engine, unless the event names others.
        scope = self._identity.lora_name, self._identity.cache_salt
        by_engine = kv_events.names_object(event.event) and scope == event.stream[:2]
        for at in range(0, len(hashes), _NAMES_A_PART):
            part = _part(hashes, at, _NAMES_A_PART)
            outcome = self._source.store_named(
                event.backend, event.rank, medium, part, event.space, by_engine, whole=False
            )
            yield from self._resolve_waiting()
            if at == 0 or outcome != "placed":
                self._note(outcome)
            if outcome != "placed":
                return

    def _store_blocks(
        self,
        event: StandardEvent,
        medium: str,
        hashes: list[int],
        tokens: list[int],
        parent: int | None,
    ) -> _Slices:
        size = self._identity.block_size
        for at in range(0, max(1, min(len(hashes), len(tokens) // size)), _BLOCKS_A_PART):
            part = _part(hashes, at, _BLOCKS_A_PART)
            outcome = self._source.store(
                event.backend,
                event.rank,
                medium,
                part,
                _part(tokens, at * size, _BLOCKS_A_PART * size),
                hashes[at - 1] if at else parent,
                event.space,
                whole=False,
            )
            if at == 0 or outcome not in ("placed", "parked"):
                self._note(outcome)
            self._slice.take(_STEPS_A_BLOCK * len(part))
            yield from self._resolve_waiting()
            if outcome not in ("placed", "parked"):
                return

    def _resolve_waiting(self) -> _Slices:
        """Places events that were waiting for the blocks just stored."""
        while not self._source.resolve_waiting(self._slice):
            yield

    def _note(self, outcome: str) -> None:
        self._stored += outcome in ("placed", "parked")
        if outcome == "parked":
            self._orphans += 1
        elif outcome != "placed":
            self._ignored[outcome] += 1

    def _remove(self, event: StandardEvent, hashes: list[int]) -> _Slices:
        medium = event.medium
        if medium is None and not self._identity.store:
            medium = GPU
        for at in range(0, len(hashes), _REMOVALS_A_PART):
            part = _part(hashes, at, _REMOVALS_A_PART)
            self._source.remove(event.backend, event.rank, medium, part, event.space)
            if self._is_spent(_STEPS_A_REMOVAL * len(part)):
                yield

    def _clear(self, event: StandardEvent) -> _Slices:
        ranks = [event.rank]
        if event.rank is None:  # a store's clear concerns every rank
            ranks = [rank for backend, rank in self._source.holders() if backend == event.backend]
        for rank in ranks:
            self._source.clear(event.backend, rank, event.medium, event.space)
            if self._is_spent(_STEPS_AN_EVENT):
                yield

    # ---- engines' own events

    def _take_engine(self, event: RawEvent, batch_rank: int | None) -> _Slices:
        """Applies an engine's own event beside standard ones, or of a batch of an unusual form."""
        applied = self._engine.apply(kv_events.engine_payload(event, batch_rank))
        while applied is None:
            yield
            applied = self._engine.advance()
        self._flaw = self._flaw or self._engine.flaw()

    def _note_bad(self, why: str) -> None:
        self._bad[why] += 1
        self._flaw = self._flaw or why


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items()))


def _part(values: list[_Value], at: int, length: int) -> list[_Value]:
    """Returns a part of a list; as a rule that is the whole list, which is not copied then."""
    return values if at == 0 and len(values) <= length else values[at : at + length]
