"""What the events of one registered publisher mean for the index.

    payload ── read_batch ──> events ─┬─ standard: envelope against the registration, order, place
                                      └─ engine's own: the decoder of those, then the same
                                             │
                                             v
                            kvd_core.conductor.Source: store, store_named, remove, clear

The registration says what an event leaves out. An event that says otherwise is another's: several
registrations may listen to one publisher, each takes what is its own, and the rest is counted.

`event_id` numbers the events of a stream. An event that is not behind the last one is stale; a hole
is counted and never waited for, because nothing can bring the event back. Three stale ones in a row
that follow each other are a backend that has begun anew behind a relay, if their numbers are nearer
to the first one heard than to the last: else they are repeated.

A long payload is applied in slices: `apply` says UNFINISHED, and `go_on` goes on until it does
not. What takes time is a generator here, which yields when the steps of its slice are used up.
Slices end between two events, and in an event between two parts of fixed lengths, so that the
result does not depend on them. Engines' own batches are sliced in the core.

No clock, no sockets, no logging.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvd.wire import kv_events
from kvd.wire.kv_events import MARK, U32_MAX, U64_MAX, Event
from kvd_core.conductor import Source, namespace
from kvd_core.index import FLAWED, NO_ROOM, SLICE_STEPS, UNFINISHED

GPU, CPU, DISK = "GPU", "CPU", "DISK"
# Names that are another medium's; any other name is a medium of its own.
MEDIA = {
    "": GPU,
    "DEVICE": GPU,
    "CPU_PINNED": CPU,
    "CPU_TIER1": CPU,
    "HOST": CPU,
    "HOST_PINNED": CPU,
    "DRAM": CPU,
    "CPU_TIER2": DISK,
    "NVME": DISK,
    "SSD": DISK,
    "STORAGE": DISK,
    "FS": DISK,
}
MAX_MEDIUM_CHARS = 64  # of a name that becomes a member of every answer

# Streams whose last number is remembered, ~300 bytes each; the one heard longest ago goes first. A
# publisher has one for each backend, medium, rank, adapter and salt.
MAX_STREAMS = 65_536
MAX_BACKENDS = 4096  # of one publisher, by name; events of more are dropped and counted

NEW_BEGINNING = 3  # stale events in a row, numbered one by one, that mean one
# Hashes, token ids and characters of stale events that are kept for it, some 60 MB; when there are
# more, none of them will be.
MAX_BEHIND = 1_048_576

# What takes a step, 0.1 us, and what is done of an event between two looks at the budget.
_STEPS_AN_EVENT = 200  # its envelope, and finding its place in its stream
_BYTES_A_STEP = 4  # of an event that is read
_HASHES_A_PART, _STEPS_A_HASH = 4096, 2  # whose values are looked at
_TOKENS_A_PART, _TOKENS_A_STEP = 16_384, 2
_BLOCKS_A_PART, _STEPS_A_BLOCK = 2048, 8  # that are stored with tokens; longer events are several
_NAMES_A_PART = 64  # that are stored without; the core counts the steps
_REMOVALS_A_PART, _STEPS_A_REMOVAL = 1024, 5

_STORED, _REMOVED, _CLEARED = "stored", "removed", "cleared"
_TYPES = (_STORED, _REMOVED, _CLEARED)

_CONTENT = (  # members of an event beside its envelope
    "seq_hashes",
    "block_hashes",
    "connector_block_hash",
    "object_key",
    "base_block_idx",
    "parent_hash",
    "token_ids",
)

_Slices = Generator[None, None, None]  # yields where a slice ends
_NOTHING: Iterator[None] = iter(())

_Value = TypeVar("_Value")
_Stream = tuple[str, str, int, str | None, int | None]


class Terms(NamedTuple):
    """What a registration says of all its publisher's events."""

    model_name: str
    tenant_id: str
    block_size: int
    lora_name: str
    cache_salt: str
    dp_rank: int
    store: bool  # a store's blocks are no rank's unless it says so


@dataclass(slots=True)
class _Place:
    """How far a stream of events has been heard."""

    first: int
    last: int
    behind: list[_Standard] = field(default_factory=list)  # stale ones that follow each other


@dataclass(slots=True)
class _Standard:
    """A standard event whose envelope is the registration's."""

    event: Event
    kind: str
    event_id: int | None
    lora_name: str
    cache_salt: str
    backend: int
    medium: str | None
    rank: int | None
    size: int = 0  # once it is kept

    def keep(self) -> int:
        """Drops what is not needed to apply it later; returns its size, as MAX_BEHIND counts."""
        self.event = {name: self.event[name] for name in _CONTENT if name in self.event}
        self.size = 1 + sum(len(each) for each in self.event.values() if hasattr(each, "__len__"))
        return self.size

    @property
    def stream(self) -> _Stream:
        return self.lora_name, self.cache_salt, self.backend, self.medium, self.rank

    @property
    def space(self) -> int:
        return namespace(self.lora_name, self.cache_salt)


class _Foreign(Exception):
    """The event is not this registration's: the dimension that says so, and the event's number."""

    def __init__(self, dimension: str, event_id: int | None = None) -> None:
        super().__init__(dimension)
        self.event_id = event_id


class Publication:
    """One publisher's events, as one registration takes them (a listener's stream)."""

    def __init__(self, source: Source, terms: Terms) -> None:
        self._source = source
        self._terms = terms
        self._backends: dict[str, int] = {"": 0}
        self._streams: dict[_Stream, _Place] = {}
        self._highest = -1  # event_id of the publisher
        self._behind = 0  # of MAX_BEHIND
        self._engine = source.engine_events(terms.lora_name, terms.cache_salt)
        self._flaw = ""
        self._full = 0  # events that have found no room, those of earlier payloads
        self.slice_steps = SLICE_STEPS  # of 0.1 us, that a call may take, about
        self._left = 0  # of these
        self._rest = _NOTHING  # of the payload that is being applied

        self._events = 0  # standard ones
        self._mismatches: Counter[str] = Counter()  # events of others, by dimension
        self._bad: Counter[str] = Counter()  # events and payloads, by what is wrong
        self._ignored: Counter[str] = Counter()  # events understood and without effect, by reason
        self.gaps = 0  # holes in event_id
        self.stale = 0  # events at or below their stream's last number
        self.beginnings = 0  # of the publisher behind a relay
        self._orphans = 0  # events set aside because their parent is not known
        self.unlocated = 0  # events with tokens that do not say where they belong
        self.conflicts = 0  # base_block_idx that contradicts the parent

    # ---- what has been heard, standard events and an engine's own

    @property
    def events(self) -> int:
        return self._events + int(self._engine.counts()["events"])

    @property
    def orphans(self) -> int:
        """Events set aside because their parent was not known."""
        return self._orphans + int(self._engine.counts()["parked"])

    @property
    def mismatches(self) -> Counter[str]:
        """Events of others, by the dimension that says so."""
        return +(self._mismatches + Counter(self._engine.counts()["mismatches"]))

    @property
    def ignored(self) -> Counter[str]:
        """Events that were understood and had no effect, by reason."""
        return +(self._ignored + Counter(self._engine.counts()["ignored"]))

    @property
    def bad(self) -> Counter[str]:
        """Events and payloads that could not be read, by what is wrong."""
        return +(self._bad + Counter(self._engine.counts()["bad"]))

    def outcomes(self) -> dict[str, int]:
        """Events that were not simply applied, summed up by what became of them; 3 us."""
        engine = self._engine.counts()
        return {
            "mismatch": self._mismatches.total() + sum(engine["mismatches"].values()),
            "bad": self._bad.total() + sum(engine["bad"].values()),
            "ignored": self._ignored.total() + sum(engine["ignored"].values()),
            "stale": self.stale,
            "orphan": self._orphans + int(engine["parked"]),
            "unlocated": self.unlocated,
        }

    # ---- a listener's stream

    def apply(self, payload: bytes) -> int:
        # Without the word there is no standard event: the fast way, nothing is made of Python.
        if MARK not in payload and not kv_events.is_json(payload):
            applied = self._engine.apply(payload)
            if applied:
                self._rest = _NOTHING
                self._flaw = self._engine.flaw()
                return self._shown()
            self._rest = self._go_on_engine(payload, applied)
        else:
            self._rest = self._apply(payload)
        return self.go_on()

    def go_on(self) -> int:
        self._left = self.slice_steps
        for _ in self._rest:
            return UNFINISHED
        self._rest = _NOTHING
        return self._shown()

    def _shown(self) -> int:
        """Returns what a payload has shown, once it is applied."""
        shown: int = FLAWED if self._flaw else 0
        full = self._ignored["full"] + self._engine.full()
        if full != self._full:
            self._full = full
            shown |= NO_ROOM
        return shown

    def _go_on_engine(self, payload: bytes, applied: bool | None) -> _Slices:
        while applied is None:
            yield
            applied = self._engine.go_on()
        self._flaw = self._engine.flaw()
        if not applied:  # it may have the form of an unusual batch
            yield from self._apply(payload)

    def _apply(self, payload: bytes) -> _Slices:
        self._flaw = ""
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
        events: list[object] = []
        for event in batch.events:
            events.append(self._read(event, batch.rank))
            if self._is_spent(_STEPS_AN_EVENT + _packed_bytes(event) // _BYTES_A_STEP):
                yield
        if len(events) > 1:
            _put_in_order(events)
        for event in events:
            yield from self._take_or_count(event, batch.rank)
            if self._is_spent(_STEPS_AN_EVENT):
                yield

    def _is_spent(self, steps: int) -> bool:
        """Takes steps off the slice; returns whether none is left."""
        self._left -= steps
        return self._left <= 0

    def _take_or_count(self, event: object, rank: int | None) -> _Slices:
        try:
            yield from self._take(event, rank)
        except _Foreign as error:
            self._mismatches[str(error)] += 1
            # A publisher that has one counter has used a number of it for that.
            self._highest = max(self._highest, -1 if error.event_id is None else error.event_id)
        except UnicodeError:
            self._note_bad("text")
        except ValueError as error:
            self._note_bad(str(error))
        except (OverflowError, TypeError):
            self._note_bad("value")

    def flaw(self) -> str:
        return self._flaw

    def clear(self) -> None:
        """The publisher has been started anew: what it held, and its numbers, are over."""
        self._rest = _NOTHING
        for backend, rank in self._source.holders():
            self._source.clear(backend, rank)
        self._forget_numbers()
        self._engine.forget()

    def restored(self) -> bool:
        return False

    def goes_on(self, payload: bytes) -> bool:
        return False

    def drop_restored(self) -> bool:
        return False

    # ---- order

    def _read(self, event: object, batch_rank: int | None) -> object:
        """Returns a standard event, what is wrong with it, or an engine's own as it is."""
        try:
            read = kv_events.read_event(event)
            if not kv_events.is_standard(read):
                return read
            return self._envelope(read, batch_rank)  # type: ignore[arg-type]
        except (ValueError, _Foreign) as error:
            return error

    def _is_next(self, event: _Standard) -> bool:
        """Whether an event goes on with its stream; notes what is missing before it."""
        number = event.event_id
        if number is None:
            return True
        stream = event.stream
        place = self._streams.pop(stream, None)
        if place is None:
            place = _Place(number, number - 1)
        if number <= place.last:
            self._streams[stream] = place
            self.stale += 1
            return False
        if number > place.last + 1 and number != self._highest + 1:
            self.gaps += 1
        place.last = number
        self._let_go(place)
        self._streams[stream] = place  # now the last of the dict
        if len(self._streams) > MAX_STREAMS:
            self._let_go(self._streams.pop(next(iter(self._streams))))
        self._highest = max(self._highest, number)
        return True

    def _begins_anew(self, event: _Standard) -> list[_Standard]:
        """Takes note of a stale event; returns those of a new beginning once it is one."""
        assert event.event_id is not None
        place = self._streams[event.stream]
        behind = place.behind
        last = behind[-1].event_id if behind else None
        if last is not None and event.event_id != last + 1:
            self._let_go(place)
        if not behind and event.event_id - place.first >= place.last - event.event_id:
            return []  # nearer to the end of what has been heard: somebody repeats it
        self._behind += event.keep()
        behind.append(event)
        if self._behind > MAX_BEHIND:
            for each in self._streams.values():
                self._let_go(each)
        if len(behind) < NEW_BEGINNING:
            return []
        return list(behind)

    def _let_go(self, place: _Place) -> None:
        """Forgets the stale events of a stream: they are no new beginning."""
        self._behind -= sum(event.size for event in place.behind)
        place.behind.clear()

    def _forget_backend(self, gone: int) -> None:
        for backend, rank in self._source.holders():
            if backend == gone:
                self._source.clear(backend, rank)
        for stream in [each for each in self._streams if each[2] == gone]:
            self._let_go(self._streams.pop(stream))

    def _forget_numbers(self) -> None:
        self._streams.clear()
        self._behind = 0
        self._highest = -1

    # ---- standard events

    def _envelope(self, event: Event, batch_rank: int | None) -> _Standard:
        terms = self._terms
        kind = event["event_type"]
        if kind not in _TYPES:
            raise ValueError("event_type")
        event_id = kv_events.number(event, "event_id", U64_MAX)
        block_size = kv_events.number(event, "block_size", U32_MAX)
        rank = kv_events.number(event, "dp_rank", U32_MAX)
        medium = kv_events.text(event, "medium")
        backend = kv_events.text(event, "backend_id") or ""
        lora_name = kv_events.text(event, "lora_name") or ""
        cache_salt = kv_events.text(event, "additional_salt") or ""
        model_name = kv_events.text(event, "model_name")
        tenant_id = kv_events.text(event, "tenant_id")
        if model_name not in (None, terms.model_name):
            raise _Foreign("model_name", event_id)
        if tenant_id not in (None, terms.tenant_id):
            raise _Foreign("tenant_id", event_id)
        if block_size not in (None, terms.block_size):
            raise _Foreign("block_size", event_id)
        if terms.lora_name and lora_name not in ("", terms.lora_name):
            raise _Foreign("lora_name", event_id)
        if terms.cache_salt and cache_salt not in ("", terms.cache_salt):
            raise _Foreign("additional_salt", event_id)
        if rank is None and not terms.store:
            rank = terms.dp_rank if batch_rank is None else batch_rank
        return _Standard(
            event,
            kind,
            event_id,
            lora_name or terms.lora_name,
            cache_salt or terms.cache_salt,
            self._backend(backend),
            None if medium is None else folded(medium),
            rank,
        )

    def _backend(self, name: str) -> int:
        known = self._backends.get(name)
        if known is None:
            if len(self._backends) >= MAX_BACKENDS:
                raise ValueError("backends")
            known = self._backends[name] = len(self._backends)
        return known

    def _take(self, event: object, batch_rank: int | None) -> _Slices:
        if not isinstance(event, (_Standard, ValueError, _Foreign)):
            yield from self._take_engine(event, batch_rank)
            return
        self._events += 1
        if not isinstance(event, _Standard):
            raise event
        apply = yield from self._understand(event)
        if self._is_next(event):
            yield from apply
            return
        anew = self._begins_anew(event)
        if anew:
            self.beginnings += 1
            self.stale -= len(anew)
            self._forget_backend(event.backend)
            for each in anew:
                self._is_next(each)
                yield from (yield from self._understand(each))

    def _understand(self, event: _Standard) -> Generator[None, None, _Slices]:
        """Returns what applies the event; raises ValueError where it is bad, before it counts."""
        if event.kind == _CLEARED:
            return self._clear(event)
        said = kv_events.hashes(event.event)
        hashes: list[int] = []
        for at in range(0, len(said), _HASHES_A_PART):
            part = _part(said, at, _HASHES_A_PART)
            hashes += map(kv_events.hash_of, part)
            if self._is_spent(_STEPS_A_HASH * len(part)):
                yield
        kv_events.number(event.event, "base_block_idx", U32_MAX)
        if event.kind == _REMOVED:
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
        self, event: _Standard, hashes: list[int], tokens: list[int] | None, parent: int | None
    ) -> _Slices:
        if not hashes:
            self._ignored["object_key"] += 1
            return
        medium = event.medium or (CPU if self._terms.store else GPU)
        depth = event.event.get("base_block_idx")
        if depth is not None and (depth == 0) != (parent is None):
            self.conflicts += 1
        if tokens is None:
            yield from self._store_names(event, medium, hashes)
        elif parent is None and (
            depth or not {"base_block_idx", "parent_hash"} & event.event.keys()
        ):
            self.unlocated += 1
        else:
            yield from self._store_blocks(event, medium, hashes, tokens, parent)

    def _store_names(self, event: _Standard, medium: str, hashes: list[int]) -> _Slices:
        for at in range(0, len(hashes), _NAMES_A_PART):
            part = _part(hashes, at, _NAMES_A_PART)
            outcome = self._source.store_named(
                event.backend, event.rank, medium, part, event.space, whole=False
            )
            yield from self._settle()
            if outcome != "placed":
                self._note(outcome)
                return

    def _store_blocks(
        self,
        event: _Standard,
        medium: str,
        hashes: list[int],
        tokens: list[int],
        parent: int | None,
    ) -> _Slices:
        size = self._terms.block_size
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
            self._left -= _STEPS_A_BLOCK * len(part)
            yield from self._settle()
            if outcome not in ("placed", "parked"):
                return

    def _settle(self) -> _Slices:
        """Does what stored blocks have set off: others may have waited for them."""
        while (left := self._source.settle(self._left)) <= 0:
            yield
        self._left = left

    def _note(self, outcome: str) -> None:
        if outcome == "parked":
            self._orphans += 1
        elif outcome != "placed":
            self._ignored[outcome] += 1

    def _remove(self, event: _Standard, hashes: list[int]) -> _Slices:
        medium = event.medium
        if medium is None and not self._terms.store:
            medium = GPU
        for at in range(0, len(hashes), _REMOVALS_A_PART):
            part = _part(hashes, at, _REMOVALS_A_PART)
            self._source.remove(event.backend, event.rank, medium, part, event.space)
            if self._is_spent(_STEPS_A_REMOVAL * len(part)):
                yield

    def _clear(self, event: _Standard) -> _Slices:
        ranks = [event.rank]
        if event.rank is None:  # a store's: every rank
            ranks = [rank for backend, rank in self._source.holders() if backend == event.backend]
        for rank in ranks:
            self._source.clear(event.backend, rank, event.medium, event.space)
            if self._is_spent(_STEPS_AN_EVENT):
                yield

    # ---- engines' own events

    def _take_engine(self, event: object, batch_rank: int | None) -> _Slices:
        """Takes one that stands beside standard events, or in a batch of an unusual form."""
        try:
            payload = kv_events.engine_payload(event, batch_rank)
        except (TypeError, OverflowError, ValueError):
            raise ValueError("event_shape") from None
        applied = self._engine.apply(payload)
        while applied is None:
            yield
            applied = self._engine.go_on()
        self._flaw = self._flaw or self._engine.flaw()

    def _note_bad(self, why: str) -> None:
        self._bad[why] += 1
        self._flaw = self._flaw or why


def folded(medium: str) -> str:
    """Returns the medium that a name stands for, in upper case; ValueError for too long a one."""
    name = medium.upper()
    if len(name) > MAX_MEDIUM_CHARS:
        raise ValueError("medium")
    return MEDIA.get(name, name)


def _put_in_order(events: list[object]) -> None:
    """Puts the standard events of each stream in the order of their numbers."""
    places: dict[_Stream, list[int]] = {}
    for at, event in enumerate(events):
        if isinstance(event, _Standard) and event.event_id is not None:
            places.setdefault(event.stream, []).append(at)
    for ats in places.values():
        if len(ats) > 1:
            ordered = sorted((events[at] for at in ats), key=_number)
            for at, event in zip(ats, ordered, strict=True):
                events[at] = event


def _part(values: list[_Value], at: int, length: int) -> list[_Value]:
    """Returns a part of a list, which as a rule is all of it."""
    return values if at == 0 and len(values) <= length else values[at : at + length]


def _packed_bytes(event: object) -> int:
    return len(event.packed) if isinstance(event, kv_events.Unread) else 0


def _number(event: object) -> int:
    assert isinstance(event, _Standard) and event.event_id is not None
    return event.event_id
