# distutils: language = c++
"""Predictions of what ranks cache, for ranks that send no events.

The structure and its costs are in `index/predicted.hpp`. An index keeps its own predictions beside
the events (`PrefixIndex.predict`); these stand alone, and ledger numbers name their ranks.
"""


cdef class Predictions:
    """The predicted blocks of the ranks of one (model, tenant). A `Pool` adds and finds them."""

    def __cinit__(self, double ttl_s, uint32_t max_blocks, double target_ratio):
        """Predictions live `ttl_s` s; beyond `max_blocks` the oldest go, down to the ratio."""
        self.c = new CPredicted(ttl_s, max_blocks, <uint32_t>(max_blocks * target_ratio))

    def __dealloc__(self):
        del self.c

    def __len__(self):
        """Predicted blocks that take memory, including those of forgotten ranks."""
        return self.c.size()

    def forget(self, uint32_t rank):
        """Ends all predictions of a rank; its number may be reused then. O(1)."""
        self.c.forget(rank)

    def prune(self, double now, size_t limit):
        """Ends at most `limit` predictions that are too old or too many; True if more are left."""
        return self.c.prune(now, limit)
