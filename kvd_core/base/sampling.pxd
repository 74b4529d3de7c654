"""The sample of requests, for compiled handlers."""


cdef class Sample:
    cdef long rate          # requests a second
    cdef long taken         # requests taken since the last `adjust`
    cdef readonly long mask  # bits of a taken id's hash that are zero; 0: all requests are taken
    cdef bint is_whole

    cpdef bint takes(self, str request_id) except -1
