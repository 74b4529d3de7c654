# cython: language_level=3, cdivision=True
"""Renders the findings of a match as JSON, straight into the answer's bytes.

    "overlap":{"longest_matched":128,"gpu":64,"dp":{"0":64,"1":32},"cpu":96,"disk":128},
    "effective_prefill_tokens":384,"potential_decode_blocks":40       members of a selection
    {"worker_id":1,"dp_rank":0,"device_blocks":4,...}                 rows of overlaps
    {"worker_id":1,"dp_rank":0,"potential_prefill_tokens":80,...}     rows of projected loads

An overlap is that of the chosen candidate's worker, in tokens: `dp` has the device depth of all its
ranks; the other figures are the best of its ranks, cumulative over the tiers. The decode blocks of
a selection include a last block that is not full. Rows count blocks, one row a rank, sorted by
(worker, dp rank). Those of many candidates are rendered piece by piece, from a copy of the states
(`KeptStates` of selector.pyx).

Costs: some 20 ns a row, less for a rank of the worker. Each function returns the end of what it has
written. The caller provides `..._room()` bytes, which cannot be exceeded.

All is inline, as in `cost.pxd`.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from kvd_core.selector.choice cimport Choice
from kvd_core.selector.cost cimport (
    Scale, decode_blocks, effective_tokens, is_decode_busy, occupied_blocks, shows_decode_busy
)
from kvd_core.selector.pool cimport CPool
from kvd_core.selector.types cimport CCandidate, CCandidateState

cdef extern from "json/text.hpp" namespace "kvd" nogil:
    size_t kMaxDigits
    char* put_text "kvd::put"(char* to, const char* text)
    char* put_number "kvd::put"(char* to, uint64_t value)


# ---- bytes

cdef inline size_t choice_room(const CPool* pool, size_t at) noexcept nogil:
    # The names and braces of a choice take 135 bytes; it has six numbers besides its ranks.
    cdef const CCandidate* c = &pool.candidate(at)
    return 160 + 6 * kMaxDigits + (pool.end_of_worker(c[0]) - c.first) * (4 + 2 * kMaxDigits)


cdef inline size_t rows_room(size_t rows) noexcept nogil:
    # The names of the longer kind of row take 172 bytes; it has seven numbers.
    return rows * (192 + 7 * kMaxDigits) + 2


# ---- a selection

cdef inline char* put_tokens(char* to, const CPool* pool, uint64_t blocks) noexcept nogil:
    return put_number(to, blocks * pool.block_size())


cdef inline char* put_ranks(
    char* to, const CPool* pool, uint32_t first, uint32_t end
) noexcept nogil:
    cdef uint32_t i
    for i in range(first, end):
        if i != first:
            to = put_text(to, b",")
        to = put_text(to, b'"')
        to = put_text(put_number(to, pool.candidate(i).dp_rank), b'":')
        to = put_tokens(to, pool, pool.state(i).device)
    return to


cdef inline char* put_choice(
    char* to, const CPool* pool, size_t at, const Scale* scale
) noexcept nogil:
    cdef const CCandidate* chosen = &pool.candidate(at)
    cdef const CCandidateState* state = &pool.state(at)
    cdef uint32_t first = chosen.first, end = pool.end_of_worker(chosen[0])
    cdef uint32_t gpu = 0, cpu = 0, disk = 0, i
    cdef const CCandidateState* rank
    for i in range(first, end):
        rank = &pool.state(i)
        gpu = max(gpu, rank.device)
        cpu = max(cpu, rank.device + rank.host)
        disk = max(disk, rank.device + rank.host + rank.disk)
    to = put_tokens(put_text(to, b'"overlap":{"longest_matched":'), pool, disk)
    to = put_tokens(put_text(to, b',"gpu":'), pool, gpu)
    to = put_ranks(put_text(to, b',"dp":{'), pool, first, end)
    to = put_tokens(put_text(to, b'},"cpu":'), pool, cpu)
    to = put_tokens(put_text(to, b',"disk":'), pool, disk)
    to = put_text(to, b'},"effective_prefill_tokens":')
    to = put_number(to, effective_tokens(scale, state))
    to = put_text(to, b',"potential_decode_blocks":')
    to = put_number(to, occupied_blocks(scale, state))
    if shows_decode_busy(scale, chosen):
        to = put_text(to, b',"decode_busy":')
        if is_decode_busy(scale, chosen, state):
            return put_text(to, b"true")
        return put_text(to, b"false")
    return to


# ---- rows

cdef inline char* put_end(char* begin, char* end) noexcept nogil:
    # Every row begins with a comma: that of the first row becomes the bracket.
    if begin == end:
        end += 1
    begin[0] = c"["
    return put_text(end, b"]")


cdef inline char* put_rank(char* to, const CCandidate* c) noexcept nogil:
    to = put_text(to, b',{"worker_id":')
    to = put_number(to, c.worker_id)
    return put_number(put_text(to, b',"dp_rank":'), c.dp_rank)


cdef inline char* put_overlap(
    char* to, const CCandidate* candidate, const CCandidateState* c
) noexcept nogil:
    to = put_rank(to, candidate)
    to = put_number(put_text(to, b',"device_blocks":'), c.device)
    to = put_text(to, b',"host_pinned_blocks":')
    to = put_number(to, <uint64_t>c.device + c.host)
    to = put_text(to, b',"disk_blocks":')
    to = put_number(to, <uint64_t>c.device + c.host + c.disk)
    to = put_number(put_text(to, b',"host_pinned_extension_blocks":'), c.host)
    to = put_number(put_text(to, b',"disk_extension_blocks":'), c.disk)
    return put_text(to, b',"shared_beyond_device_blocks":null}')


cdef inline char* put_load(
    char* to, const CCandidate* candidate, const CCandidateState* c, const Scale* scale
) noexcept nogil:
    cdef uint64_t added = effective_tokens(scale, c) if scale.settings.track_prefill else 0
    to = put_rank(to, candidate)
    to = put_number(put_text(to, b',"potential_prefill_tokens":'), c.prefill_tokens + added)
    to = put_number(put_text(to, b',"potential_decode_blocks":'), decode_blocks(scale, c))
    to = put_number(put_text(to, b',"active_requests":'), c.requests)
    return put_text(to, b"}")


cdef inline char* put_overlaps(char* to, const Choice* pool) noexcept nogil:
    cdef char* begin = to
    cdef size_t i
    for i in range(pool.size):
        to = put_overlap(to, &pool.candidates[i], &pool.states[i])
    return put_end(begin, to)


cdef inline char* put_loads(char* to, const Choice* pool, const Scale* scale) noexcept nogil:
    cdef char* begin = to
    cdef size_t i
    for i in range(pool.size):
        to = put_load(to, &pool.candidates[i], &pool.states[i], scale)
    return put_end(begin, to)
