# distutils: language = c++
"""Data sheet of the conductor's hot handlers."""
from kvd.faces.common.reader cimport BodyReader
from kvd.http.hot cimport HotHandler
from kvd_core.conductor.conductor cimport Conductor


cdef class QuestionReader(BodyReader):
    # The members of the last question; "" means no adapter, no salt, all instances.
    cdef str model_name, tenant_id, lora_name, cache_salt, instance_id

    # Reads the members of the question; returns the Conductor that can answer it, None if none can.
    cdef Conductor asked(self, dict partitions)

    # Texts by the position of their field; None if it is absent or null. The other names of `alias`
    # are the fields from `others` to `end`, without `end`.
    cdef str kept_text(self, int field)
    cdef str alias(self, int field, int others, int end, tuple names)
    cdef str adapter(self)


cdef class QueryHandler(HotHandler):
    cdef QuestionReader body
    cdef dict partitions  # by (model, tenant, block size); each has a Conductor as `conductor`
    cdef object packed    # answers a Request in msgpack
    cdef object served    # the kvd.index.served_models.ServedModels of this process

    cdef bytes no_rows(self)


cdef class HashQueryHandler(QueryHandler):
    cdef object sequence    # async: makes the sequence hashes of a Conductor
    cdef Conductor lacking  # the one that lacked them for the last body
    cdef bytes spelled      # the last body whose hashes were texts, rewritten with integers

    # Scans a body; returns the position in HASHES of the name that its hashes have.
    cdef int read_hashes(self, const char* body, size_t size) except -1
