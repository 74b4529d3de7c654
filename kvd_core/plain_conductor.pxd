# distutils: language = c++
"""Data sheet of the conductor's plain queries (plain_conductor.pyx)."""
from kvd_core.lane cimport Answerer
from kvd_core.scan cimport BodyScanner


cdef class PlainHoldings(Answerer):
    cdef BodyScanner scanner
    cdef dict partitions  # by (model, tenant, block size)
    cdef str tenant       # the default one
    cdef bint by_tokens
