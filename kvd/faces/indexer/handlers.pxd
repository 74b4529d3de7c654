# distutils: language = c++
"""Data sheet of the indexer's hot handlers."""
from kvd.faces.common.reader cimport BodyReader
from kvd.http.hot cimport HotHandler


cdef class QueryHandler(HotHandler):
    cdef BodyReader body
    cdef object state, registry
    cdef dict partitions  # the state's, by (model, tenant)

    # The partition that the body names; raises NotFound.
    cdef object partition(self)


cdef class HashQueryHandler(QueryHandler):
    pass


cdef class TieredQueryHandler(QueryHandler):
    pass
