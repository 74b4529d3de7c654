# cython: language_level=3
"""The containers of `base/arena.hpp` and the hash of `base/keyed.hpp`, over structs of Cython."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string_view cimport string_view


cdef extern from "base/arena.hpp" namespace "kvd" nogil:
    uint32_t kEmpty "kvd::ProbeTable::kEmpty"

    # Structs begin with a uint32_t that is unused while an entry is free.
    cppclass HashedArena[T]:
        T& operator[](uint32_t)
        void make_room() except +      # for one entry
        uint32_t take()                # after make_room
        void give(uint32_t)
        cbool shrink()
        uint32_t live()
        uint32_t end()                 # every live number is below it
        size_t bytes()

    cppclass ProbeTable:
        uint32_t size()
        uint32_t at(uint32_t)
        uint32_t find[State](
            uint64_t, cbool (*)(const State*, uint32_t) noexcept nogil, const State*
        )
        uint32_t index_of(uint64_t, uint32_t)  # of a value that is there
        void make_room() except +      # for one entry
        void insert[Keys](uint64_t, uint32_t, const Keys&)  # after make_room
        void erase[Keys](uint32_t, const Keys&)
        void shrink[Keys](const Keys&)
        cbool is_spread[Keys](const Keys&)
        size_t bytes()

cdef extern from "base/keyed.hpp" namespace "kvd" nogil:
    cppclass KeyedHash:
        uint64_t operator()(string_view)

cdef extern from "base/visitor.hpp" namespace "kvd" nogil:
    cppclass Visitor[State]:
        Visitor(State*, void (*)(State*, uint32_t, double) noexcept nogil)
