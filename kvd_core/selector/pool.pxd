# cython: language_level=3
"""The candidates of a model and tenant, and what index and ledger have about each for a prompt."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool

from kvd_core.index.prefix_index cimport CIndex, CMatch
from kvd_core.index.predictions cimport CPredicted
from kvd_core.selector.types cimport CCandidate, CPrompt, CCandidateState


cdef extern from "selector/pool.hpp" namespace "kvd::selector" nogil:
    cppclass CPool "kvd::selector::Pool":
        # Predictions (NULL: none) are for ranks without events; the bound is for the index's own.
        CPool(uint32_t, const CIndex*, CPredicted*, double) except +
        void add(const CCandidate&) except +    # ascending by (worker, dp rank)
        # Adds candidates of whole workers, [begin, end) of another pool, behind those here.
        void add_from(const CPool&, size_t, size_t) except +
        size_t size()
        uint32_t block_size()
        double bound()
        const CCandidate& candidate(size_t)
        size_t position(uint64_t, uint32_t)     # of the first candidate that does not sort before
        uint32_t end_of_worker(const CCandidate&)
        const CCandidateState& state(size_t)       # of the last match
        CPrompt& prompt()
        const CCandidate* candidates()          # all of them
        CCandidateState* states()                  # of all candidates
        void find_cached(CMatch&) except +
        void foresee() except +                 # once the loads are known
        void predict(size_t, double) except +   # notes the prompt as cached by a candidate
        void withdraw(size_t, double) except +  # takes that back
        # The most blocks of the prompt that one of the candidates at these positions caches.
        uint32_t most_cached(const uint32_t*, size_t)
        void remember() except +                # the loads found last
        cbool changed(uint8_t*)                 # since then, by candidate; False if none remembered
        void set_heard(size_t, cbool)
        void set_reachable(size_t, cbool)
