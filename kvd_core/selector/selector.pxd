# cython: language_level=3
"""Data sheet of the selector: the classes that Python sees."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp.vector cimport vector

from kvd_core.index.prefix_index cimport CMatch, PrefixIndex
from kvd_core.index.predictions cimport Predictions
from kvd_core.ledger.ledger cimport Ledger
from kvd_core.selector.choice cimport Choice
from kvd_core.selector.cost cimport Scale
from kvd_core.selector.pool cimport CPool
from kvd_core.selector.settings cimport CSettings, Settings
from kvd_core.selector.types cimport CCandidateState, CPrompt


cdef enum Rendering:  # what a pool renders
    kChoice
    kAnswer  # the choice as a whole object
    kOverlaps
    kLoads


cdef struct PoolSums:  # what a candidate's terms depend on: over those that may be chosen
    uint64_t least_prefill   # the fewest tokens being prefilled
    uint64_t least_uncached  # the fewest tokens of the prompt to compute
    uint64_t requests        # of all of them
    size_t ranks             # their number


cdef class Prompt:
    cdef CPrompt c


cdef class KeptStates:
    cdef Pool pool                      # its candidates stay as they are
    cdef vector[CCandidateState] states
    cdef Rendering part                 # kOverlaps or kLoads
    cdef Settings settings              # keeps alive what `scale` points to
    cdef Scale scale
    cdef size_t at                      # of the next row to be rendered


cdef class Pool:
    cdef CPool* c
    cdef PrefixIndex index
    cdef Predictions predictions    # for candidates without events; None: none are kept
    cdef Ledger ledger
    cdef CMatch no_match            # for pools without an index
    cdef Choice choice
    cdef vector[uint32_t] open      # the arrays that `choice` points to
    cdef vector[uint32_t] spare
    cdef vector[double] weights
    cdef vector[uint64_t] turns
    cdef dict workers               # by id, those that candidates cache blocks of

    cdef int add(self, candidates) except -1
    cdef int complete(self) except -1  # once all candidates have been added
    # Takes over the turns of a former pool, for the candidates in [begin, end) of this one.
    cdef int take(self, Pool former, size_t begin, size_t end) except -1
    # Adds the candidates in [begin, end) of a former pool with their turns.
    cdef int keep(self, Pool former, size_t begin, size_t end) except -1
    # As the methods with nearly the same names, for the prompt that c.prompt() has taken.
    cdef int match_prompt(self) except -1
    cdef void read_loads(self) noexcept  # the loads of this moment
    cdef int64_t choose_now(
        self, const CSettings* settings, const uint8_t* mask, uint64_t random, const double* factors
    ) noexcept
    cdef int64_t refusal_now(self, const CSettings* settings, const uint8_t* mask) noexcept
    cdef void take_back(self) noexcept      # undoes the turn of the last choice
    cdef uint32_t most_cached(self) noexcept  # blocks, over the candidates found open last
    # Tokens of the prompt on a candidate.
    cdef uint64_t cached_tokens_of(self, const CSettings* settings, size_t candidate) noexcept
    cdef uint64_t effective_tokens_of(self, const CSettings* settings, size_t candidate) noexcept
    cdef Scale scale(self, const CSettings* settings) noexcept
    # Bytes that rows of all candidates may take.
    cdef size_t rows_bytes(self) noexcept
    cdef KeptStates kept(self, Rendering part, Settings settings)
    cdef bytes rendered(self, Rendering part, Settings settings, size_t candidate, bytes opening,
                        bytes members)
    cpdef bytes render_answer(self, bytes opening, bytes members, Py_ssize_t candidate,
                              Settings settings)
    cdef void note_asked(self) noexcept  # counts the prompt as a query of the index
    # What the terms of one candidate depend on.
    cdef PoolSums sums_of(self, const CSettings* settings, const uint8_t* mask) noexcept
    cdef row(self, size_t candidate, const CSettings* settings, const uint8_t* mask,
             const double* factors, PoolSums sums)
    cdef const uint8_t* mask_of(self, bytes eligible) except? NULL
    cdef const double* factors_of(self, bytes factors) except? NULL
    cdef size_t at(self, Py_ssize_t candidate) except? 0
