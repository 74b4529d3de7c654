# distutils: language = c++
"""Answers plain requests of the selection service without an interpreted instruction on the way.

A selection is plain when its body is well-formed, its fleet exists, nothing narrows or overrides the
choice, nobody is before it in the queue, and someone is chosen. A request that would be refused, or
has to wait, is left to its handler, and so is every booking while there are replicas to tell of it or
predictions to make from it.

Random numbers are looked at first and taken once the request is answered, so that the handler finds
the source as it was.

Costs: 1 µs beside scanning the body, looking and booking; a handler takes 14 µs, and the steps of a
reservation in all 37 µs instead of 3.
"""
import json

from cpython.unicode cimport PyUnicode_DecodeUTF8
from cython.operator cimport dereference as deref
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp.string_view cimport string_view

from kvd_core.ledger.ledger cimport CAdmission, kAdded, kMaxIdBytes, kNone
from kvd.faces.indexer.plain cimport natural, optional_text, text
from kvd_core.json.scan cimport Kind, Value, Verdict
from kvd_core.selector.selector cimport kLoads
from kvd_core.selector.settings cimport kDirect
from kvd_core.selector.types cimport kMaxIslTokens

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

# Positions of the arrays and of the fields; the first eight fields are those of every scanner.
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
    kFirstUnusual  # from here on: whoever gives one wants something that is not plain
cdef enum:
    kWhole = 0  # the phase of a plain request, as kvd.selection.outcomes numbers them
ARRAYS = ("block_hashes", "sequence_hashes", "token_ids")
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
    "priority_jump",
    "affinity_target",
    "pinned_worker",
    "allowed_worker_ids",
    "routing_constraints",
    "explain",
    "phase",
    "nvext",
    "session_context",
    "advisory",
    "router_policy",
)

cdef uint64_t U32_MAX = 0xffffffff
cdef uint64_t U64_MAX = 0xffffffffffffffff
cdef int N_SELECT_FIELDS = len(SELECT_FIELDS)

cdef bytes OK = b'{"status":"ok"}'
cdef char* PREFILL_SUFFIX = b":prefill"  # of the ids of bookings for the prefill phase alone


cdef class PlainPrompt(Answerer):
    """What the answerers of questions about a prompt have in common."""

    FIELDS = PROMPT_FIELDS

    def __init__(self, BodyScanner scanner not None, selections not None, str model not None,
                 str tenant not None):
        """Takes the route's scanner, the selections, and the default model and tenant.

        Raises ValueError for a scanner whose arrays and fields are not ARRAYS and the class's FIELDS.
        """
        if (scanner.array_names, scanner.field_names) != (ARRAYS, self.FIELDS):
            raise ValueError(f"not the members of such a request: {scanner.field_names}")
        self.scanner = scanner
        self.selections = selections
        self.reservations = selections.reservations
        self.scheduler = selections.scheduler
        self.fleets = selections.fleets
        self.reuses = selections.options.assumes_kv_reuse
        self.model = model
        self.tenant = tenant

    cdef object scanned(self, const char* body, size_t size):
        cdef BodyScanner scanner = self.scanner
        if scanner.core.scan(<const uint8_t*>body, size) != Verdict.ok:
            return None
        if scanner.core.value(kTenantAlias).kind != Kind.absent:
            return None
        if not unset(scanner.core.value(kOverride)):
            return None
        if scanner.core.value(kEagle).kind != Kind.absent:
            return None
        model = given(scanner.core.value(kModel), self.model)
        tenant = given(scanner.core.value(kTenant), self.tenant)
        if model is None or tenant is None:
            return None
        fleet = self.fleets.get((model, tenant))
        return fleet if fleet is not None and fleet.workers else None

    cdef bint looked(self, Pool pool) except -1:
        if self.scanner.core.present(kTokenIds):
            return self.looked_tokens(pool)
        return self.looked_hashes(pool)

    cdef bint looked_hashes(self, Pool pool) except -1:
        cdef BodyScanner scanner = self.scanner
        cdef uint64_t isl_tokens
        cdef size_t blocks = 0, hashes = 0
        if not (scanner.core.present(kBlockHashes) and scanner.core.present(kSequenceHashes)):
            return False
        if not natural(scanner.core.value(kIslTokens), kMaxIslTokens, &isl_tokens):
            return False
        # They count for nothing here, but the handler looks at their types.
        if optional_text(scanner.core.value(kLora)) is None:
            return False
        if optional_text(scanner.core.value(kCacheSalt)) is None:
            return False
        cdef const uint64_t* local = scanner.u64(kBlockHashes, &blocks)
        cdef const uint64_t* rolling = scanner.u64(kSequenceHashes, &hashes)
        if isl_tokens == 0 or blocks != hashes:
            return False
        pool.c.prompt().take_hashes(local, blocks, rolling, hashes, isl_tokens)
        pool.look_at_prompt()
        return True

    cdef bint looked_tokens(self, Pool pool) except -1:
        cdef BodyScanner scanner = self.scanner
        cdef size_t n = 0
        if not self.reuses or not count(scanner.core.value(kIslTokens), U64_MAX):
            return False
        lora = optional_text(scanner.core.value(kLora))
        salt = optional_text(scanner.core.value(kCacheSalt))
        if lora is None or salt is None:
            return False
        cdef const uint32_t* tokens = scanner.u32(kTokenIds, &n)
        pool.c.prompt().take_tokens(
            tokens, n, pool.c.block_size(), utf8(lora), utf8(salt), False
        )
        pool.look_at_prompt()
        return True


cdef class PlainSelect(PlainPrompt):
    """Says which rank should serve a prompt, and books it there if it `books`."""

    FIELDS = SELECT_FIELDS

    def __init__(self, scanner, selections, model, tenant, bint books):
        super().__init__(scanner, selections, model, tenant)
        self.draws = selections.draws
        self.counts = selections.counts
        self.live = selections.reservations.live
        self.books = books

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        fleet = self.scanned(body, size)
        if fleet is None or not self.plain():
            return None
        if self.books and (self.reservations.steps.subscribers or fleet.predictions is not None):
            return None
        if self.scheduler.held and fleet.queue.waits(None):
            return None
        cdef const Value* wanted = &self.scanner.core.value(kReservationId)
        cdef bint drawn = self.books and unset(wanted[0])
        reservation_id = None
        if drawn:
            reservation_id = self.draws.peek_uuid(0)
        elif self.books:
            reservation_id = id_of(wanted[0])
            if reservation_id is None:
                return None
        if self.books and reservation_id in self.live:
            return None
        cdef Pool pool = fleet.pool
        if not self.looked(pool):
            return None
        return self.chosen(fleet, pool, reservation_id, drawn)

    cdef bint plain(self):
        cdef BodyScanner scanner = self.scanner
        cdef int at
        for at in range(kFirstUnusual, N_SELECT_FIELDS):
            if scanner.core.value(at).kind != Kind.absent:
                return False
        return (
            count(scanner.core.value(kOutputTokens), U32_MAX)
            and count(scanner.core.value(kStrictPriority), U32_MAX)
            and (unset(scanner.core.value(kSelectionId))
                 or scanner.core.value(kSelectionId).kind == Kind.text)
            and (unset(scanner.core.value(kSessionId)) or self.selections.affinity is None
                 and scanner.core.value(kSessionId).kind == Kind.text)
            # The handler does not look at it where nothing is booked.
            and (self.books or unset(scanner.core.value(kReservationId))
                 or scanner.core.value(kReservationId).kind == Kind.text)
        )

    cdef bytes chosen(self, fleet, Pool pool, str reservation_id, bint drawn):
        cdef Settings settings = fleet.settings
        cdef int draws = 2 if drawn else 0
        cdef int64_t candidate
        if settings.c.mode == kDirect:  # nobody is named
            return None
        candidate = pool.choose_now(
            &settings.c, pool.mask_of(fleet.whole), self.draws.peek(draws), NULL
        )
        if candidate < 0:
            return None
        if self.books and not self.book(fleet, settings, pool, candidate, reservation_id):
            pool.take_back()
            return None
        self.draws.take(draws + 1)
        self.counts.c.serve(settings.c.mode, kWhole, pool.c.prompt().isl_tokens)
        self.counts.c.choose(
            deref(pool.c), candidate, pool.cached_tokens_of(&settings.c, candidate),
            pool.most_cached(), kWhole,
        )
        members = fleet.pieces[candidate]
        if members is None:
            members = fleet.piece(candidate)
        return pool.render_answer(self.opening(reservation_id), members, candidate, settings)

    cdef bint book(self, fleet, Settings settings, Pool pool, size_t candidate,
                   str reservation_id) except -1:
        cdef CAdmission admission
        cdef uint64_t expected = 0
        admission.id = utf8(reservation_id)
        admission.rank = pool.c.candidate(candidate).booked
        admission.hashes = pool.c.prompt().sequence.data()
        admission.blocks = pool.c.prompt().sequence.size()
        admission.tokens = 0
        if settings.c.track_prefill:
            admission.tokens = pool.effective_tokens_of(&settings.c, candidate)
        admission.now = self.selections.clock()
        if natural(self.scanner.core.value(kOutputTokens), U32_MAX, &expected):
            admission.expected = <uint32_t>min(expected, U32_MAX - 1)
        if pool.ledger.c.add(admission) != kAdded:
            return False
        pool.foretell(candidate, admission.now)
        self.live[reservation_id] = fleet
        self.booked_in, self.booked_as, self.booked_at = pool.ledger, reservation_id, admission.now
        return True

    cdef undoing(self):
        return self.reservations.undoing(self.booked_in, self.booked_as, self.booked_at)

    cdef bytes opening(self, str reservation_id):
        cdef const Value* selection = &self.scanner.core.value(kSelectionId)
        cdef bytes opening = b"{"
        if not unset(selection[0]):
            opening = b'{"selection_id":%b,' % quoted(text(selection[0]))
        if reservation_id is not None:
            opening = opening + b'"reservation_id":%b,' % quoted(reservation_id)
        return opening


cdef class PlainLoads(PlainPrompt):
    """Says what every rank would be working on with one more prompt."""

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        fleet = self.scanned(body, size)
        if fleet is None:
            return None
        cdef Pool pool = fleet.pool
        if not self.looked(pool):
            return None
        return pool.rendered(kLoads, fleet.settings, 0, b"", b"")


cdef class PlainStep(Answerer):
    """What the answerers of steps of reservations have in common."""

    def __init__(self, selections not None):
        """Takes the selections."""
        self.selections = selections
        self.reservations = selections.reservations
        self.scheduler = selections.scheduler
        self.live = selections.reservations.live
        self.leases = {} if selections.affinity is None else selections.affinity.leases
        self.bodiless = True

    cdef Ledger ledger_of(self, str reservation_id):
        fleet = self.live.get(reservation_id)
        if fleet is None or self.reservations.steps.subscribers:
            return None
        if self.scheduler.held and len(fleet.queue):
            return None
        return fleet.ledger

    cdef RequestId request_of(self, Ledger ledger, Text captured):
        if ledger is None:
            return kNone
        self.prefill.assign(captured.begin, captured.size)
        self.prefill.append(PREFILL_SUFFIX)
        if ledger.c.requests().find(string_view(self.prefill)) != kNone:
            return kNone
        return ledger.c.requests().find(string_view(captured.begin, captured.size))


cdef class PlainPrefillComplete(PlainStep):
    """Ends the prefill of reservations."""

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        cdef Ledger ledger = self.ledger_of(captured_id(captured))
        cdef RequestId request = self.request_of(ledger, captured)
        if request == kNone:
            return None
        ledger.c.complete_prefill(request)
        return OK


cdef class PlainFree(PlainStep):
    """Ends reservations."""

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        reservation_id = captured_id(captured)
        if self.leases and reservation_id in self.leases:
            return None
        cdef Ledger ledger = self.ledger_of(reservation_id)
        cdef RequestId request = self.request_of(ledger, captured)
        if request == kNone:
            return None
        ledger.c.free(request)
        del self.live[reservation_id]
        return OK


cdef class PlainAllLoads(PlainStep):
    """Says what every rank of every fleet is working on."""

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        return self.selections.render_loads(None, None)


cdef bint unset(const Value& value):
    return value.kind == Kind.absent or value.kind == Kind.null


cdef bint count(const Value& value, uint64_t maximum):
    """Says whether a member is a whole number from 0 to `maximum`, or nothing."""
    cdef uint64_t number
    return unset(value) or natural(value, maximum, &number)


cdef str given(const Value& value, str default):
    """Returns a text, the default for an absent member, None for anything else."""
    return default if value.kind == Kind.absent else text(value)


cdef str id_of(const Value& value):
    """Returns a reservation's id, None for what is none."""
    if value.kind != Kind.text or <size_t>(value.end - value.begin) > kMaxIdBytes:
        return None
    return text(value)


cdef str captured_id(Text captured):
    """Returns the id in a path; one that is not UTF-8 is nobody's."""
    return PyUnicode_DecodeUTF8(captured.begin, captured.size, "surrogateescape")


cdef string_view utf8(str name) except *:
    cdef Py_ssize_t size = 0
    cdef const char* begin = PyUnicode_AsUTF8AndSize(name, &size)
    return string_view(begin, size)


cdef bytes quoted(str name):
    """Returns a text without quotes, backslashes and control characters as json.dumps does."""
    if name.isascii() and "\x7f" not in name:
        return b'"%b"' % name.encode()
    return json.dumps(name).encode()
