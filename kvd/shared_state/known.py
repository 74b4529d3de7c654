"""What outlives a session, and the next one begins with."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from kvd.shared_state.catalog import Catalog
from kvd.shared_state.fleet import KnownFleet
from kvd.shared_state.mirror import Mirror
from kvd.shared_state.outbox import Outbox
from kvd.shared_state.server import ServerLink
from kvd.shared_state.views import Views


@dataclass(frozen=True, slots=True)
class KnownState:
    """This process's part of the shared state, and what it knows of the others."""

    mirror: Mirror
    outbox: Outbox
    views: Views
    catalog: Catalog
    fleet: KnownFleet
    at_rest: trio.Lock  # held while an entry is applied, from its first step to its last


class SessionPart:
    """A part of a session, with its connection and what outlives it at hand."""

    def __init__(self, link: ServerLink, known: KnownState) -> None:
        self._client = link.client
        self._keys = link.keys
        self._clock = link.clock
        self._lease_s = link.lease_s
        self._mirror = known.mirror
        self._progress = known.mirror.progress
        self._outbox = known.outbox
        self._views = known.views
        self._catalog = known.catalog
        self._fleet = known.fleet
        self._at_rest = known.at_rest
