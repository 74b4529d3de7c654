"""The names of the keys on the server.

    {PREFIX}:ops              stream   steps of all writers, in the order in which they came
    {PREFIX}:members          set      writers whose view may still be there
    {PREFIX}:member:WRITER    text     a writer's announcement of itself; expires after a lease
    {PREFIX}:view:WRITER      text     the head of a writer's last whole view
    {PREFIX}:view:WRITER:N    list     the pieces of the writer's view N
    {PREFIX}:catalog          hash     registrations that calls have made, and removals
    {PREFIX}:catalog:changes  text     a random text, another one after each change of the catalog

The braces are a hash tag: it puts all keys into one slot of a cluster, so that a script may change
several of them.
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
    def types(self) -> dict[str, str]:
        """The server's types of the keys that all processes share."""
        return {
            self.ops: "stream",
            self.members: "set",
            self.catalog: "hash",
            self.catalog_changes: "string",
        }

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
