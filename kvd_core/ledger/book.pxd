# cython: language_level=3, cdivision=True
"""The slot accounting of one (model, tenant) in one face: its ranks, and the requests on them.

    add "chat-17" on rank 2 ──> request ──> last node of its prompt      ledger/requests.pxd
                                  │               │
         rank 2: 3 requests,      │      root ── [ a1 77 03 ] ── [ 91 c4 ]      ledger/trie.hpp
         96 prefill tokens, <─────┘                  │               │
         prompt 41.5, output 2                   ranks 2, 5       rank 2
                                                                              ledger/loads.pxd

Request ids, ranks, ages and counts belong to one book; a ledger is a book for Python. The weights
of its requests are added to the loads, which several books may share: a rank's load is then the sum
over all of them, but no ledger lists, finds or removes what belongs to another.

Invariants (those of the parts are in their files; verify.pyx checks all)
  1. ranks are listed in `order` by (worker, dp rank), and the loads name the book as one of their
     owners; two books that share loads have one id for the same rank;
  2. a book takes part in its loads while it has ranks.

A call that needs memory makes room first: it either does all that it should, or raises MemoryError
and has changed nothing. Calls that take things away never fail.

Costs (blocks n of the prompt, nodes m on its path, ranks p of a node): add, end_request
O(n + m log p), a refused add O(n). The trie's head has the costs of a split and a merge.

All is inline: there is no module of this name.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libcpp.vector cimport vector

cimport kvd_core.ledger.loads as loads
cimport kvd_core.ledger.records as records
cimport kvd_core.ledger.requests as requests
from kvd_core.ledger.trie cimport CPathPosition, kNone, LoadedRankId, NodeId
from kvd_core.ledger.types cimport (
    Admission, Book, kAdded, kExists, kFull, kMaxLedgers, kMaxRanks, kMaxTokens, kOverflow,
    kRepeated, Listed, LoadedRank, Request, RequestId, RequestList, SharedLoads
)


# ---- ranks

cdef inline size_t position_of(Book* book, uint64_t worker_id, uint32_t dp_rank) noexcept nogil:
    # The position of the first entry of `order` that does not sort before the rank.
    cdef size_t begin = 0, end = book.order.size(), middle
    cdef Listed* at
    while begin < end:
        middle = (begin + end) // 2
        at = &book.order[middle]
        if at.worker_id < worker_id or (at.worker_id == worker_id and at.dp_rank < dp_rank):
            begin = middle + 1
        else:
            end = middle
    return begin


cdef inline LoadedRankId find_rank(Book* book, uint64_t worker_id, uint32_t dp_rank) noexcept nogil:
    # The id of a rank, kNone if there is none.
    cdef size_t position = position_of(book, worker_id, dp_rank)
    cdef Listed* at
    if position == book.order.size():
        return kNone
    at = &book.order[position]
    return at.rank if at.worker_id == worker_id and at.dp_rank == dp_rank else kNone


cdef inline bint has(Book* book, LoadedRankId id) noexcept nogil:
    return loads.is_of(book.loads, id, book.bit)


cdef inline bint take_part(Book* book) noexcept nogil:
    # Enters the book into the loads; False if too many books take part.
    cdef int i
    for i in range(kMaxLedgers):
        if book.loads.books[i] == NULL:
            book.loads.books[i] = book
            book.bit = <uint8_t>(1 << i)
            return True
    return False


cdef inline bint is_in(
    const Listed* at, uint64_t worker_id, uint32_t first, uint32_t count
) noexcept nogil:
    # Whether an entry that does not sort before `first` is one of the worker's `count` ranks.
    return at.worker_id == worker_id and at.dp_rank - first < count


cdef inline void take_known_ranks(
    Book* book, uint64_t worker_id, uint32_t first, uint32_t count, Listed* to
) noexcept nogil:
    # Gives those of the worker's `count` ranks at `to` an id that other ledgers have one for.
    cdef Book* other
    cdef const Listed* known
    cdef size_t at
    cdef int i
    for i in range(kMaxLedgers):
        other = book.loads.books[i]
        if other == NULL or other == book:
            continue
        at = position_of(other, worker_id, first)
        while at < other.order.size() and is_in(&other.order[at], worker_id, first, count):
            known = &other.order[at]
            to[known.dp_rank - first].rank = known.rank
            at += 1


cdef inline int add_ranks(
    Book* book, uint64_t worker_id, uint32_t first, uint32_t count
) except -1 nogil:
    # Adds those of a worker's `count` ranks from `first` on that the book does not have. They are
    # adjacent in `order`, so the entries behind them move only once.
    cdef SharedLoads* shared = book.loads
    cdef size_t begin = position_of(book, worker_id, first)
    cdef size_t end = begin
    cdef uint32_t i
    cdef LoadedRankId id
    while end < book.order.size() and is_in(&book.order[end], worker_id, first, count):
        end += 1
    cdef size_t missing = count - (end - begin)
    if missing == 0:
        return 0
    if book.order.size() + missing > kMaxRanks:
        raise OverflowError("too many ranks")
    if book.order.size() + missing > book.order.capacity():
        book.order.reserve(max(book.order.size() + missing, 2 * book.order.size()))
    loads.make_room_for_ranks(shared, missing)
    if book.chains.size() < shared.ranks.capacity():
        book.chains.resize(shared.ranks.capacity())
    if book.bit == 0 and not take_part(book):
        raise RuntimeError("too many ledgers share their loads")
    book.order.insert(book.order.begin() + <ptrdiff_t>end, missing, Listed(worker_id, 0, kNone))
    for i in range(count, 0, -1):  # known ranks to their slots, from the last on
        if end > begin and book.order[end - 1].dp_rank == first + i - 1:
            end -= 1
            book.order[begin + i - 1] = book.order[end]
        else:
            book.order[begin + i - 1] = Listed(worker_id, first + i - 1, kNone)
    take_known_ranks(book, worker_id, first, count, &book.order[begin])
    for i in range(count):  # ids for the others, in the order of the ranks
        id = book.order[begin + i].rank
        if id == kNone:
            id = loads.take_rank(shared, worker_id, first + i)
        elif has(book, id):
            continue
        book.chains[id] = RequestList(kNone, kNone)
        book.order[begin + i].rank = id
        shared.ranks[id].owners |= book.bit
    return 0


cdef inline void remove_ranks(
    Book* book, uint64_t worker_id, const vector[LoadedRankId]& ids
) noexcept nogil:
    # Removes ranks of a worker, ascending, of which the book must have no requests any more. They
    # are adjacent in `order`, so the entries behind them move only once.
    cdef SharedLoads* shared = book.loads
    cdef size_t at, kept, next = 0
    if ids.empty():
        return
    at = kept = position_of(book, worker_id, shared.ranks[ids[0]].dp_rank)
    while next < ids.size():
        if book.order[at].rank == ids[next]:
            loads.disown(shared, ids[next], book.bit)
            next += 1
        else:
            book.order[kept] = book.order[at]
            kept += 1
        at += 1
    book.order.erase(book.order.begin() + <ptrdiff_t>kept, book.order.begin() + <ptrdiff_t>at)
    if book.order.empty():
        take_no_part(book)


cdef inline void take_no_part(Book* book) noexcept nogil:
    # The opposite of `take_part`, once no rank is the book's any more.
    cdef int i
    for i in range(kMaxLedgers):
        if book.loads.books[i] == book:
            book.loads.books[i] = NULL
    book.bit = 0
    vector[RequestList]().swap(book.chains)
    vector[Listed]().swap(book.order)


# ---- requests

cdef inline bint is_retry(Book* book, const Request* request, const Admission* a) noexcept nogil:
    cdef CPathPosition at
    if (
        a.key.size() == 0
        or a.key != requests.key_of(request)
        or a.rank != request.rank
        or a.tokens != request.tokens
        or a.blocks != request.blocks
    ):
        return False
    at = book.loads.trie.find(a.hashes, a.blocks)
    return at.depth == a.blocks and at.node == request.end


cdef inline int add(Book* book, const Admission* a) except -1 nogil:
    # Books a request; returns an AddOutcome. The caller that words a refusal counts it.
    cdef uint64_t hash = book.requests.hash(a.id)
    cdef RequestId known
    cdef CPathPosition at
    cdef char* text
    cdef NodeId end
    cdef Request* request = NULL
    if a.tokens > kMaxTokens:
        return kOverflow
    known = requests.find_hashed(&book.requests, a.id, hash)
    if known != kNone:
        if not is_retry(book, &book.requests.all[known], a):
            return kExists
        book.stats.repeated += 1
        return kRepeated
    if loads.overflows(book.loads, a.rank, a.tokens):
        return kOverflow
    at = book.loads.trie.find(a.hashes, a.blocks)
    if book.requests.all.live() >= book.limits.requests or not loads.has_room(
        book.loads, &at, a.blocks, book.limits.blocks
    ):
        return kFull
    text = requests.make_room(&book.requests, a.id, a.key)
    try:
        end = loads.insert(book.loads, &at, a)
        request = requests.take(
            &book.requests, text, a.id.size(), a.key.size(), hash, &book.chains[a.rank]
        )
    finally:
        if request == NULL:
            free(text)
    request.end = end
    request.rank = a.rank
    request.blocks = <uint32_t>a.blocks
    request.tokens = a.tokens
    request.admitted = a.now
    request.prefilling = True
    request.outputs = request.decayed = 0
    request.expected = a.expected
    request.fraction = 1
    book.stats.added += 1
    records.record_booking(book, book.requests.by_age.last)
    return kAdded


cdef inline void complete(Book* book, RequestId id) noexcept nogil:
    # Ends the prefill of a request. Has no effect where it has ended before.
    cdef Request* request = &book.requests.all[id]
    if request.prefilling:
        records.record_step(book, b"P", id)
    loads.end_prefill(book.loads, request)


cdef inline void end_request(Book* book, RequestId id) noexcept nogil:
    cdef Request* request = &book.requests.all[id]
    records.record_step(book, b"E", id)
    loads.erase(book.loads, request)
    book.outputs -= request.outputs
    book.stats.freed += 1
    requests.give(&book.requests, id, &book.chains[request.rank])


cdef inline void add_output(Book* book, RequestId id, double fraction) noexcept nogil:
    # Adds an output block. A fraction of 0 or more becomes the weight of all output blocks of the
    # request so far; with one below 0 the weights stay.
    cdef Request* request = &book.requests.all[id]
    records.record_output(book, id, fraction)
    if request.outputs == book.limits.outputs:
        book.stats.refused_outputs += 1
    else:
        loads.add_output(book.loads, request)
        book.outputs += 1
    if fraction >= 0:
        loads.decay(book.loads, request, fraction)


cdef inline void close(Book* book) noexcept nogil:
    # Takes everything away without recording it; other ledgers may continue to use the loads.
    cdef size_t at
    book.records[0] = book.records[1] = NULL
    while book.requests.by_age.first != kNone:
        end_request(book, book.requests.by_age.first)
    for at in range(book.order.size()):
        loads.disown(book.loads, book.order[at].rank, book.bit)
    take_no_part(book)


cdef inline size_t bytes_of(Book* book) noexcept nogil:
    # Includes the bytes of the shared loads.
    cdef SharedLoads* shared = book.loads
    return (
        requests.bytes_of(&book.requests)
        + book.chains.capacity() * sizeof(RequestList)
        + book.order.capacity() * sizeof(Listed)
        + shared.trie.bytes()
        + shared.ranks.capacity() * sizeof(LoadedRank)
        + (shared.free.capacity() + shared.depths.capacity()) * sizeof(uint32_t)
    )
