from libc.stdint cimport uint64_t

from kvd_core.base.recent cimport Recent


cdef class Taken:
    cdef public uint64_t messages       # well-formed messages, stale ones included
    cdef public uint64_t payload_bytes  # of these messages


cdef class Applier:
    cdef Recent _recent
    cdef object _apply  # of the BatchSink
    cdef bint apply_next(self, uint64_t seq, bytes payload) except -1


cdef class Taker:
    cdef Taken _taken
    cdef Applier _applier
    cdef object _identity
