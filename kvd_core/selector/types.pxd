# cython: language_level=3
"""The structs of a selection: candidates, the findings of a match about each, the prompt."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector

from kvd_core.index.prefix_index cimport CWorker
from kvd_core.ledger.trie cimport LoadedRankId


cdef extern from "selector/types.hpp" namespace "kvd::selector" nogil:
    uint64_t kMaxIslTokens

    cppclass CCandidate "kvd::selector::Candidate":
        uint64_t worker_id
        uint32_t dp_rank
        LoadedRankId booked        # its rank in the ledger
        const CWorker* caches      # the worker whose blocks it can use; NULL: none
        double max_batch_tokens    # 0: unbounded
        double total_blocks        # below 0: unknown
        uint32_t first             # the first candidate of its worker
        cbool heard                # False: its events do not arrive, so its blocks may be gone
        cbool reachable            # False: it cannot be chosen

    cppclass CCandidateState "kvd::selector::CandidateState":
        uint32_t device            # blocks of the prompt that it caches
        uint32_t host              # further ones behind those on the device
        uint32_t disk              # further ones behind those, on disk and external
        uint32_t live              # blocks of the prompt that its requests have in use
        uint64_t prefill_tokens    # being prefilled
        uint64_t decode_blocks     # in use
        uint32_t requests
        uint32_t decoding          # those of `requests` with nothing left to prefill
        cbool present              # False: it has left the ledger or is unreachable

    cppclass CPrompt "kvd::selector::Prompt":
        vector[uint64_t] locals
        vector[uint64_t] salted    # local hashes with the prompt's salt
        vector[uint64_t] sequence
        uint64_t isl_tokens
        cbool is_salted
        cbool is_adapted
        cbool by_tokens            # it came as tokens
        uint32_t first_token       # the first of these
        const vector[uint64_t]& used()    # the local hashes of the blocks that a rank will cache
        void take(const CPrompt&) except +
        void take_hashes(const uint64_t*, size_t, const uint64_t*, size_t, uint64_t) except +
        void take_tokens(
            const uint32_t*, size_t, uint32_t, string_view, string_view, cbool
        ) except +
        void make_unique(uint64_t)
