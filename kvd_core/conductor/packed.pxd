# distutils: language = c++
"""Data sheet of the reading of msgpack bodies (packed.pyx)."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string_view cimport string_view


cdef extern from "base/msgpack.hpp" namespace "kvd" nogil:
    cppclass CInteger "kvd::Integer":
        uint64_t bits           # sign-extended
        cbool negative

    cppclass CCursor "kvd::Cursor":
        CCursor(const uint8_t*, const uint8_t*)
        const uint8_t* at()
        size_t left()
        cbool broken()
        cbool nil()
        cbool array(uint32_t*)
        cbool map(uint32_t*)
        cbool text(string_view*)
        cbool bin(string_view*)
        cbool integer(CInteger*)
        cbool expect(size_t)
        void skip()
        void skip(uint64_t)
