# distutils: language = c++
"""Connected sockets to publishers that speak ZMTP without security, read without libzmq.

The owner connects the descriptor and waits for it; this module speaks ZMTP and receives
(zmq/sub_socket.hpp).
"""
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool
from libcpp.string cimport string
from libcpp.vector cimport vector

from kvd_core.zmq.drain cimport Inbox, MessageSource, take_events, take_frames  # no-cython-lint


cdef extern from "zmq/sub_socket.hpp" namespace "kvd" nogil:
    const char* kLost "kvd::ZmtpSubscriber::kLost"
    const char* kNoHandshake "kvd::ZmtpSubscriber::kNoHandshake"

    cdef cppclass SubSocket(MessageSource):
        SubSocket(int fd, size_t max_frame, vector[string] topics) except +
        int fd()
        bool joined()
        bool answers_pings()
        const char* fault()
        uint64_t reads()
        bool has_unsent()
        bool has_unread()
        void hang_up()
        void begin()
        void park()
        void shake() except +
        void ping() except +
        void unsubscribe() except +


# Faults of a connection that did not violate the protocol. LOST: it ended. NO_HANDSHAKE: it ended,
# or was too slow, before its handshake was done.
LOST = (<bytes>kLost).decode()
NO_HANDSHAKE = (<bytes>kNoHandshake).decode()


cdef class Subscriber:
    """One connection, subscribed to topics; it owns and closes `fd`."""

    cdef SubSocket* socket

    def __cinit__(self, int fd, size_t max_message_bytes, tuple topics not None):
        """Takes a connected stream socket, unless it raises."""
        self.socket = new SubSocket(fd, max_message_bytes, topics)

    def __dealloc__(self):
        del self.socket

    @property
    def fd(self):
        return self.socket.fd()

    @property
    def joined(self):
        """Returns whether the handshake is done, and nothing has gone wrong since."""
        return self.socket.joined()

    @property
    def fault(self):
        """Returns why the connection can no longer be used, None while it can."""
        cdef const char* fault = self.socket.fault()
        return None if fault == NULL else (<bytes>fault).decode()

    @property
    def answers_pings(self):
        """Returns whether the publisher's ZMTP has heartbeats."""
        return self.socket.answers_pings()

    @property
    def reads(self):
        """Returns how many times bytes have been read."""
        return self.socket.reads()

    @property
    def has_unsent(self):
        """Returns whether bytes wait for the socket to be writable; `shake` sends them."""
        return self.socket.has_unsent()

    @property
    def has_unread(self):
        """Returns whether bytes have come that are not read yet."""
        return self.socket.has_unread()

    def close(self):
        """Closes the descriptor, which no task may be waiting for."""
        self.socket.hang_up()

    def shake(self):
        """Continues the handshake, as far as bytes have come."""
        self.socket.shake()

    def ping(self):
        """Sends a PING, which the publisher has to answer."""
        self.socket.ping()

    def unsubscribe(self):
        """Cancels all subscriptions at the publisher."""
        self.socket.unsubscribe()

    def fill(self, Inbox inbox not None, refuse, int max_messages, int64_t budget_ns):
        """Takes event messages, as `kvd_core.zmq.drain.fill` does."""
        self.socket.begin()
        try:
            return take_events(self.socket, inbox, refuse, max_messages, budget_ns)
        finally:
            self.socket.park()

    def fill_frames(self, Inbox inbox not None, int most, int max_messages, int64_t budget_ns):
        """Takes messages of any shape, as `kvd_core.zmq.drain.fill_frames` does."""
        self.socket.begin()
        try:
            return take_frames(self.socket, inbox, most, max_messages, budget_ns)
        finally:
            self.socket.park()
