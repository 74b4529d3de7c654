# distutils: language = c++
"""The slot tracker's hot handlers: steps in the life of a request, loads and projections.

A step that concerns only the ledger is taken here. `SlotTrackers` takes steps of which replicas or
observers are notified and those with an Idempotency-Key, and raises the failures of all.

Costs: 0.5 µs beside scanning the body and the ledger's work.
"""
from libc.stdint cimport uint64_t
from libcpp.string_view cimport string_view

from kvd.faces.common.reader cimport BodyReader
from kvd.http.permits cimport Text
from kvd_core.json.scan cimport ValueKind
from kvd_core.ledger.ledger cimport Ledger
from kvd_core.ledger.trie cimport kNone
from kvd_core.ledger.types cimport (
    Admission, RequestId, kAdded, kMaxIdBytes, kMaxTokens, kWholeRowsBytes
)

from kvd.errors import Invalid
from kvd.faces.common import bodies
from kvd.faces.common.slices import arrayed, sliced
from kvd.http.messages import Response
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES

# Positions of the fields; the first three are those of every body.
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
PARTITION_MEMBERS = ("model_name", "tenant_id", "routing_group")
STEP = (*PARTITION_MEMBERS, "request_id")

cdef uint64_t U64_MAX = 0xffffffffffffffff
cdef uint64_t U32_MAX = 0xffffffff

cdef bytes OK = bodies.OK


cdef class SlotHandler(HotHandler):
    """The base of handlers of requests to one tracker."""

    ARRAYS = {}
    FIELDS = STEP

    def __init__(self, slots not None):
        """Takes the daemon's slot trackers."""
        self.body = BodyReader(self.ARRAYS, self.FIELDS)
        self.slots = slots
        self.trackers = slots.trackers
        self.replicas = slots.steps.subscribers
        self.observers = slots.moments.subscribers

    cdef object tracker(self):
        """Called last: an invalid body gets the same failure for every model."""
        model_name, tenant_id = self.body.text(kModel), self.body.tenant(kTenant)
        tracker = self.trackers.get((model_name, tenant_id))
        return self.slots.tracker(model_name, tenant_id) if tracker is None else tracker


cdef class AddHandler(SlotHandler):
    """Books a request: 201, or 200 for a retry under the same Idempotency-Key."""

    # Hashes of bookings are signed, as Dynamo's are; questions may have signed or unsigned ones.
    ARRAYS = {"sequence_hashes": "i64"}
    FIELDS = (*STEP, "worker_id", "dp_rank", "new_isl_tokens")

    def __init__(self, slots not None):
        super().__init__(slots)
        self.clock = slots.clock
        self.adds_request = True

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        self.body.read(body, size)
        self.body.require_array(0)
        cdef Admission admission
        admission.id = self.body.id_bytes(kRequestId)
        if admission.id.size() > kMaxIdBytes:
            raise Invalid(f"request_id: longer than {MAX_REQUEST_ID_BYTES} bytes")
        admission.tokens = new_tokens(self.body, kAddedTokens)
        cdef uint64_t worker_id = self.body.uint(kWorkerId, U64_MAX)
        cdef uint64_t dp_rank = self.body.uint(kDpRank, U32_MAX)
        key = None if request is None else bodies.retry_key(request)
        tracker = self.tracker()
        cdef Ledger ledger = tracker.ledger
        admission.rank = ledger.find_rank(worker_id, dp_rank)
        if tracker.leaving and worker_id in tracker.leaving:
            admission.rank = kNone  # its ranks stay in the ledger until its requests have ended
        admission.hashes = self.body.u64(0, &admission.blocks)
        admission.now = self.clock()
        admission.expected = kNone
        cdef bint added = (
            key is None
            and not self.replicas
            and admission.rank != kNone
            and ledger.admit(&admission) == kAdded
        )
        if not added:
            added = self.slots.add(
                tracker, id_text(admission.id), worker_id, dp_rank, self.body, admission.tokens,
                admission.now, key,
            )
        elif self.observers:
            self.slots.observe_begin(tracker, id_text(admission.id))
        self.status = 201 if added else 200
        self.booked_as.assign(admission.id.data(), admission.id.size())
        self.booked_in, self.booked_at = tracker if added else None, admission.now
        return OK

    cdef undoing(self):
        if self.booked_in is None:
            return None
        return self.slots.undoing(self.booked_in, self.booked_as.decode(), self.booked_at)


cdef class StepHandler(SlotHandler):
    """The base of handlers that take a step of a booked request."""

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        self.body.read(body, size)
        cdef string_view request_id = self.body.id_bytes(kRequestId)
        tracker = self.tracker()
        cdef Ledger ledger = tracker.ledger
        cdef RequestId live = ledger.find_request(request_id)
        if live == kNone or self.replicas or self.observers:
            self.track(tracker, id_text(request_id))
        else:
            self.take(ledger, live)
            ease(ledger)
        return OK

    cdef int take(self, Ledger ledger, RequestId live) except -1:
        raise NotImplementedError

    cdef int track(self, tracker, str request_id) except -1:
        raise NotImplementedError


cdef class PrefillCompleteHandler(StepHandler):
    """Ends the prefill of a request; doing so again is no error."""

    cdef int take(self, Ledger ledger, RequestId live) except -1:
        ledger.complete(live)
        return 0

    cdef int track(self, tracker, str request_id) except -1:
        self.slots.prefill_complete(tracker, request_id)
        return 0


cdef class FreeHandler(StepHandler):
    """Ends a request; an unknown one is no error."""

    cdef int take(self, Ledger ledger, RequestId live) except -1:
        ledger.end(live)
        return 0

    cdef int track(self, tracker, str request_id) except -1:
        self.slots.end(tracker, request_id)
        return 0


cdef class PotentialLoadsHandler(SlotHandler):
    """Returns the load that every rank of a tracker would have with one more prompt."""

    ARRAYS = {"sequence_hashes": "hash64"}
    FIELDS = (*PARTITION_MEMBERS, "new_isl_tokens")

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        self.body.read(body, size)
        self.body.require_array(0)
        cdef uint64_t tokens = new_tokens(self.body, kProjectedTokens)
        cdef Ledger ledger = self.tracker().ledger
        if ledger.rows_bytes() <= kWholeRowsBytes:
            return ledger.project(self.body, tokens)
        if request is not None:
            self.kept = ledger.keep_projection(self.body, tokens)
        return None

    cdef waiting(self, request):
        kept, self.kept = self.kept, None
        return Response(200, sliced(arrayed([kept])))


cdef class LoadsHandler(HotHandler):
    """Returns the loads of all ranks; the query may name a model and tenant."""

    def __init__(self, slots not None):
        """Takes the daemon's slot trackers."""
        self.slots = slots
        self.bodiless = True

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        model_name, tenant_id = (None, None) if request is None else bodies.filters(request)
        return self.slots.render_loads(model_name, tenant_id)

    cdef waiting(self, request):
        return Response(200, sliced(arrayed(self.slots.kept_loads(*bodies.filters(request)))))


cdef int ease(Ledger ledger) except -1:
    """Wakes selections that wait for ranks with less load."""
    if ledger.loads.eased is not None:
        ledger.loads.eased()
    return 0


cdef str id_text(string_view request_id):
    return request_id.data()[:request_id.size()].decode()


cdef uint64_t new_tokens(BodyReader body, int field) except? 0xfffffffffffffffe:
    """Returns a count of tokens, 0 if the member is absent."""
    return 0 if body.core.value(field).kind == ValueKind.absent else body.uint(field, kMaxTokens)
