# distutils: language = c++
"""Data sheet of the plain query (plain.pyx)."""
from kvd_core.lane cimport Answerer
from kvd_core.scan cimport BodyScanner


cdef class PlainQuery(Answerer):
    cdef BodyScanner scanner
    cdef dict partitions  # by (model, tenant)
    cdef str tenant       # the default one
    cdef bint by_tokens
