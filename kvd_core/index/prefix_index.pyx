"""The prefix index of one partition (model, tenant): who holds which blocks on which tier.

The structure and its rules are in the C++ headers that this module binds: `index/tree.hpp` (the
radix tree and the holders), `index/names.hpp` (what ranks call their blocks), `index/index.hpp`
(the rules), `index/stream.hpp` (from engine events to operations), `index/match.hpp` (queries),
`dump/dump.hpp`.

One thread owns an index. Nothing here does I/O, reads a clock or logs.
"""

import json
from collections import namedtuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cython.operator cimport dereference as deref
from libc.stdint cimport INT64_MAX, UINT64_MAX
from libcpp.memory cimport make_shared, shared_ptr

from kvd_core.index.chronicle cimport CChronicle, Chronicle

from kvd_core.events.decoder import REASONS

TIERS = ("device", "host", "disk", "external")
MAX_BLOCKS = kMaxBlocks
CLEARED = kCleared
FLAWED = kFlawed
UNFINISHED = kUnfinished
NO_ROOM = kNoRoom
NEW_RANK = kNewRank
ALL_TIERS = kAllTiers
# Steps of a batch that are applied before other tasks run, about 2 ms.
SLICE_STEPS = 20_000
# Counts of prompts, and their first tokens (see index/prompt_stats.hpp).
PromptStats = namedtuple(
    "PromptStats", ("prompts", "salted", "adapted", "announcing_salts", "first_tokens")
)
IGNORED = ("medium", "remote", "kind", "group", "block_size", "tokens", "too_many_ranks", "full")


cdef uint64_t seed_of(str lora_name, str cache_salt) except? 0:
    cdef bytes lora = (lora_name or "").encode()
    cdef bytes salt = (cache_salt or "").encode()
    return local_hash_seed(
        string_view(PyBytes_AS_STRING(lora), PyBytes_GET_SIZE(lora)),
        string_view(PyBytes_AS_STRING(salt), PyBytes_GET_SIZE(salt)),
    )


cdef object prompt_stats_of(const CPromptStats* side):
    """Returns the counts of one side as a PromptStats."""
    cdef size_t i, kept = min(side.prompts, sizeof(side.first) // sizeof(side.first[0]))
    first = [side.first[i] for i in range(kept)]
    return PromptStats(side.prompts, side.salted, side.adapted, side.announcing_salts, first)


cdef int resolve_waiting(CIndex& index) except -1:
    """Places all blocks that waited for those just placed."""
    cdef CSteps* all = new CSteps(INT64_MAX)
    try:
        index.resolve_waiting(all[0])
    finally:
        del all
    return 0


cdef class Slice:
    """What is left of a slice of long work, for work that counts its steps in Python."""

    def __cinit__(self, int64_t steps):
        """A step is about 0.1 us; none is left once far more time has passed than they take."""
        self.c = new CSteps(steps)

    def __dealloc__(self):
        del self.c

    def take(self, size_t steps):
        """Takes steps; returns whether none are left."""
        self.c.take(steps)
        return not self.c.left()


cdef class IngestStats:
    """Totals over the events of every stream that uses this object."""

    def as_dict(self):
        """Returns events and batches by kind; `ignored` and `bad` by reason."""
        cdef size_t i
        return {
            "batches": self.c.batches,
            "stored": self.c.stored,
            "removed": self.c.removed,
            "cleared": self.c.cleared,
            "ignored": {IGNORED[i]: self.c.ignored[i] for i in range(kIgnored)},
            "bad": {REASONS[i]: self.c.bad[i] for i in range(kReasons)},
        }


cdef class Budget:
    """The blocks that indexes may hold together, and those that they hold.

    `max_blocks` bounds the distinct blocks, and likewise the (rank, block) pairs; 0 is no bound.
    Lowering it drops no blocks.
    """

    def __cinit__(self, uint64_t max_blocks=0):
        self.c = make_shared[CBudget]()
        self.max_blocks = max_blocks

    @property
    def max_blocks(self):
        cdef CBudget* budget = self.c.get()
        return 0 if budget.max == UINT64_MAX else budget.max

    @max_blocks.setter
    def max_blocks(self, uint64_t blocks):
        cdef CBudget* budget = self.c.get()
        budget.max = blocks if blocks != 0 else UINT64_MAX

    @property
    def blocks(self):
        """Distinct blocks in the indexes, including those of ranks not yet swept."""
        return self.c.get().blocks

    @property
    def pairs(self):
        """(rank, block) pairs: the names of ranks for the blocks that they hold."""
        return self.c.get().names

    @property
    def refused(self):
        """Announced blocks that found no room, counted at each announcement."""
        return self.c.get().refused

    @property
    def crowded(self):
        """Of the refused blocks, those of partitions where too many wait to be placed."""
        return self.c.get().crowded


cdef class PrefixIndex:
    """Blocks of `block_size` tokens and their holders.

    `counters` receives the event totals of this index's streams; several indexes may share one. The
    index refuses what exceeds `max_blocks` (its blocks, or the names of one rank), and what the
    `budget` has no room for, which several indexes may share as well. It notes what happens to the
    blocks of workers in the `chronicle`, if there is one.
    """

    def __cinit__(
        self,
        uint32_t block_size,
        IngestStats counters not None,
        uint32_t max_blocks=MAX_BLOCKS,
        Budget budget=None,
        Chronicle chronicle=None,
    ):
        if max_blocks > MAX_BLOCKS:
            raise ValueError(f"an index has at most {MAX_BLOCKS} blocks")
        cdef shared_ptr[CBudget] shared
        if budget is not None:
            shared = budget.c
        cdef shared_ptr[CChronicle] noted
        if chronicle is not None:
            noted = chronicle.c
        self.c = new CIndex(block_size, max_blocks, shared, noted)
        self.counters = counters
        self.workers = []

    def __dealloc__(self):
        del self.c

    @property
    def block_size(self):
        """Tokens per block."""
        return self.c.block_size()

    def add_worker(self, worker_id):
        """Adds a worker (an int or a str id) without ranks and returns it."""
        cdef Worker worker = Worker.__new__(Worker)
        worker.index = self
        worker.worker_id = worker_id
        worker.c.key = json.dumps(str(worker_id)).encode()
        worker.c.number = json.dumps(worker_id).encode()
        self.workers.append(worker)
        self.order.push_back(&worker.c)
        return worker

    def sweep(self, uint32_t max_steps):
        """Frees what removed and cleared ranks held; True while there is more.

        A step takes at most about 0.1 us and frees up to 8 blocks.
        """
        return self.c.sweep(max_steps)

    def predict(self, double ttl_s, uint32_t max_entries, double target_ratio):
        """Keeps predictions of what ranks cache from now on, for pools (see `index/predicted.hpp`).

        They live `ttl_s` seconds; beyond `max_entries` predicted blocks the oldest go, down to the
        ratio. Only the first call has an effect.
        """
        self.c.predict(ttl_s, max_entries, <uint32_t>(max_entries * target_ratio))

    def predicted(self):
        """Returns the number of predicted blocks over all ranks."""
        return 0 if self.c.predicted() == NULL else self.c.predicted().size()

    def forget_predicted(self, double now, size_t limit):
        """Ends at most `limit` predictions that are too old or too many; True if more are left."""
        return self.c.predicted() != NULL and self.c.predicted().prune(now, limit)

    cpdef bytes query_tokens(self, BodyScanner scanner, int array, str lora_name=None,
                             str cache_salt=None):
        """Returns the matches of a prompt as JSON bytes (see `index/answer.hpp`).

        `array` is the position of the u32 token array in the scanner. A salted query counts salted
        blocks on ranks whose stream announces salts, and unsalted blocks on the others.
        """
        cdef size_t n = 0
        cdef const uint32_t* tokens = scanner.u32(array, &n)
        cdef uint32_t size = self.c.block_size()
        n = n // size if size != 0 else 0
        self.locals.resize(n)
        self.match_scratch.reset(deref(self.c))
        if n != 0:
            self.note_prompt(tokens[0], 1 if cache_salt else 0, 1 if lora_name else 0)
        if cache_salt:
            local_hashes(tokens, n, size, seed_of(lora_name, cache_salt), self.locals.data())
            self.match_scratch.add(deref(self.c), self.locals.data(), n, kSalted)
        local_hashes(tokens, n, size, seed_of(lora_name, None), self.locals.data())
        self.match_scratch.add(
            deref(self.c), self.locals.data(), n, kUnsalted if cache_salt else kAll
        )
        return self.answer(self.locals.data(), n)

    cpdef bytes query_hashes(self, BodyScanner scanner, int array):
        """Returns the matches of a list of local hashes as JSON bytes."""
        cdef size_t n = 0
        cdef const uint64_t* hashes = self.match_hashes(scanner, array, &n)
        return self.answer(hashes, n)

    cpdef bytes query_tiers(self, BodyScanner scanner, int array):
        """Returns them as `query_hashes` does, for each rank and tier (tiered_answer.hpp)."""
        cdef size_t n = 0
        cdef const uint64_t* hashes = self.match_hashes(scanner, array, &n)
        self.note_question(hashes, n)
        cdef CTieredAnswer* renderer = new CTieredAnswer(deref(self.c), self.match_scratch)
        cdef string_view text
        try:
            text = renderer.render(self.order, self.text)
        finally:
            del renderer
        return PyBytes_FromStringAndSize(text.data(), text.size())

    cdef const uint64_t* match_hashes(self, BodyScanner scanner, int array,
                                      size_t* n) except? NULL:
        """Matches a list of local hashes; returns these, and sets their number."""
        cdef const uint64_t* hashes = scanner.u64(array, n)
        self.match_scratch.reset(deref(self.c))
        self.match_scratch.add(deref(self.c), hashes, n[0], kAll)
        return hashes

    cdef void note_question(self, const uint64_t* locals_, size_t blocks) noexcept:
        """Counts the query of the last match, of a prompt with these local hashes."""
        if blocks != 0 and self.c.tree().block_count() != 0:
            self.questions += 1
            self.c.first_blocks().note(self.questions, locals_[0])
            self.matched += not self.match_scratch.touched().empty()

    cdef void note_prompt(self, uint32_t first, bint is_salted, bint is_adapted) noexcept:
        """Counts the prompt of a query by tokens, if it has a block or more."""
        if self.c.tree().block_count() != 0:
            self.c.asked().note(first, is_salted, is_adapted, True)

    cdef bytes answer(self, const uint64_t* locals_, size_t blocks):
        self.note_question(locals_, blocks)
        cdef CAnswer* renderer = new CAnswer(deref(self.c), self.match_scratch)
        cdef string_view text
        try:
            text = renderer.render(self.order, self.text)
        finally:
            del renderer
        return PyBytes_FromStringAndSize(text.data(), text.size())

    def match(self, locals):
        """Returns the depths in blocks of every rank that matches a list of local hashes.

        They are {(worker id, dp rank): (device, host, disk)}, cumulative over the tiers, with the
        number of device holders of each block of the longest device match.
        """
        cdef vector[uint64_t] hashes = locals
        cdef Worker worker
        cdef CDepth depth
        self.match_scratch.reset(deref(self.c))
        self.match_scratch.add(deref(self.c), hashes.data(), hashes.size(), kAll)
        found = {}
        for worker in self.workers:
            for entry in worker.c.ranks:
                depth = self.match_scratch.depth(entry.second)
                if depth.disk:
                    found[worker.worker_id, entry.first] = (depth.device, depth.host, depth.disk)
        return found, list(self.match_scratch.frequencies())

    def dump(self, bint binary=False):
        """Starts a dump of all blocks, as text or binary (`dump/format.hpp`).

        The dump stays valid while the index changes.
        """
        cdef Dump dump = Dump.__new__(Dump)
        dump.index = self
        dump.c = new CDump(deref(self.c), binary)
        return dump

    cdef vector[const string*] owners(self):
        cdef vector[const string*] owners
        cdef Worker worker
        owners.resize(self.c.rank_end(), NULL)
        for worker in self.workers:
            for entry in worker.c.ranks:
                owners[entry.second] = &worker.c.number
        return owners

    def stats(self):
        """Returns sizes now and totals since the start, in blocks unless a name says otherwise."""
        cdef const CIndexStats* t = &self.c.stats()
        return {
            "blocks": self.c.tree().block_count(),
            "questions": self.questions,
            "matched": self.matched,
            "chains": self.c.tree().node_count(),
            "bytes": self.c.bytes(),
            "held": {TIERS[i]: self.c.held(i) for i in range(kTierLayers)},
            "parked_now": self.c.parked_count(),
            "records": self.c.record_count(),
            "exceptions": self.c.exception_count(),
            "stored": t.stored,
            "refreshed": t.refreshed,
            "copies": t.copies,
            "rebound": t.rebound,
            "removed": t.removed,
            "removed_copies": t.removed_copies,
            "removed_unknown": t.removed_unknown,
            "parked": t.parked,
            "unparked": t.unparked,
            "parked_dropped": t.parked_dropped,
            "parked_unsalted": t.parked_unsalted,
            "self_references": t.self_references,
        }

    def stores_asked(self):
        """Returns whether blocks with which earlier queries began are stored by now.

        Then queries and engines hash alike, even if no query has matched.
        """
        return self.c.stores_asked(self.questions)

    def asked(self):
        """Returns counts of the prompts of queries by tokens, put while the index had blocks."""
        return prompt_stats_of(&self.c.asked())

    def announced(self):
        """Returns counts of the prompts whose first blocks engines have stored with tokens."""
        return prompt_stats_of(&self.c.announced())

    def verify(self):
        """Checks every invariant of the index; RuntimeError names the first broken one."""
        cdef CVerifier* verifier = new CVerifier(deref(self.c))
        try:
            verifier.run()
        finally:
            del verifier


cdef class Worker:
    """A worker of one index. Made by `PrefixIndex.add_worker`."""

    def __init__(self):
        raise TypeError("use PrefixIndex.add_worker")

    cdef RankId rank_of(self, uint32_t dp_rank) except? 0xffffffff:
        if self.index is None:
            raise RuntimeError("the worker was removed")
        cdef RankId rank = self.c.rank(deref(self.index.c), dp_rank)
        if rank == kNone:
            raise OverflowError(f"worker {self.worker_id} has too many ranks")
        return rank

    def register(self, uint32_t dp_rank):
        """Registers the rank: from now on answers list it even if nothing of it matches."""
        cdef RankId rank = self.rank_of(dp_rank)
        self.index.c.rank(rank).listed = True

    def unregister(self, uint32_t dp_rank):
        """Removes one rank with its blocks, which `PrefixIndex.sweep` frees; KeyError if absent.

        Unregistered ranks that only its stream has spoken for go as well.
        """
        if self.index is None or self.c.find(dp_rank) == kNone:
            raise KeyError(dp_rank)
        self.c.retire(deref(self.index.c), dp_rank)

    def ranks(self):
        """Returns the data-parallel ranks of the worker, registered or not."""
        return [entry.first for entry in self.c.ranks]

    def settled(self):
        """Lets further announcements of its streams count as copies (see recovery.pyx)."""
        if self.index is not None:
            for entry in self.c.ranks:
                self.index.c.rank(entry.second).settling = False

    def remove(self):
        """Removes the worker with all its ranks, also those seen only in batches."""
        if self.index is None:
            return
        self.c.retire_all(deref(self.index.c))
        cdef size_t at = self.index.workers.index(self)
        del self.index.workers[at]
        self.index.order.erase(self.index.order.begin() + at)
        self.index = None

    def stream(self, uint32_t dp_rank):
        """Returns a stream whose batches speak for `dp_rank` unless they name a rank themselves."""
        if self.index is None:
            raise RuntimeError("the worker was removed")
        cdef Stream stream = Stream.__new__(Stream)
        stream.worker = self
        stream.c = new CStream(deref(self.index.c), self.c, dp_rank, self.index.counters.c)
        stream.slice_steps = SLICE_STEPS
        return stream

    # The operations behind a stream, for tests and scripts. Hashes are unsigned 64-bit integers.

    def store(self, uint32_t dp_rank, names, locals, parent=None, LayerId tier=0):
        """Stores blocks in path order below `parent` (a name of this rank) or at the root.

        False if they are refused because the index is full.
        """
        cdef vector[uint64_t] named = names
        cdef vector[uint64_t] hashed = locals
        if named.size() != hashed.size() or tier >= kTierLayers:
            raise ValueError("expected as many local hashes as names, and a tier of 0..3")
        cdef CStore s
        s.names = named.data()
        s.locals = hashed.data()
        s.n = <uint32_t>named.size()
        s.has_parent = parent is not None
        s.parent = parent if parent is not None else 0
        s.layer = tier
        s.term = 0
        cdef cbool stored = self.index.c.store(self.rank_of(dp_rank), s)
        resolve_waiting(deref(self.index.c))
        return stored

    def store_named(self, uint32_t dp_rank, names, LayerId tier, bint offload=True):
        """Stores blocks known by name alone; `offload` marks the rank as one that offloads so.

        False if they are refused because the index is full.
        """
        cdef vector[uint64_t] n = names
        cdef RankId rank = self.rank_of(dp_rank)
        if offload:
            self.index.c.rank(rank).offloads = True
        return self.index.c.store_named(rank, n.data(), <uint32_t>n.size(), tier, False)

    def drop(self, uint32_t dp_rank, names, LayerId tier=0):
        """Removes blocks of one tier by name; unknown names are counted."""
        cdef RankId rank = self.rank_of(dp_rank)
        for name in names:
            self.index.c.remove(rank, name, tier)

    def clear(self, uint32_t dp_rank, tier=None):
        """Removes everything that the rank holds, or that it holds on one tier.

        It is invisible from now on; `PrefixIndex.sweep` may be needed to free it.
        """
        self.rank_of(dp_rank)
        cdef uint32_t mask = kAllLayers if tier is None else self.index.c.tier_mask(tier)
        self.c.clear(deref(self.index.c), dp_rank, mask)


cdef class Stream:
    """The events of one registered (worker, rank). Made by `Worker.stream`."""

    def __init__(self):
        raise TypeError("use Worker.stream")

    def __dealloc__(self):
        del self.c

    def apply(self, bytes payload not None):
        """Applies one batch as it came off the wire, or begins to.

        Bad input, and blocks that the index has no room for, are counted and never raise. Returns 0
        or bits: CLEARED when earlier losses do not matter any more on the tiers that `cleared`
        returns, FLAWED when part of the batch could not be understood, NO_ROOM when not all of it
        was stored, NEW_RANK when it is the first batch for its rank or the first that names a rank.
        Returns UNFINISHED alone when the batch takes longer than `slice_steps` steps of about
        0.1 us: then call `advance` until it returns something else, before the next batch.
        RuntimeError if the worker was removed.
        """
        if self.worker.index is None:
            raise RuntimeError("the worker was removed")
        cdef uint32_t outcome = self.c.apply(
            <const uint8_t*>PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload), self.slice_steps
        )
        if outcome == kUnfinished:
            self.payload = payload
        verify_if_debug(deref(self.worker.index.c))
        return outcome

    def advance(self):
        """Continues an UNFINISHED batch; returns what `apply` does."""
        if self.worker.index is None:
            raise RuntimeError("the worker was removed")
        cdef uint32_t outcome = self.c.advance(self.slice_steps)
        if outcome != kUnfinished:
            self.payload = None
        verify_if_debug(deref(self.worker.index.c))
        return outcome

    def flaw(self):
        """Returns why the last batch is FLAWED: the first of REASONS that it met, else ""."""
        cdef size_t reason = self.c.flaw()
        return "" if reason == kReasons else REASONS[reason]

    def rank(self):
        """Returns the rank that the last applied batch spoke for, None if it does not show it."""
        cdef uint32_t dp_rank = 0
        return dp_rank if self.c.rank(&dp_rank) else None

    def names_ranks(self):
        """Returns whether batches name their ranks, so that ranks not yet heard from may exist."""
        return self.c.names_ranks()

    def cleared(self):
        """Returns the tiers that clears of the last batch have emptied, as bits of ALL_TIERS."""
        return self.c.cleared()

    @property
    def ignored(self):
        """Events of the engine's process that were understood but had no effect.

        By reason of IGNORED, without zeros; `clear` begins anew.
        """
        cdef const uint64_t* counts = self.c.ignored()
        return {IGNORED[i]: counts[i] for i in range(kIgnored) if counts[i]}

    def misfit(self):
        """Returns why the index can use nothing of the stream as registered, "" if it can."""
        if self.worker.index is None:
            return ""
        if self.c.other_block_size():
            return (
                f"the engine has blocks of {self.c.other_block_size()} tokens, "
                f"{self.worker.index.block_size} are registered"
            )
        if self.c.is_unused():
            reasons = ", ".join(f"{why} {count}" for why, count in self.ignored.items())
            return f"all events were ignored: {reasons}"
        return ""

    def clear(self):
        """Drops the blocks of every rank that this stream has spoken for, registered or not.

        The rest of an UNFINISHED batch is dropped, too. So are ranks from a dump that are
        registered nowhere and that no batch has spoken for: they may be this stream's. All of this
        is invisible at once; `PrefixIndex.sweep` frees it. RuntimeError if the worker was removed.
        """
        if self.worker.index is None:
            raise RuntimeError("the worker was removed")
        self.c.clear()
        self.payload = None
        verify_if_debug(deref(self.worker.index.c))

    def restored(self):
        """Returns whether its ranks hold blocks of a dump and no batch has spoken for them yet."""
        return self.worker.index is not None and self.c.restored()

    def names_restored(self, bytes payload not None):
        """Returns whether a batch, not yet applied, names blocks that are known from a dump alone.

        It names them as parents or as removed, without having stored them itself. A new engine
        process begins with no such batch. A batch longer than 384 KiB is not searched: False.
        """
        return self.worker.index is not None and self.c.names_restored(
            <const uint8_t*>PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload)
        )

    def drop_restored(self):
        """Drops blocks restored from a dump, because the engine announces everything again.

        Returns whether there were any. RuntimeError if the worker was removed.
        """
        if self.worker.index is None:
            raise RuntimeError("the worker was removed")
        if not self.c.restored():
            return False
        self.c.drop_restored()
        verify_if_debug(deref(self.worker.index.c))
        return True


cdef class Dump:
    """A dump in progress. Made by `PrefixIndex.dump`."""

    def __init__(self):
        raise TypeError("use PrefixIndex.dump")

    def __dealloc__(self):
        del self.c

    @property
    def blocks(self):
        """Blocks written so far."""
        return self.c.blocks_written()

    def read(self, size_t enough):
        """Returns the next piece of the list of events; `done` says whether it is the last.

        A piece is complete when it has at least `enough` bytes or a slice of the work is done, so
        it may be empty. A piece of text may end inside an event, which the next one continues; a
        binary piece consists of whole records.
        """
        self.text.clear()
        self.done = not self.c.fill(self.index.owners(), self.text, enough)
        return PyBytes_FromStringAndSize(self.text.data(), self.text.size())
