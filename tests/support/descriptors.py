"""Counts file descriptors, to find those that a test leaves open, and bounds them."""

from __future__ import annotations

import gc
import os


def open_descriptors() -> int:
    """Returns how many file descriptors this process has open.

    Collects garbage first. Otherwise descriptors of earlier tests might close during this one.
    """
    gc.collect()
    return descriptors_now()


def descriptors_now() -> int:
    """Does the same without collecting garbage, for callers that poll."""
    return len(os.listdir("/proc/self/fd"))


def lowest_free_descriptor() -> int:
    """Returns the number of the next descriptor, for a limit (RLIMIT_NOFILE) that allows no more.

    A count would not do: a number below it may be free.
    """
    gc.collect()
    free = os.dup(0)
    os.close(free)
    return free
