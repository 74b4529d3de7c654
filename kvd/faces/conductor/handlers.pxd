# distutils: language = c++
"""Data sheet of the conductor's hot handlers."""
from kvd.faces.common.reader cimport BodyReader
from kvd.http.hot cimport HotHandler
from kvd_core.conductor.conductor cimport Conductor


cdef class QuestionReader(BodyReader):
    # Of the last question; "" is no adapter, no salt, all instances.
    cdef str model_name, tenant_id, lora_name, cache_salt, instance_id

    # Reads what the body asks about; returns the Conductor of that, None if there is none.
    cdef Conductor asked(self, dict partitions)

    # Texts by the position of their field, None for an absent one or null.
    cdef str kept_text(self, int field)
    cdef str alias(self, int field, int others, int end, tuple names)  # others: up to `end`
    cdef str adapter(self)


cdef class QueryHandler(HotHandler):
    cdef QuestionReader body
    cdef dict partitions  # by (model, tenant, block size); each has a Conductor as `conductor`
    cdef object packed    # answers a Request in msgpack
    cdef object served    # which models and tenants are served here

    cdef bytes no_rows(self)


cdef class HashQueryHandler(QueryHandler):
    cdef object sequence    # has the sequence hashes of a Conductor made; to be awaited
    cdef Conductor lacking  # the one that lacked them for the last body
    cdef bytes spelled      # the last body whose hashes were texts, with integers

    # Scans a body; returns which of the names of its hashes has them.
    cdef int read_hashes(self, const char* body, size_t size) except -1
