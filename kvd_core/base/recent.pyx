# distutils: language = c++
"""Remembers the last batches of a stream by number and content (base/recent.hpp)."""
from libc.stdint cimport uint64_t

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

SIZE = kRecent


cdef class Recent:
    """Digests of the last SIZE batches; each number replaces the one SIZE numbers before it.

    `expected` is the number behind the last one noted.
    """

    cpdef note(self, uint64_t number, bytes payload):
        """Notes a batch; numbers since the last one have to be skipped before."""
        self.c.note(number, PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload))
        self.expected = number + 1

    def skip(self, uint64_t first, uint64_t stop):
        """Notes that no batch has come for the numbers first .. stop - 1."""
        if first < stop:
            self.c.skip(first, stop)

    def skipped(self, uint64_t number):
        """Returns whether no batch has come for a number, which is one of the last SIZE."""
        return self.c.skipped(number)

    def holds(self, uint64_t number, bytes payload not None):
        """Returns whether this very batch was noted, and no later one in its slot."""
        return self.c.holds(number, PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload))

    def digests(self):
        """Returns all digests, for `recall` in another process."""
        return PyBytes_FromStringAndSize(<const char*>self.c.digests(), kRecent * sizeof(uint64_t))

    def recall(self, bytes digests not None):
        """Takes over another one's digests; ValueError unless they have the form of `digests`."""
        if <size_t>PyBytes_GET_SIZE(digests) != kRecent * sizeof(uint64_t):
            raise ValueError("not the digests of recent batches")
        self.c.recall(PyBytes_AS_STRING(digests))
