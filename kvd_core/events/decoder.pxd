"""events.hpp for Cython users: the events of one engine batch, as structs.

Pointers and string_views are valid during the sink's call only.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool
from libcpp.string_view cimport string_view


cdef extern from "events/events.hpp" namespace "kvd" nogil:
    cdef enum class Tier(uint8_t):
        DEVICE
        HOST
        DISK
        EXTERNAL
        UNKNOWN  # a medium that the table does not have

    cdef enum class GroupKind(uint8_t):
        NONE  # the event does not say
        FULL
        WINDOW
        OTHER

    cdef enum class Origin(uint8_t):
        UNKNOWN
        NEW
        REUSED

    cdef cppclass StoredEvent:
        const uint64_t* hashes  # engine hashes folded to 64 bits
        uint32_t n_hashes
        bool has_parent
        uint64_t parent
        const uint32_t* tokens  # pairs: all first elements and the last second one
        uint32_t n_tokens
        bool pairs  # EAGLE; never with 0 tokens
        uint64_t block_size  # tokens; 0 absent
        Tier tier
        GroupKind kind
        bool remote
        int32_t group  # -1 absent
        int64_t window  # tokens; 0 absent
        string_view lora_name  # empty: none
        bool has_lora_id
        int64_t lora_id
        string_view salt  # empty: none
        const uint32_t* mm_begin  # n_hashes + 1 offsets into mm, or NULL
        const uint64_t* mm

        Origin origin

    cdef cppclass RemovedEvent:
        const uint64_t* hashes
        uint32_t n_hashes
        Tier tier
        GroupKind kind
        bool remote
        int32_t group  # -1 absent
        const uint32_t* remaining  # copies of each block that are left, or NULL

    cdef cppclass ClearedEvent:
        Tier tier  # meaningful when has_tier
        bool has_tier

    cdef enum class Reason(uint8_t):
        pass

    const size_t kReasons
    const char* kReasonNames[]  # by Reason, kReasons of them

    cdef struct BatchResult:
        uint32_t events  # framed elements of the event list
        uint32_t bad  # calls of the sink's `bad`
        uint32_t ignored  # events tagged "Ignored"

    cdef cppclass Scratch:
        pass

    BatchResult decode_batch[Sink](
        const uint8_t* payload, size_t size, Scratch& scratch, Sink& sink
    ) except +


cdef extern from "events/publisher.hpp" namespace "kvd" nogil:
    const size_t kPublisherBytes
    const uint8_t* publisher_of(const uint8_t* payload, size_t size, const uint8_t* expected)
