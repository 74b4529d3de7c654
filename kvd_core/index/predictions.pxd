# cython: language_level=3
"""Data sheet of predictions: blocks that ranks should cache soon (predictions.pyx)."""
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool


cdef extern from "index/predicted.hpp" namespace "kvd" nogil:
    cppclass CPredicted "kvd::Predicted":
        CPredicted(double, uint32_t, uint32_t) except +  # seconds, entries, entries
        uint32_t size()
        void forget(uint32_t) except +  # drops all predictions of a rank
        cbool prune(double, size_t)     # ends at most this many that are too old or too many


cdef class Predictions:
    cdef CPredicted* c
