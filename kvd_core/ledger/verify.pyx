# distutils: language = c++
"""Checks every numbered invariant of the ledger's files and forms every sum anew.

Covers the loads and all ledgers that share them. For tests and debug builds: O(everything).
"""

from libc.math cimport fabs
from libc.stdint cimport uint8_t, uint64_t
from libcpp.memory cimport unique_ptr
from libcpp.vector cimport vector

cimport kvd_core.ledger.book as books
cimport kvd_core.ledger.requests as requests
from kvd_core.ledger.trie cimport CHeld, CTrieVerifier, kNone, LoadedRankId
from kvd_core.ledger.types cimport (
    Book, kByAge, kByRank, kMaxLedgers, Listed, LoadedRank, Request, RequestId, Requests,
    SharedLoads
)


cdef struct Sums:  # of a rank
    uint64_t tokens
    uint64_t outputs
    uint64_t requests
    uint64_t prefilling
    double output
    uint8_t owners


cdef int require(bint holds, str what) except -1:
    if not holds:
        raise AssertionError(f"kvd_core ledger invariant broken: {what}")
    return 0


cdef int verify(SharedLoads* loads) except -1:
    cdef unique_ptr[CTrieVerifier] trie = unique_ptr[CTrieVerifier](new CTrieVerifier(loads.trie))
    cdef vector[Sums] sums
    cdef dict ids = {}  # (worker id, dp rank) -> rank id
    cdef int i
    sums.resize(loads.ranks.size())
    try:
        for i in range(kMaxLedgers):
            if loads.books[i] != NULL:
                check_requests(loads.books[i], trie.get(), &sums)
        trie.get().run()
    except RuntimeError as broken:  # thrown by the trie's verifier
        require(False, str(broken))
    for i in range(kMaxLedgers):
        if loads.books[i] != NULL:
            require(loads.books[i].bit == 1 << i, "ledger 2: a ledger takes part once")
            check_listed(loads.books[i], &sums, ids)
    return check_ranks(loads, trie.get(), &sums)


cdef int check_requests(Book* book, CTrieVerifier* trie, vector[Sums]* sums) except -1:
    cdef Requests* all = &book.requests
    cdef RequestId id = all.by_age.first, previous = kNone
    cdef uint64_t count = 0, outputs = 0
    cdef Request* request
    while id != kNone:
        request = &all.all[id]
        count += 1
        require(count <= all.all.live(), "requests 1: the chain of admission ends")
        require(
            request.previous[<int>kByAge] == previous,
            "requests 1: the chain of admission is linked both ways",
        )
        require(
            requests.find(all, requests.id_of(request)) == id,
            "requests 1: a request is found by its id",
        )
        require(request.decayed <= request.outputs, "requests 2: decayed outputs are outputs")
        require(books.has(book, request.rank), "ledger: a request's rank is its ledger's")
        trie.note(request.end, request.rank, request.blocks)
        sum_up(request, &sums[0][request.rank])
        outputs += request.outputs
        previous = id
        id = request.next[<int>kByAge]
    require(all.by_age.last == previous, "requests 1: the chain of admission ends with the last")
    require(all.ids.is_spread(all.all), "requests: ids are near their homes")
    require(count == all.all.live(), "requests 1: every request is in the chain of admission")
    require(count == all.ids.size(), "requests 1: every request is in the table of ids")
    return require(outputs == book.outputs, "ledger: output blocks are counted")


cdef void sum_up(Request* request, Sums* sums) noexcept:
    cdef bint counts = request.prefilling and request.tokens != 0
    sums.requests += 1
    sums.tokens += request.tokens if request.prefilling else 0
    sums.prefilling += counts
    sums.outputs += request.outputs
    sums.output += request.decayed * request.fraction + (request.outputs - request.decayed)


cdef int check_listed(Book* book, vector[Sums]* sums, dict ids) except -1:
    cdef SharedLoads* loads = book.loads
    cdef uint64_t chained = 0
    cdef Listed at
    cdef LoadedRank* rank
    require(not book.order.empty(), "ledger 2: a ledger without ranks takes no part")
    names = []
    for at in book.order:
        name = (at.worker_id, at.dp_rank)
        names.append(name)
        require(books.has(book, at.rank), "ledger 1: a listed rank is the ledger's")
        rank = &loads.ranks[at.rank]
        require(
            (rank.worker_id, rank.dp_rank) == name, "ledger 1: ranks are listed by their names"
        )
        require(ids.setdefault(name, at.rank) == at.rank, "ledger 1: a rank has one id")
        sums[0][at.rank].owners |= book.bit
        chained += check_chain(book, at.rank)
    require(names == sorted(set(names)), "ledger 1: ranks are sorted")
    return require(
        chained == book.requests.all.live(), "requests 1: every request is in a rank's chain"
    )


cdef uint64_t check_chain(Book* book, LoadedRankId id) except? 0:
    cdef uint64_t count = 0
    cdef RequestId previous = kNone, at = book.chains[id].first
    cdef Request* request
    while at != kNone:
        request = &book.requests.all[at]
        count += 1
        require(
            request.rank == id
            and request.previous[<int>kByRank] == previous
            and count <= book.requests.all.live(),
            "requests 1: a rank's chain has its requests",
        )
        previous = at
        at = request.next[<int>kByRank]
    require(book.chains[id].last == previous, "requests 1: a rank's chain ends with its last")
    return count


cdef int check_ranks(SharedLoads* loads, CTrieVerifier* trie, vector[Sums]* sums) except -1:
    cdef size_t taken = 0, id
    cdef LoadedRank* rank
    for id in range(loads.ranks.size()):
        rank = &loads.ranks[id]
        require(rank.owners == sums[0][id].owners, "loads 3: every owner lists a rank")
        if rank.owners != 0:
            taken += 1
            check_sums(rank, &sums[0][id], trie.held(<LoadedRankId>id))
    require(taken + loads.free.size() == loads.ranks.size(), "loads 3: a rank is owned or free")
    require(loads.free.capacity() >= loads.ranks.size(), "loads 3: all ranks can be free")
    return require(loads.depths.size() >= loads.ranks.size(), "loads: depths have room")


cdef int check_sums(LoadedRank* rank, Sums* sums, CHeld held) except -1:
    require(rank.requests == sums.requests, "loads: a rank's requests are counted")
    require(rank.prefill_tokens == sums.tokens, "loads 1: prefill tokens are summed")
    require(rank.prefilling == sums.prefilling, "loads 1: requests with such tokens are counted")
    require(rank.blocks == held.blocks, "loads 2: blocks are counted")
    require(rank.outputs == sums.outputs, "loads 2: output blocks are counted")
    require(near(rank.prompt, held.weight), "loads 2: weights of blocks are summed")
    require(near(rank.output, sums.output), "loads 2: weights of output blocks are summed")
    require(rank.blocks != 0 or rank.prompt == 0, "loads 2: no blocks weigh nothing")
    return require(
        rank.outputs != 0 or rank.output == 0, "loads 2: no output blocks weigh nothing"
    )


cdef bint near(double running, double anew) noexcept:
    return fabs(running - anew) <= 1e-9 * (1 + fabs(anew))
