# distutils: language = c++
"""Answers plain requests of the slot tracker without an interpreted instruction on the way.

What is plain is said in plain.pyx: well-formed, its tracker exists, its members of the right type
and not spelled in an unusual way. A request that would be refused is left to its handler, and so is
every step of a request's life while there are replicas to tell of it.

Costs: 0.5 µs beside scanning the body and the ledger's work; a handler takes 5 µs and, in a cold
instruction cache, three times that.
"""
from libc.stdint cimport uint8_t, uint64_t
from libcpp.string_view cimport string_view

from kvd.http.fast_path cimport Text
from kvd_core.ledger.ledger cimport CAdmission, Ledger, RequestId, kAdded, kMaxIdBytes, kMaxTokens, kNone
from kvd.faces.indexer.plain cimport natural, text
from kvd_core.json.scan cimport BodyScanner, Kind, Value, Verdict

# Positions of the fields; the first three are those of every scanner.
cdef enum:
    kModel
    kTenant
    kTenantAlias
    kRequestId
    kWorkerId
    kDpRank
    kAddedTokens
cdef enum:
    kProjectedTokens = 3
PLACE = ("model_name", "tenant_id", "routing_group")
STEP_FIELDS = (*PLACE, "request_id")
ADD_FIELDS = (*STEP_FIELDS, "worker_id", "dp_rank", "new_isl_tokens")
PROJECTION_FIELDS = (*PLACE, "new_isl_tokens")

cdef uint64_t U64_MAX = 0xffffffffffffffff
cdef uint64_t U32_MAX = 0xffffffff

cdef bytes OK = b'{"status":"ok"}'


cdef class PlainSlots(Answerer):
    """What the answerers have in common: a scanner, and the trackers."""

    FIELDS = PLACE

    def __init__(self, BodyScanner scanner not None, slots not None, str tenant not None):
        """Takes the route's scanner, the slot trackers and the default tenant.

        Raises ValueError for a scanner whose fields are not the class's FIELDS.
        """
        if scanner.field_names != self.FIELDS:
            raise ValueError(f"not the fields of such a request: {scanner.field_names}")
        self.scanner = scanner
        self.slots = slots
        self.trackers = slots.trackers
        self.tenant = tenant

    cdef Ledger scanned(self, const char* body, size_t size):
        """Scans a body and returns the ledger it is about, None if it is not plain."""
        cdef BodyScanner scanner = self.scanner
        if scanner.core.scan(<const uint8_t*>body, size) != Verdict.ok:
            return None
        if scanner.core.value(kTenantAlias).kind != Kind.absent:
            return None
        cdef const Value* tenant_value = &scanner.core.value(kTenant)
        model = text(scanner.core.value(kModel))
        tenant = self.tenant if tenant_value.kind == Kind.absent else text(tenant_value[0])
        if model is None or tenant is None:
            return None
        tracker = self.trackers.get((model, tenant))
        if tracker is None:
            return None
        self.tracker = tracker
        return tracker.ledger


cdef class PlainAdd(PlainSlots):
    """Books requests."""

    FIELDS = ADD_FIELDS

    def __init__(self, scanner, slots, tenant, clock not None):
        """Takes besides a function that returns the time in seconds."""
        super().__init__(scanner, slots, tenant)
        self.clock = clock
        self.created = self.books = True

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        cdef Ledger ledger = self.scanned(body, size)
        cdef BodyScanner scanner = self.scanner
        cdef CAdmission admission
        cdef uint64_t worker_id, dp_rank, tokens = 0
        if ledger is None or self.slots.steps.subscribers or not scanner.core.present(0):
            return None
        if not (
            id_of(scanner.core.value(kRequestId), &admission.id)
            and natural(scanner.core.value(kWorkerId), U64_MAX, &worker_id)
            and natural(scanner.core.value(kDpRank), U32_MAX, &dp_rank)
            and tokens_of(scanner.core.value(kAddedTokens), &tokens)
        ):
            return None
        admission.rank = ledger.c.find_rank(worker_id, dp_rank)
        if admission.rank == kNone:
            return None
        admission.hashes = scanner.u64(0, &admission.blocks)
        admission.tokens = tokens
        admission.now = self.clock()
        if ledger.c.add(admission) != kAdded:
            return None
        self.booked_as.assign(admission.id.data(), admission.id.size())
        self.booked_in, self.booked_at = self.tracker, admission.now
        return OK

    cdef undoing(self):
        return self.slots.undoing(self.booked_in, self.booked_as.decode(), self.booked_at)


cdef class PlainPrefillComplete(PlainSlots):
    """Ends the prefill of requests."""

    FIELDS = STEP_FIELDS

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        cdef Ledger ledger = self.scanned(body, size)
        cdef RequestId request = named(self, ledger)
        if request == kNone:
            return None
        ledger.c.complete_prefill(request)
        ease(ledger)
        return OK


cdef class PlainFree(PlainSlots):
    """Ends requests."""

    FIELDS = STEP_FIELDS

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        cdef Ledger ledger = self.scanned(body, size)
        cdef RequestId request = named(self, ledger)
        if request == kNone:
            return None
        ledger.c.free(request)
        ease(ledger)
        return OK


cdef class PlainProjection(PlainSlots):
    """Says what every rank would be working on with one more prompt."""

    FIELDS = PROJECTION_FIELDS

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        cdef Ledger ledger = self.scanned(body, size)
        cdef uint64_t tokens = 0
        if ledger is None or not self.scanner.core.present(0):
            return None
        if not tokens_of(self.scanner.core.value(kProjectedTokens), &tokens):
            return None
        return ledger.project(self.scanner, tokens)


cdef class PlainLoads(PlainSlots):
    """Says what every rank of every tracker is working on."""

    def __init__(self, scanner, slots, tenant):
        super().__init__(scanner, slots, tenant)
        self.bodiless = True

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        return self.slots.render_loads(None, None)


cdef RequestId named(PlainSlots answerer, Ledger ledger) except? 0:
    """Returns the live request that a body of STEP_FIELDS names, kNone if it is to be left."""
    cdef string_view request_id
    if ledger is None or answerer.slots.steps.subscribers:
        return kNone
    if not id_of(answerer.scanner.core.value(kRequestId), &request_id):
        return kNone
    return ledger.c.requests().find(request_id)


cdef int ease(Ledger ledger) except -1:
    """Says that ranks have less to do, if anyone waits for that."""
    if ledger.loads.eased is not None:
        ledger.loads.eased()
    return 0


cdef bint id_of(const Value& value, string_view* request_id):
    """Reads a request's id where it lies in the body."""
    if value.kind != Kind.text or <size_t>(value.end - value.begin) > kMaxIdBytes:
        return False
    request_id[0] = string_view(<const char*>value.begin, value.end - value.begin)
    return True


cdef bint tokens_of(const Value& value, uint64_t* tokens):
    """Reads a count of tokens, 0 if there is none."""
    return value.kind == Kind.absent or natural(value, kMaxTokens, tokens)
