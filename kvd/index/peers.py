"""The peers an operator has named: where a starting indexer may take its state from.

The list is used at the start only, those that calls have named when it is started again; peers do
not follow each other afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvd.errors import NotFound, Unavailable
from kvd.wire.egress import EgressPolicy

# Peers that are listed: a fleet has two or three replicas. The bound keeps a client from storing
# texts here.
MAX_PEERS = 1024


class Peers:
    """Base URLs in the order they were named, each once."""

    def __init__(self, urls: Iterable[str] = (), outgoing: EgressPolicy | None = None) -> None:
        """Without a rule about addresses the default one holds."""
        self._outgoing = outgoing or EgressPolicy()
        self._urls = dict.fromkeys(urls)
        self._set = set(self._urls)
        self.refused = 0  # registrations beyond MAX_PEERS
        self.changes = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._urls)

    def named(self) -> list[str]:
        """Returns those that calls have named."""
        return [url for url in self._urls if url not in self._set]

    def __len__(self) -> int:
        return len(self._urls)

    def add(self, url: str) -> None:
        """Adds a peer; a known one stays where it is.

        Raises BadRequest on an address that may not be connected to, Unavailable at the bound.
        """
        self._outgoing.check_url(url)
        if url not in self._urls and len(self._urls) >= MAX_PEERS:
            self.refused += 1
            raise Unavailable(f"the limit of {MAX_PEERS} peers is reached")
        self._urls[url] = None
        self.changes += 1

    def remove(self, url: str) -> None:
        """Removes a peer or raises NotFound."""
        if url not in self._urls:
            raise NotFound("peer not found")
        del self._urls[url]
        self.changes += 1
