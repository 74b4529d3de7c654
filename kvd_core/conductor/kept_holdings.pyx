# distutils: language = c++
"""Publishers' holdings, written by one process and restored by its successor.

`conductor/kept_holdings.hpp` has the picture and the costs, `dump/format.hpp` the form. Publishers
are named by their indices in a list of sources; None stands there for one of another partition, or
that the later process does not have.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cython.operator cimport dereference as deref

from kvd_core.conductor.conductor cimport Source


cdef class HoldingsDump:
    """A dump of what the publishers of one conductor hold, in progress.

    It stays valid while they go on. They have to have begun: one publisher at least.
    """

    def __cinit__(self, Conductor conductor not None, list sources not None):
        self.conductor, self.sources = conductor, sources
        self.c = new CKeptHoldings(deref(conductor.index.c), deref(conductor.c))

    def __dealloc__(self):
        del self.c

    @property
    def blocks(self):
        """Blocks written so far, once for each holder and medium; not those that wait."""
        return self.c.blocks_written()

    def read(self, size_t enough):
        """Returns the next records, about `enough` bytes at most, b"" where others may run.

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
    """An entry of such a dump being applied to a conductor.

    ValueError for names of holders that nobody writes; nothing has changed then.
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
        """Goes on for about so many steps of 0.1 us; True while there is more.

        A source that has been removed meanwhile is passed over.
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
