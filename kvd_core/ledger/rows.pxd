# cython: language_level=3, cdivision=True
"""Renders the loads and projections of all ranks of a ledger as JSON, straight into the answer.

    {"worker_id":7,"dp_rank":0,"active_prefill_tokens":48,"active_decode_blocks":3}
    {"worker_id":7,"dp_rank":0,"potential_prefill_tokens":80,"potential_decode_blocks":5,
     "active_requests":2}

Rows are separated by commas and sorted by (worker, dp rank).

Costs: some 20 ns a row. Each function returns the end of what it has written. The caller provides
`rows_room()` bytes, which no rows can exceed.

All is inline: there is no module of this name.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp.string_view cimport string_view

from kvd_core.ledger.loads cimport decode_blocks
from kvd_core.ledger.trie cimport LoadedRankId
from kvd_core.ledger.types cimport Book, Listed, LoadedRank, SharedLoads

cdef extern from "json/text.hpp" namespace "kvd" nogil:
    size_t kMaxDigits
    char* put_text "kvd::put"(char* to, const char* text)
    char* put_view "kvd::put"(char* to, string_view text)
    char* put_number "kvd::put"(char* to, uint64_t value)


cdef inline size_t rows_room(Book* book, size_t prefix) noexcept nogil:
    # A row has braces and a comma, the rank's text of 56 bytes, three names of 27, 27 and 19 bytes,
    # three numbers, and the opening `prefix`.
    return book.order.size() * (56 + 27 + 27 + 19 + 3 * kMaxDigits + 3 + prefix) + 2


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
        to = put_view(put_text(to, b"{"), prefix)
        to = put_view(to, string_view(rank.text, rank.text_size))
        to = put_number(put_text(to, b',"active_prefill_tokens":'), rank.prefill_tokens)
        to = put_number(put_text(to, b',"active_decode_blocks":'), decode_blocks(rank))
        to = put_text(to, b"}")
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
        to = put_view(put_text(to, b"{"), string_view(rank.text, rank.text_size))
        to = put_text(to, b',"potential_prefill_tokens":')
        to = put_number(to, rank.prefill_tokens + new_tokens)
        to = put_text(to, b',"potential_decode_blocks":')
        to = put_number(to, decode_blocks(rank) + (blocks - depths[id]))
        to = put_number(put_text(to, b',"active_requests":'), rank.requests)
        to = put_text(to, b"}")
    return put_text(to, b"]")
