# cython: language_level=3
"""Data sheet of the selector: the C++ types it is made of and the classes Python sees."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector

from kvd_core.index.prefix_index cimport CIndex, CMatch, CWorker, PrefixIndex
from kvd_core.ledger.ledger cimport CLedger, Ledger, RankId
from kvd_core.json.scan cimport BodyScanner
from kvd_core.selector.settings cimport CSettings, Settings


cdef extern from "selector/types.hpp" namespace "kvd::selector" nogil:
    uint64_t kMaxIslTokens

    enum CRefusal "kvd::selector::Refusal":
        kNoCandidate "kvd::selector::NONE"           # none is eligible
        kAllBusy "kvd::selector::BUSY"               # all that could be chosen are busy: wait
        kAllOver "kvd::selector::OVERLOADED"         # all eligible ones exceed a busy threshold

    cppclass CCandidate "kvd::selector::Candidate":
        uint64_t worker_id
        uint32_t dp_rank
        RankId booked              # its rank in the ledger
        const CWorker* caches      # whose blocks it can use, NULL without
        double max_batch_tokens    # 0: unbounded
        double total_blocks        # 0: unknown
        cbool heard                # False: its events are not, what it caches may be gone
        cbool reachable            # False: it cannot be chosen

    cppclass CStanding "kvd::selector::CandidateState":
        uint32_t device            # blocks of the prompt, cached
        uint32_t host              # further ones
        uint32_t disk              # further ones, disk and external
        uint32_t live              # blocks of the prompt, in use by its requests
        uint64_t prefill_tokens    # being prefilled
        uint64_t decode_blocks     # in use
        uint32_t requests
        cbool present              # False: it has left the ledger or is unreachable

    cppclass CPrompt "kvd::selector::Prompt":
        vector[uint64_t] locals
        vector[uint64_t] salted    # the same with the prompt's salt
        vector[uint64_t] sequence
        uint64_t isl_tokens
        cbool is_salted
        const vector[uint64_t]& used()    # the local hashes of what a rank will cache
        void take(const CPrompt&) except +
        void take_hashes(const uint64_t*, size_t, const uint64_t*, size_t, uint64_t) except +
        void take_tokens(
            const uint32_t*, size_t, uint32_t, string_view, string_view, cbool
        ) except +
        void make_unique(uint64_t)

cdef extern from "selector/cost.hpp" namespace "kvd::selector" nogil:
    cppclass CTerms "kvd::selector::Terms":
        uint64_t cached_tokens     # weighed by tier
        uint64_t effective_tokens  # to prefill
        double raw                 # blocks to prefill before credits, with those being prefilled
        double credit              # blocks
        double prefill             # weighted
        double decode
        double cost

    cppclass CScale "kvd::selector::Scale":
        uint64_t decode_blocks(const CStanding&)
        uint64_t effective_tokens(const CStanding&)
        double device_credit(const CStanding&, uint64_t)  # the latter as of least_prefill
        CTerms terms(const CStanding&, double)
        cbool is_busy(const CCandidate&, const CStanding&)
        cbool is_overloaded(const CCandidate&, const CStanding&)

cdef extern from "selector/selector.hpp" namespace "kvd::selector" nogil:
    cppclass CPool "kvd::selector::Pool":
        CPool(uint32_t, const CIndex*, const CLedger&) except +
        void add(const CCandidate&) except +    # ascending by (worker, dp rank)
        size_t size()
        uint32_t block_size()
        const CCandidate& candidate(size_t)
        size_t position(uint64_t, uint32_t)     # of the first that does not sort before
        uint32_t end_of_worker(const CCandidate&)
        const CStanding& standing(size_t)       # of the last look
        CPrompt& prompt()
        CScale scale(const CSettings&)
        void look(CMatch&) except +
        # An index or a Refusal; a byte for each candidate, 0 for those to leave out, or NULL.
        int64_t choose(const CSettings&, const uint8_t*, uint64_t) except +
        int64_t choose(const CSettings&, const uint8_t*, uint64_t, const double*) except +
        int64_t refusal(const CSettings&, const uint8_t*) except +    # 0 or a Refusal, of now
        uint32_t best()                         # blocks, of those that the last of these found open
        void remember() except +                # the loads of now
        cbool changed(uint8_t*)                 # whose loads since; False where none are remembered
        uint64_t least_effective_tokens(const CSettings&, const uint8_t*)
        # What terms need of others.
        uint64_t least_prefill(const CSettings&, const uint8_t*) except +
        void set_heard(size_t, cbool)
        void set_reachable(size_t, cbool)
        void take_back()                        # the last choice of ROUND_ROBIN
        void take_turns(const CPool&)           # of the pool that this one replaces

cdef extern from "selector/rows.hpp" namespace "kvd::selector" nogil:
    cppclass CRows "kvd::selector::Rows":
        CRows(const CPool&)
        size_t choice_room(size_t)              # bytes
        size_t rows_room()                      # bytes
        char* choice(char*, size_t, const CSettings&)
        char* overlaps(char*)
        char* loads(char*, const CSettings&)


cdef enum Part:  # of what a pool renders
    kChoice
    kAnswer  # the choice as a whole object
    kOverlaps
    kLoads


cdef class Prompt:
    cdef CPrompt c


cdef class Pool:
    cdef CPool* c
    cdef PrefixIndex index
    cdef Ledger ledger
    cdef CMatch no_match            # for pools without an index
    cdef readonly tuple candidates  # ascending by (worker, dp rank)

    # As the methods of nearly the same names, for the prompt that c.prompt() has taken.
    cdef int look_at_prompt(self) except -1
    cdef bytes rendered(self, Part part, Settings settings, size_t candidate, bytes opening,
                        bytes members)
    cpdef bytes render_answer(self, bytes opening, bytes members, Py_ssize_t candidate,
                              Settings settings)
    # Notes the prompt as cached by a candidate, if its index keeps predictions.
    cdef int foretell(self, size_t candidate, double now) except -1
    cdef row(self, size_t candidate, Settings settings, const uint8_t* mask, const double* factors,
             uint64_t least_prefill)
    cdef const uint8_t* mask_of(self, bytes eligible) except? NULL
    cdef const double* factors_of(self, bytes factors) except? NULL
    cdef size_t at(self, Py_ssize_t candidate) except? 0
