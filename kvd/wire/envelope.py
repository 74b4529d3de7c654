"""Checks the envelope of a KV Events standard event against its publisher's registration.

The registration supplies members that an event leaves out. An event that contradicts it belongs to
another registration.

No clock, no sockets, no logging.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvd.wire import kv_events
from kvd.wire.kv_events import U32_MAX, U64_MAX, Event
from kvd_core.conductor.conductor import namespace

GPU, CPU, DISK = "GPU", "CPU", "DISK"
# Further names of the three media; any other name is a medium of its own.
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
MAX_MEDIUM_CHARS = 64  # longest name of a medium, which becomes a member of every answer

# Most backends of one publisher. From half as many on, backends that hold nothing are forgotten
# from time to time; events of further backends are dropped and counted.
MAX_BACKENDS = 4096

STORED, REMOVED, CLEARED = "stored", "removed", "cleared"
_TYPES = (STORED, REMOVED, CLEARED)

_CONTENT = (  # members that `keep` keeps; `timestamp` distinguishes an event from a repetition
    "timestamp",
    "seq_hashes",
    "block_hashes",
    "connector_block_hash",
    "object_key",
    "base_block_idx",
    "parent_hash",
    "token_ids",
)

# An adapter, a salt, a backend, a medium and a rank: each combination numbers its own events.
Stream = tuple[str, str, int, str | None, int | None]


class StreamIdentity(NamedTuple):
    """The properties of a registration that hold for all its publisher's events."""

    model_name: str
    tenant_id: str
    block_size: int
    lora_name: str
    cache_salt: str
    dp_rank: int
    store: bool  # the publisher is a store: its blocks belong to no rank unless an event names one


@dataclass(slots=True)
class StandardEvent:
    """A standard event whose envelope matches the registration."""

    event: Event
    kind: str
    event_id: int | None
    lora_name: str
    cache_salt: str
    backend: int
    medium: str | None
    rank: int | None
    size: int = 0  # set by `keep`

    def keep(self) -> int:
        """Drops members that applying it later does not need; returns its size for MAX_BEHIND."""
        self.event = {name: self.event[name] for name in _CONTENT if name in self.event}
        self.size = 1 + sum(len(each) for each in self.event.values() if hasattr(each, "__len__"))
        return self.size

    @property
    def stream(self) -> Stream:
        return self.lora_name, self.cache_salt, self.backend, self.medium, self.rank

    @property
    def space(self) -> int:
        return namespace(self.lora_name, self.cache_salt)


class Foreign(Exception):
    """The event belongs to another registration; names the member that differs."""

    def __init__(self, dimension: str, event_id: int | None = None) -> None:
        super().__init__(dimension)
        self.event_id = event_id


class Envelopes:
    """Reads the envelopes of one publisher's events, and numbers its backends by name."""

    def __init__(self, identity: StreamIdentity) -> None:
        self._identity = identity
        self._backends: dict[str, int] = {"": 0}
        self._named = 0  # the highest number given; numbers are not reused
        self._forget_at = MAX_BACKENDS // 2  # from so many backends on, some should be forgotten

    @property
    def has_many_backends(self) -> bool:
        """Returns whether it is time to `forget_backends`."""
        return len(self._backends) >= self._forget_at

    def kept(self) -> dict[str, int]:
        """Returns the numbers of all backends, for `take_over` by another process."""
        return dict(self._backends)

    def take_over(self, backends: dict[str, int]) -> None:
        self._backends |= backends
        self._named = max(self._backends.values())

    def forget_backends(self, busy: set[int]) -> None:
        """Forgets all backends but these; called between payloads, whose events may name others."""
        self._backends = {
            name: number for name, number in self._backends.items() if number in busy or not number
        }
        self._forget_at = max(MAX_BACKENDS // 2, (len(self._backends) + MAX_BACKENDS + 1) // 2)

    def read(self, event: Event, batch_rank: int | None) -> StandardEvent:
        """Reads an event's envelope; raises ValueError, or Foreign for another registration's."""
        identity = self._identity
        kind = event["event_type"]
        if kind not in _TYPES:
            raise ValueError("event_type")
        event_id = kv_events.number(event, "event_id", U64_MAX)
        block_size = kv_events.number(event, "block_size", U32_MAX)
        rank = kv_events.number(event, "dp_rank", U32_MAX)
        medium = kv_events.name(event, "medium")
        backend = kv_events.name(event, "backend_id") or ""
        lora_name = kv_events.name(event, "lora_name") or ""
        cache_salt = kv_events.text(event, "additional_salt") or ""
        model_name = kv_events.text(event, "model_name")
        tenant_id = kv_events.text(event, "tenant_id")
        if model_name not in (None, identity.model_name):
            raise Foreign("model_name", event_id)
        if tenant_id not in (None, identity.tenant_id):
            raise Foreign("tenant_id", event_id)
        if block_size not in (None, identity.block_size):
            raise Foreign("block_size", event_id)
        if identity.lora_name and lora_name not in ("", identity.lora_name):
            raise Foreign("lora_name", event_id)
        if identity.cache_salt and cache_salt not in ("", identity.cache_salt):
            raise Foreign("additional_salt", event_id)
        if rank is None and not identity.store:
            rank = identity.dp_rank if batch_rank is None else batch_rank
        return StandardEvent(
            event,
            kind,
            event_id,
            lora_name or identity.lora_name,
            cache_salt or identity.cache_salt,
            self._backend(backend),
            None if medium is None else folded(medium),
            rank,
        )

    def _backend(self, name: str) -> int:
        known = self._backends.get(name)
        if known is None:
            if len(self._backends) >= MAX_BACKENDS:
                raise ValueError("backends")
            self._named += 1
            known = self._backends[name] = self._named
        return known


def folded(medium: str) -> str:
    """Returns the medium that a name stands for, in upper case; ValueError if it is too long."""
    name = medium.upper()
    if len(name) > MAX_MEDIUM_CHARS:
        raise ValueError("medium")
    return MEDIA.get(name, name)
