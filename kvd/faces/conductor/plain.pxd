# distutils: language = c++
"""Data sheet of the conductor's plain queries (plain_conductor.pyx)."""
from kvd.http.fast_path cimport Answerer
from kvd_core.json.scan cimport BodyScanner


cdef class PlainHoldings(Answerer):
    cdef BodyScanner scanner
    cdef dict partitions  # by (model, tenant, block size)
    cdef str tenant       # the default one
    cdef bint by_tokens
