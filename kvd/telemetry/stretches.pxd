# distutils: language = c++
"""Data sheet of stretches: how compiled code reports what the loop does, in the loop's thread.

A call takes some 20 ns: one reading of the clock.
"""
from libc.stdint cimport int64_t

# In the order of CAUSES.
cdef enum:
    kOther
    kEvents
    kFastPath
    kRequests
    kRelay
    kDump
    kSnapshot
    kScrape
    kRecovery
    kUnregistration
    kSelections
    kCollector
    kCauses

cdef int64_t now_ns() noexcept nogil             # CLOCK_MONOTONIC
# All of these return the time, as `now_ns` does.
cdef int64_t begin_stretch() noexcept nogil      # the poll has returned
cdef int64_t end_stretch() noexcept nogil        # the loop is about to poll
cdef int64_t enter(int cause) noexcept nogil     # from now on time counts under this cause ...
cdef int64_t leave() noexcept nogil              # ... and from now on under the one before it


cdef class Cause:
    cdef int _number
    cdef readonly str name
