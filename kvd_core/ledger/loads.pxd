# cython: language_level=3, cdivision=True
"""The load of every rank, over the bookings of all ledgers that share it.

    ledger of one face   ──┐          rank 2, of both: 3 requests, 96 prefill tokens,
      its ranks, requests  ├─> loads                   prompt 41.5, output 2
    ledger of another    ──┘          trie of the live prompts of all                ledger/trie.hpp

A ledger takes part while it has ranks. A rank is here while any ledger has it, and its load is that
of the requests of all these ledgers: blocks that are live in two ledgers count once.

A rank's decode load is the weighted number of distinct blocks of its live prompts, plus the
weighted number of its requests' output blocks. One trie serves all ranks: what thousands of
requests share is stored once. A query for all ranks is one walk down the prompt and one up again,
which gives each rank the depth of the deepest node that it passes through:

    nodes on the way     ranks 1 2 3 4 5 6     ranks 2 5     rank 5
    given on the way up    rest, depth 3       2, depth 9    5, depth 12

On the way up, a node with as many ranks as have a depth already has no others: it is skipped.

Invariants (checked in verify.pyx)
  1. a rank's prefill tokens are the sum over its requests whose prefill is running, and
     `prefilling` counts those of these requests that have any;
  2. its blocks are those of the nodes it passes through; its prompt load is the sum of their
     weights, its output load that of its requests' output blocks. Both are exact while all weights
     are 1, else as exact as f64 sums are, and exactly 0 where nothing is left to sum;
  3. a rank has an owner, and every owner lists it; a rank id without an owner is in `free`, which
     has room for all of them.

How the two sums are formed decides how halves are rounded, as observed of Dynamo 1.6.1: a change of
weight adds (new - old) for each output block by itself, but blocks x (new - old) for a stretch of
prompt blocks of equal weight. The load is the sum of both, rounded, halves away from zero. A
stretch is gathered over nodes, so it does not matter where other ranks split them. What ends loses
its weight as if the weight became 0, which gives the same result to the last bit.

Only `make_room_for_ranks` and `insert` take memory; they change nothing where there is none.

Costs (blocks n of the prompt, nodes m on its path, ranks p of a node, ranks r in all): insert,
erase O(n + m log p); end_prefill O(1); add_output O(1); decay O(output blocks + m log p);
live_depths O(n + r + further ranks of the nodes that are not skipped).

All is inline: there is no module of this name.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset
from libcpp.vector cimport vector

from kvd_core.base.arena cimport Visitor
from kvd_core.ledger.trie cimport CPathPosition, CRankRef, CTrieNode, kRoot, LoadedRankId, NodeId
from kvd_core.ledger.types cimport (
    Admission, kMaxRankRefs, kMaxRankTokens, LoadedRank, Request, SharedLoads
)

cdef extern from "json/text.hpp" namespace "kvd" nogil:
    char* put_text "kvd::put"(char* to, const char* text)
    char* put_number "kvd::put"(char* to, uint64_t value)


# ---- ranks

cdef inline bint is_of(SharedLoads* loads, LoadedRankId id, uint8_t owners) noexcept nogil:
    return id < loads.ranks.size() and (loads.ranks[id].owners & owners) != 0


cdef inline uint64_t decode_blocks(const LoadedRank* rank) noexcept nogil:
    # The rank's decode load, rounded.
    cdef double load = rank.prompt + rank.output
    cdef uint64_t whole
    if load <= 0:
        return 0
    whole = <uint64_t>load
    return whole + (load - <double>whole >= 0.5)


cdef inline uint32_t decoding(const LoadedRank* rank) noexcept nogil:
    # The number of requests with nothing left to prefill.
    return rank.requests - rank.prefilling


cdef inline int make_room_for_ranks(SharedLoads* loads, size_t count) except -1 nogil:
    # Reserves memory for this many calls of `take_rank`.
    cdef size_t needed = loads.ranks.size() + count - min(count, loads.free.size())
    if needed > loads.ranks.capacity():
        loads.ranks.reserve(max(needed, 2 * loads.ranks.size()))
    loads.free.reserve(loads.ranks.capacity())
    if loads.depths.size() < loads.ranks.capacity():
        loads.depths.resize(loads.ranks.capacity())
    return 0


cdef inline char* put_rank(char* to, uint64_t worker_id, uint32_t dp_rank) noexcept nogil:
    # The JSON members that name a rank; 56 bytes at most.
    to = put_number(put_text(to, b'"worker_id":'), worker_id)
    return put_number(put_text(to, b',"dp_rank":'), dp_rank)


cdef inline LoadedRankId take_rank(
    SharedLoads* loads, uint64_t worker_id, uint32_t dp_rank
) noexcept nogil:
    # A rank that no ledger has, after make_room_for_ranks.
    cdef LoadedRankId id
    cdef LoadedRank* rank
    if loads.free.empty():
        id = <LoadedRankId>loads.ranks.size()
        loads.ranks.extend()
    else:
        id = loads.free.back()
        loads.free.pop_back()
    rank = &loads.ranks[id]
    memset(rank, 0, sizeof(LoadedRank))
    rank.worker_id = worker_id
    rank.dp_rank = dp_rank
    rank.text_size = <uint8_t>(put_rank(rank.text, worker_id, dp_rank) - rank.text)
    return id


cdef inline void disown(SharedLoads* loads, LoadedRankId id, uint8_t owner) noexcept nogil:
    # The ledger must have no requests on the rank any more.
    loads.ranks[id].owners &= <uint8_t>~owner
    if loads.ranks[id].owners != 0:
        return
    loads.free.push_back(id)
    if loads.free.size() == loads.ranks.size():
        loads.ranks.release()
        vector[LoadedRankId]().swap(loads.free)
        vector[uint32_t]().swap(loads.depths)


# ---- weights

cdef struct WeightChange:
    # A change of the weight of prompt blocks, gathered into stretches of equal old weight.
    LoadedRank* rank
    double to
    uint64_t blocks
    double weight


cdef inline void end_stretch(WeightChange* change) noexcept nogil:
    if change.blocks != 0:
        change.rank.prompt += <double>change.blocks * (change.to - change.weight)
    change.blocks = 0


cdef inline void add_to_stretch(
    WeightChange* change, uint32_t blocks, double weight
) noexcept nogil:
    if weight != change.weight:
        end_stretch(change)
    change.blocks += blocks
    change.weight = weight


cdef inline void lose_stretch(WeightChange* change, uint32_t blocks, double weight) noexcept nogil:
    change.rank.blocks -= blocks
    add_to_stretch(change, blocks, weight)


cdef inline void reweigh_outputs(
    LoadedRank* rank, const Request* request, double to
) noexcept nogil:
    cdef uint32_t i
    for i in range(request.outputs):
        rank.output += to - (request.fraction if i < request.decayed else 1)


# ---- requests

cdef inline bint has_room(
    SharedLoads* loads, const CPathPosition* at, size_t blocks, uint64_t limit
) noexcept nogil:
    return (
        blocks <= limit
        and loads.trie.block_count() + (blocks - at.depth) <= limit
        and loads.trie.rank_ref_count() + loads.trie.rank_refs_needed(at[0], blocks) <= kMaxRankRefs
    )


cdef inline bint overflows(SharedLoads* loads, LoadedRankId id, uint64_t tokens) noexcept nogil:
    return loads.ranks[id].prefill_tokens + tokens > kMaxRankTokens


cdef inline NodeId insert(
    SharedLoads* loads, const CPathPosition* at, const Admission* a
) except? 0 nogil:
    # Inserts a prompt that was found as far as `at`; returns its last node.
    cdef size_t gained = 0
    cdef NodeId end = loads.trie.insert(at[0], a.hashes, a.blocks, a.rank, gained)
    cdef LoadedRank* rank = &loads.ranks[a.rank]
    rank.requests += 1
    rank.prefill_tokens += a.tokens
    rank.prefilling += a.tokens != 0
    rank.blocks += gained
    rank.prompt += <double>gained
    return end


cdef inline void end_prefill(SharedLoads* loads, Request* request) noexcept nogil:
    cdef LoadedRank* rank = &loads.ranks[request.rank]
    if not request.prefilling:
        return
    request.prefilling = False
    rank.prefill_tokens -= request.tokens
    rank.prefilling -= request.tokens != 0


cdef inline void erase(SharedLoads* loads, Request* request) noexcept nogil:
    cdef LoadedRank* rank = &loads.ranks[request.rank]
    cdef WeightChange change = WeightChange(rank, 0, 0, 0)
    end_prefill(loads, request)
    loads.trie.erase(request.end, request.rank, Visitor[WeightChange](&change, lose_stretch))
    end_stretch(&change)
    reweigh_outputs(rank, request, 0)
    rank.outputs -= request.outputs
    if rank.blocks == 0:
        rank.prompt = 0
    if rank.outputs == 0:
        rank.output = 0
    rank.requests -= 1


cdef inline void add_output(SharedLoads* loads, Request* request) noexcept nogil:
    cdef LoadedRank* rank = &loads.ranks[request.rank]
    request.outputs += 1
    rank.outputs += 1
    rank.output += 1


cdef inline void decay(SharedLoads* loads, Request* request, double fraction) noexcept nogil:
    # Gives the weight `fraction`, in [0, 1], to all output blocks of a request so far, and to the
    # blocks at the end of its prompt that no other request of its rank has.
    cdef LoadedRank* rank = &loads.ranks[request.rank]
    cdef WeightChange change = WeightChange(rank, fraction, 0, 0)
    reweigh_outputs(rank, request, fraction)
    request.decayed = request.outputs
    request.fraction = fraction
    loads.trie.weigh(
        request.end, request.rank, fraction, Visitor[WeightChange](&change, add_to_stretch)
    )
    end_stretch(&change)


# ---- queries

cdef inline const uint32_t* live_depths(
    SharedLoads* loads, const uint64_t* hashes, size_t n
) noexcept nogil:
    # How many leading blocks of a prompt each rank has live, by rank id. Valid until the next call.
    cdef uint32_t* depths = loads.depths.data()
    cdef CPathPosition at = loads.trie.find(hashes, n)
    cdef uint32_t depth = <uint32_t>at.depth, given = 0, inside = at.inside, i
    cdef NodeId id = at.node
    cdef const CTrieNode* node
    cdef const CRankRef* refs
    if loads.ranks.size() != 0:
        memset(depths, 0, loads.ranks.size() * sizeof(uint32_t))
    while id != kRoot:
        node = &loads.trie.node(id)
        if node.ranks.size() != given:
            given = node.ranks.size()
            refs = node.ranks.begin()
            for i in range(given):
                if depths[refs[i].rank] == 0:
                    depths[refs[i].rank] = depth
        depth -= inside
        id = node.parent
        if id != kRoot:
            inside = loads.trie.node(id).len
    return depths
