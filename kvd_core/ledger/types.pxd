# cython: language_level=3
"""The parts of a ledger besides the trie: requests, ranks, arguments and results."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector

from kvd_core.base.arena cimport HashedArena, KeyedHash, ProbeTable
from kvd_core.ledger.trie cimport CTrie, LoadedRankId, NodeId

ctypedef uint32_t RequestId  # dense, reused after the request has ended


cdef extern from "base/page_buffer.hpp" namespace "kvd" nogil:
    cppclass PageBuffer[T]:
        size_t size()
        size_t capacity()
        T* data()
        T& operator[](size_t)
        void reserve(size_t) except +
        void extend()                  # after reserve; the new entry has to be written
        void release()


cdef extern from "ledger/bounds.hpp" namespace "kvd::ledger" nogil:
    size_t kMaxIdBytes
    uint32_t kMaxRequests
    uint64_t kMaxBlocks
    uint64_t kMaxRankRefs
    uint32_t kMaxOutputs
    uint32_t kMaxRanks
    uint64_t kMaxTokens
    uint64_t kMaxRankTokens
    size_t kWholeRowsBytes
    enum:
        kMaxLedgers


cdef extern from "ledger/record_buffer.hpp" namespace "kvd::ledger" nogil:
    cppclass RecordBuffer:
        RecordBuffer(size_t limit)
        char* extend(char kind, size_t n)
        const char* bytes()
        size_t size()
        uint64_t dropped()
        void pause()
        void resume()
        void clear()


cdef enum:
    kJournals = 2  # journals that can record one ledger: one for a file, one for replicas


cdef enum AddOutcome:
    kAdded      # booked
    kRepeated   # this very request is live already, booked with the same retry key
    kExists     # another request has the id
    kFull       # too many requests or blocks
    kOverflow   # too many tokens


cdef enum ChainKind:
    kByAge      # all requests of a ledger, in order of admission
    kByRank     # those of a rank, in order of admission
    kChains


cdef struct RequestList:
    RequestId first
    RequestId last


cdef struct Request:
    RequestId previous[kChains]
    RequestId next[kChains]
    char* text         # id, then retry key; NULL where the number has no request
    uint64_t hash      # of the id
    uint64_t tokens    # to prefill, as given
    double admitted    # seconds of the caller's clock
    double fraction    # weight of the first `decayed` output blocks
    LoadedRankId rank
    NodeId end         # the last node of its prompt; kRoot if the prompt is empty
    uint32_t blocks    # of the prompt
    uint32_t outputs   # output blocks
    uint32_t decayed
    uint32_t expected  # output tokens, kNone if unknown
    uint16_t id_size   # bytes
    uint16_t key_size  # bytes, 0 without a retry key
    bint prefilling    # its prefill is running: its tokens count


cdef struct Requests:  # see requests.pxd
    HashedArena[Request] all
    ProbeTable ids
    KeyedHash hash     # of ids
    RequestList by_age
    size_t texts       # bytes


cdef struct LoadedRank:
    uint64_t worker_id
    uint32_t dp_rank
    uint32_t requests        # live ones, of all ledgers
    uint64_t prefill_tokens  # of requests whose prefill is running
    uint64_t blocks          # distinct blocks of its live prompts
    uint64_t outputs         # output blocks
    double prompt            # sum of the weights of `blocks`
    double output            # sum of the weights of `outputs`
    char text[56]            # "worker_id":7,"dp_rank":0
    uint8_t text_size
    uint8_t owners           # bits of the ledgers that have the rank; 0: free
    uint32_t prefilling      # those of `requests` that have tokens left to prefill


cdef struct SharedLoads:  # see loads.pxd
    CTrie trie
    PageBuffer[LoadedRank] ranks
    vector[LoadedRankId] free
    vector[uint32_t] depths  # one for each rank: the answer of the last `live_depths`
    Book* books[kMaxLedgers]    # of the ledgers that take part, by the number of their bit


cdef struct LedgerLimits:
    uint32_t requests
    uint64_t blocks
    uint32_t outputs


cdef struct Listed:  # an entry in the order in which ranks are rendered
    uint64_t worker_id
    uint32_t dp_rank
    LoadedRankId rank


cdef struct LedgerStats:
    uint64_t added
    uint64_t repeated         # adds that were retries of a live request
    uint64_t freed
    uint64_t refused_outputs  # output blocks


cdef struct Book:  # see book.pxd
    LedgerLimits limits
    SharedLoads* loads
    uint8_t bit            # its bit among the owners of ranks, 0 while it has no ranks
    Requests requests
    vector[RequestList] chains   # by rank id, the requests on the rank
    vector[Listed] order   # ranks by (worker, dp rank)
    uint64_t outputs       # output blocks of all requests
    LedgerStats stats
    RecordBuffer* records[2]  # of the kJournals that record each step; NULL: none
    uint32_t number           # the ledger's number in these records


cdef struct Admission:
    string_view id
    string_view key         # empty: none
    LoadedRankId rank       # one of the ledger's
    const uint64_t* hashes  # sequence hashes of the prompt
    size_t blocks
    uint64_t tokens         # to prefill
    double now              # seconds
    uint32_t expected       # tokens of output, kNone if unknown
