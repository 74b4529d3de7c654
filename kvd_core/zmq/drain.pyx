# distutils: language = c++
"""Empties ZMQ sockets into inboxes, in a sixth of the CPU time that pyzmq takes.

A socket stays pyzmq's: pyzmq sets its options, connects it, waits for it and closes it. This module
only receives, through the very libzmq that pyzmq has loaded (zmq/drain.hpp). Received messages wait
in an inbox (zmq/inbox.hpp) until they are taken.
"""
import os
import sys

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport errno
from libc.string cimport memcmp, memcpy

import zmq
import zmq.backend

BAD_FRAME_COUNT = "frame_count"
BAD_SEQUENCE = "sequence_length"
BAD_NUMBER = "sequence_number"
TOO_LARGE = "too_large"

cdef enum:
    kCopiedAtOnce = 1024 * 1024  # bytes of a message, for which fresh memory is mapped: 0.4 ms

COPIED_AT_ONCE = <int>kCopiedAtOnce

cdef Libzmq _zmq


cdef _load():
    module = sys.modules[zmq.backend.Socket.__module__]
    cdef bytes path = os.fsencode(module.__file__)
    cdef const char* fault = _zmq.load(path)
    if fault != NULL:
        raise ImportError(f"{fault.decode()} ({module.__file__})")


_load()


cdef class InboxSpace:
    """The bounds that all inboxes share, in messages and in bytes; 0 is no bound."""

    def __cinit__(self, uint64_t max_messages=0, uint64_t max_bytes=0):
        cdef InboxBounds bounds
        bounds.messages, bounds.bytes = max_messages, max_bytes
        self.space = new CInboxSpace(bounds)

    def __dealloc__(self):
        del self.space

    @property
    def messages(self):
        """Returns the number of waiting messages."""
        return self.space.messages()

    @property
    def size_bytes(self):
        """Returns the size of the waiting messages."""
        return self.space.bytes()


cdef class Inbox:
    """The waiting messages of one stream, within its own bounds and those of the space.

    `pushed` and `popped` count all messages that ever came in and went out, so they are positions
    in the order of arrival. `dropped` counts messages that found no room.
    """

    def __cinit__(self, InboxSpace space not None, uint64_t max_messages=0, uint64_t max_bytes=0):
        cdef InboxBounds bounds
        bounds.messages, bounds.bytes = max_messages, max_bytes
        self.space = space
        self.inbox = new CInbox(space.space[0], bounds)

    def __dealloc__(self):
        del self.inbox

    @property
    def pushed(self):
        return self.inbox.pushed()

    @property
    def popped(self):
        return self.inbox.popped()

    @property
    def messages(self):
        return self.inbox.messages()

    @property
    def size_bytes(self):
        return self.inbox.bytes()

    @property
    def dropped(self):
        return self.inbox.dropped()

    @property
    def has_hole(self):
        """Returns whether messages were dropped after the last one that was kept."""
        return self.inbox.has_hole()

    def seal(self):
        """Protects the waiting messages: a message without room cannot replace the newest."""
        self.inbox.seal()

    def begin(self):
        """Sets `first` to the position of the first message that is pushed from now on."""
        self.inbox.begin()

    @property
    def first(self):
        return self.inbox.first()

    def push(self, uint64_t seq, bytes payload not None):
        """Keeps a message if there is room."""
        _keep(self.inbox, seq, NULL, PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload))

    def drain(self, take, uint64_t max_messages, int64_t budget_ns, bytes speaker not None, meet):
        """Calls `take(seq, payload)` for messages; returns whether more may be waiting.

        `speaker` is the publisher of the message before the first, as 16 bytes, or b"" if that
        named none; before a message of another publisher, `meet(publisher)` is called.

        Stops after a message for which `take` returns True, after `max_messages` messages, or after
        the first that ends later than `budget_ns` from the start. A message longer than
        COPIED_AT_ONCE is copied in several calls, the last of which passes it on. An exception of
        `take` passes through; its message is gone then, and later ones still wait.
        """
        cdef CInbox* inbox = self.inbox
        cdef Deadline* deadline = new Deadline(budget_ns)
        cdef uint64_t seq
        cdef const uint8_t* known = _id(speaker)
        cdef const uint8_t* publisher
        try:
            for _ in range(max_messages):
                if inbox.empty():
                    return False
                seq = inbox.seq()
                if self.payload is None:  # else this message's publisher is met already
                    publisher = inbox.publisher()
                    if publisher == NULL:
                        publisher = publisher_of(<const uint8_t*>inbox.data(), inbox.size(), known)
                    if publisher != known and not _same(publisher, known):
                        speaker = b"" if publisher == NULL else publisher[:kPublisherBytes]
                        known = _id(speaker)
                        meet(speaker)
                payload = self.take_payload()
                if payload is None:
                    return True
                if take(seq, payload) is True or deadline.passed():
                    return True
            return True
        finally:
            del deadline

    cdef bytes take_payload(self):
        cdef CInbox* inbox = self.inbox
        cdef size_t size = inbox.size(), part
        if size <= kCopiedAtOnce:
            payload = PyBytes_FromStringAndSize(inbox.data(), size)
        else:
            if self.payload is None:
                inbox.seal()  # no other message may take its place any more
                self.payload, self.copied = PyBytes_FromStringAndSize(NULL, size), 0
            if self.copied < size:
                part = min(size - self.copied, <size_t>kCopiedAtOnce)
                memcpy(
                    PyBytes_AS_STRING(self.payload) + self.copied, inbox.data() + self.copied, part
                )
                self.copied += part
                inbox.discard(self.copied)
                return None
            payload, self.payload = self.payload, None
        inbox.pop()
        return payload

    def take_frames(self):
        """Returns the frames of the oldest message, None when there is none."""
        if self.inbox.empty():
            return None
        cdef const char* at = self.inbox.data()
        cdef const char* end = at + self.inbox.size()
        cdef uint32_t size
        frames = []
        while at < end:
            memcpy(&size, at, sizeof(size))
            at += sizeof(size)
            frames.append(PyBytes_FromStringAndSize(at, size))
            at += size
        self.inbox.pop()
        return frames

    def clear(self):
        """Drops all waiting messages, without counting them as dropped."""
        self.inbox.clear()
        self.payload = None


cdef const uint8_t* _id(bytes publisher) noexcept:
    """Returns the 16 bytes of a publisher's id, NULL for an empty one."""
    if len(publisher) != kPublisherBytes:
        return NULL
    return <const uint8_t*>PyBytes_AS_STRING(publisher)


cdef bint _same(const uint8_t* publisher, const uint8_t* other) noexcept:
    return publisher != NULL and other != NULL and memcmp(publisher, other, kPublisherBytes) == 0


cdef void _keep(
    CInbox* inbox, uint64_t seq, const uint8_t* publisher, const char* data, size_t size
) except *:
    cdef unsigned char* slot = inbox.push(seq, publisher, size)
    if slot != NULL:
        memcpy(slot, data, size)


def fill(Inbox inbox not None, size_t socket, refuse, int max_messages, int64_t budget_ns):
    """Takes event messages off a socket; returns whether more may be waiting.

    A well-formed message (topic, 8-byte big-endian number, payload) goes to the inbox with its
    number, its payload, and the 16 bytes of a publisher's id if they follow the number. For any
    other message, `refuse(reason)` is called with one of this module's BAD_ texts. Stops after
    `max_messages` messages, or after the first that ends later than `budget_ns` from the start.
    `socket` is the address from pyzmq's `Socket.underlying`; `refuse` must not close it. Raises
    zmq.ZMQError for an error of libzmq.
    """
    cdef MessageReader* reader = _reader(socket)
    try:
        return take_events(reader, inbox, refuse, max_messages, budget_ns)
    finally:
        del reader


def fill_frames(Inbox inbox not None, size_t socket, int most, int max_messages, int64_t budget_ns):
    """Takes messages of any shape off a socket, like `fill`; returns whether more may be waiting.

    Of a message with more than `most` frames, only `most` + 1 are kept, and the inbox is marked as
    `cut`: the rest of the message is never read.
    """
    cdef MessageReader* reader = _reader(socket)
    try:
        return take_frames(reader, inbox, most, max_messages, budget_ns)
    finally:
        del reader


cdef bint take_events(
    MessageSource* source, Inbox inbox, refuse, int max_messages, int64_t budget_ns
) except -1:
    cdef Deadline* deadline = new Deadline(budget_ns)
    cdef ReceiveOutcome got
    try:
        for _ in range(max_messages):
            got = source.next()
            if got == ReceiveOutcome.empty:
                return False
            if got == ReceiveOutcome.later:
                return True
            if got == ReceiveOutcome.event:
                if not source.hand_over(inbox.inbox[0]):
                    _keep_event(inbox.inbox, source)
            elif got == ReceiveOutcome.failed:
                _raise()
            else:
                refuse(_bad(got))
            if deadline.passed():
                return True
        return True
    finally:
        del deadline


cdef void _keep_event(CInbox* inbox, MessageSource* source) except *:
    _keep(inbox, source.seq(), source.publisher(), source.payload(), source.size())


cdef str _bad(ReceiveOutcome got):
    if got == ReceiveOutcome.bad_frame_count:
        return BAD_FRAME_COUNT
    if got == ReceiveOutcome.too_large:
        return TOO_LARGE
    return BAD_SEQUENCE if got == ReceiveOutcome.bad_sequence else BAD_NUMBER


cdef bint take_frames(
    MessageSource* source, Inbox inbox, int most, int max_messages, int64_t budget_ns
) except -1:
    cdef Deadline* deadline = new Deadline(budget_ns)
    cdef string packed
    cdef ReceiveOutcome got
    try:
        for _ in range(max_messages):
            if inbox.cut:
                return False
            got = source.next_of_any_shape(most, packed)
            if got == ReceiveOutcome.empty or got == ReceiveOutcome.too_large:
                return False
            if got == ReceiveOutcome.later:
                return True
            if got == ReceiveOutcome.failed:
                _raise()
            inbox.cut = got == ReceiveOutcome.bad_frame_count
            _keep(inbox.inbox, 0, NULL, packed.data(), packed.size())
            if deadline.passed():
                return True
        return True
    finally:
        del deadline


cdef MessageReader* _reader(size_t socket) except NULL:
    if socket == 0:
        raise ValueError("the socket is closed")
    return new MessageReader(_zmq, <void*>socket)


cdef _raise():
    cdef int fault = errno
    raise zmq.ZMQError(fault)
