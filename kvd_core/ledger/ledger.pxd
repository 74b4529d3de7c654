# cython: language_level=3
"""Data sheet of the ledger: the C++ types it is made of and the class Python sees."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector


cdef extern from "ledger/ledger.hpp" namespace "kvd::ledger" nogil:
    ctypedef uint32_t RankId       # dense, used again after removal
    ctypedef uint32_t RequestId    # likewise
    uint32_t kNone                 # no rank, no request
    size_t kMaxIdBytes
    uint32_t kMaxRequests
    uint64_t kMaxBlocks
    uint32_t kMaxOutputs
    uint32_t kMaxRanks
    uint64_t kMaxTokens

    enum COutcome "kvd::ledger::Outcome":
        kAdded "kvd::ledger::ADDED"          # booked
        kRepeated "kvd::ledger::REPEATED"    # the same with the same retry key lives already
        kExists "kvd::ledger::EXISTS"        # another request has the id
        kFull "kvd::ledger::FULL"            # too many requests or blocks
        kOverflow "kvd::ledger::OVERFLOWN"   # too many tokens

    cppclass CLimits "kvd::ledger::Limits":
        uint32_t requests
        uint64_t blocks
        uint32_t outputs

    cppclass CTally "kvd::ledger::Tally":
        uint64_t added
        uint64_t repeated
        uint64_t freed
        uint64_t refused_outputs

    cppclass CTrie "kvd::ledger::Trie":
        uint32_t node_count()
        uint64_t block_count()
        uint64_t rank_ref_count()

    cppclass CRequest "kvd::ledger::Request":
        uint64_t tokens             # to prefill, as given
        double admitted             # seconds of the caller's clock
        RankId rank
        uint32_t blocks             # of the prompt
        uint32_t outputs            # output blocks
        uint32_t expected           # tokens of output, kNone if nobody has said
        RequestId newer             # the next in order of admission
        RequestId after             # the next of the same rank
        cbool prefilling
        string_view id()

    cppclass CRequests "kvd::ledger::Requests":
        const CRequest& operator[](RequestId)
        RequestId find(string_view)
        RequestId oldest()
        uint32_t size()

    cppclass CRankChain "kvd::ledger::RankChain":
        RequestId first

    cppclass CRank "kvd::ledger::Rank":
        uint64_t worker_id
        uint32_t dp_rank
        uint32_t requests           # live ones, of all ledgers
        uint64_t prefill_tokens     # of requests whose prefill is running
        char text[56]               # its names as JSON members, of text_size bytes
        uint8_t text_size
        uint64_t decode_blocks()    # weighted, rounded

    cppclass CListed "kvd::ledger::Listed":
        uint64_t worker_id
        uint32_t dp_rank
        RankId rank

    cppclass CAdmission "kvd::ledger::Admission":
        string_view id
        string_view key             # empty: none
        RankId rank                 # one of the ledger's
        const uint64_t* hashes      # sequence hashes of the prompt
        size_t blocks               # how many
        uint64_t tokens             # to prefill
        double now                  # seconds
        uint32_t expected           # tokens of output; kNone at first: not known

    cppclass CLoads "kvd::ledger::Loads":
        const CTrie& trie()
        RankId rank_end()                 # above every rank id
        const CRank& rank(RankId)
        # Leading blocks of a prompt that each rank has live, one figure for each id < rank_end();
        # until the next call.
        const uint32_t* depths(const uint64_t*, size_t)

    cppclass CLedger "kvd::ledger::Ledger":
        CLedger(const CLimits&, shared_ptr[CLoads]) except +
        CLoads& loads()
        const CRequests& requests()
        const CTally& tally()
        const vector[CListed]& order()    # ranks by (worker, dp rank)
        uint64_t output_count()
        size_t bytes()
        cbool has(RankId)
        const CRankChain& chain(RankId)   # its requests on a rank, in order of admission
        RankId find_rank(uint64_t, uint32_t)
        RankId add_rank(uint64_t, uint32_t) except +
        void remove_rank(RankId)
        COutcome add(const CAdmission&) except +    # refusals are not counted
        void complete_prefill(RequestId)
        void free(RequestId) except +
        void add_output(RequestId)
        void decay(RequestId, double) except +

cdef extern from "ledger/verify.hpp" namespace "kvd::ledger" nogil:
    cppclass CVerifier "kvd::ledger::Verifier":
        CVerifier(const CLoads&)
        void run() except +


cdef class Loads:
    cdef shared_ptr[CLoads] c
    cdef object __weakref__
    cdef readonly object eased  # see ledger.pyx

cdef class Ledger:
    cdef CLedger* c
    cdef readonly Loads loads
    cdef uint64_t expired     # requests
    cdef uint64_t removed     # requests that went with their rank
    cdef uint64_t exists      # adds refused
    cdef uint64_t full        # likewise
    cdef uint64_t overflow    # likewise

    # As add(), from C: the same, with hashes from anywhere.
    cdef COutcome admit(self, str request_id, RankId rank, const uint64_t* hashes, size_t blocks,
                        object tokens, double now, str key, object expected) except *
    # The request's number, kNone if there is none.
    cdef RequestId find(self, str request_id) except? 0
    cdef RankId own(self, RankId rank) except? 0xffffffff
    cdef list let_go(self, RequestId request, list ids)
