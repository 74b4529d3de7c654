# distutils: language = c++
"""Data sheet of BusyWait, with which the idle poller waits for the next request."""
from libc.stdint cimport int64_t

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents


cdef class BusyWait:
    cdef int64_t _longest_ns          # longest wait without sleeping; 0: always sleep
    cdef double _prompt               # share of the last 8 waits or so that ended within that
    cdef int64_t _credit_ns, _at      # time that may still be lost, as of `_at`
    # Of the last check whether the machine is busy: when it was, and all time awake until then.
    cdef int64_t _checked_at, _checked_awake_ns
    cdef int64_t _taken_ns            # since that check, of the time awake: others had the core
    cdef int64_t _busy_until, _pause_ns
    cdef readonly int64_t found_ns, lost_ns

    # Waits as poll(2) does, and returns the same. The last descriptor must be readable whenever any
    # other is. `began` is the time now.
    cdef int wait(
        self, pollfd* watched, size_t count, int timeout_ms, int64_t began
    ) noexcept nogil

    cdef bint _pays(self, int64_t now) noexcept nogil
    cdef bint _is_machine_busy(self, int64_t now) noexcept nogil
