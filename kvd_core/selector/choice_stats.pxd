# cython: language_level=3
# distutils: language = c++
"""Data sheet of the counts of choices."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from kvd_core.selector.pool cimport CPool


cdef extern from "selector/choice_stats.hpp" namespace "kvd::selector" nogil:
    size_t kModes
    size_t kPhases
    size_t kChoicePhases
    size_t kOutcomes

    cppclass CLengths "kvd::selector::Log2Histogram<22>":
        uint64_t buckets[23]       # at most 0, 1, 2, 4, ...; the last one: more

    cppclass CRegret "kvd::selector::Log2Histogram<16>":
        uint64_t buckets[17]

    cppclass CTenths "kvd::selector::Tenths":
        uint64_t buckets[11]       # at most 0, 0.1, ... 1
        double sum

    cppclass CChoiceSums "kvd::selector::ChoiceSums":
        uint64_t choices
        uint64_t prompt_tokens
        uint64_t cached_tokens     # weighted by tier
        uint64_t effective_tokens
        uint64_t chosen_blocks
        uint64_t best_blocks
        uint64_t chosen_tokens
        uint64_t best_tokens
        CRegret regret             # blocks
        CTenths rates

    cppclass CChoiceStats "kvd::selector::ChoiceStats":
        uint64_t outcomes[5][4][16]
        uint64_t held[5][4]
        uint64_t served_tokens
        CLengths lengths           # tokens
        CChoiceSums choices[3]
        void serve(size_t mode, size_t phase, uint64_t tokens)
        # Takes the position of a candidate, its cached tokens, and the pool's most_cached.
        void choose(CPool&, size_t, uint64_t, uint32_t, size_t phase)


cdef class ChoiceStats:
    cdef CChoiceStats c
