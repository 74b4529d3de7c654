# distutils: language = c++
"""Serves selections that need only a choice and the ledger: no earlier selection waits, no replica
is to be notified, and no session is bound. All others go through kvd.selection.scheduler.
Likewise takes steps of reservations that change nothing but the ledger; all others go through
kvd.selection.reservations.

Costs: 1 µs beside matching, choosing and booking; the scheduler takes 14 µs.
"""
from cython.operator cimport dereference as deref

from kvd.selection.serving cimport booked_tokens, utf8
from kvd_core.ledger.trie cimport kNone
from kvd_core.ledger.types cimport Admission, kAdded
from kvd_core.selector.settings cimport kDirect
from kvd_core.selector.types cimport CCandidate

from collections import namedtuple

from kvd.selection.phases import PREFILL_SUFFIX

# A rank that was chosen for a prompt and booked: worker id, dp rank, tokens to be prefilled there.
Booked = namedtuple("Booked", ("worker_id", "dp_rank", "prefill_tokens"))

cdef enum:
    kWhole = 0  # the phase of a usual request, as kvd.selection.stats numbers them

cdef uint32_t U32_MAX = 0xffffffff
cdef string PREFILL = PREFILL_SUFFIX.encode()


cdef class ImmediateSelection:
    """Chooses a rank and books it in one step."""

    def __init__(self, selections not None):
        """Takes the daemon's selections."""
        self.selections = selections
        self.reservations = selections.reservations
        self.scheduler = selections.scheduler
        self.draws = selections.draws
        self.choice_stats = selections.choice_stats
        self.owner_of = selections.reservations.owner_of
        self.replicas = selections.reservations.steps.subscribers
        self.observers = selections.reservations.moments.subscribers
        self.sample = selections.reservations.sample

    cpdef bint suits(self, candidates, str reservation_id, str session_id) except -1:
        if candidates is None or not candidates.workers:
            return False
        if reservation_id is not None and (self.replicas or reservation_id in self.owner_of):
            return False
        if session_id is not None and self.selections.affinity is not None:
            return False
        if self.scheduler.held and candidates.queue.waits(None):
            return False
        cdef Settings settings = candidates.settings
        return settings.c.mode != kDirect  # which needs a pinned worker

    def select(self, candidates not None, str reservation_id not None, expected=None):
        """Chooses a rank for the prompt that the candidates' pool has matched, and books it.

        expected: tokens of output, if they can be estimated. Returns a Booked, or None and changes
        nothing if only the scheduler can serve the request.
        """
        cdef uint32_t output = kNone if expected is None else min(expected, U32_MAX - 1)
        cdef Pool pool = candidates.pool
        cdef int64_t chosen = self.serve(candidates, pool, reservation_id, output)
        if chosen < 0:
            return None
        cdef Settings settings = candidates.settings
        cdef const CCandidate* c = &pool.c.candidate(chosen)
        return Booked(c.worker_id, c.dp_rank, pool.effective_tokens_of(&settings.c, chosen))

    cdef int64_t serve(self, candidates, Pool pool, str reservation_id, uint32_t expected
                       ) except? -2:
        cdef Settings settings = candidates.settings
        cdef int64_t candidate = pool.choose_now(
            &settings.c, pool.mask_of(candidates.whole_mask), self.draws.peek(0), NULL
        )
        if candidate < 0:
            return -1
        if reservation_id is not None and not self.reserve(
            candidates, settings, pool, candidate, reservation_id, expected
        ):
            pool.take_back()
            return -1
        self.draws.take(1)
        self.choice_stats.c.serve(settings.c.mode, kWhole, pool.c.prompt().isl_tokens)
        self.choice_stats.c.choose(
            deref(pool.c), candidate, pool.cached_tokens_of(&settings.c, candidate),
            pool.most_cached(), kWhole,
        )
        return candidate

    cdef bint reserve(self, candidates, Settings settings, Pool pool, size_t candidate,
                      str reservation_id, uint32_t expected) except -1:
        cdef Admission admission
        admission.id = utf8(reservation_id)
        admission.rank = pool.c.candidate(candidate).booked
        admission.hashes = pool.c.prompt().sequence.data()
        admission.blocks = pool.c.prompt().sequence.size()
        admission.tokens = booked_tokens(pool, settings, candidate)
        admission.now = self.selections.clock()
        admission.expected = expected
        if pool.ledger.admit(&admission) != kAdded:
            return False
        pool.c.predict(candidate, admission.now)
        self.owner_of[reservation_id] = candidates
        self.booked_at = admission.now
        if self.observers and self.sample.takes(reservation_id):
            self.reservations.observe_begin(candidates, reservation_id)
        return True


cdef class ImmediateSteps:
    """Takes steps of reservations."""

    def __init__(self, selections not None):
        """Takes the daemon's selections."""
        self.reservations = selections.reservations
        self.scheduler = selections.scheduler
        self.owner_of = selections.reservations.owner_of
        self.replicas = selections.reservations.steps.subscribers
        self.observers = selections.reservations.moments.subscribers
        self.sample = selections.reservations.sample
        self.leases = {} if selections.affinity is None else selections.affinity.leases
        self.retried = selections.reservations.retries.names

    cpdef int prefill_complete(self, str reservation_id) except -1:
        cdef Ledger ledger = self.ledger_of(reservation_id)
        cdef RequestId live = self.request_of(ledger, reservation_id)
        if live == kNone:
            self.reservations.prefill_complete(reservation_id)
        else:
            ledger.complete(live)
        return 0

    cpdef int free(self, str reservation_id) except -1:
        cdef Ledger ledger = None
        if not (
            (self.leases and reservation_id in self.leases)
            or (self.retried and reservation_id in self.retried)
        ):
            ledger = self.ledger_of(reservation_id)
        cdef RequestId live = self.request_of(ledger, reservation_id)
        if live == kNone:
            self.reservations.free(reservation_id)
        else:
            ledger.end(live)
            del self.owner_of[reservation_id]
        return 0

    cdef Ledger ledger_of(self, str reservation_id):
        candidates = self.owner_of.get(reservation_id)
        if candidates is None or self.replicas:
            return None
        if self.observers and self.sample.takes(reservation_id):
            return None
        if self.scheduler.held and len(candidates.queue):
            return None
        return candidates.ledger

    cdef RequestId request_of(self, Ledger ledger, str reservation_id) except? 0xffffffff:
        if ledger is None:
            return kNone
        cdef string_view id = utf8(reservation_id)
        self.prefill_id.assign(id.data(), id.size())
        self.prefill_id.append(PREFILL)
        if ledger.find_request(string_view(self.prefill_id)) != kNone:
            return kNone
        return ledger.find_request(id)
