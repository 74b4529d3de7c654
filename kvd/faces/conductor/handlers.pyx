# distutils: language = c++
"""The conductor's hot handlers: they answer how much of a prompt each instance holds.

Members have several names, and hashes may be texts. The documented names are read here;
kvd.faces.conductor.members reads the rarer ones, and raises the failures of wrong members.
kvd.faces.conductor.msgpack answers questions in msgpack.
"""
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint64_t

from kvd.faces.common.reader cimport natural
from kvd.http.permits cimport Text
from kvd_core.conductor.conductor cimport Conductor
from kvd_core.json.scan cimport ValueKind, Value

from kvd.errors import BadRequest
from kvd.faces.common.bodies import MAX_KEPT_BYTES, U32_MAX, render
from kvd.faces.conductor import members as reading
from kvd.faces.conductor.msgpack import is_packed
from kvd.http.messages import Response
from kvd.http.scanning import scanned_ahead
from kvd.model import DEFAULT_TENANT

# Positions of the fields.
cdef enum:
    kModel
    kTenant
    kBlockSize
    kLora
    kInstance
    kSalt
    kLoraId
    kModelAliases
    kSaltAliases = kModelAliases + 2
    kEnd = kSaltAliases + 2
FIELDS = (
    "model",
    "tenant_id",
    "block_size",
    "lora_name",
    "instance_id",
    "cache_salt",
    "lora_id",
    "modelname",
    "model_name",
    "additional_salt",
    "additionalsalt",
)

cdef uint64_t U32 = U32_MAX
cdef size_t LONGEST_NAME = MAX_KEPT_BYTES  # bytes
cdef str TENANT = DEFAULT_TENANT


cdef class QuestionReader(BodyReader):
    """Reads the body of a question."""

    cdef int read(self, const char* body, size_t size) except -1:
        if not self.scans(body, size):
            reading.scan(self, None)
        return 0

    cdef dict known(self):
        try:
            return self.members()
        except TypeError as error:
            raise reading.detailed(BadRequest(str(error)), "invalid_type") from None

    cdef Conductor asked(self, dict partitions):
        cdef uint64_t block_size = 0
        model = self.alias(kModel, kModelAliases, kSaltAliases, reading.MODEL)
        if not model:
            model = reading.model_name(self.known(), "model")
        self.model_name = model
        self.tenant_id = self.kept_text(kTenant) or TENANT
        if not natural(self.core.value(kBlockSize), U32, &block_size) or block_size == 0:
            reading.uint(self.known(), "block_size", 1)
        self.lora_name = self.adapter()
        self.cache_salt = self.alias(kSalt, kSaltAliases, kEnd, reading.SALT) or ""
        self.instance_id = self.kept_text(kInstance) or ""
        partition = partitions.get((model, self.tenant_id, block_size))
        return None if partition is None else partition.conductor

    cdef str kept_text(self, int field):
        cdef const Value* value = &self.core.value(field)
        cdef size_t size = value.end - value.begin
        if value.kind == ValueKind.absent or value.kind == ValueKind.null:
            return None
        if value.kind == ValueKind.text and size <= LONGEST_NAME:
            return PyUnicode_DecodeUTF8(<const char*>value.begin, size, NULL)
        return reading.text(self.known(), self.field_names[field])

    cdef str alias(self, int field, int others, int end, tuple names):
        cdef int other
        for other in range(others, end):
            if not self.is_unset(other):
                return reading.alias(self.known(), names)
        return self.kept_text(field)

    cdef str adapter(self):
        if self.is_unset(kLoraId):
            return self.kept_text(kLora) or ""
        return reading.adapter(self.known())


cdef class QueryHandler(HotHandler):
    """Returns what every instance holds of a prompt given as token ids."""

    ARRAYS = {"token_ids": "u32?"}

    def __init__(self, dict partitions not None, packed not None, served not None):
        """Takes partitions by model, tenant and block size; a function that answers a Request in
        msgpack; and the ServedModels of this process.
        """
        self.served = served
        self.scanner = self.body = QuestionReader(self.ARRAYS, FIELDS)
        self.partitions = partitions
        self.packed = packed

    def __call__(self, request not None):
        if is_packed(request):
            return self.packed(request)
        return HotHandler.__call__(self, request)

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        cdef QuestionReader asks = self.body
        asks.read(body, size)
        if not asks.core.present(0):
            reading.require(asks.known(), "token_ids")
        cdef Conductor conductor = asks.asked(self.partitions)
        if conductor is None:
            return self.no_rows()
        return conductor.query_tokens(
            asks, 0, asks.lora_name, asks.cache_salt, asks.tenant_id, asks.instance_id
        )

    cdef bytes no_rows(self):
        cdef QuestionReader asks = self.body
        self.served.check((asks.model_name, asks.tenant_id))
        return render({self.body.tenant_id: {}})


cdef class HashQueryHandler(QueryHandler):
    """Returns what every instance holds of a prompt given as its sequence hashes.

    The first question to a partition waits until sequence hashes are made for its blocks.
    """

    ARRAYS = dict.fromkeys(reading.HASHES, "hash64?")

    def __init__(self, dict partitions, packed, served, sequence not None):
        """Takes also an async function that makes the sequence hashes of a Conductor."""
        super().__init__(partitions, packed, served)
        self.sequence = sequence
        self.waits = True

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        cdef QuestionReader asks = self.body
        cdef int array = self.read_hashes(body, size)
        cdef Conductor conductor = asks.asked(self.partitions)
        if conductor is None:
            return self.no_rows()
        if not conductor.c.sequenced():
            self.lacking = conductor
            return None
        return conductor.query_hashes(
            asks, array, asks.lora_name, asks.cache_salt, asks.tenant_id, asks.instance_id
        )

    cdef int read_hashes(self, const char* body, size_t size) except -1:
        cdef QuestionReader asks = self.body
        cdef int array, found = -1
        if not asks.scans(body, size):
            spelled = reading.as_integers(body[:size])
            if spelled is None:
                asks.read(body, size)
            else:
                self.spelled = spelled  # kept until the answer: the reader's values point into it
                asks.read(self.spelled, len(self.spelled))
        for array in range(len(reading.HASHES)):
            if not asks.core.present(array):
                continue
            if found < 0:
                found = array
            elif asks.array(reading.HASHES[array]) != asks.array(reading.HASHES[found]):
                given = [name for name in reading.HASHES if name in asks.known()]
                raise reading.differing(given, given[1])
        if found < 0:
            raise reading.missing(reading.HASHES[0])
        return found

    cdef waiting(self, request):
        conductor, self.lacking = self.lacking, None
        return self.sequenced(request, conductor)

    async def sequenced(self, request, conductor):
        """Answers once a conductor has its sequence hashes."""
        await self.sequence(conductor)
        # The body is read again: others have used the reader meanwhile.
        request.ahead = await scanned_ahead(self, request.body)
        response = self(request)
        return response if isinstance(response, Response) else await response
