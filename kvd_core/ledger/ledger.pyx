# distutils: language = c++
"""The slot accounting of one (model, tenant): what every rank is working on.

The structure and its rules are in `ledger/book.pxd` (the bookings of one face), `ledger/loads.pxd`
(the load of ranks, which ledgers may share) and `ledger/requests.pxd`, over the C++ trie of live
prompts (`ledger/trie.hpp`). `ledger/rows.pxd` renders the JSON.

One thread owns the ledgers that share loads. Nothing here does I/O, reads a clock or logs. In the
costs, n is the number of blocks of a prompt, m the nodes of the trie on its path (at most the
number of points on it where live prompts branch or end), r the number of ranks.
"""

from collections import namedtuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.pyport cimport PY_SSIZE_T_MAX
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t
from libcpp.memory cimport make_unique
from libcpp.vector cimport vector

cimport cython
from kvd_core.base.rendering cimport PyBytes_New, cut
from kvd_core.json.scan cimport BodyScanner
cimport kvd_core.ledger.book as books
cimport kvd_core.ledger.requests as requests
from kvd_core.ledger.loads cimport decode_blocks, live_depths
from kvd_core.ledger.journal cimport Journal
from kvd_core.ledger.records cimport put_booking
from kvd_core.ledger.rows cimport (
    keep_rows, put_kept_load, put_kept_projected, put_loads, put_projection, put_text, rows_room
)
from kvd_core.ledger.trie cimport kNone
from kvd_core.ledger.types cimport (
    kAdded, kByAge, kByRank, kExists, kFull, kJournals, kMaxBlocks, kMaxIdBytes, kMaxOutputs,
    kMaxRanks, kMaxRequests, kMaxTokens, kOverflow, kRepeated, kWholeRowsBytes, LedgerStats,
    Listed, LoadedRank, RecordBuffer, Request,
)
from kvd_core.ledger.verify cimport verify

cdef extern from "<cassert>" nogil:
    void require "assert" (bint holds)  # in debug builds

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

MAX_REQUESTS = kMaxRequests
MAX_BLOCKS = kMaxBlocks
MAX_RANKS = kMaxRanks
MAX_TOKENS = kMaxTokens
MAX_REQUEST_ID_BYTES = kMaxIdBytes
WHOLE_ROWS_BYTES = kWholeRowsBytes

ADDED = <int>kAdded
REPEATED = <int>kRepeated
EXISTS = <int>kExists
FULL = <int>kFull
OVERFLOW = <int>kOverflow

LiveRequest = namedtuple(
    "LiveRequest",
    "worker_id dp_rank blocks prefill_tokens tokens prefill_complete admitted_at output_blocks"
    " expected_output_tokens",
)
Load = namedtuple("Load", "prefill_tokens decode_blocks requests")


cdef struct PromptHashes:
    const uint64_t* hashes
    size_t blocks


cdef PromptHashes prompt_of(object hashes) except *:
    cdef PromptHashes prompt
    if isinstance(hashes, BodyScanner):
        prompt.hashes = (<BodyScanner>hashes).u64(0, &prompt.blocks)
        return prompt
    if not isinstance(hashes, bytes) or PyBytes_GET_SIZE(hashes) % sizeof(uint64_t):
        raise TypeError("hashes are a BodyScanner or the bytes of native 64-bit integers")
    prompt.hashes = <const uint64_t*>PyBytes_AS_STRING(hashes)
    prompt.blocks = PyBytes_GET_SIZE(hashes) // sizeof(uint64_t)
    return prompt


cdef string_view utf8(str text) except *:
    cdef Py_ssize_t size = 0
    cdef const char* begin = PyUnicode_AsUTF8AndSize(text, &size)
    return string_view(begin, size)


cdef string_view bounded(str text, str what) except *:
    cdef string_view bytes_ = utf8(text)
    if bytes_.size() > kMaxIdBytes:
        raise ValueError(f"{what} exceeds {MAX_REQUEST_ID_BYTES} bytes")
    return bytes_


cdef class Loads:
    """The load of ranks, shared by ledgers that know nothing else of each other.

    `eased` is None, or a callable for when the load becomes less, so that a selection that waits
    for an idle rank can be served. The ledger does not call it: the caller that completes, frees,
    expires or removes does.
    """

    def __cinit__(self):
        self.shared = make_unique[SharedLoads]()

    def on_eased(self, eased):
        """Sets the callable for when the load becomes less, or None."""
        self.eased = eased


@cython.no_gc_clear  # __dealloc__ ends the requests, for which it needs the loads
cdef class Ledger:
    """Live requests of the ranks of one (model, tenant), and the loads that follow from them.

    Requests and ranks are the ledger's own, even if others share its loads; a rank's load is the
    sum over all of them.
    """

    def __cinit__(
        self,
        uint32_t max_requests=kMaxRequests,
        uint64_t max_blocks=kMaxBlocks,
        uint32_t max_output_blocks=kMaxOutputs,
        Loads loads=None,
    ):
        if max_requests > kMaxRequests or max_blocks > kMaxBlocks:
            raise ValueError("limits can only be lowered")
        if max_output_blocks > kMaxOutputs:
            raise ValueError("limits can only be lowered")
        self.loads = Loads() if loads is None else loads
        self.book = make_unique[Book]()
        self.c = self.book.get()
        self.c.limits = LedgerLimits(max_requests, max_blocks, max_output_blocks)
        self.c.loads = self.loads.shared.get()
        self.c.requests.by_age = RequestList(kNone, kNone)

    def __dealloc__(self):
        if self.c != NULL:
            books.close(self.c)

    def add_rank(self, uint64_t worker_id, uint32_t dp_rank):
        """Adds a rank, or finds it, and returns its id: dense, reused after removal.

        Ledgers that share loads have one id for the same rank. OverflowError if there are MAX_RANKS
        already. O(log r), and 16 bytes moved for each rank that sorts behind it.
        """
        books.add_ranks(self.c, worker_id, dp_rank, 1)
        return books.find_rank(self.c, worker_id, dp_rank)

    def add_ranks(self, uint64_t worker_id, uint32_t first, uint32_t count):
        """Adds those of `count` ranks of a worker, from dp rank `first` on, that are not there.

        All or, with an OverflowError for more than MAX_RANKS or a dp rank above 2^32 - 1, none.
        O(count log r), and 16 bytes moved for each rank that sorts behind them.
        """
        if <uint64_t>first + count > <uint64_t>1 << 32:
            raise OverflowError("dp ranks must be below 2^32")
        books.add_ranks(self.c, worker_id, first, count)

    def remove_ranks(self, uint64_t worker_id, dp_ranks not None, Py_ssize_t limit=PY_SSIZE_T_MAX):
        """Removes ranks of a worker with their requests; returns (request id, dp rank) of each.

        dp_ranks: in ascending order, else ValueError; those that are not there are passed over. The
        requests of a rank are returned in order of admission. At most `limit` of them are ended: if
        that many come back, there may be more, and the ranks still exist. Other ledgers keep their
        requests on these ranks, and what they weigh. O(free of each), 30 ns a rank, and 16 bytes
        moved for each rank that sorts behind them.
        """
        cdef vector[LoadedRankId] ranks = self.known(worker_id, dp_ranks)
        cdef LoadedRankId rank
        cdef RequestId request
        ended = []
        for rank in ranks:
            dp_rank = self.c.loads.ranks[rank].dp_rank
            request = self.c.chains[rank].first
            while request != kNone and len(ended) < limit:
                ended.append((self.text_of(request), dp_rank))
                request = self.c.requests.all[request].next[<int>kByRank]
        cdef Py_ssize_t left = len(ended)
        for rank in ranks:
            while left and self.c.chains[rank].first != kNone:
                books.end_request(self.c, self.c.chains[rank].first)
                left -= 1
        self.removed += len(ended)
        if len(ended) < limit:
            books.remove_ranks(self.c, worker_id, ranks)
        return ended

    def rank_of(self, uint64_t worker_id, uint32_t dp_rank):
        """Returns the id of a rank, None if there is none. O(log r)."""
        cdef LoadedRankId rank = books.find_rank(self.c, worker_id, dp_rank)
        return None if rank == kNone else rank

    def add(self, str request_id not None, LoadedRankId rank, hashes, tokens, double now,
            str key=None, expected_output=None):
        """Books a request: its prompt, and `tokens` to prefill until its prefill is complete.

        `hashes` is a scanner whose array 0 has the sequence hashes, or their bytes as native 64-bit
        integers. `now` is in seconds and must not go back. `expected_output` tokens are kept with
        the request and change no load. Returns ADDED, or why nothing changed: REPEATED (this very
        request is live already, and both came with the same `key`), EXISTS (the id is in use), FULL
        (MAX_REQUESTS or MAX_BLOCKS), OVERFLOW (more than MAX_TOKENS, or the rank's sum would exceed
        2^62).

        KeyError if there is no such rank; ValueError for an id or key of more than
        MAX_REQUEST_ID_BYTES, or negative tokens. O(n + m log r).
        """
        cdef PromptHashes prompt = prompt_of(hashes)
        cdef Admission admission
        cdef int outcome
        admission.id = bounded(request_id, "the request id")
        if key is not None:
            admission.key = bounded(key, "the retry key")
        admission.rank = self.own(rank)
        if tokens < 0:
            raise ValueError("tokens must not be negative")
        admission.tokens = min(tokens, kMaxTokens + 1)
        admission.hashes = prompt.hashes
        admission.blocks = prompt.blocks
        admission.now = now
        admission.expected = kNone
        if expected_output is not None:
            admission.expected = min(expected_output, kNone - 1)
        outcome = books.add(self.c, &admission)
        self.exists += outcome == kExists
        self.full += outcome == kFull
        self.overflow += outcome == kOverflow
        return outcome

    def prefill_complete(self, str request_id not None):
        """Takes a request's prefill tokens off its rank, once; False if it is not live. O(1)."""
        cdef RequestId request = self.find(request_id)
        if request == kNone:
            return False
        self.complete(request)
        return True

    def free(self, str request_id not None):
        """Ends a request; False if it is not live. O(n + m log r + output blocks)."""
        cdef RequestId request = self.find(request_id)
        if request == kNone:
            return False
        books.end_request(self.c, request)
        return True

    def output_block(self, str request_id not None, fraction=None, uint64_t count=1):
        """Adds `count` output blocks to a request; False if it is not live.

        With a `fraction`, all output blocks of the request so far, and the blocks at the end of its
        prompt that no other request of its rank has, weigh that much from now on. A request has at
        most 2^20 output blocks; further ones are counted in `stats()["refused"]`, at most 2^20 for
        one call. ValueError for a fraction outside [0, 1]. O(count), with a fraction O(m log r +
        output blocks).
        """
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError("the fraction must lie in [0, 1]")
        cdef RequestId request = self.find(request_id)
        if request == kNone:
            return False
        cdef uint64_t left
        for left in range(min(count, <uint64_t>kMaxOutputs), 0, -1):
            books.add_output(self.c, request, -1 if fraction is None or left > 1 else fraction)
        return True

    def expire(self, double before, Py_ssize_t limit):
        """Frees at most `limit` requests admitted before a time, oldest first; returns their ids.

        If `limit` ids come back, there may be more. O(free of each).
        """
        cdef list ids = []
        cdef RequestId request = self.c.requests.by_age.first
        while len(ids) < limit and request != kNone:
            if not self.c.requests.all[request].admitted < before:
                break
            ids.append(self.text_of(request))
            request = self.c.requests.all[request].next[<int>kByAge]
        for _ in range(len(ids)):
            books.end_request(self.c, self.c.requests.by_age.first)
        self.expired += len(ids)
        return ids

    def oldest(self):
        """Returns when the oldest live request was admitted, None if there is none. O(1)."""
        cdef RequestId request = self.c.requests.by_age.first
        return None if request == kNone else self.c.requests.all[request].admitted

    def request(self, str request_id not None):
        """Returns the LiveRequest with an id, None if there is none. O(1).

        Its `prefill_tokens` are those that still count, its `tokens` those it was booked with.
        """
        cdef RequestId number = self.find(request_id)
        if number == kNone:
            return None
        cdef Request* request = &self.c.requests.all[number]
        cdef LoadedRank* rank = &self.c.loads.ranks[request.rank]
        return LiveRequest(
            rank.worker_id,
            rank.dp_rank,
            request.blocks,
            request.tokens if request.prefilling else 0,
            request.tokens,
            not request.prefilling,
            request.admitted,
            request.outputs,
            None if request.expected == kNone else request.expected,
        )

    def hashes(self, str request_id not None):
        """Returns a live request's sequence hashes as native 64-bit integers, None if not live.

        O(blocks).
        """
        cdef RequestId number = self.find(request_id)
        if number == kNone:
            return None
        cdef Request* request = &self.c.requests.all[number]
        hashes = PyBytes_FromStringAndSize(NULL, request.blocks * sizeof(uint64_t))
        self.c.loads.trie.copy_path(request.end, request.blocks, PyBytes_AS_STRING(hashes))
        return hashes

    def load(self, LoadedRankId rank):
        """Returns the Load of a rank, over all ledgers that share it.

        KeyError if this ledger does not have the rank. O(1).
        """
        cdef LoadedRank* r = &self.c.loads.ranks[self.own(rank)]
        return Load(r.prefill_tokens, decode_blocks(r), r.requests)

    def render_loads(self, bytes prefix not None=b""):
        """Returns the loads of all ranks as comma-separated JSON objects, by (worker, dp rank).

        `prefix` opens each object: JSON members with a comma behind. O(r). See `ledger/rows.pxd`.
        """
        cdef string_view opening = string_view(PyBytes_AS_STRING(prefix), PyBytes_GET_SIZE(prefix))
        cdef Py_ssize_t room = rows_room(self.c.order.size(), opening.size())
        cdef PyObject* answer = PyBytes_New(NULL, room)
        cdef char* begin = PyBytes_AS_STRING(<object>answer)
        cdef char* end = put_loads(begin, self.c, opening)
        require(end - begin <= room)
        return cut(answer, end - begin)

    def project(self, hashes, uint64_t new_tokens):
        """Returns the load that each rank would have with one more request, as a JSON array.

        OverflowError for more than MAX_TOKENS. O(n + r + the ranks on the path). See
        `ledger/rows.pxd`.
        """
        if new_tokens > kMaxTokens:
            raise OverflowError("too many tokens")
        cdef PromptHashes prompt = prompt_of(hashes)
        cdef const uint32_t* depths = live_depths(self.c.loads, prompt.hashes, prompt.blocks)
        cdef Py_ssize_t room = rows_room(self.c.order.size(), 0)
        cdef PyObject* answer = PyBytes_New(NULL, room)
        cdef char* begin = PyBytes_AS_STRING(<object>answer)
        cdef char* end = put_projection(begin, self.c, depths, prompt.blocks, new_tokens)
        require(end - begin <= room)
        return cut(answer, end - begin)

    cpdef size_t rows_bytes(self, size_t prefix=0) noexcept:
        """Returns the bytes that its rows may take, each with a prefix of so many bytes. O(1).

        Beyond WHOLE_ROWS_BYTES rows should be kept and read in pieces.
        """
        return rows_room(self.c.order.size(), prefix)

    def keep_loads(self, bytes prefix not None=b""):
        """Returns the rows of `render_loads` as KeptRows of this moment. O(r)."""
        cdef KeptRows kept = KeptRows.__new__(KeptRows)
        kept.prefix = prefix
        keep_rows(kept.rows, self.c, NULL, 0, 0)
        return kept

    def keep_projection(self, hashes, uint64_t new_tokens):
        """Returns the rows of `project`, which checks as well, as KeptRows of this moment."""
        if new_tokens > kMaxTokens:
            raise OverflowError("too many tokens")
        cdef PromptHashes prompt = prompt_of(hashes)
        cdef const uint32_t* depths = live_depths(self.c.loads, prompt.hashes, prompt.blocks)
        cdef KeptRows kept = KeptRows.__new__(KeptRows)
        keep_rows(kept.rows, self.c, depths, prompt.blocks, new_tokens)
        return kept

    def depths(self, hashes):
        """Returns how many leading blocks of a prompt each rank has live, by rank id, no zeros."""
        cdef PromptHashes prompt = prompt_of(hashes)
        cdef const uint32_t* depths = live_depths(self.c.loads, prompt.hashes, prompt.blocks)
        cdef Listed at
        return {at.rank: depths[at.rank] for at in self.c.order if depths[at.rank]}

    def stats(self):
        """Returns sizes now and totals since the start.

        Blocks, nodes, rank_refs (pairs of a node and a rank) and bytes cover all ledgers that share
        the loads; everything else is this ledger's.
        """
        cdef LedgerStats* t = &self.c.stats
        return {
            "requests": self.c.requests.all.live(),
            "blocks": self.c.loads.trie.block_count(),
            "nodes": self.c.loads.trie.node_count(),
            "rank_refs": self.c.loads.trie.rank_ref_count(),
            "ranks": self.c.order.size(),
            "output_blocks": self.c.outputs,
            "bytes": books.bytes_of(self.c),
            "added": t.added,
            "repeated": t.repeated,
            "freed": t.freed - self.expired - self.removed,
            "expired": self.expired,
            "removed": self.removed,
            "refused": {
                "exists": self.exists,
                "full": self.full,
                "overflow": self.overflow,
                "output_blocks": t.refused_outputs,
            },
        }

    def verify(self):
        """Checks every invariant and forms every sum anew; AssertionError says what is wrong.

        Checks all ledgers that share the loads.
        """
        verify(self.c.loads)

    # ---- the journal

    def record_in(self, uint32_t number, *journals):
        """Lets at most two journals record each step of requests from now on, under a number.

        Without any, nothing is recorded. Requests booked before are not recorded: see `export`.
        """
        if len(journals) > kJournals:
            raise ValueError(f"{len(journals)} journals are too many")
        cdef int i
        cdef Journal journal
        for i in range(kJournals):
            self.c.records[i] = NULL
        self.journals = journals
        for i, each in enumerate(journals):
            journal = <Journal?>each
            self.c.records[i] = journal.c
        self.c.number = number

    @property
    def number(self):
        """The ledger's number in the journals that record it."""
        return self.c.number

    def export(self, Journal journal not None, uint32_t after, size_t enough):
        """Records the live requests in a journal, until it has at least `enough` more bytes.

        Returns where the next call continues, None at the end; the first call begins at 0. A
        request that lives from the first call to the last is recorded once, whatever comes and goes
        meanwhile. MemoryError if the journal is full.
        """
        cdef RecordBuffer* records = journal.c
        cdef size_t begun = records.size()
        cdef uint64_t dropped = records.dropped()
        while after < self.c.requests.all.end():
            if records.size() - begun >= enough:
                return after
            if self.c.requests.all[after].text != NULL:
                put_booking(self.c, records, after)
                if records.dropped() != dropped:
                    raise MemoryError("the journal is full")
            after += 1
        return None

    cdef vector[LoadedRankId] known(self, uint64_t worker_id, dp_ranks) except *:
        cdef vector[LoadedRankId] found
        cdef int64_t before = -1
        cdef uint32_t dp_rank
        cdef size_t at = 0
        cdef Listed* listed
        for dp_rank in dp_ranks:
            if before < 0:
                at = books.position_of(self.c, worker_id, dp_rank)
            elif dp_rank <= before:
                raise ValueError("dp ranks must ascend")
            before = dp_rank
            while at < self.c.order.size():
                listed = &self.c.order[at]
                if listed.worker_id != worker_id or listed.dp_rank > dp_rank:
                    break
                at += 1
                if listed.dp_rank == dp_rank:
                    found.push_back(listed.rank)
                    break
        return found

    cdef RequestId find(self, str request_id) except? 0:
        return requests.find(&self.c.requests, utf8(request_id))

    cdef LoadedRankId own(self, LoadedRankId rank) except? 0xffffffff:
        if not books.has(self.c, rank):
            raise KeyError(rank)
        return rank

    cdef str text_of(self, RequestId request):
        cdef string_view text = requests.id_of(&self.c.requests.all[request])
        return PyUnicode_DecodeUTF8(text.data(), text.size(), NULL)

    # ---- for compiled callers, which have checked the arguments

    cdef LoadedRankId find_rank(self, uint64_t worker_id, uint32_t dp_rank) noexcept:
        return books.find_rank(self.c, worker_id, dp_rank)

    cdef RequestId find_request(self, string_view request_id) noexcept:
        return requests.find(&self.c.requests, request_id)

    cdef int admit(self, const Admission* admission) except -1:
        return books.add(self.c, admission)

    cdef void complete(self, RequestId request) noexcept:
        books.complete(self.c, request)

    cdef void end(self, RequestId request) noexcept:
        books.end_request(self.c, request)


cdef class KeptRows:
    """Rows of all ranks of a ledger at one moment, which are rendered piece by piece.

    Made by `Ledger.keep_loads` and `Ledger.keep_projection`; 32 bytes a rank.
    """

    def __init__(self):
        raise TypeError("use Ledger.keep_loads or Ledger.keep_projection")

    def read(self, size_t enough):
        """Returns further rows, with a comma before each, of at least `enough` bytes if there are.

        b"" at the end. Only `enough` and one row bound a piece from above.
        """
        cdef string_view prefix
        if self.prefix is not None:
            prefix = string_view(PyBytes_AS_STRING(self.prefix), PyBytes_GET_SIZE(self.prefix))
        cdef size_t room = enough + rows_room(1, prefix.size())
        cdef PyObject* piece = PyBytes_New(NULL, room)
        cdef char* begin = PyBytes_AS_STRING(<object>piece)
        cdef char* end = begin
        while self.at < self.rows.size() and <size_t>(end - begin) < enough:
            end = put_text(end, b",")
            if self.prefix is None:
                end = put_kept_projected(end, &self.rows[self.at])
            else:
                end = put_kept_load(end, &self.rows[self.at], prefix)
            self.at += 1
        require(<size_t>(end - begin) <= room)
        return cut(piece, end - begin)
