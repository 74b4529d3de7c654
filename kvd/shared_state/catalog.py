"""Shares registrations that calls to any replica make, so that all replicas have them.

    here, by calls ── new or other than agreed ──> catalog <── the same, by others
    here           <── add, remove ──────────────── other than agreed

The agreed rows are those that were the same here and in the catalog after the last comparison. A
row that differs from them here was changed here and is written to the catalog. A row that differs
in the catalog was changed by another process and is applied here. A removal stays in the catalog
for GONE_S, so that processes that were away for less time learn of it. A row is later than the one
that it replaces. So if the server was emptied or has come back with an old copy, the lost rows stay
agreed and are written again, but never over a row that another process has written since: otherwise
a worker that was removed meanwhile would come back.

Router settings that calls have made for models (thresholds, modes, policies) are in the table
ROUTER_SETTINGS, with one row for each setting. The settings and the fleet file of this process win
over the catalog.
Replicas and peers that calls have named are not shared: each process has its own.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import trio

from kvd.errors import KvdError, Misdirected, NotFound
from kvd.fleet_file.follower import RegistrationTarget
from kvd.fleet_file.parse import TABLES
from kvd.persistence.registrations import SLICE, Registrations, wanted_of
from kvd.shared_state.entries import FORM, Unreadable, moment_of, understanding, unpacked
from kvd.shared_state.keys import Keys
from kvd.shared_state.server import Client, time_of, write_rows, write_rows_again
from kvd.telemetry.logs import get_logger

GONE_S = 86_400.0  # time that a removal is kept for processes that were away
WRITTEN_AT_ONCE = 64  # rows that one command writes
COMPARED_AT_ONCE = 512  # rows compared between two checkpoints: under 1 ms
TICK_S = 0.001  # how much later than the row before it a row is at least

# The table of router settings; its keys are a model, a tenant and a setting's name.
ROUTER_SETTINGS = "said"

MAX_ROWS = 131_072  # changed rows that one comparison writes; the next ones write the rest

log = get_logger(__name__)

Field = str  # a field of the catalog's hash: the table and the key of a registration

# Lets the server write; returns False if it refuses.
Write = Callable[[Awaitable[Any]], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class CatalogRow:
    """A registration, or the fact that it has been removed."""

    table: str
    members: str  # JSON with sorted keys; empty if the registration was removed
    mark: str  # see kvd.persistence.registrations
    # When it was written, by the server's clock; later than the row before it. 0 if not stated:
    # earlier versions do so for removals alone.
    at: float = 0.0
    known: object = None  # stands for the registration here (see RegistrationTarget)

    def packed(self) -> bytes:
        content: bytes = msgpack.packb([FORM, self.table, self.members, self.mark, self.at])
        return content

    @classmethod
    def read(cls, content: bytes) -> CatalogRow | None:
        """Returns a row, None if its form is not known here; raises Unreadable."""
        with understanding("a registration"):
            form, table, members, mark, at = unpacked(content)
            if form != FORM:
                return None
            return cls(str(table), str(members), str(mark), moment_of(at))

    def is_like(self, other: CatalogRow | None) -> bool:
        """Returns whether two rows say the same, whenever they were written."""
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
    """Keeps the registrations of this process and those of the catalog the same."""

    def __init__(
        self, registrations: Registrations, targets: Mapping[str, RegistrationTarget]
    ) -> None:
        self.stats = CatalogStats()
        self._registrations = registrations
        self._targets = targets
        self._agreed: dict[Field, CatalogRow] = {}
        self._failed: set[Field] = set()  # rows of others that could not be registered here
        self._covered: set[Field] = set()  # rows of others that our fleet file has set here
        self._restored: set[Field] = set()  # registrations from the state directory, until agreed
        self._unread: set[Field] = set()  # fields of the catalog that cannot be read here
        # Agreed rows that the server has lost, and the older ones that it has instead, if any.
        self._lost: dict[Field, CatalogRow | None] = {}
        self._changes: int | None = None  # the registrations' `changes` at the last comparison
        self._seen: bytes | None = None  # the name of the catalog's last change at that time

    @property
    def changes(self) -> int:
        """The number of changes so far to the registrations here."""
        return self._registrations.changes

    async def note_restored(self) -> None:
        """Notes the registrations that exist before any call can have arrived."""
        self._restored = set(await self._here())

    async def sync(self, client: Client, keys: Keys, write: Write) -> None:
        """Applies the changes of other processes, and writes those made here.

        Writes that the server refuses are tried again the next time. Raises what the client raises.
        """
        seen = await client.get(keys.catalog_changes)
        if seen != self._seen or self._seen is None:
            await self._take(await self._there(client, keys))
            self._seen = seen
        changes = self._registrations.changes
        if self._changes != changes:
            await self._take_uncovered()
            if await self._write(client, keys, write):
                self._changes = changes
        self._restored.clear()

    async def _here(self) -> dict[Field, CatalogRow]:
        """Returns the registrations of clients here; other tasks run meanwhile."""
        found: dict[Field, CatalogRow] = {}
        for number, each in enumerate(self._registrations.rows(), 1):
            if each is not None and each.table != "replica":
                members = json.dumps(each.members, sort_keys=True)
                row = CatalogRow(each.table, members, each.mark, known=each.known)
                found[_field(each.table, each.wanted)] = row
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        settings = self._registrations.router_settings()
        for number, (tuning_key, changes) in enumerate(settings, 1):
            for name, value in changes.items():
                row = CatalogRow(ROUTER_SETTINGS, json.dumps({name: value}), "")
                found[f"{ROUTER_SETTINGS} {json.dumps([*tuning_key, name])}"] = row
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
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
        """Applies what other processes have changed since the last comparison."""
        here = await self._here()
        lost: dict[Field, CatalogRow | None] = {}
        for number, (field, row) in enumerate(there.items(), 1):
            mine, agreed = here.get(field), self._agreed.get(field)
            is_changed = not row.is_like(agreed) or field in self._failed
            changed_here = (
                mine is not None and field not in self._restored and not mine.is_like(agreed)
            )
            if agreed is not None and 0 < row.at < agreed.at and not row.is_like(agreed):
                lost[field] = row
            elif is_changed and not changed_here:
                await self._apply_row(field, mine, row)
            elif not is_changed:
                self._agreed[field] = row
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        missing = self._agreed.keys() - there.keys() - self._unread  # the server was emptied
        self._lost = lost | dict.fromkeys(missing)
        if self._lost:
            self._changes = None  # `_write` must compare all registrations again

    async def _take_uncovered(self) -> None:
        """Applies rows of others that our fleet file covered, as far as it no longer does."""
        here = await self._here() if self._covered else {}
        for field in list(self._covered):
            if field in here:  # a client has registered it since: `_write` compares the two
                self._covered.discard(field)
            else:
                await self._apply_row(field, None, self._agreed[field])

    async def _apply_row(self, field: Field, mine: CatalogRow | None, row: CatalogRow) -> None:
        """Applies a row of another process here, then counts it as agreed.

        The row is agreed last: one that is agreed and not here would count as removed by a client,
        should this be cancelled halfway.
        """
        outcome = await self._outcome_of(field, mine, row)
        self._failed.discard(field)
        self._covered.discard(field)
        if outcome is not None:
            outcome.add(field)
        self._agreed[field] = row

    async def _outcome_of(
        self, field: Field, mine: CatalogRow | None, row: CatalogRow
    ) -> set[Field] | None:
        """Applies a row here; returns the set that its field then belongs to, None if to no set."""
        target = self._targets.get(row.table)
        if target is None and row.table != ROUTER_SETTINGS:
            return self._failed
        known = None if mine is None else mine.known
        try:
            if target is None:
                return self._apply_settings(field, mine, row)
            if mine is not None and not row.is_like(mine):
                before = wanted_of(mine.table, mine.members, mine.mark)
                if not target.holds(before, known):
                    return None  # a client has removed or replaced it meanwhile
                if not row.members or not target.can_change(
                    before, wanted_of(row.table, row.members, row.mark)
                ):
                    await target.remove(before, known)
                    self.stats.removed += 1
                    mine = known = None
            if row.members and not row.is_like(mine):
                wanted = wanted_of(row.table, row.members, row.mark)
                if self._registrations.is_set(row.table, wanted):
                    return self._covered
                await target.add(wanted, over=mine is not None, known=known)
                self.stats.added += 1
        except NotFound:  # a client has removed or replaced it meanwhile
            return None
        except Misdirected:  # this process does not serve that model
            return self._failed
        except (KvdError, ValueError, TypeError) as error:
            self.stats.failed += 1
            log.warning("shared_registration_failed", registration=field, reason=str(error))
            return self._failed
        return None

    def _apply_settings(
        self, field: Field, mine: CatalogRow | None, row: CatalogRow
    ) -> set[Field] | None:
        """Applies another process's router setting; raises ValueError and TypeError.

        Returns what `_outcome_of` does.
        """
        model_name, tenant_id, _ = json.loads(field.removeprefix(f"{ROUTER_SETTINGS} "))
        if not isinstance(model_name, str) or not isinstance(tenant_id, str | None):
            raise TypeError("the entry names no model and tenant")
        before = {} if mine is None else json.loads(mine.members)
        after = json.loads(row.members) if row.members else {}
        self._registrations.replace_settings((model_name, tenant_id), before, after)
        is_covered = after and not self._registrations.without_file((model_name, tenant_id), after)
        return self._covered if is_covered else None

    async def _write(self, client: Client, keys: Keys, write: Write) -> bool:
        """Writes what clients have changed here since the last comparison.

        Changes count as agreed once other processes can see them. Returns whether all have been
        written: not if the server refuses some, or if there are more than MAX_ROWS.
        """
        here = await self._here()
        now = await time_of(client, keys)
        changed: dict[Field, CatalogRow] = {}
        for number, (field, row) in enumerate(here.items(), 1):
            if not row.is_like(self._agreed.get(field)):
                changed[field] = row
            if number % COMPARED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        for number, (field, row) in enumerate(list(self._agreed.items()), 1):
            is_apart = field in self._failed or field in self._covered
            if row.members and field not in here and not is_apart:
                changed[field] = CatalogRow(row.table, "", "")
            elif not row.members and row.at < now - GONE_S:
                del self._agreed[field]
                self._lost.pop(field, None)
                await client.hdel(keys.catalog, [field])
            if number % COMPARED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        names = list(changed)[:MAX_ROWS]
        lost = list(self._lost.keys() - set(names))
        for at in range(0, len(lost), WRITTEN_AT_ONCE):
            rows = {name: self._agreed[name].packed() for name in lost[at : at + WRITTEN_AT_ONCE]}
            instead = {name: old.packed() for name in rows if (old := self._lost[name]) is not None}
            if not await write(write_rows_again(client, keys, rows, instead)):
                return False
            self.stats.written += len(rows)
        for at in range(0, len(names), WRITTEN_AT_ONCE):
            written = {
                name: replace(changed[name], known=None, at=self._after(name, now))
                for name in names[at : at + WRITTEN_AT_ONCE]
            }
            rows = {name: row.packed() for name, row in written.items()}
            if not await write(write_rows(client, keys, rows)):
                return False
            # Not with the last row: others may change these before the next ones are accepted.
            self._agreed |= written
            self.stats.written += len(rows)
        self._lost.clear()
        return len(names) == len(changed)

    def _after(self, field: Field, now: float) -> float:
        """Returns the time of a row that replaces the agreed one, whatever the clock says."""
        agreed = self._agreed.get(field)
        return now if agreed is None else max(now, agreed.at + TICK_S)


def _field(table: str, wanted: Any) -> Field:
    return f"{table} {json.dumps(TABLES[table].key(wanted))}"
