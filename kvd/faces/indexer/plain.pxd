# distutils: language = c++
"""Data sheet of the plain query (plain.pyx)."""
from libc.stdint cimport uint64_t

from kvd.http.fast_path cimport Answerer
from kvd_core.json.scan cimport BodyScanner, Value

# Members of plain requests; what is of another type or spelling is None or False, and left to the
# handler.
cdef str text(const Value& value)
cdef str optional_text(const Value& value)  # "" for an absent member or null
cdef bint natural(const Value& value, uint64_t maximum, uint64_t* number)


cdef class PlainQuery(Answerer):
    cdef BodyScanner scanner
    cdef dict partitions  # by (model, tenant)
    cdef str tenant       # the default one
    cdef bint by_tokens
    cdef bint by_tiers
