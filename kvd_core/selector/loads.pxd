# cython: language_level=3, cdivision=True
"""The findings of the ledger: each candidate's load, and how much of the prompt it has in use.

Costs: O(candidates), and what `live_depths` takes. All is inline, as in `cost.pxd`.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t

from kvd_core.ledger.loads cimport decode_blocks, decoding, live_depths
from kvd_core.ledger.trie cimport LoadedRankId
from kvd_core.ledger.types cimport Book, LoadedRank
from kvd_core.selector.pool cimport CPool
from kvd_core.selector.types cimport CCandidate, CCandidateState


cdef inline void find_live(CPool* pool, Book* book) noexcept nogil:
    # Finds the blocks of the pool's prompt that each candidate has in use.
    cdef const uint32_t* depths = live_depths(
        book.loads, pool.prompt().sequence.data(), pool.prompt().sequence.size()
    )
    cdef const CCandidate* candidates = pool.candidates()
    cdef CCandidateState* states = pool.states()
    cdef size_t ranks = book.loads.ranks.size(), i
    cdef LoadedRankId rank
    for i in range(pool.size()):
        rank = candidates[i].booked
        states[i].live = depths[rank] if rank < ranks else 0


cdef inline void find_loads(CPool* pool, Book* book) noexcept nogil:
    # Finds the loads of this moment. A rank that has left the ledger or is unreachable is not
    # present.
    cdef const CCandidate* candidates = pool.candidates()
    cdef CCandidateState* states = pool.states()
    cdef LoadedRank* ranks = book.loads.ranks.data()
    cdef size_t known = book.loads.ranks.size(), i
    cdef const CCandidate* candidate
    cdef CCandidateState* state
    cdef LoadedRank* rank
    for i in range(pool.size()):
        candidate = &candidates[i]
        state = &states[i]
        state.present = False
        if candidate.booked >= known:
            continue
        rank = &ranks[candidate.booked]
        if rank.owners & book.bit == 0:
            continue
        state.present = (
            candidate.reachable
            and rank.worker_id == candidate.worker_id
            and rank.dp_rank == candidate.dp_rank
        )
        state.prefill_tokens = rank.prefill_tokens
        state.decode_blocks = decode_blocks(rank)
        state.requests = rank.requests
        state.decoding = decoding(rank) & 0xffffff
