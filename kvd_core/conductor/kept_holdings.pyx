# distutils: language = c++
"""Publishers' holdings, written by one process and restored by its successor.

`conductor/kept_holdings.hpp` has the picture and the costs, `dump/format.hpp` the form. Publishers
are named by their indices in a list of sources. The list has None for a publisher of another
partition, or one that the later process does not have.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cython.operator cimport dereference as deref

from kvd_core.conductor.conductor cimport Source


cdef class HoldingsDump:
    """A dump, in progress, of what the publishers of one conductor hold.

    It stays valid while they continue. The conductor must have had at least one publisher.
    """

    def __cinit__(self, Conductor conductor not None, list sources not None):
        self.conductor, self.sources = conductor, sources
        self.c = new CKeptHoldings(deref(conductor.index.c), deref(conductor.c))

    def __dealloc__(self):
        del self.c

    @property
    def blocks(self):
        """Blocks written so far, once for each holder and medium, without waiting blocks."""
        return self.c.blocks_written()

    def read(self, size_t enough):
        """Returns the next records, about `enough` bytes at most, or b"" to let other tasks run.

        `done` says whether these were the last.
        """
        cdef vector[const CSource*] known
        cdef Source source
        cdef size_t i
        known.resize(len(self.sources), NULL)
        for i, source in enumerate(self.sources):
            if source is not None:
                known[i] = source.c
        self.text.clear()
        self.done = not self.c.fill(known, self.text, enough)
        return PyBytes_FromStringAndSize(self.text.data(), self.text.size())


cdef class HoldingsRestore:
    """An entry of such a dump that is being applied to a conductor.

    ValueError for malformed names of holders; nothing has changed then.
    """

    def __cinit__(self, StagedEntry entry not None, Conductor conductor not None, list sources):
        self.entry, self.conductor, self.sources = entry, conductor, sources
        self.c = new CRestoreHoldings(
            deref(conductor.index.c), deref(conductor.c), deref(entry.stage.c), deref(entry.c)
        )

    def __dealloc__(self):
        del self.c

    @property
    def blocks(self):
        """Blocks stored so far."""
        return self.c.stored()

    def apply(self, int64_t max_steps):
        """Continues for about `max_steps` steps of 0.1 us; True while there is more.

        A source that has been removed meanwhile is skipped.
        """
        cdef vector[CSource*] known
        cdef Source source
        cdef size_t i
        known.resize(len(self.sources), NULL)
        for i, source in enumerate(self.sources):
            if source is not None:
                known[i] = source.c
        cdef CSteps* steps = new CSteps(max_steps)
        try:
            return self.c.apply(known, deref(steps))
        finally:
            del steps
