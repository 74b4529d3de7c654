# cython: language_level=3
"""Data sheet of the chronicle."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp.memory cimport shared_ptr


cdef extern from "index/chronicle.hpp" namespace "kvd" nogil:
    cppclass CChronicle "kvd::Chronicle":
        CChronicle(uint32_t, double) except +
        void set_time(double)       # seconds
        double seconds(uint32_t)    # of ticks
        double reach()              # when the oldest remembered change was noted
        uint32_t capacity()         # changes
        uint64_t first()            # number of the oldest remembered change
        uint64_t next()             # number of the next change to be noted


cdef class Chronicle:
    cdef shared_ptr[CChronicle] c
