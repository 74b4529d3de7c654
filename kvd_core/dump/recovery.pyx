"""Dumps of other indexers: first read whole into a stage, then applied to indexes.

`dump/format.hpp` describes the forms, `dump/staged.hpp` the stage. Reading changes no index, and
applying cannot fail halfway. Both go in slices that the caller chooses.

Events that a dump was made from may still be on their way, and announce its blocks again. So a rank
that took blocks from a dump is `settling`: a re-announcement by its stream is no second copy, until
`Worker.settled` says that the stream has caught up.
"""

import json

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cython.operator cimport dereference as deref

from kvd_core.index.prefix_index cimport PrefixIndex, Worker

BINARY_HEAD = b"KVDDUMP1"


def binary_entry(str model_name, str tenant_id, uint32_t block_size):
    """Returns the record that opens one partition in a binary dump."""
    cdef bytes model = model_name.encode(), tenant = tenant_id.encode()
    return b"".join((
        b"P", block_size.to_bytes(4, "little"),
        len(model).to_bytes(4, "little"), model, len(tenant).to_bytes(4, "little"), tenant,
    ))


def binary_end(uint64_t blocks):
    """Returns the record that ends a binary dump of this many blocks."""
    return b"E" + blocks.to_bytes(8, "little")


cdef class Staged:
    """All content of one dump."""

    def __dealloc__(self):
        del self.c


cdef class DumpReader:
    """Reads one dump, in its text or binary form; with `sequences`, a dump of publishers.

    A ValueError says why a dump is refused: malformed, wrong, or beyond the limits. Nothing of it
    may be used then.
    """

    def __cinit__(self, bint binary, *, uint64_t max_blocks, uint64_t max_events,
                  uint64_t max_entries, uint64_t max_ranks, bint sequences=False):
        cdef CLimits limits
        limits.blocks, limits.runs, limits.entries = max_blocks, max_events, max_entries
        limits.ranks = max_ranks
        self.stage = Staged.__new__(Staged)
        self.stage.c = new CStage(limits, sequences)
        if binary:
            self.binary = new CDumpBinary(deref(self.stage.c))
        else:
            self.text = new CDumpText(deref(self.stage.c))

    def __dealloc__(self):
        del self.text
        del self.binary

    @property
    def blocks(self):
        """Blocks read so far."""
        return self.stage.c.blocks()

    def feed(self, bytes piece not None):
        """Reads the next piece."""
        cdef const uint8_t* p = <const uint8_t*>PyBytes_AS_STRING(piece)
        cdef size_t n = PyBytes_GET_SIZE(piece)
        if self.binary != NULL:
            self.binary.feed(p, n)
        else:
            self.text.feed(p, n)

    def finish(self):
        """Returns the entries of the dump, which must be complete."""
        if self.binary != NULL:
            self.binary.finish()
        else:
            self.text.finish()
        entries = []
        cdef size_t i
        cdef StagedEntry entry
        for i in range(self.stage.c.entries().size()):
            entry = StagedEntry.__new__(StagedEntry)
            entry.stage = self.stage
            entry.c = &self.stage.c.entries()[i]
            entries.append(entry)
        return entries


cdef class StagedEntry:
    """One partition of a dump. Made by `DumpReader.finish`."""

    def __init__(self):
        raise TypeError("use DumpReader.finish")

    @property
    def key(self):
        """The entry's name in a text dump, `model:tenant`."""
        return self.c.key.decode()

    @property
    def model_name(self):
        """The model, None if only the key names it."""
        return self.c.model.decode() if self.c.has_model else None

    @property
    def tenant_id(self):
        """The tenant, None if only the key names it."""
        return self.c.tenant.decode() if self.c.has_tenant else None

    @property
    def block_size(self):
        """Tokens per block."""
        return self.c.block_size

    @property
    def blocks(self):
        """(rank, tier, block) triples."""
        return self.c.blocks

    @property
    def worker_count(self):
        """The number of its workers."""
        return self.c.workers.size()

    def workers(self, size_t start=0, size_t stop=0xffffffff):
        """Returns the ids of its workers, or of a part: ints and texts, in the order of `apply`.

        ValueError if one is not well-formed.
        """
        cdef size_t i
        ids = []
        for i in range(start, min(stop, self.c.workers.size())):
            worker_id = json.loads(self.c.workers[i].id)
            if isinstance(worker_id, str):
                worker_id.encode()  # refuses an escaped lone surrogate, which is no text
            ids.append(worker_id)
        return ids

    def restore(self):
        """Starts to apply the entry."""
        cdef Restore restore = Restore.__new__(Restore)
        restore.entry = self
        restore.c = new CRestore(deref(self.stage.c), deref(self.c))
        return restore


cdef class Restore:
    """An entry that is being applied. Made by `StagedEntry.restore`."""

    def __init__(self):
        raise TypeError("use StagedEntry.restore")

    def __dealloc__(self):
        del self.c

    @property
    def blocks(self):
        """Blocks stored so far."""
        return self.c.stored()

    def apply(self, PrefixIndex index not None, list workers not None, uint32_t max_blocks):
        """Stores about `max_blocks` blocks; True while there are more.

        `workers[i]` is the index's worker for `entry.workers()[i]`. If it is None or has been
        removed, its blocks are skipped.
        """
        cdef vector[CWorker*] wanted
        cdef Worker worker
        if <size_t>len(workers) != self.entry.c.workers.size():
            raise ValueError("expected as many workers as the entry has")
        for worker in workers:
            wanted.push_back(&worker.c if worker is not None and worker.index is index else NULL)
        cdef CWorkersOf* to = new CWorkersOf(deref(index.c), wanted)
        cdef CSteps* steps = new CSteps(max_blocks * kStepsARestored)
        try:
            return self.c.apply(deref(index.c), deref(to), deref(steps))
        finally:
            del to
            del steps
