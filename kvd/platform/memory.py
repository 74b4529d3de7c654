"""Tunes the C library's allocator and Python's collector, and gives back free memory.

A heap of the C library keeps memory that was freed in it. After a burst of small messages most of
that is in the heap of libzmq's I/O thread, which received them: 80 MB after a million.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator

import trio

from kvd.telemetry.metrics import Family, counter, gauge

# mallopt(3), from <malloc.h>; negative numbers are parameters of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Largest buffer that the heap keeps for further use: twice the longest body.
LARGEST_REUSED_BYTES = 16 * 1024 * 1024
# Free memory kept at the end of each heap; no trim gives this part of a thread's heap back.
KEPT_FREE_BYTES = 8 * 1024 * 1024

CHECK_EVERY_S = 3.0  # pause between two checks of the heaps
CHECK_SHARE = 0.001  # share of the time that these checks may take
# Free memory, beyond what the last trim has left, that is worth another trim.
WORTH_TRIMMING_BYTES = 4 * 1024 * 1024

# Passes of the loop between two collections of young objects: 0.1 s or less where much happens.
COLLECT_PASSES = 64


class _Mallinfo2(ctypes.Structure):
    """The result of mallinfo2(3), over all heaps of the process."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def keep_freed_memory() -> None:
    """Makes glibc reuse the buffers of request bodies, instead of mapping them anew every time.

    By default glibc gives back free memory at the end of the heap beyond 128 KiB, and the kernel
    clears every page anew: that was 40 % of the CPU time of a query of 800 KB. Does nothing with
    another C library.
    """
    libc = glibc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, LARGEST_REUSED_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES)


def glibc() -> ctypes.CDLL | None:
    """Returns the C library if it is glibc 2.33 or later."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo2
    return libc


class FrequentCollector(trio.abc.Instrument):
    """Has Python's collector visit young objects often, while they are few.

    By itself it begins after so many more allocations than frees. Tasks that wake up replace as
    many objects as they free: those of 512 listeners grew to 15,000 young objects, and the next
    small collection took 13 ms.
    """

    def __init__(self) -> None:
        self._passes = 0

    def after_io_wait(self, timeout: float) -> None:
        self._passes += 1
        if self._passes == COLLECT_PASSES:
            self._passes = 0
            gc.collect(1)


class Heaps:
    """The C library's heaps of this process; with glibc, gives their free memory back."""

    def __init__(self) -> None:
        self._libc = glibc()
        self._free = 0  # bytes, at the last check
        self._floor = 0  # bytes that have been free without a break since the last trim
        self._trims = 0

    async def run(self) -> None:
        """Gives memory that has been free for a while back to the kernel."""
        if self._libc is None:
            return
        pause = CHECK_EVERY_S
        while True:
            await trio.sleep(pause)
            used_s = await trio.to_thread.run_sync(self.check)
            pause = max(CHECK_EVERY_S, used_s / CHECK_SHARE)

    def check(self) -> float:
        """Trims if enough memory has become free since the last trim, and was at the last check.

        Returns the seconds of CPU time that this took.

        Memory that was given back still counts as free: hence the floor. Both calls visit every
        free piece with the heap locked, which takes some milliseconds for ten thousand pieces.
        """
        libc = self._libc
        assert libc is not None
        begun = time.thread_time()
        before, self._free = self._free, libc.mallinfo2().fordblks
        self._floor = min(self._floor, self._free)
        if min(before, self._free) >= self._floor + WORTH_TRIMMING_BYTES:
            libc.malloc_trim(0)
            self._trims += 1
            self._floor = self._free = libc.mallinfo2().fordblks
        return time.thread_time() - begun

    def metrics(self) -> Iterator[Family]:
        """Yields the heaps' free memory at the last check, and how often it was given back."""
        help = "Free bytes held by the C library's heaps, resident or not"
        yield gauge("kvd_heap_free_bytes", help, self._free)
        help = "Number of times that the C library's heaps returned free memory to the system"
        yield counter("kvd_heap_trims_total", help, self._trims)
