# cython: language_level=3
"""Data sheet of the prefix index: the C++ types it is made of and the classes Python sees."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector

from kvd_core.index.chronicle cimport CChronicle
from kvd_core.index.predictions cimport CPredicted
from kvd_core.json.scan cimport BodyScanner


cdef extern from "base/steps.hpp" namespace "kvd" nogil:
    cppclass CSteps "kvd::Steps":
        CSteps(int64_t)
        cbool left()
        int64_t rest()
        void take(size_t)

cdef extern from "index/index.hpp" namespace "kvd" nogil:
    ctypedef uint32_t RankId
    ctypedef uint32_t LayerId
    uint32_t kNone
    LayerId kTierLayers
    LayerId kGhostLayer
    uint32_t kAllLayers
    uint32_t kMaxBlocks "kvd::Tree::kMaxBlocks"

    cppclass CBudget "kvd::Budget":
        uint64_t max                # bounds the blocks, and likewise the names
        uint64_t blocks             # in trees
        uint64_t names              # of live ranks
        uint64_t refused            # announced blocks that found no room
        uint64_t crowded            # of these, blocks refused because too many wait to be placed

    cppclass CPromptStats "kvd::PromptStats":
        uint64_t prompts            # known by their tokens
        uint64_t salted
        uint64_t adapted
        uint64_t announcing_salts            # from engines that would have announced a salt
        uint32_t first[16]          # the first tokens of the last prompts, in a ring
        void note(uint32_t, cbool, cbool, cbool)

    cppclass CFirstBlocks "kvd::FirstBlocks":
        void note(uint64_t, uint64_t)

    cppclass CIndexStats "kvd::IndexStats":
        uint64_t stored             # blocks gained by a rank on a layer
        uint64_t refreshed          # blocks announced again
        uint64_t copies             # second and further copies of a block
        uint64_t rebound            # names that came back with other content
        uint64_t removed            # blocks lost by a rank on a layer
        uint64_t removed_copies     # removals that a further copy survived
        uint64_t removed_unknown    # removals of names not held
        uint64_t parked             # blocks set aside: parent or content unknown
        uint64_t unparked           # blocks placed after all
        uint64_t parked_dropped     # blocks lost to the bound on parked ones
        uint64_t parked_unsalted    # of `unparked`: hashed without the salt of their prompt
        uint64_t self_references    # events refused: a name repeated, or equal to its parent

    cppclass CRank "kvd::Rank":
        cbool live
        cbool listed                # registered, so answers list it even without a match
        cbool salted
        cbool offloads
        cbool settling              # took blocks from a dump; its stream may announce them again
        cbool restored              # took blocks from a dump, and no batch has spoken for it since
        uint32_t dp_rank

    cppclass CStore "kvd::Store":
        const uint64_t* names       # what the rank calls the blocks, in path order
        const uint64_t* locals      # their local hashes
        uint32_t n
        cbool has_parent
        uint64_t parent             # the rank's name of the block before the first
        LayerId layer
        uint64_t term               # what the prompt's first block adds to the seed, or 0

    cppclass CTree "kvd::Tree":
        uint32_t node_count()
        uint32_t block_count()

    cppclass CIndex "kvd::Index":
        CIndex(uint32_t, uint32_t, shared_ptr[CBudget], shared_ptr[CChronicle]) except +
        uint32_t block_size()
        CTree& tree()
        const CIndexStats& stats()
        CPromptStats& asked()                      # of queries
        CPromptStats& announced()                  # of engines
        CFirstBlocks& first_blocks()               # of queries
        cbool stores_asked(uint64_t)
        uint64_t held(LayerId)
        CRank& rank(RankId)
        RankId rank_end()
        cbool sweep(uint32_t) except +
        uint32_t tier_mask(uint32_t)
        cbool store(RankId, const CStore&) except +
        cbool resolve_waiting(CSteps&) except +
        cbool store_named(RankId, const uint64_t*, uint32_t, LayerId, cbool) except +
        void remove(RankId, uint64_t, LayerId) except +
        void predict(double, uint32_t, uint32_t) except +    # seconds, entries, entries
        CPredicted* predicted()        # NULL: none are kept
        size_t parked_count()
        size_t record_count()
        size_t exception_count()
        size_t bytes()

cdef extern from "index/worker.hpp" namespace "kvd" nogil:
    cppclass CWorker "kvd::Worker":
        string key
        string number
        vector[pair[uint32_t, RankId]] ranks
        RankId find(uint32_t)
        RankId rank(CIndex&, uint32_t) except +
        void retire(CIndex&, uint32_t) except +
        RankId clear(CIndex&, uint32_t, uint32_t) except +
        void retire_all(CIndex&) except +

cdef extern from "index/stream.hpp" namespace "kvd" nogil:
    uint32_t kCleared
    uint32_t kFlawed
    uint32_t kUnfinished
    uint32_t kNoRoom
    uint32_t kNewRank
    uint32_t kAllTiers
    size_t kIgnored
    size_t kReasons

    cppclass CIngestStats "kvd::IngestStats":
        uint64_t batches
        uint64_t stored             # events
        uint64_t removed            # events
        uint64_t cleared            # events
        uint64_t* ignored           # by kvd::Ignored
        uint64_t* bad               # by kvd::Reason

    cppclass CStream "kvd::Stream":
        CStream(CIndex&, CWorker&, uint32_t, CIngestStats&) except +
        uint32_t apply(const uint8_t*, size_t, uint32_t) except +
        uint32_t advance(uint32_t) except +
        size_t flaw()               # a kvd::Reason, or kReasons
        cbool rank(uint32_t*)       # false when the last batch does not show its rank
        cbool names_ranks()
        uint32_t cleared()          # tiers as bits
        const uint64_t* ignored()   # by kvd::Ignored
        cbool is_unused()
        uint64_t other_block_size()  # tokens, 0 for none
        void clear() except +
        cbool restored()
        void drop_restored() except +
        cbool names_restored(const uint8_t*, size_t) except +

cdef extern from "index/match.hpp" namespace "kvd" nogil:
    cppclass CDepth "kvd::Match::Depth":
        uint32_t device             # blocks
        uint32_t host               # blocks, device included
        uint32_t disk               # blocks, device, host and external included

    enum SaltFilter "kvd::Match::SaltFilter":
        kAll "kvd::Match::SaltFilter::kAll"
        kSalted "kvd::Match::SaltFilter::kSalted"
        kUnsalted "kvd::Match::SaltFilter::kUnsalted"

    cppclass CMatch "kvd::Match":
        void reset(const CIndex&) except +
        void add(const CIndex&, const uint64_t*, size_t, SaltFilter) except +
        CDepth depth(RankId)
        const vector[RankId]& touched()
        const vector[uint32_t]& frequencies()

cdef extern from "index/answer.hpp" namespace "kvd" nogil:
    cppclass CAnswer "kvd::Answer":
        CAnswer(const CIndex&, const CMatch&)
        string_view render(const vector[const CWorker*]&, string&) except +

cdef extern from "index/tiered_answer.hpp" namespace "kvd" nogil:
    cppclass CTieredAnswer "kvd::TieredAnswer":
        CTieredAnswer(const CIndex&, const CMatch&)
        string_view render(const vector[const CWorker*]&, string&) except +

cdef extern from "dump/dump.hpp" namespace "kvd" nogil:
    cppclass CDump "kvd::Dump":
        CDump(CIndex&, cbool) except +
        uint64_t blocks_written()
        cbool fill(const vector[const string*]&, string&, size_t) except +

cdef extern from "index/verify.hpp" namespace "kvd" nogil:
    cppclass CVerifier "kvd::Verifier":
        CVerifier(const CIndex&)
        void run() except +
    void verify_if_debug(const CIndex&) except +

cdef extern from "base/hash.hpp" namespace "kvd" nogil:
    uint64_t local_hash_seed(string_view, string_view)
    void local_hashes(const uint32_t*, size_t, size_t, uint64_t, uint64_t*)


cdef int resolve_waiting(CIndex& index) except -1

cdef class IngestStats:
    cdef CIngestStats c


cdef class Slice:
    cdef CSteps* c


cdef class Budget:
    cdef shared_ptr[CBudget] c


cdef class PrefixIndex:
    cdef CIndex* c
    cdef readonly IngestStats counters
    cdef list workers                   # of Worker, in the order they were added
    cdef vector[const CWorker*] order   # the same, for rendering
    cdef CMatch match_scratch
    cdef vector[uint64_t] locals
    cdef string text
    cdef readonly uint64_t questions    # queries of a block or more, put while there were blocks
    cdef readonly uint64_t matched      # of these, queries of which some rank had a part

    cpdef bytes query_tokens(self, BodyScanner scanner, int array, str lora_name=*,
                             str cache_salt=*)
    cpdef bytes query_hashes(self, BodyScanner scanner, int array)
    cpdef bytes query_tiers(self, BodyScanner scanner, int array)
    cdef bytes answer(self, const uint64_t* locals_, size_t blocks)
    cdef const uint64_t* match_hashes(self, BodyScanner scanner, int array, size_t* n) except? NULL
    cdef void note_question(self, const uint64_t* locals_, size_t blocks) noexcept
    cdef void note_prompt(self, uint32_t first, bint is_salted, bint is_adapted) noexcept
    cdef vector[const string*] owners(self)


cdef class Worker:
    cdef CWorker c
    cdef PrefixIndex index              # None once the worker is removed
    cdef readonly object worker_id

    cdef RankId rank_of(self, uint32_t dp_rank) except? 0xffffffff


cdef class Stream:
    cdef CStream* c
    cdef Worker worker
    cdef bytes payload                  # of an unfinished batch
    cdef public uint32_t slice_steps    # steps that a call of `apply` or `advance` takes, about


cdef class Dump:
    cdef CDump* c
    cdef PrefixIndex index
    cdef string text
    cdef readonly bint done             # everything is written
