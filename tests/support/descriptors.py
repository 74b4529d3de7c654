"""Counts file descriptors, to find those that a test leaves open."""

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
