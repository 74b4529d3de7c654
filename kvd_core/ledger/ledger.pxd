# cython: language_level=3
"""Data sheet of the ledger: the classes that Python sees, and what they offer compiled code."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp.memory cimport unique_ptr
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector

from kvd_core.ledger.journal cimport Journal
from kvd_core.ledger.rows cimport KeptRow
from kvd_core.ledger.trie cimport LoadedRankId
from kvd_core.ledger.types cimport (
    Admission, Book, LedgerLimits, RequestId, RequestList, SharedLoads
)


cdef class Loads:
    cdef unique_ptr[SharedLoads] shared
    cdef object __weakref__
    cdef readonly object eased  # see ledger.pyx


cdef class Ledger:
    cdef unique_ptr[Book] book
    cdef Book* c              # book.get()
    cdef readonly Loads loads
    cdef tuple journals       # keeps alive what the book writes to
    cdef uint64_t expired     # requests
    cdef uint64_t removed     # requests that went with their rank
    cdef uint64_t exists      # adds refused
    cdef uint64_t full        # likewise
    cdef uint64_t overflow    # likewise

    # The id of a rank, kNone if there is none.
    cdef LoadedRankId find_rank(self, uint64_t worker_id, uint32_t dp_rank) noexcept
    # The number of a live request, kNone if there is none.
    cdef RequestId find_request(self, string_view request_id) noexcept
    cdef RequestId find(self, str request_id) except? 0
    # The ids of those of a worker's ranks that are there; ValueError if these do not ascend.
    cdef vector[LoadedRankId] known(self, uint64_t worker_id, dp_ranks) except *
    # The same as add(), with an AddOutcome; the caller counts refusals.
    cdef int admit(self, const Admission* admission) except -1
    # Ends the prefill of a live request.
    cdef void complete(self, RequestId request) noexcept
    # Ends a live request.
    cdef void end(self, RequestId request) noexcept

    cpdef size_t rows_bytes(self, size_t prefix=*) noexcept

    cdef LoadedRankId own(self, LoadedRankId rank) except? 0xffffffff
    cdef str text_of(self, RequestId request)


cdef class KeptRows:
    cdef vector[KeptRow] rows
    cdef size_t at          # of the next row to be rendered
    cdef bytes prefix       # of rows of loads; None: they are projections
