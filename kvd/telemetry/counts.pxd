# distutils: language = c++
"""Data sheet of histograms and of the counts of requests."""
from libcpp.vector cimport vector


cdef class Histogram:
    cdef vector[double] _bounds
    cdef vector[long long] _buckets  # one more than bounds; none includes those below it
    cdef readonly double sum

    cpdef void observe(self, double value) noexcept


cdef class EndpointCounts:
    cdef readonly dict methods, errors  # requests by method, failures by class of status
    cdef readonly Histogram seconds


cdef class RequestCounts:
    cdef readonly dict endpoints  # EndpointCounts by path
    cdef tuple _bounds
    cdef str _unobserved

    cpdef observe(self, str path, str method, int status, double seconds)
