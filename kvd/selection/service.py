"""The selection service as a whole; see the package for what its parts are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvd.ledgers import Ledgers
from kvd.model import PartitionKey
from kvd.registry import Registry
from kvd.scheduling.options import RouterOptions
from kvd.selection.affinity import Affinity
from kvd.selection.bookings import Bookings
from kvd.selection.choices import Choices
from kvd.selection.fleet import Fleet
from kvd.selection.workers import Workers
from kvd.state import State
from kvd_core.draws import Draws


class Selections:
    """The state of the selection service."""

    def __init__(
        self,
        state: State,
        registry: Registry,
        options: RouterOptions,
        expiry_s: float,
        random: Random,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
        ledgers: Ledgers | None = None,
    ) -> None:
        """Requests of other faces that use the same `ledgers` weigh on choices."""
        self.options = options
        self.clock = clock
        self.draws = Draws(random)
        # Predicted blocks are nobody else's business.
        self.state = state if options.uses_kv_events else State()
        self.fleets: dict[PartitionKey, Fleet] = {}
        self.affinity: Affinity | None = None
        if options.session_affinity_ttl_s is not None:
            ttl_s, writer_id = options.session_affinity_ttl_s, random.randrange(1, 2**64)
            self.affinity = Affinity(self.fleets, ttl_s, writer_id, clock, wall_ns)
        self.bookings = Bookings(
            self.fleets,
            expiry_s,
            clock,
            lambda fleet: self.choices.turn(fleet),
            ledgers or Ledgers(),
            self.affinity,
            decays=options.tracks_output_blocks,
        )
        self.choices = Choices(
            self.fleets, options, self.bookings, self.draws, clock, self.affinity
        )
        self.workers = Workers(
            self.fleets, self.state, registry, options, self.bookings, self.choices.turn_all
        )

    def render_loads(self, model_name: str | None, tenant_id: str | None) -> bytes:
        """Returns a JSON array of what every fleet works on, sorted; None is any."""
        rows = (
            fleet.render_loads()
            for key, fleet in sorted(self.fleets.items())
            if model_name in (None, key.model_name) and tenant_id in (None, key.tenant_id)
        )
        return b"[%b]" % b",".join(rows)
