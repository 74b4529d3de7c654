"""The selection service as a whole; see the package for what its parts are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvd.ledgers import Ledgers
from kvd.model import PartitionKey
from kvd.registry import Registry
from kvd.scheduling.options import RouterOptions
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
        ledgers: Ledgers | None = None,
    ) -> None:
        """Requests of other faces that use the same `ledgers` weigh on choices."""
        self.options = options
        self.clock = clock
        self.draws = Draws(random)
        # Predicted blocks are nobody else's business.
        self.state = state if options.uses_kv_events else State()
        self.fleets: dict[PartitionKey, Fleet] = {}
        self.bookings = Bookings(
            self.fleets,
            expiry_s,
            clock,
            lambda fleet: self.choices.turn(fleet),
            ledgers or Ledgers(),
        )
        self.choices = Choices(self.fleets, options, self.bookings, self.draws, clock)
        self.workers = Workers(
            self.fleets, self.state, registry, options, self.bookings, self.choices.turn_all
        )

    def reload(self, options: RouterOptions, expiry_s: float) -> None:
        """Goes on with other weights, thresholds, policy and expiry; the rest stays as it is.

        Selections that wait have the weights and thresholds they came with.
        """
        self.options.settings = options.settings
        self.options.queue_policy = options.queue_policy
        self.bookings.expiry_s = expiry_s
        for fleet in self.fleets.values():
            fleet.queue.reorder(options.queue_policy)

    def render_loads(self, model_name: str | None, tenant_id: str | None) -> bytes:
        """Returns a JSON array of what every fleet works on, sorted; None is any."""
        rows = (
            fleet.render_loads()
            for key, fleet in sorted(self.fleets.items())
            if model_name in (None, key.model_name) and tenant_id in (None, key.tenant_id)
        )
        return b"[%b]" % b",".join(rows)
