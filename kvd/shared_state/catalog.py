"""Registrations that were made by calls to any replica: said once, known to all.

    here, by calls ── new or other than agreed ──> catalog <── the same, by others
    here           <── add, remove ──────────────── other than agreed

`agreed` is what was the same here and there after the last comparison. What differs from it here
was changed here and is written; what differs there was changed by another process and is done here.
A removal stays in the catalog for GONE_S, so that a process that was away for less hears of it.
What a server that was emptied has lost stays agreed and is written again, but never over what
another process has said since: a worker that is removed meanwhile would come back.

What calls have said of models (thresholds, modes, policies) is in the table SAID, a row a setting.
What the settings or the fleet file of this process say goes before the catalog. Replicas and peers
that were named by calls are no part of it: they are each process's own.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import msgpack
import trio

from kvd.errors import KvdError, Misdirected, NotFound
from kvd.fleet_file.follower import RegistrationTarget
from kvd.fleet_file.parse import TABLES
from kvd.persistence.registrations import SLICE, Registrations, wanted_of
from kvd.shared_state.entries import FORM, Unreadable, moment_of, understanding, unpacked
from kvd.shared_state.keys import Keys
from kvd.shared_state.server import Client, time_of, write_missing
from kvd.telemetry.logs import get_logger

GONE_S = 86_400.0  # that a removal is kept for those who were away
WRITTEN_AT_ONCE = 64  # rows that one command writes

SAID = "said"  # the table of what was said of models: its keys are a model, a tenant and a name

MAX_ROWS = 131_072  # registrations in the catalog; what comes beyond that stays with its process

log = get_logger(__name__)

Field = str  # of the catalog: the table and the key of a registration

# Has the server write; False if it refuses.
Write = Callable[[Awaitable[Any]], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class CatalogRow:
    """A registration, or that it has been removed."""

    table: str
    members: str  # JSON, in one order; empty: it was removed
    mark: str  # see kvd.persistence.registrations
    gone_at: float  # by the server's clock, 0: it was not

    def packed(self) -> bytes:
        content: bytes = msgpack.packb([FORM, self.table, self.members, self.mark, self.gone_at])
        return content

    @classmethod
    def read(cls, content: bytes) -> CatalogRow | None:
        """Returns a row, None in a form of another version; raises Unreadable."""
        with understanding("a registration"):
            form, table, members, mark, gone_at = unpacked(content)
            if form != FORM:
                return None
            return cls(str(table), str(members), str(mark), moment_of(gone_at))

    def is_like(self, other: CatalogRow | None) -> bool:
        """Returns whether two say the same, whenever they have said it."""
        return other is not None and (self.members, self.mark) == (other.members, other.mark)


@dataclass(slots=True)
class CatalogStats:
    """Counts of registrations by outcome; plain numbers for metrics."""

    written: int = 0
    added: int = 0
    removed: int = 0
    failed: int = 0
    unreadable: int = 0


class Catalog:
    """Keeps the registrations here and those of the catalog the same."""

    def __init__(
        self, registrations: Registrations, targets: Mapping[str, RegistrationTarget]
    ) -> None:
        self.stats = CatalogStats()
        self._registrations = registrations
        self._targets = targets
        self._agreed: dict[Field, CatalogRow] = {}
        self._failed: set[Field] = set()  # rows of others that cannot be registered here
        self._restored: set[Field] = set()  # what a state directory has brought, until agreed
        self._unread: set[Field] = set()  # what the catalog has in a form that is not read here
        self._lost: set[Field] = set()  # agreed, and to be written again
        self._changes: int | None = None  # of the registrations, when they were compared
        self._seen: bytes | None = None  # the name of the catalog's last change then

    @property
    def changes(self) -> int:
        """Changes of what is registered here, so far."""
        return self._registrations.changes

    async def note_restored(self) -> None:
        """Notes what is registered before any call can have come."""
        self._restored = set(await self._here())

    async def sync(self, client: Client, keys: Keys, write: Write) -> None:
        """Does what others have changed, and has what has changed here written.

        What the server refuses to take is tried again the next time. Raises what the client raises.
        """
        seen = await client.get(keys.catalog_changes)
        if seen != self._seen or self._seen is None:
            await self._take(await self._there(client, keys))
            self._seen = seen
        changes = self._registrations.changes
        if self._changes != changes and await self._write(client, keys, write):
            self._changes = changes
        self._restored.clear()

    async def _here(self) -> dict[Field, CatalogRow]:
        """Returns what clients have registered here; others run meanwhile."""
        found: dict[Field, CatalogRow] = {}
        for number, (table, wanted, members, mark) in enumerate(self._registrations.rows(), 1):
            if table != "replica":
                row = CatalogRow(table, json.dumps(members, sort_keys=True), mark, 0.0)
                found[_field(table, wanted)] = row
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        for tuning_key, changes in self._registrations.said():
            for name, value in changes.items():
                row = CatalogRow(SAID, json.dumps({name: value}), "", 0.0)
                found[f"{SAID} {json.dumps([*tuning_key, name])}"] = row
        return found

    async def _there(self, client: Client, keys: Keys) -> dict[Field, CatalogRow]:
        found: dict[Field, CatalogRow] = {}
        self._unread.clear()
        contents = await client.hgetall(keys.catalog)
        for number, (name, content) in enumerate(contents.items(), 1):
            field = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
            try:
                row = CatalogRow.read(content)
            except Unreadable:
                self.stats.unreadable += 1
                row = None
            if row is None:
                self._unread.add(field)
            else:
                found[field] = row
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        return found

    async def _take(self, there: dict[Field, CatalogRow]) -> None:
        """Does here what others have changed since the last comparison."""
        here = await self._here()
        for number, (field, row) in enumerate(there.items(), 1):
            mine = here.get(field)
            is_news = not row.is_like(self._agreed.get(field)) or field in self._failed
            changed_here = (
                mine is not None
                and field not in self._restored
                and not mine.is_like(self._agreed.get(field))
            )
            if is_news and not changed_here:
                await self._do(field, mine, row)
            elif not is_news:
                self._agreed[field] = row
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        self._lost = self._agreed.keys() - there.keys() - self._unread  # the server was emptied
        if self._lost:
            self._changes = None  # `_write` is to compare what is here again

    async def _do(self, field: Field, mine: CatalogRow | None, row: CatalogRow) -> None:
        self._agreed[field] = row
        self._failed.discard(field)
        target = self._targets.get(row.table)
        if target is None and row.table != SAID:
            self._failed.add(field)
            return
        try:
            if target is None:
                self._say(field, mine, row)
                return
            if mine is not None and not row.is_like(mine):
                before = wanted_of(mine.table, mine.members, mine.mark)
                if not row.members or not target.can_change(
                    before, wanted_of(row.table, row.members, row.mark)
                ):
                    await target.remove(before)
                    self.stats.removed += 1
                    mine = None
            if row.members and not row.is_like(mine):
                wanted = wanted_of(row.table, row.members, row.mark)
                if not self._registrations.is_set(row.table, wanted):
                    await target.add(wanted, over=mine is not None)
                    self.stats.added += 1
        except NotFound:  # a client was faster
            return
        except Misdirected:  # another process serves that model
            self._failed.add(field)
        except (KvdError, ValueError, TypeError) as error:
            self._failed.add(field)
            self.stats.failed += 1
            log.warning("shared_registration_failed", registration=field, reason=str(error))

    def _say(self, field: Field, mine: CatalogRow | None, row: CatalogRow) -> None:
        """Applies another process's settings of a model; raises ValueError and TypeError."""
        model_name, tenant_id, _ = json.loads(field.removeprefix(f"{SAID} "))
        if not isinstance(model_name, str) or not isinstance(tenant_id, str | None):
            raise TypeError("the entry names no model and tenant")
        before = {} if mine is None else json.loads(mine.members)
        after = json.loads(row.members) if row.members else {}
        self._registrations.say((model_name, tenant_id), before, after)

    async def _write(self, client: Client, keys: Keys, write: Write) -> bool:
        """Writes what clients have changed here since then; False if that was refused.

        It is agreed once others can have heard of it.
        """
        here = await self._here()
        now = await time_of(client, keys)
        changed: dict[Field, CatalogRow] = {}
        for field, row in here.items():
            if not row.is_like(self._agreed.get(field)):
                changed[field] = row
        for field, row in list(self._agreed.items()):
            if row.members and field not in here and field not in self._failed:
                changed[field] = CatalogRow(row.table, "", "", now)
            elif not row.members and row.gone_at < now - GONE_S:
                del self._agreed[field]
                self._lost.discard(field)
                await client.hdel(keys.catalog, [field])
        written = {field: changed[field] for field in list(changed)[:MAX_ROWS]}
        lost = list(self._lost - written.keys())
        for at in range(0, len(lost), WRITTEN_AT_ONCE):
            some = lost[at : at + WRITTEN_AT_ONCE]
            missing = {name: self._agreed[name].packed() for name in some}
            if not await write(write_missing(client, keys.catalog, missing)):
                return False
            self.stats.written += len(missing)
        names = list(written)
        for at in range(0, len(names), WRITTEN_AT_ONCE):
            some = names[at : at + WRITTEN_AT_ONCE]
            rows: dict[str | bytes, bytes] = {name: written[name].packed() for name in some}
            if not await write(client.hset(keys.catalog, rows)):
                return False
            self.stats.written += len(rows)
        if (names or self._lost) and not await write(
            client.set(keys.catalog_changes, token_hex(8))
        ):
            return False
        self._agreed |= written
        self._lost.clear()
        return True


def _field(table: str, wanted: Any) -> Field:
    return f"{table} {json.dumps(TABLES[table].key(wanted))}"
