"""The phases of a request in disaggregated serving, with the roles and the cost of each.

    phase        served by roles                weighed by                         booked
    none         all but prefill                everything                         blocks and tokens
    prefill      prefill, both                  cached blocks, prefill tokens      tokens
    decode       all but prefill                blocks in use                      blocks
    both         a prefill and a decode worker, in one step

A worker without a role serves whole requests. It can decode, but nothing says that it can hand its
prefilled blocks over to another worker.
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
    BOTH = "both"  # by two workers, or by one


# A reservation for BOTH books its prefill phase apart, under its own id followed by this.
PREFILL_SUFFIX = ":prefill"

# Results of `in_phase` that are cached: requests may override settings.
SETTINGS_KEPT = 256


def serves(role: Role | None, phase: Phase | None) -> bool:
    """Returns whether a worker of this role serves a phase; phase None is the whole request."""
    if phase is Phase.PREFILL:
        return role in (Role.PREFILL, Role.BOTH)
    return role is not Role.PREFILL


@lru_cache(SETTINGS_KEPT)
def in_phase(settings: Settings, phase: Phase | None) -> Settings:
    """Returns the settings for one phase; prefill has a round-robin order of its own."""
    if phase is Phase.PREFILL:
        return settings.replace(track_active_blocks=False, line=1)
    if phase is Phase.DECODE:  # prefills do not hold it up, so it never waits
        changes = {"overlap_weight": 0.0, "track_prefill": False, "queue_threshold": None}
        return settings.replace(**changes, weighted=False)  # by blocks in use under every policy
    return settings
