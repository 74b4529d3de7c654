# distutils: language = c++
# distutils: extra_compile_args = -falign-loops=32
"""Chooses the rank that should serve a prompt.

`selector/choice.pxd` has the rules of choosing, `selector/cost.pxd` the costs, `selector/rows.pxd`
the JSON; `selector/pool.hpp` is the C++ that asks the index, `selector/loads.pxd` asks the ledger.

One thread owns a pool, with its index and ledger. Nothing here does I/O, reads a clock or draws
random numbers.

The compiler aligns loops here: otherwise a pass over the candidates takes up to 8 % longer,
depending on the code around it.
"""

from collections import namedtuple
from operator import itemgetter

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.math cimport INFINITY
from libc.stddef cimport ptrdiff_t
from libc.string cimport memset
from libcpp.string_view cimport string_view

from kvd_core.base.rendering cimport PyBytes_New, cut
from kvd_core.index.predictions cimport CPredicted
from kvd_core.index.prefix_index cimport CIndex, Worker
from kvd_core.json.scan cimport BodyScanner
from kvd_core.ledger.ledger cimport Ledger
from kvd_core.ledger.trie cimport LoadedRankId, kNone
from kvd_core.selector.choice cimport (
    choose, find_open, kAllBusy, kAllOver, kNoCandidate, least_prefill, least_uncached,
    open_requests, return_turn, set_chances, weigh
)
from kvd_core.selector.cost cimport (
    CostTerms, WeightedTerms, cached_tokens, decode_blocks, device_credit_of, effective_tokens,
    has_too_many_blocks, is_busy, is_overloaded, keeps_sessions, prefills_too_large_a_part,
    prefills_too_much, scale_of, terms_of, weighted_terms_of
)
from kvd_core.selector.loads cimport find_live, find_loads
from kvd_core.selector.rows cimport (
    choice_room, kMaxDigits, put_choice, put_load, put_loads, put_number, put_overlap, put_overlaps,
    put_text, rows_room
)
from kvd_core.selector.settings cimport Settings, kRandom, kRoundRobin, kTurns
from kvd_core.selector.types cimport CCandidate, CCandidateState, kMaxIslTokens

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

NONE = <int64_t>kNoCandidate
BUSY = <int64_t>kAllBusy
OVERLOADED = <int64_t>kAllOver

MAX_ISL_TOKENS = kMaxIslTokens

# A rank, or `ranks` of a worker with ascending dp ranks from `dp_rank` on; `ledger_rank` is that of
# the first.
Candidate = namedtuple(
    "Candidate",
    "worker_id dp_rank worker ledger_rank max_num_batched_tokens total_kv_blocks ranks",
    defaults=(0, None, 1),
)
Explained = namedtuple(
    "Explained",
    "worker_id dp_rank device_blocks host_blocks disk_blocks live_blocks active_prefill_tokens"
    " active_decode_blocks active_requests decoding_requests cached_tokens"
    " effective_prefill_tokens potential_decode_blocks raw_prefill_blocks credit_blocks"
    " prefill_cost decode_cost counted_tokens uncached_cost hold_up_cost crowding_cost queued_cost"
    " request_cost block_cost product_cost cost keeps_sessions eligible overloaded busy preference"
    " heard reachable",
)

# A candidate that may be chosen: its position, its weight (the lower the better; None if the mode
# weighs nothing), and the chance that `choose` takes it.
Chance = namedtuple("Chance", "position weight chance")


cdef extern from "json/text.hpp" namespace "kvd" nogil:
    char* put(char* to, string_view text)


cdef string_view utf8(str text) except *:
    cdef Py_ssize_t size = 0
    cdef const char* begin
    if text is None:
        return string_view()
    begin = PyUnicode_AsUTF8AndSize(text, &size)
    return string_view(begin, size)


cdef const uint64_t* hashes_of(bytes hashes, size_t* n) except? NULL:
    if PyBytes_GET_SIZE(hashes) % sizeof(uint64_t):
        raise ValueError("hashes are the bytes of native 64-bit integers")
    n[0] = PyBytes_GET_SIZE(hashes) // sizeof(uint64_t)
    return <const uint64_t*>PyBytes_AS_STRING(hashes)


cdef bytes bytes_of(const vector[uint64_t]& hashes):
    return PyBytes_FromStringAndSize(<const char*>hashes.data(), hashes.size() * sizeof(uint64_t))


cdef char* put_array(char* to, const char* opening, const vector[uint64_t]& numbers) noexcept nogil:
    cdef size_t at
    to = put_text(to, opening)
    for at in range(numbers.size()):
        if at:
            to = put_text(to, ",")
        to = put_number(to, numbers[at])
    return put_text(to, "]")


cdef bint is_same_rank(const CCandidate* a, const CCandidate* b) noexcept nogil:
    return a.worker_id == b.worker_id and a.dp_rank == b.dp_rank


cdef class Prompt:
    """A prompt that waits, for `Pool.match_again`. Made by `Pool.hold`."""

    def __init__(self):
        raise TypeError("use Pool.hold")

    @property
    def isl_tokens(self):
        """Its length in tokens."""
        return self.c.isl_tokens

    @property
    def local_hashes(self):
        """As native 64-bit integers; with the prompt's salt if it has one."""
        return bytes_of(self.c.used())

    @property
    def sequence_hashes(self):
        """As native 64-bit integers."""
        return bytes_of(self.c.sequence)

    def render(self):
        """Returns the members of a selection's body that describe it: JSON, comma-separated."""
        cdef size_t n = self.c.used().size() + self.c.sequence.size()
        cdef size_t most = 64 + (n + 1) * (kMaxDigits + 1)  # 64: names and brackets
        cdef PyObject* text = PyBytes_New(NULL, most)
        cdef char* begin = PyBytes_AS_STRING(<object>text)
        cdef char* to = put_number(put_text(begin, '"isl_tokens":'), self.c.isl_tokens)
        to = put_array(to, ',"block_hashes":[', self.c.used())
        to = put_array(to, ',"sequence_hashes":[', self.c.sequence)
        return cut(text, to - begin)

    @property
    def bytes(self):
        """The memory that it takes."""
        return sizeof(CPrompt) + sizeof(uint64_t) * (
            self.c.locals.capacity() + self.c.salted.capacity() + self.c.sequence.capacity()
        )


cdef class Pool:
    """The ranks of one (model, tenant) that requests can be sent to.

    First `match` a prompt; all other answers are about the prompt matched last.
    """

    def __cinit__(
        self, PrefixIndex index, Ledger ledger not None, uint32_t block_size, candidates=(),
        Predictions predictions=None, double predicted_bound=INFINITY,
    ):
        """Takes Candidates in any order; each rank of them is a candidate, in ascending order.

        If `index` or a Candidate's `worker` is None, nothing counts as cached except what
        `predictions` say. Predictions beside events count on ranks with at most `predicted_bound`
        times the mean requests plus 1. ValueError for an index of another block size, a worker of
        another index, or a rank that comes twice; KeyError for a rank that is not in the ledger
        under this id. O(candidates log candidates).
        """
        cdef const CIndex* blocks = NULL
        cdef CPredicted* predicted = NULL
        if block_size == 0 or (index is not None and index.c.block_size() != block_size):
            raise ValueError(f"not the block size of the index: {block_size}")
        self.index = index
        self.predictions = predictions
        self.ledger = ledger
        self.workers = {}
        if index is not None:
            blocks = index.c
        if predictions is not None:
            predicted = predictions.c
        self.c = new CPool(block_size, blocks, predicted, predicted_bound)
        self.add(sorted(candidates, key=itemgetter(0, 1)))
        self.complete()

    cdef int add(self, candidates) except -1:
        cdef Worker worker
        cdef CCandidate c
        cdef uint32_t ranks, _i
        for each in candidates:
            c.worker_id, c.dp_rank, worker, c.booked, c.max_batch_tokens, total, ranks = each
            if self.c.size() and is_same_rank(&self.c.candidate(self.c.size() - 1), &c):
                raise ValueError(f"rank {c.dp_rank} of worker {c.worker_id} comes twice")
            c.total_blocks = -1 if total is None else total
            if self.ledger.find_rank(c.worker_id, c.dp_rank) != c.booked:
                raise KeyError(c.booked)
            if worker is not None and (self.index is None or worker.index is not self.index):
                raise ValueError(f"worker {c.worker_id} is not of the pool's index")
            c.caches = NULL
            if worker is not None:
                c.caches = &worker.c
                if self.workers.setdefault(c.worker_id, worker) is not worker:
                    raise ValueError(f"worker {c.worker_id} comes twice")
            self.c.add(c)
            for _i in range(1, ranks):
                c.dp_rank += 1
                c.booked = self.ledger.find_rank(c.worker_id, c.dp_rank)
                if c.booked == kNone:
                    raise KeyError(c.dp_rank)
                self.c.add(c)
        return 0

    cdef int complete(self) except -1:
        cdef size_t n = self.c.size()
        self.open.resize(n)
        self.spare.resize(n)
        self.weights.resize(n)
        self.turns.resize(n * kTurns)
        self.choice.size = n
        self.choice.open = self.open.data()
        self.choice.spare = self.spare.data()
        self.choice.weights = self.weights.data()
        self.choice.turns = self.turns.data()
        if n != 0:
            self.choice.candidates = &self.c.candidate(0)
            self.choice.states = &self.c.state(0)
        return 0

    def __dealloc__(self):
        del self.c

    def __len__(self):
        return self.c.size()

    @property
    def block_size(self):
        """Tokens per block."""
        return self.c.block_size()

    def candidate(self, Py_ssize_t position):
        """Returns the candidate at a position as a Candidate."""
        cdef const CCandidate* c = &self.c.candidate(self.at(position))
        return Candidate(
            c.worker_id,
            c.dp_rank,
            None if c.caches == NULL else self.workers[c.worker_id],
            c.booked,
            int(c.max_batch_tokens),
            None if c.total_blocks < 0 else int(c.total_blocks),
        )

    @property
    def candidates(self):
        """All of them as Candidates, ascending by (worker id, dp rank), made at each call."""
        return tuple(map(self.candidate, range(len(self))))

    # ---- matching a prompt

    @property
    def blocks(self):
        """The number of blocks of the prompt matched last."""
        return self.c.prompt().locals.size()

    def match(self, bytes local_hashes not None, bytes sequence_hashes not None,
              uint64_t isl_tokens):
        """Finds what each candidate caches of a prompt, and what it is working on.

        Hashes are the bytes of native 64-bit integers. OverflowError for more than MAX_ISL_TOKENS.
        O(blocks + candidates + ranks that match).
        """
        cdef size_t locals_ = 0, rolling = 0
        cdef const uint64_t* local = hashes_of(local_hashes, &locals_)
        cdef const uint64_t* sequence = hashes_of(sequence_hashes, &rolling)
        bounded(isl_tokens)
        self.c.prompt().take_hashes(local, locals_, sequence, rolling, isl_tokens)
        self.match_prompt()

    def match_tokens(self, BodyScanner scanner not None, int array, str lora_name=None,
                     str cache_salt=None, unique=None, *, bint eagle=False):
        """Matches the token ids of a scanned body; their number is the prompt's length.

        A salted prompt can use salted blocks of ranks whose stream announces salts, and unsalted
        blocks of the others. `unique`, a random u64, makes its sequence hashes differ from all
        others: the prompt then shares no block in use. `eagle` hashes pairs of tokens, as EAGLE
        engines do.
        """
        cdef size_t n = 0
        cdef const uint32_t* tokens = scanner.u32(array, &n)
        self.c.prompt().take_tokens(
            tokens, n, self.c.block_size(), utf8(lora_name), utf8(cache_salt), eagle
        )
        if unique is not None:
            self.c.prompt().make_unique(unique)
        self.match_prompt()

    def match_again(self, Prompt prompt not None):
        """Matches a prompt that this pool or an earlier one has held."""
        self.c.prompt().take(prompt.c)
        self.match_prompt()

    def hold(self):
        """Returns a copy of the prompt matched last, which outlives the pool."""
        cdef Prompt prompt = Prompt.__new__(Prompt)
        prompt.c = self.c.prompt()
        return prompt

    cdef int match_prompt(self) except -1:
        if self.index is None:  # a conditional expression would copy the scratch
            self.c.find_cached(self.no_match)
        else:
            self.c.find_cached(self.index.match_scratch)
        find_live(self.c, self.ledger.c)
        self.read_loads()
        self.c.foresee()
        return 0

    cdef void read_loads(self) noexcept:
        find_loads(self.c, self.ledger.c)

    # ---- the candidates' state

    def set_heard(self, Py_ssize_t candidate, bint heard):
        """Sets whether anything that a candidate caches counts, from the next match on."""
        self.c.set_heard(self.at(candidate), heard)

    def set_reachable(self, Py_ssize_t candidate, bint reachable):
        """Sets whether a candidate can be chosen."""
        self.c.set_reachable(self.at(candidate), reachable)

    # ---- replacing another pool

    def is_like(self, Pool other not None):
        """Returns whether another pool has the same index, ledger, predictions and block size."""
        return (
            self.index is other.index
            and self.ledger is other.ledger
            and self.predictions is other.predictions
            and self.c.block_size() == other.c.block_size()
        )

    def renewed(self, dict changes not None):
        """Returns a pool of the same index, ledger and predictions, with these workers exchanged.

        `changes` has, by worker id, the worker's Candidates from now on, ascending by dp rank; none
        if it has left. All ranks are heard and reachable, and keep their turns. Raises as the
        constructor does. O(candidates), at 0.02 µs each, and 0.1 for those in `changes`, which are
        checked.
        """
        cdef Pool pool = Pool.__new__(
            Pool, self.index, self.ledger, self.c.block_size(), (), self.predictions, self.c.bound()
        )
        cdef size_t begin = 0, end, at
        cdef uint64_t worker_id
        pool.workers = {each: self.workers[each] for each in self.workers if each not in changes}
        for worker_id in sorted(changes):
            end = self.c.position(worker_id, 0)
            pool.keep(self, begin, end)
            begin = end
            if end != self.c.size() and self.c.candidate(end).worker_id == worker_id:
                begin = self.c.end_of_worker(self.c.candidate(end))
            at = pool.c.size()
            pool.add(changes[worker_id])
            pool.take(self, at, pool.c.size())
        pool.keep(self, begin, self.c.size())
        pool.choice.turn = self.choice.turn
        pool.complete()
        return pool

    def take_turns(self, Pool former not None):
        """Takes over the turns of a pool that this one replaces.

        O(candidates log candidates).
        """
        self.choice.turn = former.choice.turn
        self.take(former, 0, self.c.size())

    cdef int take(self, Pool former, size_t begin, size_t end) except -1:
        cdef const CCandidate* c
        cdef size_t i, at
        cdef int line
        self.turns.resize(max(self.turns.size(), end * kTurns))
        for i in range(begin, end):
            c = &self.c.candidate(i)
            at = former.c.position(c.worker_id, c.dp_rank)
            if at == former.c.size() or not is_same_rank(&former.c.candidate(at), c):
                continue
            for line in range(kTurns):
                self.turns[i * kTurns + line] = former.turns[at * kTurns + line]
        return 0

    cdef int keep(self, Pool former, size_t begin, size_t end) except -1:
        self.c.add_from(former.c[0], begin, end)
        self.turns.insert(
            self.turns.end(),
            former.turns.begin() + <ptrdiff_t>(begin * kTurns),
            former.turns.begin() + <ptrdiff_t>(end * kTurns),
        )
        return 0

    # ---- choosing

    def choose(self, Settings settings not None, bytes eligible, uint64_t random,
               bytes factors=None):
        """Returns the position of a candidate, or why none is chosen.

        `eligible` has a byte for each candidate, 0 to leave it out; None allows all. `random` is a
        uniform u64. It decides among equals, unless the cost is the weighted one, and it decides
        everything in mode RANDOM or with a temperature. `factors` are native doubles, one for each
        candidate, that its cost is multiplied with. NONE: no candidate is eligible; OVERLOADED: all
        eligible ones exceed a busy threshold; BUSY: all others are busy, so the request should
        wait. O(candidates).
        """
        return self.choose_now(
            &settings.c, self.mask_of(eligible), random, self.factors_of(factors)
        )

    def chances(self, Settings settings not None, bytes eligible, bytes factors=None):
        """Returns a Chance for each candidate that may be chosen, or why none may be.

        The arguments are those of `choose`, whose answer it foretells; nothing changes, no turn is
        taken. O(candidates).
        """
        cdef Scale scale = self.scale(&settings.c)
        cdef const double* liked = self.factors_of(factors)
        cdef int64_t refusal = find_open(&self.choice, &scale, self.mask_of(eligible))
        cdef bint weighs = settings.c.mode != kRoundRobin and settings.c.mode != kRandom
        cdef double total
        cdef size_t k, n = self.choice.n_open
        if refusal < 0:
            return refusal
        if weighs:
            weigh(&self.choice, &scale, liked)
        weights = [self.choice.weights[k] if weighs else None for k in range(n)]
        total = set_chances(&self.choice, &scale)
        return [
            Chance(self.choice.open[k], weights[k], self.choice.weights[k] / total)
            for k in range(n)
        ]

    def exceeded(self, Py_ssize_t candidate, Settings settings not None):
        """Returns the names of the busy thresholds that a candidate exceeds, heeded or not."""
        cdef size_t i = self.at(candidate)
        cdef Scale scale = self.scale(&settings.c)
        cdef const CCandidate* c = &self.c.candidate(i)
        cdef const CCandidateState* s = &self.c.state(i)
        named = (
            ("active_prefill_tokens_threshold", prefills_too_much(&scale, s)),
            ("active_prefill_tokens_threshold_frac", prefills_too_large_a_part(&scale, c, s)),
            ("active_decode_blocks_threshold", has_too_many_blocks(&scale, c, s)),
            ("queue_threshold", is_busy(&scale, c, s)),
        )
        return [name for name, exceeds in named if exceeds]

    def refusal(self, Settings settings not None, bytes eligible):
        """Returns NONE, OVERLOADED or BUSY if `choose` would return that after a match now, else 0.

        Needs no prompt, and reads the loads of this moment. O(candidates).
        """
        return self.refusal_now(&settings.c, self.mask_of(eligible))

    def stay(self, Settings settings not None, bytes eligible, bytes wanted not None):
        """Returns a mask of the `wanted` candidates that a session may stay with, None if none.

        These are within the settings' `session_bound`, by the loads of this moment. None also where
        `refusal` would not be 0. O(candidates).
        """
        cdef Scale scale = self.scale(&settings.c)
        cdef const uint8_t* asked = self.mask_of(wanted)
        # A new object to write into: a copy of a single byte would be the shared one for it.
        cdef bytes left = PyBytes_FromStringAndSize(NULL, self.c.size())
        cdef char* mask = PyBytes_AS_STRING(left)
        cdef uint64_t requests
        cdef bint some = False
        cdef size_t i
        if self.refusal_now(&settings.c, self.mask_of(eligible)) != 0:
            return None
        requests = open_requests(&self.choice)
        for i in range(self.c.size()):
            mask[i] = asked[i] != 0 and keeps_sessions(
                &scale, &self.c.state(i), requests, self.choice.n_open
            )
            some = some or mask[i] != 0
        return left if some else None

    def best(self, Settings settings not None, bytes eligible):
        """Returns the most blocks of the prompt that a candidate caches which may be chosen.

        By the loads of this moment. O(candidates).
        """
        self.refusal_now(&settings.c, self.mask_of(eligible))
        return self.most_cached()

    def least_prefill_tokens(self, Settings settings not None, bytes eligible):
        """Returns the fewest tokens that an eligible candidate would have to prefill.

        O(candidates).
        """
        cdef const uint8_t* mask = self.mask_of(eligible)
        cdef Scale scale = self.scale(&settings.c)
        cdef uint64_t least = scale.isl
        cdef size_t i
        for i in range(self.c.size()):
            if mask == NULL or mask[i] != 0:
                least = min(least, effective_tokens(&scale, &self.c.state(i)))
        return least

    def deepest(self, size_t limit):
        """Returns the candidates that cache most of the prompt, as (worker id, dp rank, blocks).

        Blocks are of any tier. At most `limit`, and none that caches nothing. O(candidates log
        candidates).
        """
        cdef list found = []
        cdef const CCandidateState* c
        cdef int64_t blocks
        cdef size_t i
        for i in range(self.c.size()):
            c = &self.c.state(i)
            blocks = <int64_t>c.device + c.host + c.disk
            if blocks != 0:
                found.append((-blocks, i))
        found.sort()
        return [(*self.candidate(i)[:2], -less) for less, i in found[:limit]]

    def mask(self, worker_ids, dp_rank=None):
        """Returns an `eligible` that allows these workers' ranks, all or those with a dp rank.

        Unknown workers and ranks are ignored. O(worker ids x log candidates + candidates).
        """
        cdef bytes eligible = PyBytes_FromStringAndSize(NULL, self.c.size())
        cdef char* mask = PyBytes_AS_STRING(eligible)
        cdef uint64_t worker_id
        cdef size_t at
        memset(mask, 0, self.c.size())
        for worker_id in worker_ids:
            if dp_rank is not None:
                found = self.find(worker_id, dp_rank)
                if found is not None:
                    mask[<size_t>found] = 1
                continue
            at = self.c.position(worker_id, 0)
            while at < self.c.size() and self.c.candidate(at).worker_id == worker_id:
                mask[at] = 1
                at += 1
        return eligible

    def remember(self):
        """Remembers the loads of this moment, for `changed`. O(candidates)."""
        self.read_loads()
        self.c.remember()

    def changed(self):
        """Returns a byte for each candidate: 1 if its load is not the remembered one, else 0.

        None if nothing is remembered. O(candidates).
        """
        cdef bytes changed = PyBytes_FromStringAndSize(NULL, self.c.size())
        self.read_loads()
        return changed if self.c.changed(<uint8_t*>PyBytes_AS_STRING(changed)) else None

    def find(self, uint64_t worker_id, uint32_t dp_rank):
        """Returns the position of a candidate, None if it is not one. O(log candidates)."""
        cdef size_t at = self.c.position(worker_id, dp_rank)
        if at == self.c.size():
            return None
        cdef const CCandidate* c = &self.c.candidate(at)
        return at if c.worker_id == worker_id and c.dp_rank == dp_rank else None

    # ---- booking

    def effective_prefill_tokens(self, Py_ssize_t candidate, Settings settings not None):
        """Returns the tokens that a candidate would have to prefill, as a booking counts them."""
        return self.effective_tokens_of(&settings.c, self.at(candidate))

    def reserve(self, str request_id not None, Py_ssize_t candidate, tokens, double now,
                str key=None, expected_output=None, *, bint blocks=True):
        """Reserves a candidate for the prompt as `Ledger.add` does; returns what that returns.

        Without `blocks`, it books the tokens alone.
        """
        cdef LoadedRankId rank = self.c.candidate(self.at(candidate)).booked
        sequence = bytes_of(self.c.prompt().sequence) if blocks else b""
        return self.ledger.add(request_id, rank, sequence, tokens, now, key, expected_output)

    def predict(self, Py_ssize_t candidate, double now):
        """Predicts that a candidate caches the prompt, if predictions are kept. O(blocks)."""
        self.c.predict(self.at(candidate), now)

    def withdraw(self, Py_ssize_t candidate, double then):
        """Takes back what `predict` at that time has predicted of the prompt, and no other has.

        O(blocks).
        """
        self.c.withdraw(self.at(candidate), then)

    # ---- explaining a choice

    def explain(self, Settings settings not None, bytes eligible=None, bytes factors=None):
        """Returns all terms of the cost of all candidates, as Explained.

        They are in blocks unless named otherwise; those of the cost that is not in use are 0.
        `eligible` and `factors` are those of `choose`.
        """
        cdef const uint8_t* mask = self.mask_of(eligible)
        cdef const double* liked = self.factors_of(factors)
        cdef PoolSums sums = self.sums_of(&settings.c, mask)
        return [self.row(i, &settings.c, mask, liked, sums) for i in range(self.c.size())]

    def explained(self, Py_ssize_t candidate, Settings settings not None, bytes eligible=None,
                  bytes factors=None):
        """Returns all terms of the cost of one candidate, as Explained."""
        cdef size_t i = self.at(candidate)
        cdef const uint8_t* mask = self.mask_of(eligible)
        cdef PoolSums sums = self.sums_of(&settings.c, mask)
        return self.row(i, &settings.c, mask, self.factors_of(factors), sums)

    cdef row(self, size_t i, const CSettings* settings, const uint8_t* mask, const double* factors,
             PoolSums sums):
        cdef double factor = 1 if factors == NULL else factors[i]
        cdef const CCandidate* c = &self.c.candidate(i)
        cdef const CCandidateState* s = &self.c.state(i)
        cdef Scale scale = self.scale(settings)
        cdef CostTerms t = terms_of(&scale, s, device_credit_of(&scale, s, sums.least_prefill))
        cdef WeightedTerms w = weighted_terms_of(&scale, s, sums.least_uncached)
        if settings.weighted:
            t.raw = t.credit = t.prefill = t.decode = 0
            t.cost = w.cost
        else:
            w = WeightedTerms(0, 0, 0, 0, 0, settings.active_request_weight * s.requests, 0, 0, 0)
        return Explained(
            c.worker_id,
            c.dp_rank,
            s.device,
            s.host,
            s.disk,
            s.live,
            s.prefill_tokens,
            s.decode_blocks,
            s.requests,
            s.decoding,
            t.cached_tokens,
            t.effective_tokens,
            decode_blocks(&scale, s),
            t.raw,
            t.credit,
            t.prefill,
            t.decode,
            w.counted,
            w.uncached,
            w.hold_up,
            w.crowding,
            w.queued,
            w.requests,
            w.blocks,
            w.product,
            t.cost * factor,
            keeps_sessions(&scale, s, sums.requests, sums.ranks),
            s.present and (mask == NULL or mask[i] != 0),
            is_overloaded(&scale, c, s),
            is_busy(&scale, c, s),
            factor,
            c.heard,
            c.reachable,
        )

    # ---- rendering

    def render_choice(self, Py_ssize_t candidate, Settings settings not None):
        """Returns the members of a selection of a candidate, from `"overlap":` on.

        They are JSON without braces, see `selector/rows.pxd`. O(ranks of the worker).
        """
        return self.rendered(kChoice, settings, self.at(candidate), b"", b"")

    cpdef bytes render_answer(self, bytes opening, bytes members, Py_ssize_t candidate,
                              Settings settings):
        """Returns an answer as a JSON object: `opening`, `members`, and those of render_choice."""
        if self.index is not None:
            self.note_asked()
        return self.rendered(kAnswer, settings, self.at(candidate), opening, members)

    cdef void note_asked(self) noexcept:
        """Counts the prompt among the queries of the index."""
        cdef CPrompt* prompt = &self.c.prompt()
        self.index.note_question(prompt.used().data(), prompt.locals.size())
        if prompt.by_tokens and prompt.locals.size() != 0:
            self.index.note_prompt(prompt.first_token, prompt.is_salted, prompt.is_adapted)

    def render_overlaps(self):
        """Returns every candidate's cached blocks as a JSON array, see `selector/rows.pxd`."""
        return self.rendered(kOverlaps, None, 0, b"", b"")

    def render_loads(self, Settings settings not None):
        """Returns the load that every candidate would have with the prompt, as a JSON array."""
        return self.rendered(kLoads, settings, 0, b"", b"")

    def keep_overlaps(self):
        """Returns the rows of `render_overlaps` as KeptStates. O(candidates)."""
        return self.kept(kOverlaps, None)

    def keep_loads(self, Settings settings not None):
        """Returns the rows of `render_loads` as KeptStates. O(candidates)."""
        return self.kept(kLoads, settings)

    cdef bytes rendered(self, Rendering part, Settings settings, size_t candidate, bytes opening,
                        bytes members):
        cdef PyObject* answer
        cdef char* begin
        cdef char* end
        cdef Scale scale
        cdef bint one = part == kChoice or part == kAnswer
        cdef size_t room = choice_room(self.c, candidate) if one else self.rows_bytes()
        cdef size_t before = PyBytes_GET_SIZE(opening) + PyBytes_GET_SIZE(members)
        answer = PyBytes_New(NULL, before + room + 1)
        begin = PyBytes_AS_STRING(<object>answer)
        end = put(put(begin, view(opening)), view(members))
        if part == kOverlaps:
            end = put_overlaps(end, &self.choice)
        else:
            scale = self.scale(&settings.c)
            if part == kLoads:
                end = put_loads(end, &self.choice, &scale)
            else:
                end = put_choice(end, self.c, candidate, &scale)
        if part == kAnswer:
            end = put_text(end, b"}")
        return cut(answer, end - begin)

    # ---- for compiled callers, which have checked the arguments

    cdef size_t rows_bytes(self) noexcept:
        return rows_room(self.c.size())

    cdef KeptStates kept(self, Rendering part, Settings settings):
        cdef KeptStates kept = KeptStates.__new__(KeptStates)
        kept.pool, kept.part, kept.settings = self, part, settings
        kept.states.assign(self.c.states(), self.c.states() + self.c.size())
        if settings is not None:
            kept.scale = self.scale(&settings.c)
        return kept

    cdef int64_t choose_now(
        self, const CSettings* settings, const uint8_t* mask, uint64_t random, const double* factors
    ) noexcept:
        cdef Scale scale = self.scale(settings)
        return choose(&self.choice, &scale, mask, random, factors)

    cdef int64_t refusal_now(self, const CSettings* settings, const uint8_t* mask) noexcept:
        cdef Scale scale = self.scale(settings)
        self.read_loads()
        return find_open(&self.choice, &scale, mask)

    cdef void take_back(self) noexcept:
        return_turn(&self.choice)

    cdef uint32_t most_cached(self) noexcept:
        return self.c.most_cached(self.choice.open, self.choice.n_open)

    cdef PoolSums sums_of(self, const CSettings* settings, const uint8_t* mask) noexcept:
        cdef Scale scale = self.scale(settings)
        cdef PoolSums sums
        find_open(&self.choice, &scale, mask)
        sums.least_prefill = least_prefill(&self.choice, &scale)
        sums.least_uncached = least_uncached(&self.choice, &scale)
        sums.requests = open_requests(&self.choice)
        sums.ranks = self.choice.n_open
        return sums

    cdef uint64_t cached_tokens_of(self, const CSettings* settings, size_t candidate) noexcept:
        cdef Scale scale = self.scale(settings)
        return cached_tokens(&scale, &self.c.state(candidate))

    cdef uint64_t effective_tokens_of(self, const CSettings* settings, size_t candidate) noexcept:
        cdef Scale scale = self.scale(settings)
        return effective_tokens(&scale, &self.c.state(candidate))

    cdef Scale scale(self, const CSettings* settings) noexcept:
        return scale_of(settings, &self.c.prompt(), self.c.block_size())

    cdef const uint8_t* mask_of(self, bytes eligible) except? NULL:
        if eligible is None:
            return NULL
        if <size_t>PyBytes_GET_SIZE(eligible) != self.c.size():
            raise ValueError("expected one byte for each candidate")
        return <const uint8_t*>PyBytes_AS_STRING(eligible)

    cdef const double* factors_of(self, bytes factors) except? NULL:
        if factors is None:
            return NULL
        if <size_t>PyBytes_GET_SIZE(factors) != self.c.size() * sizeof(double):
            raise ValueError("expected one double for each candidate")
        return <const double*>PyBytes_AS_STRING(factors)

    cdef size_t at(self, Py_ssize_t candidate) except? 0:
        if not 0 <= candidate < <Py_ssize_t>self.c.size():
            raise IndexError(candidate)
        return candidate


cdef string_view view(bytes text) noexcept:
    return string_view(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))


cdef int bounded(uint64_t isl_tokens) except -1:
    if isl_tokens > kMaxIslTokens:
        raise OverflowError("too many tokens")
    return 0


cdef class KeptStates:
    """Rows of all candidates as the last match has found them, which are rendered piece by piece.

    Made by `Pool.keep_overlaps` and `Pool.keep_loads`; 48 bytes a candidate.
    """

    def __init__(self):
        raise TypeError("use Pool.keep_overlaps or Pool.keep_loads")

    def read(self, size_t enough):
        """Returns further rows, with a comma before each, of at least `enough` bytes if there are.

        b"" at the end. Only `enough` and one row bound a piece from above.
        """
        cdef PyObject* piece
        cdef char* begin
        cdef char* end
        cdef const CCandidate* candidates = self.pool.c.candidates()
        if self.at == self.states.size():
            return b""
        piece = PyBytes_New(NULL, enough + rows_room(1))
        begin = end = PyBytes_AS_STRING(<object>piece)
        while self.at < self.states.size() and <size_t>(end - begin) < enough:
            if self.part == kOverlaps:
                end = put_overlap(end, &candidates[self.at], &self.states[self.at])
            else:
                end = put_load(end, &candidates[self.at], &self.states[self.at], &self.scale)
            self.at += 1
        return cut(piece, end - begin)
