# distutils: language = c++
"""Gives pollables turns: in rows while trio's tasks run, and between two passes while none can.

A pollable has a set of its own (http/idle_poll.py). A *row* polls them all and gives each one that
is readable a turn, again and again until nothing is left or the row's time is over. Turns are
short, so that a pollable with many clients keeps no other waiting.

Costs: a poll for each round of turns, and two readings of the clock.
"""
from libc.stdint cimport int64_t
from libcpp.vector cimport vector

from kvd.http.busy_wait cimport BusyWait, pollfd
from kvd.telemetry.stretches cimport begin_stretch, end_stretch, now_ns
from kvd_core.base.served cimport kAll, kNothing, kSome

cdef extern from "<poll.h>" nogil:
    enum:
        POLLIN
    int poll(pollfd* fds, unsigned long count, int timeout_ms)

NOTHING, ALL, SOME = kNothing, kAll, kSome

cdef enum:
    kTurnNs = 10 * 1000  # of one pollable's turn: one request, or one of each connection
    kRunnable = 8  # runnable tasks that end a row: each may take 0.2 ms, and trio runs all of them


def serve_row(list pollables not None, int64_t budget_ns, runnable not None):
    """Serves pollables in turns until nothing is left or `budget_ns` nanoseconds have passed.

    It also ends once `runnable` has kRunnable tasks. Returns NOTHING if nothing had come, ALL, or
    SOME if more may be waiting.
    """
    cdef int64_t end = now_ns() + budget_ns
    cdef vector[pollfd] watched = _watching(pollables)
    cdef int done = kNothing
    poll(watched.data(), watched.size(), 0)
    while _give_turns(watched, pollables):
        done = kAll
        if now_ns() >= end or len(runnable) >= kRunnable:
            return kSome
        poll(watched.data(), watched.size(), 0)
    return done


def serve_before(list pollables not None, int64_t budget_ns, runnable not None):
    """Does what `serve_row` does between two passes of trio, before it polls."""
    end_stretch()
    begin_stretch()
    try:
        return serve_row(pollables, budget_ns, runnable)
    finally:
        end_stretch()


cdef vector[pollfd] _watching(list pollables):
    cdef vector[pollfd] watched
    for pollable in pollables:
        watched.push_back(_awaiting(pollable.fileno()))
    return watched


cdef pollfd _awaiting(int fd):
    cdef pollfd one
    one.fd = fd
    one.events = POLLIN
    one.revents = 0
    return one


cdef bint _give_turns(const vector[pollfd]& watched, list pollables) except -1:
    """Gives each readable pollable a turn; returns whether any had something to do."""
    cdef bint served = False
    cdef Py_ssize_t i = 0
    for pollable in pollables:
        if watched[i].revents:
            served |= <int>pollable.serve_ready(kTurnNs) != kNothing
        i += 1
    return served


def serve_between(list pollables not None, int others, runnable not None, BusyWait awake not None,
                  double seconds, double linger_s, int64_t budget_ns):
    """Serves pollables for as long as they alone have something to do.

    `others` is a descriptor that is readable whenever a pollable or anything else is: trio's set.
    This ends when `others` is readable but no pollable is, or `others` is after `budget_ns` of
    turns; when a task is in `runnable`; after `linger_s` without a request; and after `seconds` in
    all. Between two requests it sleeps, or waits awake by `awake`. Returns whether there was
    anything to do, and whether `others` is readable.
    """
    cdef vector[pollfd] watched = _watching(pollables)
    cdef pollfd* anything
    # Trio's work until now is a stretch; the sleep in here is no part of it.
    cdef int64_t now = end_stretch()
    cdef int64_t end = now + <int64_t>(seconds * 1e9)
    cdef int64_t linger = <int64_t>(linger_s * 1e9)
    cdef int64_t spent_ns = 0  # on turns since nothing else was found to be ready
    cdef int64_t began
    cdef int timeout_ms, ready
    cdef bint turned, served = False
    watched.push_back(_awaiting(others))
    anything = &watched.back()
    while now < end:
        timeout_ms = <int>((min(end - now, linger) + 999999) // 1000000)
        with nogil:
            ready = awake.wait(watched.data(), watched.size(), timeout_ms, now)
        if ready <= 0:
            break
        began = begin_stretch()
        turned = _give_turns(watched, pollables)
        served |= turned
        now = end_stretch()
        spent_ns += now - began
        if not turned or len(runnable) or spent_ns >= budget_ns:
            poll(anything, 1, 0)
            if anything.revents or len(runnable):
                return served, anything.revents != 0
            spent_ns = 0
    return served, False
