# distutils: language = c++
"""Remembers the last batches of a stream by number and content (base/recent.hpp)."""
from libc.stdint cimport uint64_t

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

SIZE = kRecent


cdef class Recent:
    """Digests of the last SIZE batches; each number replaces the one SIZE numbers before it."""

    def note(self, uint64_t number, bytes payload not None):
        self.c.note(number, PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload))

    def skip(self, uint64_t first, uint64_t stop):
        """Notes that nothing has come for the numbers first .. stop - 1."""
        if first < stop:
            self.c.skip(first, stop)

    def skipped(self, uint64_t number):
        """Returns whether nothing has come for one of the last SIZE numbers."""
        return self.c.skipped(number)

    def holds(self, uint64_t number, bytes payload not None):
        """Returns whether this very batch was noted under this number, as the last of its slot."""
        return self.c.holds(number, PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload))

    def digests(self):
        """Returns what is remembered, for `recall` in another process."""
        return PyBytes_FromStringAndSize(<const char*>self.c.digests(), kRecent * sizeof(uint64_t))

    def recall(self, bytes digests not None):
        """Remembers what another one has; ValueError if this is not what `digests` gives."""
        if <size_t>PyBytes_GET_SIZE(digests) != kRecent * sizeof(uint64_t):
            raise ValueError("not the digests of recent batches")
        self.c.recall(PyBytes_AS_STRING(digests))
