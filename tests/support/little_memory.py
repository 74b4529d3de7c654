"""Leaves a process little memory, so that what needs more of it fails."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager

PIECE_BYTES = 32 * 2**10  # no free memory of this size is left in the heap
PIECES = 8192  # to use up at most 256 MiB of free memory there


@contextmanager
def little_memory(spare_bytes: int) -> Iterator[None]:
    """Leaves the process so many further bytes, beside free memory smaller than a piece."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    pieces = (ctypes.c_void_p * PIECES)()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))
        for at in range(PIECES):
            pieces[at] = libc.malloc(PIECE_BYTES)
            if not pieces[at]:
                break
        resource.setrlimit(resource.RLIMIT_AS, (size + spare_bytes, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for piece in pieces:
            libc.free(piece)
