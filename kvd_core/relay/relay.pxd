"""Declarations of the C++ relay (relay/relay.hpp)."""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libcpp cimport bool
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "relay/relay.hpp" namespace "kvd::relay" nogil:
    enum class ExchangePhase:
        kReady
        kEnded

    enum class CExchangeOutcome "kvd::relay::ExchangeOutcome":
        pass

    enum class Framing:
        kAsIs
        kChunks

    struct CAnswerHead "kvd::relay::AnswerHead":
        int status
        bool events

    struct CLimits "kvd::relay::Limits":
        int64_t connect_ns
        int64_t silence_ns
        int64_t client_ns
        int64_t idle_ns
        int64_t gone_ns

    struct CStats "kvd::relay::Stats":
        uint64_t begun
        uint64_t connected
        uint64_t reused
        uint64_t sent_again
        uint64_t receives
        uint64_t payload_bytes
        uint64_t pauses
        uint64_t fillers

    enum class Served:
        pass

    struct Notice:
        uint64_t id
        bool ready

    cppclass CTail "kvd::relay::Tail":
        uint64_t size()
        string text() except +

    cppclass Exchange:
        ExchangePhase phase
        CExchangeOutcome outcome
        bool completes
        string received
        string held
        CTail tail
        CAnswerHead head
        uint64_t receives

    void c_tune "kvd::relay::tune"(int fd, int64_t gone_ns)

    cppclass CRelay "kvd::relay::Relay":
        CRelay() except +
        CLimits limits
        CStats stats
        int fd()
        size_t live()
        const vector[Notice]& notices()
        void clear_notices()
        uint32_t add_engine(const char* host, uint16_t port) except +ValueError
        void move_engine(uint32_t id, const char* host, uint16_t port) except +ValueError
        void remove_engine(uint32_t id)
        size_t idle(uint32_t id)
        uint64_t begin(uint32_t engine, int client_fd, const char* head, size_t head_size,
                       const char* body, size_t body_size, size_t hold) except +
        bool knows(uint64_t id)
        const Exchange& exchange(uint64_t id)
        bool forward(uint64_t id, const char* head, size_t head_size, Framing framing,
                     bool marked) except +
        void fill(uint64_t id, const char* filler, size_t size, int64_t pause_ns) except +
        void drop(uint64_t id) except +
        Served turn(int64_t budget_ns) except +
        void sweep() except +


cdef class Relay:
    cdef CRelay* core
    cdef dict bodies      # by exchange: bodies that may still be read
    cdef object on_notice
    cdef deliver(self)
    cdef const Exchange* known(self, uint64_t exchange) except NULL
