# distutils: language = c++
"""Answers the conductor's plain queries without an interpreted instruction on the way.

A query is plain when its body is well-formed, spells its members as documented, and its partition
exists, with sequence hashes if it asks by them; any other is left to the route's handler (see
plain.pyx).
"""
from libc.stdint cimport uint8_t, uint64_t

from kvd_core.conductor.conductor cimport Conductor
from kvd.http.fast_path cimport Text
from kvd.faces.indexer.plain cimport natural, optional_text, text
from kvd_core.json.scan cimport BodyScanner, Kind, Verdict

# Positions of the FIELDS; those from kAliases on make a query not plain, unless they are null.
cdef enum:
    kModel
    kTenant
    kBlockSize
    kLora
    kInstance
    kSalt
    kAliases
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
cdef int N_FIELDS = len(FIELDS)
cdef uint64_t MAX_BLOCK_SIZE = 0xffffffff  # largest block size of a plain query: 32 bits
# Longest name in a plain query: names are kept for the next query, and the handler refuses longer
# ones.
cdef size_t MAX_NAME_BYTES = 4096


cdef class PlainHoldings(Answerer):
    """Answers queries by token ids, or by sequence hashes."""

    def __init__(self, BodyScanner scanner not None, dict partitions not None, str tenant not None):
        """Takes the route's scanner, partitions by model, tenant and block size, the default tenant.

        A partition has its Conductor as `conductor`. Raises ValueError for a scanner whose fields
        are not the FIELDS.
        """
        if scanner.field_names != FIELDS:
            raise ValueError(f"not the fields of a query: {scanner.field_names}")
        self.by_tokens = scanner.elements == ("u32",)
        self.scanner = scanner
        self.partitions = partitions
        self.tenant = tenant

    cdef bytes answer(self, const char* body, size_t size, Text captured):
        cdef BodyScanner scanner = self.scanner
        cdef uint64_t block_size = 0
        cdef Kind kind
        cdef int i
        if scanner.core.scan(<const uint8_t*>body, size) != Verdict.ok:
            return None
        if not scanner.core.present(0):
            return None
        for i in range(1, len(scanner.array_names)):
            if scanner.core.present(i):
                return None
        for i in range(kAliases, N_FIELDS):
            kind = scanner.core.value(i).kind
            if kind != Kind.absent and kind != Kind.null:
                return None
        for i in (kModel, kTenant, kLora, kInstance, kSalt):
            if scanner.core.value(i).kind == Kind.text:
                if <size_t>(scanner.core.value(i).end - scanner.core.value(i).begin) > MAX_NAME_BYTES:
                    return None
        model = text(scanner.core.value(kModel))
        tenant = optional_text(scanner.core.value(kTenant))
        lora = optional_text(scanner.core.value(kLora))
        salt = optional_text(scanner.core.value(kSalt))
        instance = optional_text(scanner.core.value(kInstance))
        if not model or tenant is None or lora is None or salt is None or instance is None:
            return None
        if not natural(scanner.core.value(kBlockSize), MAX_BLOCK_SIZE, &block_size):
            return None
        tenant = tenant or self.tenant
        partition = self.partitions.get((model, tenant, block_size))
        if partition is None:
            return None
        cdef Conductor conductor = partition.conductor
        if not self.by_tokens and not conductor.c.sequenced():
            return None
        if self.by_tokens:
            return conductor.query_tokens(scanner, 0, lora, salt, tenant, instance)
        return conductor.query_hashes(scanner, 0, lora, salt, tenant, instance)
