# distutils: language = c++
"""Explains how far prompts are cached on ranks: `index/trace.hpp` has the rules."""

from collections import namedtuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cython.operator cimport dereference as deref
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector

from kvd_core.index.chronicle cimport CChronicle
from kvd_core.index.prefix_index cimport (
    CIndex, CTree, PrefixIndex, RankId, Worker, kNone, kTierLayers
)
from kvd_core.json.scan cimport BodyScanner

cdef extern from "index/trace.hpp" namespace "kvd" nogil:
    cppclass CEnd "kvd::Trace::End":
        uint32_t depth              # blocks before the end
        uint32_t at                 # ticks
        int why
        uint8_t tier

    cppclass CRankHistory "kvd::Trace::RankHistory":
        RankId rank
        CEnd all
        const CEnd& tier(size_t)

    cppclass CTracedChange "kvd::Trace::TracedChange":
        uint32_t at                 # ticks
        RankId rank
        uint32_t first "from"       # blocks of the prompt
        uint32_t end "to"
        int kind
        uint8_t tiers

    cppclass CTrace "kvd::Trace":
        CTrace(const CIndex&, const uint64_t*, const uint64_t*, uint32_t, size_t) except +
        void add(RankId) except +
        cbool advance(uint64_t) except +
        const vector[CRankHistory]& rows()
        const vector[CTracedChange]& steps()
        size_t oldest()
        uint64_t all_steps()

    # Members of an index that prefix_index.pxd does not declare.
    const CChronicle* chronicle_of(const CIndex&)
    vector[uint64_t] locals_of(const CTree&, const uint64_t*, size_t) except +

cdef extern from "index/prompt_stats.hpp" namespace "kvd" nogil:
    cppclass CSeed "kvd::Seeds::Seed":
        uint64_t adapter
        uint64_t salt

    cppclass CSeeds "kvd::Seeds":
        CSeed* kept
        uint32_t size()

cdef extern from "index/trace.hpp" namespace "kvd" nogil:
    const CSeeds& seeds_of(const CIndex&)

cdef extern from "base/hash.hpp" namespace "kvd" nogil:
    uint64_t kBaseSeed
    uint64_t lora_term(string_view)
    uint64_t salt_term(string_view)
    void local_hashes(const uint32_t*, size_t, size_t, uint64_t, uint64_t*)
    void eagle_hashes(const uint32_t*, size_t, size_t, uint64_t, uint64_t*)

# Why a tier, or all of them, end.
END_REASONS = (
    "end_of_prompt",
    "evicted",
    "cleared",
    "restarted",
    "never_stored",
    "not_reusable",
    "unknown",
)
# What happens to blocks; the last two are about all that a rank holds on some tiers.
KINDS = ("stored", "evicted", "cleared", "restarted")

# Where a tier, or all of them, end: the blocks before that; one of END_REASONS; when it happened
# (seconds, None if it is nothing that happens at a time); on which tier.
End = namedtuple("End", ("depth", "why", "at", "tier"))
# A rank: the ends by tier, and the end of all tiers.
Traced = namedtuple("Traced", ("tiers", "all"))
# What has happened to blocks [begin, end) of the prompt. `tiers` is one of TIERS; where the rank
# lost all that it held, it has tiers as bits.
Happened = namedtuple("Happened", ("at", "kind", "worker_id", "dp_rank", "tiers", "begin", "end"))


cdef const uint64_t* hashes_of(bytes hashes) except? NULL:
    if PyBytes_GET_SIZE(hashes) % sizeof(uint64_t):
        raise ValueError("hashes are the bytes of native 64-bit integers")
    return <const uint64_t*>PyBytes_AS_STRING(hashes)


cdef uint64_t term_of(str text, bint is_salt) except? 0:
    cdef bytes encoded = (text or "").encode()
    cdef string_view view = string_view(PyBytes_AS_STRING(encoded), PyBytes_GET_SIZE(encoded))
    return salt_term(view) if is_salt else lora_term(view)


def terms(str lora_name, str cache_salt):
    """Returns what an adapter and a salt add to the seed of local hashes; 0 for None."""
    return term_of(lora_name, False), term_of(cache_salt, True)


def hashed(BodyScanner scanner not None, int array, uint32_t block_size, uint64_t adapter,
           uint64_t salt, *, bint eagle=False):
    """Returns the local hashes of a scanned body's token ids, as bytes of native 64-bit integers.

    `adapter` and `salt` come from `terms`, 0 for none. `eagle` hashes pairs of tokens, as EAGLE
    engines do.
    """
    cdef uint64_t seed = kBaseSeed + adapter + salt  # the sum wraps around
    cdef size_t n = 0, blocks
    cdef const uint32_t* tokens = scanner.u32(array, &n)
    blocks = (n - 1 if eagle and n != 0 else n) // block_size
    found = PyBytes_FromStringAndSize(NULL, blocks * sizeof(uint64_t))
    cdef uint64_t* out = <uint64_t*>PyBytes_AS_STRING(found)
    if eagle:
        eagle_hashes(tokens, blocks, block_size, seed, out)
    else:
        local_hashes(tokens, blocks, block_size, seed, out)
    return found


def given(BodyScanner scanner not None, int array):
    """Returns the hashes of an array of a scanned body, as bytes of native 64-bit integers."""
    cdef size_t n = 0
    cdef const uint64_t* hashes = scanner.u64(array, &n)
    return PyBytes_FromStringAndSize(<const char*>hashes, n * sizeof(uint64_t))


def recalled(PrefixIndex index not None, bytes sequence_hashes not None):
    """Returns the local hashes of a prompt known by sequence hashes, as far as the index has it.

    Both are bytes of native 64-bit integers. O(blocks + chains where the tree branches).
    """
    cdef vector[uint64_t] locals_ = locals_of(
        index.c.tree(), hashes_of(sequence_hashes), PyBytes_GET_SIZE(sequence_hashes) // 8
    )
    return PyBytes_FromStringAndSize(
        <const char*>locals_.data(), locals_.size() * sizeof(uint64_t)
    )


def seeds(PrefixIndex index not None):
    """Returns the last (adapter, salt) pairs that engines' prompts added to seeds of local hashes.

    Each pair comes once; 0 stands for none. Prompts with neither are left out.
    """
    cdef const CSeeds* kept = &seeds_of(deref(index.c))
    cdef uint32_t i
    return [(kept.kept[i].adapter, kept.kept[i].salt) for i in range(kept.size())]


cdef class Trace:
    """The history of a prompt's blocks on some ranks of an index."""

    cdef unique_ptr[CTrace] c
    cdef PrefixIndex index
    cdef dict ranks  # worker id and dp rank, by rank of the index

    def __init__(self, PrefixIndex index not None, bytes plain not None, bytes salted,
                 size_t most_steps):
        """Takes a prompt by its local hashes, as bytes of native 64-bit integers.

        `salted` are the hashes with its salt, for ranks whose streams announce salts; None if it
        has no salt. Keeps the newest `most_steps` things that have happened. ValueError if the two
        differ in length or no step may be kept.
        """
        cdef const uint64_t* of_salt = NULL
        cdef uint32_t blocks = <uint32_t>(PyBytes_GET_SIZE(plain) // sizeof(uint64_t))
        if most_steps == 0 or (salted is not None and len(salted) != len(plain)):
            raise ValueError("expected as many salted hashes as plain ones, and a step or more")
        if salted is not None:
            of_salt = hashes_of(salted)
        self.c.reset(new CTrace(deref(index.c), hashes_of(plain), of_salt, blocks, most_steps))
        self.index = index
        self.ranks = {}

    def add(self, Worker worker not None, uint32_t dp_rank):
        """Adds a rank; KeyError if the worker has no such rank in the index."""
        cdef RankId rank = worker.c.find(dp_rank)
        if worker.index is not self.index or rank == kNone:
            raise KeyError(dp_rank)
        self.c.get().add(rank)
        self.ranks[rank] = (worker.worker_id, dp_rank)

    def advance(self, uint64_t changes):
        """Goes through this many changes; True while there are more, else the rows are complete."""
        return self.c.get().advance(changes)

    cdef object seconds(self, uint32_t ticks):
        return chronicle_of(deref(self.index.c)).seconds(ticks)

    cdef object end(self, const CEnd& end):
        why = END_REASONS[end.why]
        at = self.seconds(end.at) if why in KINDS else None
        return End(end.depth, why, at, end.tier)

    def rows(self):
        """Returns a Traced for each added rank, by worker id and dp rank."""
        cdef const CRankHistory* row
        cdef size_t i
        found = {}
        for i in range(self.c.get().rows().size()):
            row = &self.c.get().rows()[i]
            tiers = [self.end(row.tier(tier)) for tier in range(kTierLayers)]
            found[self.ranks[row.rank]] = Traced(tiers, self.end(row.all))
        return found

    def happened(self):
        """Returns what has happened to the prompt's blocks, the oldest first, as Happened."""
        cdef size_t kept = self.c.get().steps().size(), i
        cdef const CTracedChange* step
        found = []
        for i in range(kept):
            step = &self.c.get().steps()[(self.c.get().oldest() + i) % kept]
            found.append(Happened(
                self.seconds(step.at), KINDS[step.kind], *self.ranks[step.rank], step.tiers,
                step.first, step.end,
            ))
        return found

    @property
    def left_out(self):
        """The number of changes that were left out, all older than those in `happened`."""
        return self.c.get().all_steps() - self.c.get().steps().size()
