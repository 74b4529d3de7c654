# distutils: language = c++
"""The selection service's hot handlers.

A selection without unusual members is chosen and booked here, in one go:

    body ──> PromptReader ──> usual, none before it in the queue, no replica to notify?
                                │ yes              │ no
                                v                  v
               kvd.selection.immediate ── no rank ─> kvd.selection.scheduler ──> answer, or a wait

The scheduler serves selections that need more than the choice and the ledger: constraints, phases,
sessions, explanations, replicas, Idempotency-Keys, the queue. It also raises the errors where no
rank can be chosen. Both ways read the body once, with the same reader and `choosing.request_of`,
choose with the same Pool, and count and report a booking with kvd.selection.serving. The fast path
leaves a selection for the scheduler to the task of its connection, as it may have to wait.

Costs: those of kvd.selection.immediate, and scanning the body.
"""
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvd.faces.common.reader cimport segment
from kvd.http.permits cimport Text
from kvd.selection.serving cimport opening, utf8
from kvd_core.json.scan cimport ValueKind
from kvd_core.ledger.trie cimport kNone
from kvd_core.ledger.types cimport kMaxIdBytes, kWholeRowsBytes
from kvd_core.selector.selector cimport kLoads, kOverlaps
from kvd_core.selector.settings cimport Settings
from kvd_core.selector.types cimport kMaxIslTokens

from dataclasses import replace
from functools import partial
from itertools import chain

from kvd.faces.common import bodies
from kvd.faces.common.slices import arrayed, sliced
from kvd.faces.selection import choosing, prompts
from kvd.faces.selection.members import retry_of
from kvd.http.messages import Response
from kvd.model import PartitionKey
from kvd.selection.candidates import schedulable
from kvd.selection.requests import QueuedRequest
from kvd.selection.worker_record import DEFAULT_MODEL

# Positions of the arrays and of the fields; the first eight fields are those of every body.
cdef enum:
    kBlockHashes
    kSequenceHashes
    kTokenIds
cdef enum:
    kModel
    kTenant
    kTenantAlias
    kIslTokens
    kLora
    kCacheSalt
    kOverride
    kEagle
    kSelectionId
    kReservationId
    kOutputTokens
    kStrictPriority
    kSessionId
    kSessionContext
    kUnusual = kSessionContext  # the first of the unusual fields, which need the scheduler
PROMPT_FIELDS = (
    "model_name",
    "tenant_id",
    "routing_group",
    "isl_tokens",
    "lora_name",
    "cache_salt",
    "router_config_override",
    "is_eagle",
)
SELECT_FIELDS = (
    *PROMPT_FIELDS,
    "selection_id",
    "reservation_id",
    "expected_output_tokens",
    "strict_priority",
    "session_id",
    "session_context",
    "priority_jump",
    "affinity_target",
    "pinned_worker",
    "allowed_worker_ids",
    "routing_constraints",
    "explain",
    "phase",
    "nvext",
    "advisory",
    "router_policy",
    "expected_ttft",
    "slo_ttft_ms",
)

cdef uint64_t U32_MAX = 0xffffffff
cdef int N_SELECT_FIELDS = len(SELECT_FIELDS)
cdef str MODEL = DEFAULT_MODEL

cdef bytes OK = bodies.OK
cdef bytes OVERLAPS_END = (
    b',"shared_cache":{"enabled":false,"total_hit_blocks":0,"ranges":[],"error":null}}'
)


cdef class PromptReader(BodyReader):
    """Reads bodies with a prompt: hashes, or tokens to be hashed."""

    cpdef int read_prompt(self, selections) except -1:
        if self.core.present(kTokenIds):
            return self.read_tokens(selections)
        self.by_tokens = False
        self.read_flavour()  # only checked: the prompt is hashed already
        if not (self.core.present(kBlockHashes) and self.core.present(kSequenceHashes)):
            raise prompts.missing(self.known(), "block_hashes", "sequence_hashes")
        if self.is_unset(kIslTokens):
            raise prompts.missing(self.known(), "isl_tokens")
        self.isl_tokens = self.uint(kIslTokens, kMaxIslTokens)
        if self.isl_tokens == 0:
            raise prompts.empty()
        self.locals_ = kBlockHashes
        return self.check_lengths()

    cpdef int read_booked(self, selections) except -1:
        if self.core.present(kTokenIds):
            return self.read_tokens(selections)
        self.by_tokens = False
        self.read_flavour()
        if not self.core.present(kSequenceHashes):
            raise prompts.missing(self.known(), "sequence_hashes")
        if self.is_unset(kIslTokens):
            raise prompts.missing(self.known(), "isl_tokens")
        self.isl_tokens = self.uint(kIslTokens, kMaxIslTokens)
        self.locals_ = kSequenceHashes
        if not self.core.present(kBlockHashes):
            return 0
        self.locals_ = kBlockHashes
        return self.check_lengths()

    cdef int read_tokens(self, selections) except -1:
        self.by_tokens = True
        if not self.is_unset(kIslTokens):
            self.uint(kIslTokens, kMaxIslTokens)  # only checked: the tokens are counted
        self.isl_tokens = self.core.narrow(kTokenIds).size()
        self.read_flavour()
        self.unique = None
        if not (self.is_unset(kOverride) and selections.options.assumes_kv_reuse):
            self.unique = prompts.unique(selections, self.known())
        return 0

    cdef int read_flavour(self) except -1:
        self.lora_name = self.optional_text(kLora)
        self.cache_salt = self.optional_text(kCacheSalt)
        self.eagle = self.optional_flag(kEagle)
        return 0

    cdef int check_lengths(self) except -1:
        cdef size_t blocks = self.core.wide(kBlockHashes).size()
        cdef size_t hashes = self.core.wide(kSequenceHashes).size()
        if blocks != hashes:
            raise prompts.of_two_lengths(blocks, hashes)
        return 0

    cpdef int put_before(self, Pool pool) except -1:
        cdef size_t locals_ = 0, n = 0
        cdef const uint32_t* tokens
        cdef const uint64_t* local
        cdef const uint64_t* sequence
        if self.by_tokens:
            tokens = self.u32(kTokenIds, &n)
            pool.c.prompt().take_tokens(
                tokens, n, pool.c.block_size(), utf8(self.lora_name or ""),
                utf8(self.cache_salt or ""), self.eagle,
            )
            if self.unique is not None:
                pool.c.prompt().make_unique(self.unique)
        else:
            local = self.u64(self.locals_, &locals_)
            sequence = self.u64(kSequenceHashes, &n)
            pool.c.prompt().take_hashes(local, locals_, sequence, n, self.isl_tokens)
        return pool.match_prompt()

    def put_again(self, bytes body not None):
        """Returns a function that makes a pool match the tokens anew; None without tokens."""
        if not self.by_tokens:
            return None
        options = self.lora_name, self.cache_salt, self.unique, self.eagle
        return partial(prompts.match_again, body, *options)


cdef class PromptHandler(HotHandler):
    """The base of handlers that match a prompt."""

    FIELDS = PROMPT_FIELDS

    def __init__(self, selections not None):
        """Takes the daemon's selections."""
        self.scanner = self.body = PromptReader(prompts.ARRAYS, self.FIELDS)
        self.selections = selections
        self.candidates = selections.candidates

    cdef tuple partition_key(self):
        absent = self.body.core.value(kModel).kind == ValueKind.absent
        model = MODEL if absent else self.body.text(kModel)
        return model, self.body.tenant(kTenant)

    cdef Settings settings_in(self, partition_key):
        if self.body.is_unset(kOverride):
            return self.selections.settings(partition_key)
        members = self.body.known()
        return choosing.settings_of(self.selections, PartitionKey(*partition_key), members)

    cdef Pool matched_pool(self, partition_key):
        candidates = self.candidates.get(partition_key)
        if candidates is None or not candidates.workers:
            schedulable(self.candidates, PartitionKey(*partition_key))
        cdef Pool pool = candidates.pool
        self.body.put_before(pool)
        return pool


cdef class PotentialLoadsHandler(PromptHandler):
    """Returns the load that every rank would have with one more prompt."""

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        self.body.read(body, size)
        self.body.read_prompt(self.selections)
        partition_key = self.partition_key()
        cdef Settings settings = self.settings_in(partition_key)
        cdef Pool pool = self.matched_pool(partition_key)
        if pool.rows_bytes() <= kWholeRowsBytes:
            return pool.rendered(kLoads, settings, 0, b"", b"")
        if request is not None:
            self.kept = pool.kept(kLoads, settings)
        return None

    cdef waiting(self, request):
        kept, self.kept = self.kept, None
        return Response(200, sliced(arrayed([kept])))


cdef class OverlapScoresHandler(PromptHandler):
    """Returns how many blocks of a prompt every rank caches."""

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        self.body.read(body, size)
        self.body.read_prompt(self.selections)
        partition_key = self.partition_key()
        if not self.body.is_unset(kOverride):
            self.settings_in(partition_key)  # only checked: they change no overlap
        cdef Pool pool = self.matched_pool(partition_key)
        begin = b'{"block_size":%d,"num_blocks":%d,"workers":' % (pool.block_size, pool.blocks)
        if pool.rows_bytes() <= kWholeRowsBytes:
            return pool.rendered(kOverlaps, None, 0, begin, b"") + OVERLAPS_END
        if request is not None:
            rows = arrayed([pool.kept(kOverlaps, None)])
            self.pieces = chain([begin], rows, [OVERLAPS_END])
        return None

    cdef waiting(self, request):
        pieces, self.pieces = self.pieces, None
        return Response(200, sliced(pieces))


cdef class SelectHandler(PromptHandler):
    """Chooses the rank that should serve a prompt, and with `reserves` books the prompt there.

    A selection may wait until a rank is not busy.
    """

    FIELDS = SELECT_FIELDS

    def __init__(self, selections, bint reserves):
        super().__init__(selections)
        self.reservations = selections.reservations
        self.scheduler = selections.scheduler
        self.draws = selections.draws
        self.immediate = ImmediateSelection(selections)
        self.adds_request = reserves
        self.waits = True

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        # If the request is left to a task, that task calls `answer` again: it must draw the same
        # numbers.
        self.draws.mark()
        try:
            answer = self.answered(body, size, request)
            if answer is None and request is None:
                self.draws.rewind()
            return answer
        finally:
            self.draws.unmark()

    cdef bytes answered(self, const char* body, size_t size, request):
        self.receipt = self.booked_in = None
        self.is_matched = False
        self.body.read(body, size)
        partition_key = self.partition_key()
        usual = self.usual_members()
        selection = retry = None
        if not self.is_usual():
            if request is None:
                return None  # the task reads the unusual members, once
            selection = self.asked(partition_key, usual, self.body.known())
        if self.adds_request:
            retry = self.read_booking(selection, request)
        self.body.read_prompt(self.selections)
        if selection is None and retry is None:
            candidates = self.candidates.get(partition_key)
            if self.immediate.suits(candidates, self.reservation_id, self.session_id):
                answer = self.served(candidates)
                if answer is not None:
                    return answer
        if request is None:
            return None
        return self.scheduled(selection or self.asked(partition_key, usual, {}), retry, request)

    cdef tuple usual_members(self):
        cdef PromptReader asks = self.body
        self.selection_id = asks.optional_text(kSelectionId)
        self.expected, expected = kNone, None
        if not asks.is_unset(kOutputTokens):
            expected = asks.uint(kOutputTokens, U32_MAX)
            self.expected = min(expected, U32_MAX - 1)
        priority = 0 if asks.is_unset(kStrictPriority) else asks.uint(kStrictPriority, U32_MAX)
        self.session_id = None
        if asks.is_unset(kSessionContext):
            self.session_id = asks.optional_text(kSessionId)
        return self.selection_id, expected, priority, self.session_id, asks.optional_text(kLora)

    cdef object asked(self, partition_key, usual, members):
        """Returns the SelectRequest of the body; `members` has its unusual members."""
        return choosing.request_of(self.selections, PartitionKey(*partition_key), members, *usual)

    cdef object read_booking(self, selection, request):
        """Reads the id of the booking, or makes one; returns the Retry if there is a key for it."""
        given = self.body.optional_text(kReservationId)
        if given is None:
            given = self.selection_id or None  # Dynamo's only id, which every later step names
        if selection is not None or (given is not None and utf8(given).size() > kMaxIdBytes):
            choosing.check_booking(selection, given)
        retry = None if request is None else retry_of(request, given)
        self.reservation_id = given
        if given is None:
            self.reservation_id = self.draws.peek_uuid(0)
            self.draws.take(2)
        return retry

    cdef bytes scheduled(self, selection, retry, request):
        """Returns the scheduler's answer; None if the selection waits."""
        if self.adds_request:
            selection = replace(selection, reservation_id=self.reservation_id, retry=retry)
        lookup = has_matched if self.is_matched else self.body.put_before
        reply = self.scheduler.select(selection, lookup)
        if isinstance(reply, QueuedRequest):
            reply.again = self.body.put_again(request.body)
            self.queued = reply
            return None
        self.receipt = reply.receipt
        return reply.answer

    cdef waiting(self, request):
        queued, self.queued = self.queued, None
        return choosing.wait(self.scheduler, queued)

    cdef undoing(self):
        if self.receipt is not None:
            return partial(self.reservations.take_back, self.receipt)
        if self.booked_in is None:
            return None
        booked_at = self.immediate.booked_at
        return self.reservations.undoing(self.booked_in, self.reservation_id, booked_at)

    cdef bint is_usual(self) noexcept:
        cdef int at
        for at in range(kUnusual, N_SELECT_FIELDS):
            if not self.body.is_unset(at):
                return False
        return self.body.is_unset(kOverride)

    cdef bytes served(self, candidates):
        """Chooses and books at once; returns None, with nothing changed, if it cannot."""
        cdef Pool pool = candidates.pool
        self.body.put_before(pool)
        self.is_matched = True
        cdef int64_t candidate = self.immediate.serve(
            candidates, pool, self.reservation_id, self.expected
        )
        if candidate < 0:
            return None
        if self.adds_request:
            self.booked_in = candidates
        members = candidates.rank_members[candidate]
        if members is None:
            members = candidates.render_rank(candidate)
        begin = opening(self.selection_id, self.reservation_id, None)
        return pool.render_answer(begin, members, candidate, candidates.settings)


cdef class ReservationHandler(HotHandler):
    """The base of handlers that take a step of a reservation."""

    def __init__(self, selections not None):
        """Takes the daemon's selections."""
        self.steps = ImmediateSteps(selections)
        self.bodiless = True


cdef class PrefillCompleteHandler(ReservationHandler):
    """Ends the prefill of a reservation; doing so again is no error."""

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        self.steps.prefill_complete(segment(captured))
        return OK


cdef class FreeHandler(ReservationHandler):
    """Ends a reservation."""

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        self.steps.free(segment(captured))
        return OK


cdef class LoadsHandler(HotHandler):
    """Returns the loads of all ranks and the queues; the query may name a model and tenant."""

    def __init__(self, selections not None):
        """Takes the daemon's selections."""
        self.selections = selections
        self.bodiless = True

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        model_name, tenant_id = (None, None) if request is None else bodies.filters(request)
        return self.selections.render_loads(model_name, tenant_id)

    cdef waiting(self, request):
        return Response(200, sliced(load_pieces(self.selections.named(*bodies.filters(request)))))


def load_pieces(every):
    """Yields the array of loads in pieces; those of a model and tenant are of one moment."""
    separator = b"["
    for candidates in every:
        before, after = candidates.around_loads()
        rows = candidates.ledger.keep_projection(b"", 0)
        yield separator + before
        yield from arrayed([rows])
        yield after
        separator = b","
    yield b"]"


def has_matched(pool):
    """Does nothing: the pool has matched the prompt already."""
