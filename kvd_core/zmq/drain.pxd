# Messages taken from ZMQ sockets without pyzmq, and the inboxes where they wait; zmq/drain.hpp and
# zmq/inbox.hpp have the pictures.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool
from libcpp.string cimport string


cdef extern from "events/publisher.hpp" namespace "kvd" nogil:
    const size_t kPublisherBytes
    const uint8_t* publisher_of(const uint8_t* payload, size_t size, const uint8_t* expected)


cdef extern from "zmq/inbox.hpp" namespace "kvd" nogil:
    cdef cppclass InboxBounds:
        uint64_t messages  # 0: no bound
        uint64_t bytes

    cdef cppclass CInboxSpace "kvd::InboxSpace":
        CInboxSpace(InboxBounds) except +
        uint64_t messages()
        uint64_t bytes()

    cdef cppclass CInbox "kvd::Inbox":
        CInbox(CInboxSpace&, InboxBounds) except +
        uint64_t pushed()
        uint64_t popped()
        uint64_t messages()
        uint64_t bytes()
        uint64_t dropped()
        bool empty()
        bool has_hole()
        void seal()
        void begin()
        uint64_t first()
        # NULL if there is no room.
        unsigned char* push(uint64_t seq, const uint8_t* publisher, size_t size) except +
        uint64_t seq()      # of the oldest message, while there is one
        const uint8_t* publisher()
        size_t size()
        const char* data()  # valid until the following pop, push or clear
        void discard(size_t bytes)  # the first ones of the oldest message, which are not read again
        void pop()
        void clear()


cdef extern from "zmq/drain.hpp" namespace "kvd" nogil:
    cdef cppclass Libzmq:
        const char* load(const char* module_path)  # the fault, or null

    cdef enum class ReceiveOutcome:
        empty            # no message is waiting
        later            # a message may be waiting, but this turn has done enough
        event            # seq, publisher, payload and size describe a well-formed message
        bad_frame_count  # another number of frames than 3, or too many
        bad_sequence     # the second frame is neither 8 nor 24 bytes long
        bad_number       # the number is 2^64 - 1, which marks the end of a replay
        too_large        # beyond the bound of its size, which ends the connection; reported once
        failed           # libzmq refused; errno says why

    cdef cppclass MessageSource:
        ReceiveOutcome next() except +
        ReceiveOutcome next_of_any_shape(int most, string& packed) except +
        bool hand_over(CInbox&) except +  # False: the payload has to be copied
        uint64_t seq()
        const uint8_t* publisher()  # 16 bytes, or null
        const char* payload()  # valid until the following next()
        size_t size()          # bytes of the payload

    cdef cppclass MessageReader(MessageSource):
        MessageReader(const Libzmq&, void* socket) except +

    cdef cppclass Deadline:
        Deadline(int64_t budget_ns) except +
        bool passed()


cdef class InboxSpace:
    cdef CInboxSpace* space


cdef class Inbox:
    cdef InboxSpace space  # has to outlive the inbox
    cdef CInbox* inbox
    cdef bytes payload     # of the oldest message, if it is long and copied in part
    cdef size_t copied     # bytes of it
    cdef public bint cut  # a message had too many frames, so its socket can no longer be used

    # Takes the payload of the oldest message; None if a part of it is still to be copied.
    cdef bytes take_payload(self)


cdef bint take_events(
    MessageSource* source, Inbox inbox, refuse, int max_messages, int64_t budget_ns
) except -1
cdef bint take_frames(
    MessageSource* source, Inbox inbox, int most, int max_messages, int64_t budget_ns
) except -1
