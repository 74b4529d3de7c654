# distutils: language = c++
"""The last changes of blocks, in a ring that indexes share (`index/chronicle.hpp`)."""

from libcpp.memory cimport make_shared

BYTES_A_CHANGE = 32  # sizeof(Change), which the header checks


cdef class Chronicle:
    """The last `capacity` changes of who holds which block: stores, removals, clears."""

    def __cinit__(self, uint32_t capacity, double now=0.0):
        """`now` is in seconds, of the same clock as for `set_time`.

        ValueError if `capacity` is 0, MemoryError if there is not enough memory.
        """
        if capacity == 0:
            raise ValueError("a chronicle needs room for at least one change")
        self.c = make_shared[CChronicle](capacity, now)

    def set_time(self, double now):
        """Sets the time, in seconds, with which further changes are noted."""
        self.c.get().set_time(now)

    @property
    def capacity(self):
        return self.c.get().capacity()

    @property
    def noted(self):
        """Changes noted since it was made."""
        return self.c.get().next()

    @property
    def overwritten(self):
        """The number of these that newer ones have replaced."""
        return self.c.get().first()

    @property
    def reach(self):
        """When the oldest remembered change was noted, in seconds; now if there is none."""
        return self.c.get().reach()
