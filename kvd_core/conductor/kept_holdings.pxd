# cython: language_level=3
"""Data sheet of publishers' holdings as they are kept (kept_holdings.pyx)."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string cimport string
from libcpp.vector cimport vector

from kvd_core.conductor.conductor cimport CConductor, CSource, Conductor
from kvd_core.dump.recovery cimport CEntry, CStage, StagedEntry
from kvd_core.index.prefix_index cimport CIndex, CSteps


cdef extern from "conductor/kept_holdings.hpp" namespace "kvd" nogil:
    cppclass CKeptHoldings "kvd::KeptHoldings":
        CKeptHoldings(CIndex&, const CConductor&) except +
        uint64_t blocks_written()
        cbool fill(const vector[const CSource*]&, string&, size_t) except +

    cppclass CRestoreHoldings "kvd::RestoreHoldings":
        CRestoreHoldings(CIndex&, CConductor&, const CStage&, const CEntry&) except +
        cbool apply(vector[CSource*], CSteps&) except +
        uint64_t stored()


cdef class HoldingsDump:
    cdef CKeptHoldings* c
    cdef Conductor conductor
    cdef list sources
    cdef string text
    cdef readonly bint done     # everything is written


cdef class HoldingsRestore:
    cdef CRestoreHoldings* c
    cdef Conductor conductor
    cdef StagedEntry entry
    cdef list sources
