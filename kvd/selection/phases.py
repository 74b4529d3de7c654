"""The phases of a request in disaggregated serving: which roles serve each, by which cost.

    phase        served by roles                weighed by                         booked
    none         all but prefill                everything                         blocks and tokens
    prefill      prefill, both                  cached blocks, prefill tokens      tokens
    decode       all but prefill                blocks in use                      blocks
    both         one of each of the last two, in one step

A worker without a role serves whole requests: it can decode, but it is not known to hand over
what it has prefilled.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

from kvd.selection.worker_record import Role
from kvd_core.selector.settings import Settings


class Phase(StrEnum):
    """The part of a request that is to be served."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"  # by two workers, or one


# Booked beside a reservation, under its id with this behind it: the prefill phase of BOTH.
PREFILL_SUFFIX = ":prefill"

# Settings overridden by requests that are kept as they are weighed for a phase.
SETTINGS_KEPT = 256


def serves(role: Role | None, phase: Phase | None) -> bool:
    """Returns whether a worker of this role serves a phase; None is the whole request."""
    if phase is Phase.PREFILL:
        return role in (Role.PREFILL, Role.BOTH)
    return role is not Role.PREFILL


@lru_cache(SETTINGS_KEPT)
def in_phase(settings: Settings, phase: Phase | None) -> Settings:
    """Returns the settings for one phase; prefill has a rotation of its own."""
    if phase is Phase.PREFILL:
        return settings.replace(track_active_blocks=False, line=1)
    if phase is Phase.DECODE:  # which nothing that is being prefilled holds up
        changes = {"overlap_weight": 0.0, "track_prefill": False, "queue_threshold": None}
        return settings.replace(**changes, weighted=False)  # blocks in use, whatever the policy
    return settings
