"""The sample of requests, for compiled handlers."""


cdef class Sample:
    cdef long rate          # requests a second
    cdef long taken         # since the last question
    cdef readonly long mask  # of the hash; 0: all are taken
    cdef bint is_whole

    cpdef bint takes(self, str request_id) except -1
