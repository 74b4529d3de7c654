"""Data sheet of JSON written as msgpack (repack.pyx)."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t
from libcpp.vector cimport vector


cdef extern from "conductor/repack.hpp" namespace "kvd" nogil:
    cppclass CRepack "kvd::Repack":
        void feed(const uint8_t*, size_t) except +
        const vector[uint8_t]* whole()  # NULL unless one whole value has been fed


cdef class Repack:
    cdef CRepack c
    cdef bytes text
    cdef size_t at  # the first byte that has not been read
