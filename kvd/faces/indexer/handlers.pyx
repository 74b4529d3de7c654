# distutils: language = c++
"""The indexer's hot handlers: they answer how much of a prompt each rank caches.

Costs: 0.4 µs beside scanning the body and querying the index.
"""
import trio

from kvd.faces.common.reader cimport BodyReader
from kvd.http.permits cimport Text
from kvd_core.index.prefix_index cimport PrefixIndex

from kvd.errors import NotFound
from kvd.faces.indexer.workers import streams_of
from kvd.model import PartitionKey
from kvd_core.index.prefix_index import IngestStats

# Positions of the fields.
cdef enum:
    kModel
    kTenant
    kTenantAlias
    kCacheSalt
    kStreams
    kLora
FIELDS = ("model_name", "tenant_id", "routing_group", "cache_salt", "streams", "lora_name")


cdef class QueryHandler(HotHandler):
    """Returns how much of a prompt, given as token ids, each rank caches."""

    ARRAY = {"token_ids": "u32"}
    FIELDS = FIELDS

    def __init__(self, state not None, registry):
        """Takes the daemon's state, which has the partitions, and the registry of its ranks."""
        self.scanner = self.body = BodyReader(self.ARRAY, self.FIELDS)
        self.state = state
        self.registry = registry
        self.partitions = state.partitions

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        self.body.read(body, size)
        self.body.require_array(0)
        lora_name, cache_salt = self.body.optional_text(kLora), self.body.optional_text(kCacheSalt)
        cdef bint streams = self.body.optional_flag(kStreams)
        partition = self.partition()
        cdef PrefixIndex index = partition.index
        answer = index.query_tokens(self.body, 0, lora_name, cache_salt)
        return with_streams(answer, partition, self.registry) if streams else answer

    cdef object partition(self):
        """Called last: an invalid body gets the same failure for every model."""
        model_name, tenant_id = self.body.text(kModel), self.body.tenant(kTenant)
        partition = self.partitions.get((model_name, tenant_id))
        return self.state.partition(model_name, tenant_id) if partition is None else partition


cdef class HashQueryHandler(QueryHandler):
    """Returns how much of a prompt, given as local hashes, each rank caches.

    Local hashes carry adapter and salt already, so a salt given beside them changes nothing.
    """

    ARRAY = {"block_hashes": "hash64"}
    FIELDS = FIELDS[:kLora]

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        self.body.read(body, size)
        self.body.require_array(0)
        self.body.optional_text(kCacheSalt)
        cdef bint streams = self.body.optional_flag(kStreams)
        partition = self.partition()
        cdef PrefixIndex index = partition.index
        answer = index.query_hashes(self.body, 0)
        return with_streams(answer, partition, self.registry) if streams else answer


cdef class TieredQueryHandler(QueryHandler):
    """Returns what each rank caches on each tier, for selectors without an index of their own.

    Such a selector fails, or forgets all overlap, if it gets no answer. So a model and tenant whose
    last worker has just left is answered with no matches, rather than with NotFound.
    """

    ARRAY = {"block_hashes": "hash64"}
    FIELDS = FIELDS[:kCacheSalt]

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        self.body.read(body, size)
        self.body.require_array(0)
        model_name, tenant_id = self.body.text(kModel), self.body.tenant(kTenant)
        partition = self.partitions.get((model_name, tenant_id))
        cdef PrefixIndex index
        if partition is not None:
            index = partition.index
        else:
            index = self.forsaken(PartitionKey(model_name, tenant_id))
        return index.query_tiers(self.body, 0)

    def forsaken(self, key):
        """Returns an empty index for a model and tenant whose last worker has just left."""
        block_size = self.registry.block_size_left(key)
        if block_size is None:
            model_name, tenant_id = key
            failure = NotFound(f"no indexer for model={model_name} routing_group={tenant_id}")
            raise failure.about(key)
        return PrefixIndex(block_size, IngestStats())


cdef bytes with_streams(bytes answer, partition, registry):
    """Adds the state of each registered rank's stream, in the form of the scores."""
    streams = streams_of(partition, registry, trio.current_time())
    return answer[: len(answer) - 1] + b',"streams":' + streams + b"}"
