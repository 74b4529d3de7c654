# distutils: language = c++
"""Measures how long the loop is busy between two polls, and with what.

    poll ──> other │ events │ other │ fast path │ other ──> poll
             └─────────────── a stretch ──────────────┘

A request that comes meanwhile waits for the end of the stretch, so clients feel the longest ones.
Code that begins long work names its cause. A process has one loop, and one set of counts.

1. A stretch begins when the loop's poll returns and ends when it polls again: it has no sleep.
2. Each nanosecond counts for one cause: the last one that was entered and not left, else OTHER.
3. A stretch counts once, as a whole, under the cause that took most of it.
4. Between `enter` and `leave` nothing is awaited, and nothing polls.
5. A stretch is wall time. For the longest one the CPU time of the thread is kept as well, up to
   kCheckNs too much; the rest is time that the kernel gave to others.

The longest stretch of a cause is remembered for a minute at least and two at most, so that a
reader that reads once a minute misses none.
"""
import gc
from contextlib import contextmanager
from typing import NamedTuple

from cpython.pythread cimport PyThread_get_thread_ident
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID, clock_gettime, timespec
from posix.types cimport clockid_t

import trio

# Upper bounds of a histogram's buckets in seconds; no stretch should exceed 5 ms.
BOUNDS = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)

cdef enum:
    kBounds = 16
    kDeepest = 16  # causes within causes; deeper ones count as the last of these

cdef int64_t kWindowNs = 60 * <int64_t>1000000000  # window for which longest stretches are kept
# Least time between two readings of the thread's CPU clock at the start of stretches; a reading
# takes 0.6 µs.
cdef int64_t kCheckNs = 1000 * <int64_t>1000


cdef struct Longest:
    int64_t ns
    int64_t at      # its end; 0: there is none
    int64_t cpu_ns  # CPU time of the thread in it

cdef struct Account:
    int64_t buckets[kBounds + 1]
    int64_t ns          # of all of its stretches
    Longest longest[2]  # of the window under way, and of the one before

cdef Account _accounts[kCauses]
cdef int64_t _bounds[kBounds]
for _i, _bound in enumerate(BOUNDS):
    _bounds[_i] = round(_bound * 1e9)
cdef int64_t _window_end = 0

# State of the stretch under way.
cdef bint _begun = False
cdef int64_t _start = 0, _since = 0        # its begin; the last change of the cause
cdef int64_t _spent[kCauses]
cdef int _entered[kDeepest]
cdef int _depth = 0                        # position in _entered; the first entry is OTHER
cdef int64_t _cpu = 0, _checked_at = 0      # the last reading of the CPU clock, and its time


cdef int64_t now_ns() noexcept nogil:
    return _read(CLOCK_MONOTONIC)


cdef inline int64_t _read(clockid_t clock) noexcept nogil:
    cdef timespec now
    clock_gettime(clock, &now)
    return now.tv_sec * <int64_t>1000000000 + now.tv_nsec


cdef inline void _charge(int64_t now) noexcept nogil:
    _spent[_entered[min(_depth, kDeepest - 1)]] += now - _since


cdef int64_t begin_stretch() noexcept nogil:
    global _begun, _start, _since, _depth, _cpu, _checked_at
    _begun = True
    _start = _since = now_ns()
    _depth = 0
    if _start - _checked_at >= kCheckNs:
        _cpu, _checked_at = _read(CLOCK_THREAD_CPUTIME_ID), _start
    memset(_spent, 0, sizeof(_spent))
    return _start


cdef int64_t enter(int cause) noexcept nogil:
    global _since, _depth
    cdef int64_t now = now_ns()
    _charge(now)
    _since = now
    _depth += 1
    if _depth < kDeepest:
        _entered[_depth] = cause
    return now


cdef int64_t leave() noexcept nogil:
    global _since, _depth
    cdef int64_t now = now_ns()
    _charge(now)
    _since = now
    if _depth:
        _depth -= 1
    return now


cdef int64_t end_stretch() noexcept nogil:
    global _begun
    cdef int64_t now = now_ns()
    cdef int most = 0, i
    if not _begun:
        return now
    _begun = False
    _charge(now)
    for i in range(1, kCauses):
        if _spent[i] > _spent[most]:
            most = i
    _count(_accounts[most], now - _start, now)
    return now


cdef void _count(Account& account, int64_t ns, int64_t now) noexcept nogil:
    cdef int bucket = 0
    while bucket < kBounds and ns > _bounds[bucket]:
        bucket += 1
    account.buckets[bucket] += 1
    account.ns += ns
    _turn_window(now)
    if ns >= account.longest[0].ns:
        account.longest[0].ns = ns
        account.longest[0].at = now
        account.longest[0].cpu_ns = min(ns, _read(CLOCK_THREAD_CPUTIME_ID) - _cpu)


cdef void _turn_window(int64_t now) noexcept nogil:
    global _window_end
    cdef int i
    cdef bint is_long_over = now >= _window_end + kWindowNs
    if now < _window_end:
        return
    for i in range(kCauses):
        _accounts[i].longest[1] = _accounts[i].longest[0]
        memset(&_accounts[i].longest[0], 0, sizeof(Longest))
        if is_long_over:
            memset(&_accounts[i].longest[1], 0, sizeof(Longest))
    _window_end = now + kWindowNs


cdef class Cause:
    """A cause of busy time: a block (`with`), the steps of a coroutine, or an iteration."""

    def __cinit__(self, int number, str name):
        self._number = number
        self.name = name

    def __enter__(self):
        enter(self._number)

    def __exit__(self, *_):
        leave()

    def steps_of(self, coroutine not None):
        """Returns an awaitable that runs a coroutine and counts its steps under this cause."""
        return _Steps(self._number, coroutine)

    def each(self, items not None):
        """Yields the items; the time to produce each counts under this cause."""
        found = iter(items)
        while True:
            enter(self._number)
            try:
                item = next(found)
            except StopIteration:
                return
            finally:
                leave()
            yield item


cdef class _Steps:
    """The awaitable and its iterator: as a generator it would take six times the memory."""

    cdef int _number
    cdef object _coroutine

    def __cinit__(self, int number, coroutine):
        self._number = number
        self._coroutine = coroutine

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        enter(self._number)
        try:
            return self._coroutine.send(value)
        finally:
            leave()

    def throw(self, *exception):
        enter(self._number)
        try:
            return self._coroutine.throw(*exception)
        finally:
            leave()

    def close(self):
        self._coroutine.close()


OTHER = Cause(kOther, "other")
EVENTS = Cause(kEvents, "events")
FAST_PATH = Cause(kFastPath, "fast_path")
REQUESTS = Cause(kRequests, "requests")
RELAY = Cause(kRelay, "relay")
DUMP = Cause(kDump, "dump")
SNAPSHOT = Cause(kSnapshot, "snapshot")
SCRAPE = Cause(kScrape, "scrape")
RECOVERY = Cause(kRecovery, "recovery")
UNREGISTRATION = Cause(kUnregistration, "unregistration")
SELECTIONS = Cause(kSelections, "selections")
COLLECTOR = Cause(kCollector, "collector")
CAUSES = (
    *(OTHER, EVENTS, FAST_PATH, REQUESTS, RELAY, DUMP, SNAPSHOT, SCRAPE, RECOVERY),
    *(UNREGISTRATION, SELECTIONS, COLLECTOR),
)


class _Polls(trio.abc.Instrument):
    """Marks where trio polls."""

    def after_io_wait(self, timeout):
        begin_stretch()

    def before_io_wait(self, timeout):
        end_stretch()


@contextmanager
def stretches_counted():
    """Counts the stretches of this run of trio, until the context ends."""
    cdef unsigned long loop = PyThread_get_thread_ident()

    def collects(phase, info):
        if PyThread_get_thread_ident() != loop:
            return  # another thread than the loop's collects
        if phase == "start":
            enter(kCollector)
        else:
            leave()

    polls = _Polls()
    trio.lowlevel.add_instrument(polls)
    gc.callbacks.append(collects)
    try:
        yield
    finally:
        gc.callbacks.remove(collects)
        trio.lowlevel.remove_instrument(polls)


class StretchStats(NamedTuple):
    """The stretches of one cause."""

    cause: str
    buckets: list
    seconds: float  # all of them together
    longest_s: float  # the longest of the last minute or two; 0: none
    longest_age_s: float  # time since its end
    longest_cpu_s: float  # CPU time of the thread in it


def stretch_counts():
    """Returns the counts of each cause that has had stretches."""
    cdef int64_t now = now_ns()
    cdef Account* account
    cdef Longest longest
    cdef int i
    _turn_window(now)
    found = []
    for i in range(kCauses):
        account = &_accounts[i]
        buckets = [account.buckets[j] for j in range(kBounds + 1)]
        if any(buckets):
            longest = account.longest[account.longest[1].ns > account.longest[0].ns]
            age_s = (now - longest.at) * 1e-9 if longest.at else 0.0
            found.append(
                StretchStats(
                    CAUSES[i].name,
                    buckets,
                    account.ns * 1e-9,
                    longest.ns * 1e-9,
                    age_s,
                    longest.cpu_ns * 1e-9,
                )
            )
    return found
