# cython: language_level=3
"""Data sheet of journals."""

from libcpp.memory cimport unique_ptr

from kvd_core.ledger.types cimport RecordBuffer


cdef class Journal:
    cdef unique_ptr[RecordBuffer] buffer
    cdef RecordBuffer* c
