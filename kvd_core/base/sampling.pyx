"""Samples the requests whose steps observers are notified of, where all would cost too much.

A request is taken if the hash of its id ends with enough zero bits, so that either all its steps
are taken or none. When more are taken than the rate allows, the mask grows by a bit at once; when
few are, the next `adjust` removes a bit. Cost: the hash of an id, some 50 ns.
"""
from cpython.object cimport PyObject_Hash

cdef enum:
    kLargest = 0xfffff  # mask: a million times the rate


cdef class Sample:
    """Takes about `rate` requests a second, however many there are."""

    def __cinit__(self, long rate):
        self.rate = rate

    def take_all(self):
        """Takes every request from now on."""
        self.mask = 0
        self.is_whole = True

    cpdef bint takes(self, str request_id) except -1:
        """Returns whether a request is in the sample."""
        return not PyObject_Hash(request_id) & self.mask

    def count(self):
        """Counts a request that was taken."""
        self.taken += 1
        if self.taken > 2 * self.rate and self.mask < kLargest and not self.is_whole:
            self.mask = self.mask << 1 | 1
            self.taken = self.rate

    def adjust(self, double seconds):
        """Takes more from now on, if few were taken in the last `seconds`."""
        if self.taken < self.rate * seconds / 2:
            self.mask >>= 1
        self.taken = 0
