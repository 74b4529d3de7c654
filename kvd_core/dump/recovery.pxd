# cython: language_level=3
"""Data sheet of received dumps."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.deque cimport deque
from libcpp.string cimport string
from libcpp.vector cimport vector

from kvd_core.index.prefix_index cimport CIndex, CSteps, CWorker


cdef extern from "dump/staged.hpp" namespace "kvd" nogil:
    cppclass CLimits "kvd::DumpLimits":
        uint64_t blocks
        uint64_t runs
        uint64_t entries
        uint64_t ranks

    cppclass CStagedWorker "kvd::StagedWorker":
        string id                   # as JSON

    cppclass CEntry "kvd::StagedEntry":
        string key                  # "model:tenant", empty in the binary form
        string model
        string tenant
        cbool has_model
        cbool has_tenant
        uint32_t block_size         # tokens
        uint64_t blocks
        vector[CStagedWorker] workers

    cppclass CStage "kvd::Stage":
        CStage(CLimits, cbool) except +
        deque[CEntry]& entries()
        uint64_t blocks()

    cppclass CRestore "kvd::Restore":
        CRestore(const CStage&, const CEntry&) except +
        cbool apply(CIndex&, CWorkersOf&, CSteps&) except +
        uint64_t stored()

    cppclass CWorkersOf "kvd::WorkersOf":
        CWorkersOf(CIndex&, const vector[CWorker*]&)

    int64_t kStepsARestored

cdef extern from "dump/text.hpp" namespace "kvd" nogil:
    cppclass CDumpText "kvd::DumpText":
        CDumpText(CStage&) except +
        void feed(const uint8_t*, size_t) except +
        void finish() except +

cdef extern from "dump/binary.hpp" namespace "kvd" nogil:
    cppclass CDumpBinary "kvd::DumpBinary":
        CDumpBinary(CStage&) except +
        void feed(const uint8_t*, size_t) except +
        void finish() except +


cdef class Staged:
    cdef CStage* c


cdef class DumpReader:
    cdef Staged stage
    cdef CDumpText* text
    cdef CDumpBinary* binary


cdef class StagedEntry:
    cdef Staged stage               # owns what `c` points to
    cdef CEntry* c


cdef class Restore:
    cdef StagedEntry entry
    cdef CRestore* c
