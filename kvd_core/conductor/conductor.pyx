# distutils: language = c++
"""The conductor's part of an index: publishers of the KV Events standard, and what they hold.

`conductor/conductor.hpp` has the picture, the invariants and the costs, `conductor/holdings.hpp`
the counting of a query. All blocks are in the index that the conductor is made for, which needs no
knowledge of it.

One thread owns both. Nothing here does I/O, reads a clock or logs.
"""

import json
from functools import lru_cache

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cython.operator cimport dereference as deref
from libc.stdint cimport INT64_MAX

from kvd_core.events.decoder import REASONS
from kvd_core.index.prefix_index cimport kAllLayers, kNone, resolve_waiting, verify_if_debug

from kvd_core.index.prefix_index import SLICE_STEPS

DEFAULT_SEED = 1337
OUTCOMES = ("placed", "parked", "full", "refused")


cdef extern from "base/hash.hpp" namespace "kvd" nogil:
    uint64_t lora_term(string_view)
    uint64_t salt_term(string_view)


cdef extern from "index/verify.hpp" namespace "kvd" nogil:
    cppclass CConductorVerifier "kvd::Verifier":
        CConductorVerifier(const CIndex&)
        void run() except +
        void run(const CConductor&) except +


@lru_cache(maxsize=4096)
def namespace(str lora_name, str cache_salt):
    """Returns the number of the namespace that an adapter and a salt make; 0 without either."""
    cdef bytes lora = lora_name.encode()
    cdef bytes salt = cache_salt.encode()
    return lora_term(string_view(PyBytes_AS_STRING(lora), PyBytes_GET_SIZE(lora))) + salt_term(
        string_view(PyBytes_AS_STRING(salt), PyBytes_GET_SIZE(salt))
    )


@lru_cache(maxsize=65536)
def _json(str text):
    return json.dumps(text).encode()


@lru_cache(maxsize=65536)
def _text(bytes key):
    return json.loads(key)


cdef class Conductor:
    """The conductor's part of one index.

    It costs the index nothing before the first source or the first query by hash.
    """

    def __cinit__(self, PrefixIndex index not None, uint64_t seed=DEFAULT_SEED):
        self.index = index
        self.c = new CConductor(deref(index.c), seed)
        self.layers = {}

    def __dealloc__(self):
        del self.c

    def add_source(self, str instance_id not None, str lora_name, str cache_salt, uint32_t dp_rank,
                   bint store):
        """Adds a registration and returns the Source that its events are given to."""
        cdef Source source = Source.__new__(Source)
        source.conductor = self
        source.instance_id = instance_id
        source.c = self.c.add_source(
            _json(instance_id), namespace(lora_name, cache_salt), namespace(lora_name, ""), dp_rank,
            store,
        )
        return source

    def has(self, str instance_id not None):
        """Returns whether any registration names the instance."""
        return self.c.find(_json(instance_id)) != NULL

    def instances(self):
        """Returns the ids of all instances."""
        return [json.loads(each) for each in self.c.keys_of_instances()]

    def link(self, str instance_id not None, Worker worker):
        """Lets the instance's holdings count as the worker's, too; None ends that."""
        cdef CInstance* instance = self.c.find(_json(instance_id))
        cdef CWorker* linked = NULL
        if worker is not None:
            linked = &worker.c
        if instance != NULL:
            self.c.link(instance, linked)

    def sequence(self, uint32_t max_steps):
        """Prepares queries by hash; True once they find all blocks.

        From the first call on, every new block gets its sequence hash. Blocks that were there
        before get theirs in steps of at most about 0.1 us, two a block.
        """
        return self.c.sequence(max_steps)

    cpdef bytes query_tokens(
        self, BodyScanner scanner, int array, str lora_name, str cache_salt, str tenant,
        str instance
    ):
        """Returns what every instance, or one, holds of a prompt, as JSON bytes.

        `array` is the position of the u32 token array in the scanner.
        """
        cdef size_t n = 0
        cdef const uint32_t* tokens = scanner.u32(array, &n)
        self.holdings.by_token_ids(deref(self.c), tokens, n, namespace(lora_name, cache_salt))
        return self.render(tenant, instance)

    cpdef bytes query_hashes(
        self, BodyScanner scanner, int array, str lora_name, str cache_salt, str tenant,
        str instance
    ):
        """Returns the same as `query_tokens` for a list of sequence hashes from the root.

        First completes what `sequence` has not done yet: O(blocks of the index).
        """
        self.finish_sequences()
        cdef size_t n = 0
        cdef const uint64_t* hashes = scanner.u64(array, &n)
        self.holdings.by_sequences(deref(self.c), hashes, n, namespace(lora_name, cache_salt))
        return self.render(tenant, instance)

    def tiers_of_tokens(self, bytes tokens not None, str lora_name, str cache_salt, str instance):
        """Returns how far every instance, or one, reaches into a prompt, rank by rank.

        `tokens` are the ids, 4 bytes each in the machine's order. A rank's figures are (dp rank,
        device, with its own host memory, with all host memory, with disk and external), in tokens:
        each continues where the one before ends. An instance without an engine of the adapter is
        left out unless it reaches somewhere.
        """
        self.holdings.by_token_ids(
            deref(self.c),
            <const uint32_t*>PyBytes_AS_STRING(tokens),
            PyBytes_GET_SIZE(tokens) // sizeof(uint32_t),
            namespace(lora_name, cache_salt),
        )
        return self.tiers(lora_name, instance)

    def tiers_of_hashes(self, bytes hashes not None, str lora_name, str cache_salt, str instance):
        """Returns the same for sequence hashes from the root, 8 bytes each."""
        self.holdings.by_sequences(
            deref(self.c),
            <const uint64_t*>PyBytes_AS_STRING(hashes),
            PyBytes_GET_SIZE(hashes) // sizeof(uint64_t),
            namespace(lora_name, cache_salt),
        )
        return self.tiers(lora_name, instance)

    def match_tokens(self, tokens, str lora_name="", str cache_salt="", str instance=""):
        """Returns the rows for a list of tokens, for tests and scripts."""
        cdef vector[uint32_t] given = tokens
        self.holdings.by_token_ids(
            deref(self.c), given.data(), given.size(), namespace(lora_name, cache_salt)
        )
        return json.loads(self.render("", instance))[""]

    def match_hashes(self, hashes, str lora_name="", str cache_salt="", str instance=""):
        """Returns the rows for a list of sequence hashes, for tests and scripts."""
        cdef vector[uint64_t] given = hashes
        self.finish_sequences()
        self.holdings.by_sequences(
            deref(self.c), given.data(), given.size(), namespace(lora_name, cache_salt)
        )
        return json.loads(self.render("", instance))[""]

    cdef int finish_sequences(self) except -1:
        if not self.c.sequenced():
            while not self.c.sequence(0xffffffff):
                pass
        return 0

    cdef bytes render(self, str tenant, str instance):
        cdef bytes of = _json(tenant)
        cdef bytes only = _json(instance) if instance else b""
        self.holdings.render(
            deref(self.c),
            self.index.order,
            string_view(PyBytes_AS_STRING(of), PyBytes_GET_SIZE(of)),
            string_view(PyBytes_AS_STRING(only), PyBytes_GET_SIZE(only)),
            self.text,
        )
        return PyBytes_FromStringAndSize(self.text.data(), self.text.size())

    cdef list tiers(self, str lora_name, str instance):
        cdef bytes only = _json(instance) if instance else b""
        cdef uint64_t size = self.index.c.block_size()
        cdef vector[CTierRow] rows = self.holdings.tiers(
            deref(self.c),
            self.index.order,
            namespace(lora_name, ""),
            string_view(PyBytes_AS_STRING(only), PyBytes_GET_SIZE(only)),
        )
        found = []
        for row in rows:
            ranks = [
                (each.dp_rank, each.device * size, each.own_host * size, each.host * size,
                 each.disk * size)
                for each in row.ranks
            ]
            found.append((_text(row.key), ranks))
        return found

    cdef LayerId layer(self, str medium) except? 0xfffffffe:
        found = self.layers.get(medium)
        if found is None:
            found = self.c.medium(medium.encode(), json.dumps(medium).encode())
            if found != kNone:
                self.layers[medium] = found
        return found

    cdef uint32_t mask(self, medium) except? 0xfffffffe:
        """Returns the layer of a medium, or all for None; 0 without a layer for it."""
        if medium is None:
            return kAllLayers
        cdef LayerId layer = self.layer(medium)
        return 0 if layer == kNone else <uint32_t>1 << layer

    def stats(self):
        """Returns the number and bytes of waiting blocks' entries, without the parked blocks."""
        return {"waiting": self.c.waiter_count(), "bytes": self.c.bytes()}

    def verify(self):
        """Checks every invariant of index and conductor; RuntimeError names the first broken."""
        cdef CConductorVerifier* verifier = new CConductorVerifier(deref(self.index.c))
        try:
            verifier.run()
            verifier.run(deref(self.c))
        finally:
            del verifier


cdef class Source:
    """One registration. Made by `Conductor.add_source`.

    A holder is named by a number for its backend, and by a data-parallel rank or None. Hashes are
    unsigned 64-bit integers, media are upper-case names, namespaces are those of `namespace`.
    """

    def __init__(self):
        raise TypeError("use Conductor.add_source")

    cdef RankId holder(self, uint32_t backend, rank) except? 0xfffffffe:
        if self.c == NULL:
            raise RuntimeError("the source was removed")
        return self.conductor.c.holder(
            self.c, backend, rank is not None, 0 if rank is None else rank
        )

    def store(
        self,
        uint32_t backend,
        rank,
        str medium not None,
        hashes,
        tokens,
        parent,
        uint64_t space,
        bint inherits=False,
        bint by_engine=False,
        objects=None,
        bint whole=True,
    ):
        """Stores consecutive blocks with known tokens, below `parent` or at the root.

        Only whole blocks count. With `inherits`, a known parent's namespace takes precedence over
        `space`. `objects` are lists of ascending hashes of images, one list a block. Returns one of
        OUTCOMES, or why there is none: "media", "holders". OverflowError or TypeError for numbers
        out of range. Unless `whole`, calls of `resolve_waiting` have to follow.
        """
        cdef vector[uint64_t] named = hashes
        cdef vector[uint32_t] content = tokens
        cdef vector[uint32_t] begin
        cdef vector[uint64_t] mm
        cdef CStoredBlocks stored
        cdef uint32_t size = self.conductor.index.c.block_size()
        cdef LayerId layer = self.conductor.layer(medium)
        cdef RankId id = self.holder(backend, rank)
        if layer == kNone:
            return "media"
        if id == kNone:
            return "holders"
        stored.n = <uint32_t>min(named.size(), content.size() // size if size else 0)
        stored.hashes = named.data()
        stored.tokens = content.data()
        stored.has_parent = parent is not None
        stored.parent = parent if parent is not None else 0
        stored.layer = layer
        stored.space = space
        stored.inherits = inherits
        stored.by_engine = by_engine
        stored.mm_begin = NULL
        stored.mm = NULL
        if objects is not None:
            for i in range(stored.n):
                begin.push_back(<uint32_t>mm.size())
                for item in objects[i]:
                    mm.push_back(item)
            begin.push_back(<uint32_t>mm.size())
            stored.mm_begin = begin.data()
            stored.mm = mm.data()
        cdef int outcome = <int>self.conductor.c.store(self.c, id, stored)
        if whole:
            resolve_waiting(deref(self.conductor.index.c))
        verify_if_debug(deref(self.conductor.index.c))
        return OUTCOMES[outcome]

    def store_named(
        self,
        uint32_t backend,
        rank,
        str medium not None,
        hashes,
        uint64_t space,
        bint by_engine=False,
        bint whole=True,
    ):
        """Stores blocks known by hash alone; returns as `store` does."""
        cdef vector[uint64_t] named = hashes
        cdef LayerId layer = self.conductor.layer(medium)
        cdef RankId id = self.holder(backend, rank)
        cdef CSteps* all = NULL
        cdef uint32_t came
        if layer == kNone:
            return "media"
        if id == kNone:
            return "holders"
        all = new CSteps(INT64_MAX)
        try:
            came = self.conductor.c.store_named(
                self.c, id, named.data(), 0, <uint32_t>named.size(), layer, space, by_engine, False,
                all[0],
            )
        finally:
            self.spent += INT64_MAX - all.rest()
            del all
        if whole:
            resolve_waiting(deref(self.conductor.index.c))
        verify_if_debug(deref(self.conductor.index.c))
        return "full" if came == kNone else "placed"

    def resolve_waiting(self, Slice slice not None):
        """Continues what stored blocks have set off; True once all is done and steps are left.

        The steps that `store_named` has taken since the last call count as taken from the slice.
        """
        slice.c.take(self.spent)
        self.spent = 0
        return self.conductor.c.resolve_waiting(slice.c[0]) and slice.c.left()

    def remove(self, uint32_t backend, rank, medium, hashes, uint64_t space, bint by_engine=False):
        """Takes blocks off one medium, or off all if that is None; unknown hashes are counted."""
        cdef vector[uint64_t] named = hashes
        cdef RankId id = self.holder(backend, rank)
        cdef uint32_t mask = self.conductor.mask(medium)
        cdef size_t i
        if mask == 0 or id == kNone:
            return
        for i in range(named.size()):
            self.conductor.c.remove(self.c, id, named[i], mask, space, by_engine)
        verify_if_debug(deref(self.conductor.index.c))

    def clear(self, uint32_t backend, rank, medium=None, space=None):
        """Drops what a holder has on one medium or all, in one namespace or all."""
        cdef RankId id = self.holder(backend, rank)
        cdef uint32_t mask = self.conductor.mask(medium)
        if mask == 0 or id == kNone:
            return
        self.conductor.c.clear(self.c, id, mask, 0 if space is None else space, space is None)
        verify_if_debug(deref(self.conductor.index.c))

    def engine_events(self, str lora_name not None, str cache_salt not None):
        """Returns an EngineEvents, which takes batches of an engine's own events.

        It supplies the adapter and the salt for events that name none.
        """
        if self.c == NULL:
            raise RuntimeError("the source was removed")
        cdef EngineEvents events = EngineEvents.__new__(EngineEvents)
        events.source = self
        events.slice_steps = SLICE_STEPS
        events.c = new CEngineEvents(
            deref(self.conductor.c), self.c, lora_name.encode(), cache_salt.encode()
        )
        return events

    def holders(self):
        """Returns the (backend, rank) of every holder of the source."""
        if self.c == NULL:
            return []
        return [(each.backend, each.dp_rank if each.ranked else None) for each in self.c.holders]

    def settled(self):
        """Notes that the publisher has passed its restored position.

        Until then, a re-announcement of a restored block is no second copy.
        """
        if self.c != NULL:
            self.conductor.c.settled(deref(self.c))

    def drop_idle(self):
        """Forgets holders that hold nothing, so that new ones find room."""
        if self.c != NULL:
            self.conductor.c.drop_idle(self.c)

    def stats(self):
        """Returns the numbers of blocks that the source holds, and of queries that matched them.

        `blocks` are in the tree, counted for each rank and medium; `waiting` blocks lack tokens or
        a parent. `asked` are the queries of a block or more that have shown the instance; for
        `matched` of these, the source held the first block.
        """
        cdef pair[uint64_t, uint64_t] held
        if self.c == NULL:
            return {"blocks": 0, "waiting": 0, "asked": 0, "matched": 0}
        held = self.conductor.c.held_by(deref(self.c))
        return {
            "blocks": held.first,
            "waiting": held.second,
            "asked": self.c.instance.asked - self.c.asked_before,
            "matched": self.c.matched,
        }

    def remove_all(self):
        """Ends the registration: its blocks stop counting, and `PrefixIndex.sweep` frees them."""
        if self.c != NULL:
            self.conductor.c.remove_source(self.c)
            self.c = NULL


cdef class EngineEvents:
    """Takes an engine's own events for a source. Made by `Source.engine_events`."""

    def __init__(self):
        raise TypeError("use Source.engine_events")

    def __dealloc__(self):
        del self.c

    def apply(self, bytes payload not None):
        """Applies one batch, or begins to, and returns True; False if it is refused whole.

        Nothing of a refused batch is counted. Returns None when the batch takes longer than
        `slice_steps` steps of about 0.1 us: then call `advance` until it returns something else.
        Bad input is counted and never raises. RuntimeError if the source was removed.
        """
        if self.source.c == NULL:
            raise RuntimeError("the source was removed")
        cdef Progress progress = self.c.apply(
            <const uint8_t*>PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload), self.slice_steps
        )
        if progress == Progress.UNFINISHED:
            self.payload = payload
        return self.result_of(progress)

    def advance(self):
        """Continues an unfinished batch; returns what `apply` does."""
        if self.source.c == NULL:
            raise RuntimeError("the source was removed")
        cdef Progress progress = self.c.advance(self.slice_steps)
        if progress != Progress.UNFINISHED:
            self.payload = None
        return self.result_of(progress)

    cdef object result_of(self, Progress progress):
        verify_if_debug(deref(self.source.conductor.index.c))
        return None if progress == Progress.UNFINISHED else progress == Progress.DONE

    def flaw(self):
        """Returns why the last batch was not wholly understood: the first of REASONS, else ""."""
        cdef size_t reason = self.c.flaw()
        return "" if reason == kReasons else REASONS[reason]

    def full(self):
        """Returns the number of events, or parts of events, that found no room."""
        return self.c.counters.full

    def forget(self):
        """Forgets what events have shown: another engine process speaks from now on.

        The rest of an unfinished batch is dropped, too.
        """
        self.c.forget()
        self.payload = None

    def stats(self):
        """Returns totals of events: stored, parked, mismatched, ignored, and bad by reason."""
        cdef const CEngineStats* n = &self.c.counters
        cdef size_t i
        return {
            "events": n.events,
            "stored": n.stored,
            "parked": n.parked,
            "mismatches": {"lora_name": n.lora_name, "block_size": n.block_size},
            "ignored": {
                "remote": n.remote,
                "group": n.group,
                "pairs": n.pairs,
                "full": n.full,
                "media": n.media,
                "holders": n.holders,
                "refused": n.refused,
            },
            "bad": {REASONS[i]: n.bad[i] for i in range(kReasons)},
        }
