# distutils: language = c++
"""Data sheet of the wait for the next request: what the idle poller waits with."""
from libc.stdint cimport int64_t


cdef class BusyWait:
    cdef int64_t _longest_ns          # of a wait without sleeping; 0: none
    cdef double _prompt               # share of the last waits that ended within that, about 8
    cdef int64_t _credit_ns, _at      # left to be lost, as of then
    cdef int64_t _checked_at, _switches, _busy_until, _pause_ns
    cdef readonly int64_t found_ns, lost_ns

    # As poll(2) for one descriptor that is to be readable. Without the GIL.
    cdef int wait(self, int fd, int timeout_ms) noexcept nogil

    cdef bint _pays(self, int64_t now) noexcept nogil
    cdef bint _is_machine_busy(self, int64_t now) noexcept nogil
