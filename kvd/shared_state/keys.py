"""The names of what is kept on the server.

    {PREFIX}:ops              stream   steps of all writers, in the order in which they came
    {PREFIX}:members          set      writers whose view may still be there
    {PREFIX}:member:WRITER    text     what a writer says of itself; ends a lease after it
    {PREFIX}:view:WRITER      text     which view of a writer is whole, and what it stands for
    {PREFIX}:view:WRITER:N    list     the pieces of its view N
    {PREFIX}:catalog          hash     registrations that were made by calls, and removals
    {PREFIX}:catalog:changes  text     another one after each change of the catalog

The braces are a hash tag: on a cluster all of it is in one slot, so a script may change several.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The names under one prefix."""

    prefix: str

    def _name(self, *parts: str) -> str:
        return ":".join((f"{{{self.prefix}}}", *parts))

    @property
    def ops(self) -> str:
        return self._name("ops")

    @property
    def members(self) -> str:
        return self._name("members")

    @property
    def catalog(self) -> str:
        return self._name("catalog")

    @property
    def catalog_changes(self) -> str:
        return self._name("catalog", "changes")

    def member(self, writer: str) -> str:
        return self._name("member", writer)

    def view(self, writer: str) -> str:
        return self._name("view", writer)

    def pieces(self, writer: str, number: int) -> str:
        return self._name("view", writer, str(number))
