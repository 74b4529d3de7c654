# distutils: language = c++
"""Data sheet of the conductor's part of an index (conductor.pyx)."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector

from kvd_core.index.prefix_index cimport (
    CIndex, CSteps, CWorker, LayerId, PrefixIndex, RankId, Slice, Worker
)
from kvd_core.json.scan cimport BodyScanner


cdef extern from "conductor/conductor.hpp" namespace "kvd" nogil:
    cppclass CHolder "kvd::Holder":
        uint32_t backend
        cbool ranked
        uint32_t dp_rank            # 0 without a rank
        RankId id

    cppclass CInstance "kvd::Instance":
        string key                  # as a JSON member name
        uint64_t asked              # queries that have shown it

    cppclass CSource "kvd::Source":
        CInstance* instance
        vector[CHolder] holders
        uint64_t asked_before       # the instance's `asked` when the source came
        uint64_t matched            # queries whose first block it held

    cppclass CStoredBlocks "kvd::StoredBlocks":
        const uint64_t* hashes
        uint32_t n
        cbool has_parent
        uint64_t parent
        const uint32_t* tokens      # those of n blocks
        LayerId layer
        uint64_t space              # the namespace
        cbool inherits              # a known parent's namespace takes precedence
        cbool by_engine
        const uint32_t* mm_begin    # n + 1 offsets, or NULL
        const uint64_t* mm

    enum CStoreOutcome "kvd::Conductor::StoreOutcome":
        pass

    cppclass CConductor "kvd::Conductor":
        CConductor(CIndex&, uint64_t) except +
        cbool sequenced()           # queries by hash find all blocks that they can
        cbool sequence(uint32_t) except +
        CSource* add_source(const string&, uint64_t, uint64_t, uint32_t, cbool) except +
        void remove_source(CSource*) except +
        void drop_idle(CSource*) except +
        CInstance* find(const string&)
        vector[string] keys_of_instances() except +
        void link(CInstance*, CWorker*) except +
        RankId holder(CSource*, uint32_t, cbool, uint32_t) except +
        LayerId medium(const string&, const string&) except +
        CStoreOutcome store(CSource*, RankId, CStoredBlocks&) except +
        uint32_t store_named(
            CSource*, RankId, const uint64_t*, uint32_t, uint32_t, LayerId, uint64_t, cbool, cbool,
            CSteps&
        ) except +
        cbool resolve_waiting(CSteps&) except +
        void settled(const CSource&)
        void remove(CSource*, RankId, uint64_t, uint32_t, uint64_t, cbool) except +
        void clear(CSource*, RankId, uint32_t, uint64_t, cbool) except +
        pair[uint64_t, uint64_t] held_by(const CSource&)
        size_t waiter_count()
        size_t bytes()

cdef extern from "conductor/engine_events.hpp" namespace "kvd" nogil:
    size_t kReasons

    cppclass CEngineStats "kvd::EngineStats":
        uint64_t events
        uint64_t stored
        uint64_t parked
        uint64_t lora_name
        uint64_t block_size
        uint64_t remote
        uint64_t group
        uint64_t pairs
        uint64_t full
        uint64_t media
        uint64_t holders
        uint64_t refused
        uint64_t* bad           # by kvd::Reason

    cdef enum class Progress "kvd::EngineEvents::Progress"(uint8_t):
        REFUSED
        DONE
        UNFINISHED

    cppclass CEngineEvents "kvd::EngineEvents":
        CEngineEvents(CConductor&, CSource*, string, string) except +
        Progress apply(const uint8_t*, size_t, uint32_t) except +
        Progress advance(uint32_t) except +
        size_t flaw()           # a kvd::Reason, or kReasons
        void forget()
        CEngineStats counters

cdef extern from "conductor/holdings.hpp" namespace "kvd" nogil:
    cppclass CReaches "kvd::Holdings::Reaches":  # of a rank, in blocks, cumulative
        uint32_t dp_rank
        uint32_t device
        uint32_t own_host
        uint32_t host
        uint32_t disk

    cppclass CTierRow "kvd::Holdings::TierRow":
        string key                  # of the instance, as a JSON text
        vector[CReaches] ranks

    cppclass CHoldings "kvd::Holdings":
        void by_token_ids(CConductor&, const uint32_t*, size_t, uint64_t) except +
        void by_sequences(const CConductor&, const uint64_t*, size_t, uint64_t) except +
        vector[CTierRow] tiers(
            const CConductor&, const vector[const CWorker*]&, uint64_t, string_view
        ) except +
        void render(
            const CConductor&, const vector[const CWorker*]&, string_view, string_view, string&
        ) except +


cdef class Conductor:
    cdef CConductor* c
    cdef readonly PrefixIndex index
    cdef CHoldings holdings
    cdef string text
    cdef dict layers    # by the medium's spelling

    cpdef bytes query_tokens(
        self, BodyScanner scanner, int array, str lora_name, str cache_salt, str tenant,
        str instance
    )
    cpdef bytes query_hashes(
        self, BodyScanner scanner, int array, str lora_name, str cache_salt, str tenant,
        str instance
    )
    cdef int finish_sequences(self) except -1
    cdef bytes render(self, str tenant, str instance)
    cdef list tiers(self, str lora_name, str instance)
    cdef LayerId layer(self, str medium) except? 0xfffffffe
    cdef uint32_t mask(self, medium) except? 0xfffffffe


cdef class Source:
    cdef CSource* c     # NULL once it is removed
    cdef Conductor conductor
    cdef readonly object instance_id
    cdef int64_t spent  # steps of `store_named` since the last `resolve_waiting`

    cdef RankId holder(self, uint32_t backend, rank) except? 0xfffffffe


cdef class EngineEvents:
    cdef CEngineEvents* c
    cdef Source source
    cdef bytes payload                  # of an unfinished batch
    cdef public uint32_t slice_steps    # steps that a call of `apply` or `advance` takes, about

    cdef object result_of(self, Progress progress)
