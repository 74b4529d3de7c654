# cython: language_level=3, cdivision=True
"""The live requests of a ledger: by id, in order of admission, and by rank.

    ids       [ .. | 4 | .. | 0 | 9 | .. ]     open addressing over 4-byte numbers
                     │
    request 4   text "chat-17" "retry-a"       id and retry key, one buffer
                rank 2, end node 9, 12 blocks, 48 tokens, prefill running
                outputs: 5, of which the first 3 weigh 0.25
                by age: previous 0, next 9     all requests, in order of admission
                by rank: previous 0, next -    those of rank 2, in order of admission

A fraction given for a request replaces the weight of all its output blocks so far, and blocks that
come later weigh 1. So two counts and one fraction describe them all, however many there are.

Invariants (checked in verify.pyx)
  1. ids are distinct; every live request is in `ids` and in both chains once;
  2. decayed <= outputs.

Only `make_room` takes memory: once it has succeeded, `take` finds what it needs.

Costs: find O(bytes of the id); take, give O(1) and one allocation; 88 bytes and the two texts.

All is inline: there is no module of this name.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy
from libcpp cimport bool as cbool
from libcpp.string_view cimport string_view

from kvd_core.base.arena cimport HashedArena, kEmpty
from kvd_core.ledger.trie cimport kNone
from kvd_core.ledger.types cimport (
    RequestList, ChainKind, kByAge, kByRank, Request, RequestId, Requests
)

cdef extern from "base/pages.hpp" namespace "kvd" nogil:
    void* take_heap(size_t) except +


# ---- chains

cdef inline void append(
    Requests* requests, RequestList* chain, ChainKind kind, RequestId id
) noexcept nogil:
    requests.all[id].previous[<int>kind] = chain.last
    requests.all[id].next[<int>kind] = kNone
    if chain.last == kNone:
        chain.first = id
    else:
        requests.all[chain.last].next[<int>kind] = id
    chain.last = id


cdef inline void unlink(
    Requests* requests, RequestList* chain, ChainKind kind, RequestId id
) noexcept nogil:
    cdef RequestId previous = requests.all[id].previous[<int>kind]
    cdef RequestId next = requests.all[id].next[<int>kind]
    if previous == kNone:
        chain.first = next
    else:
        requests.all[previous].next[<int>kind] = next
    if next == kNone:
        chain.last = previous
    else:
        requests.all[next].previous[<int>kind] = previous


# ---- requests

cdef inline string_view id_of(const Request* request) noexcept nogil:
    return string_view(request.text, request.id_size)


cdef inline string_view key_of(const Request* request) noexcept nogil:
    return string_view(request.text + request.id_size, request.key_size)


cdef struct Sought:
    HashedArena[Request]* all
    string_view id
    uint64_t hash


cdef inline RequestId find_hashed(Requests* requests, string_view id, uint64_t hash) noexcept nogil:
    # The number of a live request, kNone if there is none; `hash` is the hash of its id.
    cdef Sought sought
    cdef uint32_t at
    sought.all = &requests.all
    sought.id = id
    sought.hash = hash
    at = requests.ids.find(hash, is_sought, &sought)
    return kNone if at == kEmpty else requests.ids.at(at)


cdef inline cbool is_sought(const Sought* sought, uint32_t number) noexcept nogil:
    cdef Request* request = &sought.all[0][number]
    return (
        request.hash == sought.hash
        and request.id_size == sought.id.size()
        and memcmp(request.text, sought.id.data(), sought.id.size()) == 0
    )


cdef inline RequestId find(Requests* requests, string_view id) noexcept nogil:
    return find_hashed(requests, id, requests.hash(id))


cdef inline char* make_room(Requests* requests, string_view id, string_view key) except NULL nogil:
    # Makes room for one more request. Returns its texts, to be passed to `take` or to free().
    cdef char* text
    requests.ids.make_room()
    requests.all.make_room()
    text = <char*>take_heap(id.size() + key.size() + 1)
    memcpy(text, id.data(), id.size())
    if key.size() != 0:
        memcpy(text + id.size(), key.data(), key.size())
    return text


cdef inline Request* take(
    Requests* requests, char* text, size_t id_size, size_t key_size, uint64_t hash,
    RequestList* of_rank
) noexcept nogil:
    # A new request, the newest of all and of its rank; the caller sets the remaining members.
    cdef RequestId number = requests.all.take()
    cdef Request* request = &requests.all[number]
    request.text = text
    request.hash = hash
    request.id_size = <uint16_t>id_size
    request.key_size = <uint16_t>key_size
    requests.texts += id_size + key_size + 1
    requests.ids.insert(request.hash, number, requests.all)
    append(requests, &requests.by_age, kByAge, number)
    append(requests, of_rank, kByRank, number)
    return request


cdef inline void give(Requests* requests, RequestId number, RequestList* of_rank) noexcept nogil:
    cdef Request* request = &requests.all[number]
    requests.ids.erase(requests.ids.index_of(request.hash, number), requests.all)
    requests.ids.shrink(requests.all)
    unlink(requests, &requests.by_age, kByAge, number)
    unlink(requests, of_rank, kByRank, number)
    requests.texts -= <size_t>request.id_size + request.key_size + 1
    free(request.text)
    request.text = NULL
    requests.all.give(number)
    if requests.all.live() == 0:
        while requests.all.shrink():
            pass


cdef inline size_t bytes_of(Requests* requests) noexcept nogil:
    return requests.all.bytes() + requests.ids.bytes() + requests.texts
