# cython: language_level=3, cdivision=True
"""The steps of requests as records of journals, written wherever a step is taken.

    kind   what                       bytes, little-endian, without padding
    'B'    a request is booked, or    u32 ledger, u64 worker, u32 dp rank, u32 blocks, u64 tokens,
           is exported as booked      f64 admitted, u32 expected (2^32-1: unknown), u32 outputs,
                                      u32 decayed, f64 fraction, u8 prefilling, u16 n, u16 k,
                                      n bytes id, k bytes retry key, blocks * u64 hashes
    'P'    its prefill is complete    u32 ledger, u16 n, n bytes id
    'E'    it has ended               the same
    'O'    one more output block      u32 ledger, f64 fraction (below 0: unchanged), u16 n, id

A change of these needs another FORMAT of the file (kvd/persistence/frames.py).

`ledger` is the ledger's number in the journal. `admitted` is in seconds of the clock that the
ledger was given. A request's blocks are its path in the trie, so a request booked long ago can be
recorded as well as a new one.

Costs: 'B' O(blocks), a copy; the others O(bytes of the id). Nothing here fails: a record that finds
no room is dropped and counted (record_buffer.hpp).

All is inline: there is no module of this name.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvd_core.ledger.types cimport Book, LoadedRank, RecordBuffer, Request, RequestId


cdef enum:
    kBookedBytes = 61  # bytes of a booking before its texts
    kStepBytes = 6     # bytes of a step before its id


cdef inline char* put_u16(char* to, uint16_t value) noexcept nogil:
    memcpy(to, &value, sizeof(value))
    return to + sizeof(value)


cdef inline char* put_u32(char* to, uint32_t value) noexcept nogil:
    memcpy(to, &value, sizeof(value))
    return to + sizeof(value)


cdef inline char* put_u64(char* to, uint64_t value) noexcept nogil:
    memcpy(to, &value, sizeof(value))
    return to + sizeof(value)


cdef inline char* put_f64(char* to, double value) noexcept nogil:
    memcpy(to, &value, sizeof(value))
    return to + sizeof(value)


cdef inline void put_booking(Book* book, RecordBuffer* records, RequestId id) noexcept nogil:
    # Records a request as it is booked now.
    cdef Request* request = &book.requests.all[id]
    cdef LoadedRank* rank = &book.loads.ranks[request.rank]
    cdef size_t texts = <size_t>request.id_size + request.key_size
    cdef char* to = records.extend(
        b"B", kBookedBytes + texts + request.blocks * sizeof(uint64_t)
    )
    if to == NULL:
        return
    to = put_u32(to, book.number)
    to = put_u64(to, rank.worker_id)
    to = put_u32(to, rank.dp_rank)
    to = put_u32(to, request.blocks)
    to = put_u64(to, request.tokens)
    to = put_f64(to, request.admitted)
    to = put_u32(to, request.expected)
    to = put_u32(to, request.outputs)
    to = put_u32(to, request.decayed)
    to = put_f64(to, request.fraction)
    to[0] = request.prefilling
    to = put_u16(to + 1, request.id_size)
    to = put_u16(to, request.key_size)
    memcpy(to, request.text, texts)
    book.loads.trie.copy_path(request.end, request.blocks, to + texts)


cdef inline void record_booking(Book* book, RequestId id) noexcept nogil:
    # Records that a request has been booked.
    for records in book.records:
        if records != NULL:
            put_booking(book, records, id)


cdef inline void record_step(Book* book, char kind, RequestId id) noexcept nogil:
    # Records that a request's prefill is complete or that it ends; to be called before it does.
    cdef Request* request = &book.requests.all[id]
    cdef char* to
    for records in book.records:
        if records == NULL:
            continue
        to = records.extend(kind, <size_t>kStepBytes + request.id_size)
        if to != NULL:
            to = put_u16(put_u32(to, book.number), request.id_size)
            memcpy(to, request.text, request.id_size)


cdef inline void record_output(Book* book, RequestId id, double fraction) noexcept nogil:
    # Records one more output block, with a fraction that all of the request's weigh from now on.
    cdef Request* request = &book.requests.all[id]
    cdef char* to
    for records in book.records:
        if records == NULL:
            continue
        to = records.extend(b"O", <size_t>kStepBytes + sizeof(double) + request.id_size)
        if to != NULL:
            to = put_u16(put_f64(put_u32(to, book.number), fraction), request.id_size)
            memcpy(to, request.text, request.id_size)
