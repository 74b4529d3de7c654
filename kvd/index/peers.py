"""The peers that operators have named: a starting indexer may take its state from them.

The list is used at the start alone; peers that calls have named serve at the next start. Peers do
not exchange anything afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvd.errors import NotFound, Unavailable
from kvd.wire.egress import EgressPolicy

# Peers in the list: a fleet has two or three replicas. The bound keeps clients from using the list
# to store texts.
MAX_PEERS = 1024


class Peers:
    """Base URLs of peers, each once, in the order in which they were named."""

    def __init__(self, urls: Iterable[str] = (), outgoing: EgressPolicy | None = None) -> None:
        """Without `outgoing` the default rules about addresses hold."""
        self._outgoing = outgoing or EgressPolicy()
        self._urls = dict.fromkeys(urls)
        self._set = set(self._urls)
        self.refused = 0  # registrations beyond MAX_PEERS
        self.changes = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._urls)

    def named(self) -> list[str]:
        """Returns the peers that calls have named."""
        return [url for url in self._urls if url not in self._set]

    def __len__(self) -> int:
        return len(self._urls)

    def add(self, url: str) -> None:
        """Adds a peer; a known peer keeps its position.

        Raises BadRequest on an address that kvd may not connect to, Unavailable at the bound.
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
