# cython: language_level=3, cdivision=True
"""What a look finds in the ledger: how much of the prompt each candidate has in use, and its load.

Costs: O(candidates), and what `live_depths` takes. All is inline, as in `cost.pxd`.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t

from kvd_core.ledger.loads cimport decode_blocks, decoding, is_of, live_depths
from kvd_core.ledger.trie cimport RankId
from kvd_core.ledger.types cimport Book, Rank, SharedLoads
from kvd_core.selector.pool cimport CPool
from kvd_core.selector.types cimport CCandidate, CStanding


cdef inline void find_live(CPool* pool, Book* book) noexcept nogil:
    # Blocks of the pool's prompt that are in use.
    cdef SharedLoads* loads = book.loads
    cdef const uint32_t* depths = live_depths(
        loads, pool.prompt().sequence.data(), pool.prompt().sequence.size()
    )
    cdef CStanding* standings = pool.standings()
    cdef size_t ranks = loads.ranks.size(), i
    cdef RankId rank
    for i in range(pool.size()):
        rank = pool.candidate(i).booked
        standings[i].live = depths[rank] if rank < ranks else 0


cdef inline void find_loads(CPool* pool, Book* book) noexcept nogil:
    # The loads of this moment; whoever has left the ledger or is unreachable is not present.
    cdef SharedLoads* loads = book.loads
    cdef CStanding* standing = pool.standings()
    cdef const CCandidate* candidate
    cdef Rank* rank
    cdef size_t i
    for i in range(pool.size()):
        candidate = &pool.candidate(i)
        standing[i].present = False
        if not is_of(loads, candidate.booked, book.bit):
            continue
        rank = &loads.ranks[candidate.booked]
        standing[i].present = (
            candidate.reachable
            and rank.worker_id == candidate.worker_id
            and rank.dp_rank == candidate.dp_rank
        )
        standing[i].prefill_tokens = rank.prefill_tokens
        standing[i].decode_blocks = decode_blocks(rank)
        standing[i].requests = rank.requests
        standing[i].decoding = decoding(rank) & 0xffffff
