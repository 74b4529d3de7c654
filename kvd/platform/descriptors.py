"""The limit of file descriptors, and its division among listeners, selections and the rest.

    listeners: 4 each | clients whose selections wait: 1 each | all else, other clients included

Without bounds, registrations would take the descriptors that clients' connections need: a listener
that finds none tries again, and so takes each one that becomes free before a client can. Nor may
waiting selections take all descriptors: the requests that end their wait need some.
"""

from __future__ import annotations

import fcntl
import os
import resource
import sys

# Descriptors of a listener with CURVE, 4 seen in /proc/PID/fd: its SUB socket and the pair at its
# monitor, the engine's connection, and one that libzmq has while it makes another. Without CURVE a
# listener has one.
LISTENER_DESCRIPTORS = 4

# Descriptors kept for all else: 1,024 connections for each of three ports; three for each of 64
# replays; four for each replica; and those that are always open.
OTHER_DESCRIPTORS = 3_584

# Listeners of the process: with CURVE each takes three of libzmq's 65,535 sockets; the rest is for
# replays.
MAX_LISTENERS = 21_000

# Least limit with which kvd starts: room for the descriptors that are always open, sockets of the
# faces and of replicas, and some clients (30 seen in /proc/PID/fd). libzmq aborts the process if it
# finds no descriptor.
LEAST = 64

# Most selections that wait, each with a connection, a task of 5 KB and its prompt; the default of
# `router_queue_requests`. Real fleets have a few hundred.
MAX_WAITING = 16_384

# Descriptors for which the kernel has room from the start, in 128 KiB of its own. It doubles a
# table that is full, and where a process has threads, `socket` and `accept` then wait for 15 to
# 25 ms until no core can still be reading the old table.
ROOM = 16_384

ENOUGH = OTHER_DESCRIPTORS + MAX_WAITING + MAX_LISTENERS * LISTENER_DESCRIPTORS


def open_standard_streams() -> None:
    """Opens those of the descriptors 0 to 2 with which this process was started closed.

    The next file or socket would get such a number, and log lines would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def raise_limit() -> int:
    """Raises this process's limit as far as is allowed and of use; returns the limit."""
    soft, hard = (
        ENOUGH if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    wanted = max(soft, min(hard, ENOUGH))
    if wanted > soft:
        _, kept = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, kept))
    return wanted


def make_room(limit: int) -> None:
    """Has the kernel make its table of descriptors now; call this before there are threads."""
    lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    highest = fcntl.fcntl(lowest, fcntl.F_DUPFD_CLOEXEC, min(limit, ROOM) - 1)
    os.close(highest)
    os.close(lowest)


def listeners_within(limit: int) -> int:
    """Returns how many listeners there may be with a limit of so many descriptors."""
    return min(MAX_LISTENERS, (_shared_out(limit) - waiting_within(limit)) // LISTENER_DESCRIPTORS)


def waiting_within(limit: int) -> int:
    """Returns how many selections may wait: as many as there may be listeners, or MAX_WAITING."""
    return min(MAX_WAITING, _shared_out(limit) // (LISTENER_DESCRIPTORS + 1))


def _shared_out(limit: int) -> int:
    """Returns the descriptors for listeners and waiting selections: half of a low limit."""
    return limit - min(OTHER_DESCRIPTORS, limit // 2)
