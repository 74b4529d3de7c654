# distutils: language = c++
"""Blocks that ranks are thought to cache, where no events announce what they cache.

The structure and its costs are in `index/predicted.hpp`. An index keeps its own beside what events
announce (`PrefixIndex.predict`); these stand alone, and ranks are named by the numbers of a ledger.
"""


cdef class Predictions:
    """The predicted blocks of the ranks of one (model, tenant). A `Pool` adds and finds them."""

    def __cinit__(self, double ttl_s, uint32_t max_blocks, double target_ratio):
        """Blocks live `ttl_s` seconds; beyond `max_blocks` the oldest go, down to the ratio."""
        self.c = new CPredicted(ttl_s, max_blocks, <uint32_t>(max_blocks * target_ratio))

    def __dealloc__(self):
        del self.c

    def __len__(self):
        """Blocks of ranks that take memory, those of ranks that are forgotten included."""
        return self.c.size()

    def forget(self, uint32_t rank):
        """Ends all predictions of a rank; its number may then be that of another one. O(1)."""
        self.c.forget(rank)

    def prune(self, double now, size_t limit):
        """Ends at most `limit` blocks that are too old or too many; True if there are more."""
        return self.c.prune(now, limit)
