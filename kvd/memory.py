"""Tells the C library's allocator what this process is like."""

from __future__ import annotations

import ctypes

# mallopt(3), from <malloc.h>; negative numbers are parameters of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

LARGEST_REUSED_BYTES = 16 * 1024 * 1024  # twice the longest body
KEPT_FREE_BYTES = 32 * 1024 * 1024  # at the end of the heap


def keep_freed_memory() -> None:
    """Lets buffers of request bodies be used again, instead of mapped and unmapped every time.

    By default glibc gives back what is free at the end of the heap beyond 128 KiB, and the kernel
    clears every page anew: that was 40 % of the CPU time of a query of 800 KB. Does nothing where
    the C library has no such function.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_REUSED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES)
