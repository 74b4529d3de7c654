"""Data sheet of the splitting of payloads (split.pyx)."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector


cdef extern from "events/split.hpp" namespace "kvd" nogil:
    cppclass CSplitEvent "kvd::Split::Event":
        size_t begin "from"     # bytes of the payload
        size_t end "to"
        size_t containers       # maps and arrays

    cppclass CSplit "kvd::Split":
        vector[CSplitEvent] events
        uint64_t beyond         # number of further events
        cbool has_rank
        uint32_t rank
        const char* fault       # NULL when there is none
        void read(const uint8_t*, size_t, size_t) except +
