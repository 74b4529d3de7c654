"""The processes that share the state: each announces itself at short intervals.

    member:WRITER = {name, address, serves, numbers, view}     expires a lease after the last one
    members       = the writers whose lease or view may still be there

For each writer `numbers` has the number up to which the announcing process has all steps; for
itself that is the last step that the server has. A process that has read the stream and has less
has missed steps. These may be the last steps of a process that is gone, which only some have read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

from kvd.shared_state.entries import FORM, Unreadable, number_of, understanding, unpacked
from kvd.shared_state.keys import Keys
from kvd.shared_state.server import Client

MAX_MEMBERS = 1024  # announcements of processes that are read; more would be a fault


@dataclass(frozen=True, slots=True)
class Member:
    """A process's announcement of itself."""

    writer: str
    name: str  # of its host
    address: str | None  # at which others reach its indexer face
    serves: tuple[tuple[str, str | None], ...]  # models and tenants; empty means all
    numbers: Mapping[str, int]  # by writer: the step up to which it has all
    view: int  # number of its last view; 0 if it has none yet

    def packed(self) -> bytes:
        members = {
            "v": FORM,
            "name": self.name,
            "address": self.address,
            "serves": self.serves,
            "numbers": dict(self.numbers),
            "view": self.view,
        }
        content: bytes = msgpack.packb(members)
        return content

    @classmethod
    def read(cls, writer: str, content: bytes) -> Member | None:
        """Returns a process's announcement, None if its form is not known here.

        Raises Unreadable.
        """
        with understanding("the row of a process"):
            members = unpacked(content)
            if members["v"] != FORM:
                return None
            serves = tuple((str(model), tenant) for model, tenant in members["serves"])
            address = members["address"]
            return cls(
                writer,
                str(members["name"]),
                None if address is None else str(address),
                serves,
                {str(each): number_of(number) for each, number in members["numbers"].items()},
                number_of(members["view"]),
            )


async def announce(client: Client, keys: Keys, member: Member, lease_s: float) -> None:
    """Announces a process for the time of a lease; raises what the client raises."""
    await client.sadd(keys.members, [member.writer])
    await client.set(keys.member(member.writer), member.packed(), px=round(lease_s * 1000))


async def leave(client: Client, keys: Keys, writer: str) -> None:
    """Removes a process's announcement; its view stays until it expires."""
    await client.delete([keys.member(writer)])


async def listed(client: Client, keys: Keys, own: str) -> tuple[dict[str, Member], list[str]]:
    """Returns the other processes that are there, and the writers that are gone but left a view.

    Raises what the client raises.
    """
    writers = sorted(
        each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each)
        for each in await client.smembers(keys.members)
    )[:MAX_MEMBERS]
    others = [writer for writer in writers if writer != own]
    if not others:
        return {}, []
    contents = await client.mget([keys.member(writer) for writer in others])
    found: dict[str, Member] = {}
    gone: list[str] = []
    for writer, content in zip(others, contents, strict=True):
        try:
            member = None if content is None else Member.read(writer, content)
        except Unreadable:  # the process will announce itself again
            continue
        if member is not None:
            found[writer] = member
        elif content is None and await client.exists([keys.view(writer)]):
            gone.append(writer)
        elif content is None:
            await client.srem(keys.members, [writer])
    return found, gone
