"""A Redis server as a plain-Python model: the commands that sessions use, and ways to fail.

Like a server with one process, it answers one command after the other. It may freeze, be
unreachable, break connections off, be full, be emptied, have its clock set, trim its stream, lose
its last writes, as happens when a copy takes over, or come back with an old copy of its data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import trio

from kvd.shared_state.server import WRITE_ROWS, WRITE_ROWS_AGAIN

PATIENCE_S = 3.0  # time for which a client waits for an answer


class StreamEntry(NamedTuple):
    identifier: bytes
    field_values: Mapping[bytes, bytes]


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class MemoryServer:
    """The state of the server, which all clients share."""

    def __init__(self, most_entries: int) -> None:
        """Its stream keeps at most `most_entries`, whatever limit its writers ask for."""
        self.is_gone = False
        self.is_frozen = False
        self.is_full = False
        self.breaks_after: int | None = None  # commands until a connection is cut off
        self.loses_answer = (
            False  # the next command that writes succeeds, but its client never knows
        )
        self.ahead_s = 0.0  # of its clock before that of the simulation
        self._most = most_entries
        self._thawed = trio.Event()
        self._changed = trio.Event()
        self.flush()

    def flush(self) -> None:
        self._last = (0, 0)
        self.entries: list[tuple[tuple[int, int], dict[bytes, bytes]]] = []
        self.values: dict[str, Any] = {}
        self._ends: dict[str, float] = {}

    def lose(self, count: int) -> None:
        """Forgets the last entries; new ones get their positions again."""
        for _ in range(min(count, len(self.entries))):
            self.entries.pop()
        self._last = self.entries[-1][0] if self.entries else (0, 0)

    def copy(self) -> Any:
        """Returns a copy of the data, as on its disk, and the clock that they are by."""
        return deepcopy((self.ahead_s, self._last, self.entries, self.values, self._ends))

    def restore(self, copied: Any) -> None:
        self.ahead_s, self._last, self.entries, self.values, self._ends = deepcopy(copied)

    def freeze(self) -> None:
        self.is_frozen, self._thawed = True, trio.Event()

    def thaw(self) -> None:
        self.is_frozen = False
        self._thawed.set()

    def come_back(self) -> None:
        self.is_gone = False
        self.thaw()

    async def _enter(self) -> None:
        await trio.sleep(0.0002)
        if self.is_frozen:
            with trio.move_on_after(PATIENCE_S):
                await self._thawed.wait()
        if self.is_gone or self.is_frozen:
            raise TimeoutError("the server does not answer")
        if self.breaks_after is not None:
            self.breaks_after -= 1
            if self.breaks_after < 0:
                self.breaks_after = None
                raise ConnectionResetError("the server has cut the connection off")

    def _leave(self) -> None:
        if self.loses_answer:
            self.loses_answer = False
            raise ConnectionResetError("the server was killed before it answered")

    def _now(self) -> float:
        return trio.current_time() + self.ahead_s

    def _find(self, name: str) -> Any:
        if self._ends.get(name, self._now()) < self._now():
            self.values.pop(name, None)
            self._ends.pop(name, None)
        return self.values.get(name)

    # ---- commands

    async def eval(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        await self._enter()
        if script in (WRITE_ROWS, WRITE_ROWS_AGAIN):
            change, *members = arguments
            found = self.values.setdefault(keys[0], {})
            if script == WRITE_ROWS:
                found.update(zip(map(_bytes, members[::2]), members[1::2], strict=True))
            else:
                for name, expected, value in zip(*(members[n::3] for n in range(3)), strict=True):
                    if found.get(_bytes(name), b"") == expected:
                        found[_bytes(name)] = value
            self.values[keys[1]] = _bytes(change)
            self._leave()
            return None
        assert script == "return redis.call('TIME')"
        seconds, rest = divmod(self._now(), 1)
        return b"%d" % seconds, b"%d" % (rest * 1e6)

    async def get(self, name: str) -> bytes | None:
        await self._enter()
        found: bytes | None = self._find(name)
        return found

    async def mget(self, names: Iterable[str]) -> tuple[bytes | None, ...]:
        await self._enter()
        return tuple(self._find(name) for name in names)

    async def set(
        self, name: str, value: object, ex: int | None = None, px: int | None = None
    ) -> bool:
        await self._enter()
        self.values[name] = _bytes(value)
        self._ends.pop(name, None)
        if ex is not None or px is not None:
            self._ends[name] = self._now() + (ex or 0) + (px or 0) / 1000
        self._leave()
        return True

    async def type(self, name: str) -> bytes:
        await self._enter()
        return b"none"  # all keys are those that sessions have made

    async def exists(self, names: Iterable[str]) -> int:
        await self._enter()
        return sum(self._find(name) is not None for name in names)

    async def delete(self, names: Iterable[str]) -> int:
        await self._enter()
        return sum(self.values.pop(name, None) is not None for name in names)

    async def expire(self, name: str, seconds: int) -> bool:
        await self._enter()
        if name in self.values:
            self._ends[name] = self._now() + seconds
        return name in self.values

    async def rpush(self, name: str, values: Iterable[bytes]) -> int:
        await self._enter()
        if self.is_full:
            raise MemoryError("OOM command not allowed when used memory > 'maxmemory'")
        found: list[bytes] = self.values.setdefault(name, [])
        found += values
        self._leave()
        return len(found)

    async def lrange(self, name: str, start: int, stop: int) -> list[bytes]:
        await self._enter()
        found: list[bytes] = self._find(name) or []
        return found[start : stop + 1]

    async def sadd(self, name: str, values: Iterable[str]) -> int:
        await self._enter()
        self.values.setdefault(name, set()).update(map(_bytes, values))
        return 1

    async def srem(self, name: str, values: Iterable[str]) -> int:
        await self._enter()
        self.values.setdefault(name, set()).difference_update(map(_bytes, values))
        return 1

    async def smembers(self, name: str) -> frozenset[bytes]:
        await self._enter()
        return frozenset(self._find(name) or ())

    async def hgetall(self, name: str) -> dict[bytes, bytes]:
        await self._enter()
        return dict(self._find(name) or {})

    async def hdel(self, name: str, fields: Iterable[str]) -> int:
        await self._enter()
        found = self.values.get(name, {})
        return sum(found.pop(_bytes(field), None) is not None for field in fields)

    # ---- the stream

    async def xadd(self, name: str, field_values: Mapping[Any, Any], **trims: Any) -> bytes:
        await self._enter()
        now = int(self._now() * 1000)
        ms, number = self._last
        self._last = (now, 0) if now > ms else (ms, number + 1)
        fields = {_bytes(key): _bytes(value) for key, value in field_values.items()}
        self.entries.append((self._last, fields))
        del self.entries[: -self._most]
        self._changed.set()
        self._changed = trio.Event()
        self._leave()
        return b"%d-%d" % self._last

    def _between(self, after: tuple[int, int], end: tuple[int, int], count: int) -> Any:
        return tuple(
            StreamEntry(b"%d-%d" % position, OrderedDict(fields))
            for position, fields in self.entries
            if after < position <= end
        )[:count]

    async def xrevrange(self, name: str, count: int) -> Any:
        await self._enter()
        return tuple(
            StreamEntry(b"%d-%d" % position, OrderedDict(fields))
            for position, fields in self.entries[: -count - 1 : -1]
        )

    async def xrange(self, name: str, start: str, end: str, count: int) -> Any:
        await self._enter()
        assert start.startswith("(")
        return self._between(_place(start[1:]), _place(end), count)

    async def xread(self, streams: Mapping[str, str], count: int, block: int) -> Any:
        await self._enter()
        ((name, after),) = streams.items()
        found = self._between(_place(after), (2**63, 0), count)
        if not found:
            with trio.move_on_after(block / 1000):
                await self._changed.wait()
            await self._enter()
            found = self._between(_place(after), (2**63, 0), count)
        return {name.encode(): found} if found else None


def _place(text: str) -> tuple[int, int]:
    ms, _, number = text.partition("-")
    return int(ms), int(number)
