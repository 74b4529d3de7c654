"""How many descriptors the process may have, and how many listeners they are enough for.

Without a bound, registrations took what clients' connections need: a listener that finds no
descriptor tries again, and so takes every one that becomes free, before a client can.
"""

from __future__ import annotations

import resource

# Of a listener: its SUB socket and the pair at its monitor, the engine's connection, and one that
# libzmq has while it makes another (4 seen in /proc/PID/fd).
LISTENER_DESCRIPTORS = 4

# For all else: connections of three ports, 1,024 each; 64 replays, three each; replicas, four each;
# what is open anyway.
OTHER_DESCRIPTORS = 3_584

# Each has three of the 65,535 sockets that libzmq has; the rest is for replays.
MAX_LISTENERS = 21_000

# Below this kvd does not start: what is open anyway, sockets of four faces and replicas, and some
# clients (30 seen in /proc/PID/fd). libzmq aborts the process where it finds none.
LEAST = 64

ENOUGH = OTHER_DESCRIPTORS + MAX_LISTENERS * LISTENER_DESCRIPTORS


def raise_limit() -> int:
    """Raises this process's limit as far as it is allowed to and is of use; returns the limit."""
    soft, hard = (
        ENOUGH if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    wanted = max(soft, min(hard, ENOUGH))
    if wanted > soft:
        _, kept = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, kept))
    return wanted


def listeners_within(limit: int) -> int:
    """Returns how many listeners that many descriptors are for; half of a low limit is not."""
    return min(MAX_LISTENERS, (limit - min(OTHER_DESCRIPTORS, limit // 2)) // LISTENER_DESCRIPTORS)
