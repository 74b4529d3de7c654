# cython: language_level=3, cdivision=True
"""Renders the loads and projections of all ranks of a ledger as JSON, straight into the answer.

    {"worker_id":7,"dp_rank":0,"active_prefill_tokens":48,"active_decode_blocks":3}
    {"worker_id":7,"dp_rank":0,"potential_prefill_tokens":80,"potential_decode_blocks":5,
     "active_requests":2}

Rows are separated by commas and sorted by (worker, dp rank). Those of many ranks are kept as
`KeptRow`s of one moment, which `KeptRows` of ledger.pyx renders piece by piece.

Costs: some 20 ns a row; keeping one takes 5. Each function returns the end of what it has written.
The caller provides `rows_room()` bytes, which no rows can exceed.

All is inline: there is no module of this name.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp.string_view cimport string_view

from libcpp.vector cimport vector

from kvd_core.ledger.loads cimport decode_blocks, put_rank
from kvd_core.ledger.trie cimport LoadedRankId
from kvd_core.ledger.types cimport Book, Listed, LoadedRank, SharedLoads

cdef extern from "json/text.hpp" namespace "kvd" nogil:
    size_t kMaxDigits
    char* put_text "kvd::put"(char* to, const char* text)
    char* put_view "kvd::put"(char* to, string_view text)
    char* put_number "kvd::put"(char* to, uint64_t value)


cdef struct KeptRow:
    uint64_t worker_id
    uint64_t prefill_tokens
    uint64_t decode_blocks
    uint32_t dp_rank
    uint32_t requests


cdef inline size_t rows_room(size_t rows, size_t prefix) noexcept nogil:
    # A row has braces and a comma, the rank's text of 56 bytes, three names of 27, 27 and 19 bytes,
    # three numbers, and the opening `prefix`.
    return rows * (56 + 27 + 27 + 19 + 3 * kMaxDigits + 3 + prefix) + 2


cdef inline char* put_load(
    char* to, string_view prefix, string_view rank, uint64_t prefill, uint64_t decode
) noexcept nogil:
    to = put_view(put_text(to, b"{"), prefix)
    to = put_view(to, rank)
    to = put_number(put_text(to, b',"active_prefill_tokens":'), prefill)
    to = put_number(put_text(to, b',"active_decode_blocks":'), decode)
    return put_text(to, b"}")


cdef inline char* put_projected(
    char* to, string_view rank, uint64_t prefill, uint64_t decode, uint32_t requests
) noexcept nogil:
    to = put_view(put_text(to, b"{"), rank)
    to = put_number(put_text(to, b',"potential_prefill_tokens":'), prefill)
    to = put_number(put_text(to, b',"potential_decode_blocks":'), decode)
    to = put_number(put_text(to, b',"active_requests":'), requests)
    return put_text(to, b"}")


cdef inline char* put_loads(
    char* to, Book* book, string_view prefix
) noexcept nogil:
    # `prefix` is JSON text that opens each row.
    cdef Listed* listed = book.order.data()
    cdef SharedLoads* loads = book.loads
    cdef LoadedRank* rank
    cdef size_t i
    for i in range(book.order.size()):
        rank = &loads.ranks[listed[i].rank]
        if i != 0:
            to = put_text(to, b",")
        to = put_load(
            to, prefix, string_view(rank.text, rank.text_size), rank.prefill_tokens,
            decode_blocks(rank),
        )
    return to


cdef inline char* put_projection(
    char* to, Book* book, const uint32_t* depths, size_t blocks, uint64_t new_tokens
) noexcept nogil:
    # The projection for a prompt of `blocks`, whose first depths[id] blocks rank id has live.
    cdef Listed* listed = book.order.data()
    cdef SharedLoads* loads = book.loads
    cdef LoadedRank* rank
    cdef LoadedRankId id
    cdef size_t i
    to = put_text(to, b"[")
    for i in range(book.order.size()):
        id = listed[i].rank
        rank = &loads.ranks[id]
        if i != 0:
            to = put_text(to, b",")
        to = put_projected(
            to, string_view(rank.text, rank.text_size), rank.prefill_tokens + new_tokens,
            decode_blocks(rank) + (blocks - depths[id]), rank.requests,
        )
    return put_text(to, b"]")


cdef inline int keep_rows(
    vector[KeptRow]& rows, Book* book, const uint32_t* depths, size_t blocks, uint64_t new_tokens
) except -1 nogil:
    # Keeps the projection for a prompt as above, or the loads of this moment without `depths`.
    cdef SharedLoads* loads = book.loads
    cdef LoadedRank* rank
    cdef KeptRow row
    cdef Listed at
    rows.reserve(book.order.size())
    for at in book.order:
        rank = &loads.ranks[at.rank]
        row.worker_id = at.worker_id
        row.dp_rank = at.dp_rank
        row.prefill_tokens = rank.prefill_tokens + new_tokens
        row.decode_blocks = decode_blocks(rank)
        if depths != NULL:
            row.decode_blocks += blocks - depths[at.rank]
        row.requests = rank.requests
        rows.push_back(row)
    return 0


cdef inline char* put_kept_load(char* to, const KeptRow* row, string_view prefix) noexcept nogil:
    cdef char rank[56]
    cdef char* end = put_rank(rank, row.worker_id, row.dp_rank)
    return put_load(
        to, prefix, string_view(rank, end - rank), row.prefill_tokens, row.decode_blocks
    )


cdef inline char* put_kept_projected(char* to, const KeptRow* row) noexcept nogil:
    cdef char rank[56]
    cdef char* end = put_rank(rank, row.worker_id, row.dp_rank)
    return put_projected(
        to, string_view(rank, end - rank), row.prefill_tokens, row.decode_blocks, row.requests
    )
