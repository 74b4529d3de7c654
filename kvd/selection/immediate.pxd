# distutils: language = c++
"""Data sheet of the selections and steps that need no scheduler (immediate.pyx)."""
from libc.stdint cimport int64_t, uint32_t
from libcpp.string cimport string
from libcpp.string_view cimport string_view

from kvd_core.base.draws cimport Draws
from kvd_core.base.sampling cimport Sample
from kvd_core.ledger.ledger cimport Ledger
from kvd_core.ledger.types cimport RequestId
from kvd_core.selector.choice_stats cimport ChoiceStats
from kvd_core.selector.selector cimport Pool
from kvd_core.selector.settings cimport Settings


cdef class ImmediateSelection:
    cdef object selections, reservations, scheduler
    cdef Draws draws
    cdef ChoiceStats choice_stats
    cdef dict owner_of             # Candidates by reservation id
    cdef list replicas, observers  # subscribers to steps (kvd.slots.live_requests)
    cdef Sample sample             # picks the requests whose steps observers get
    cdef readonly double booked_at  # seconds, when the last booking was made

    # Returns whether a selection can be served here; `reservation_id` is None if it books nothing.
    cpdef bint suits(self, candidates, str reservation_id, str session_id) except -1
    # Chooses a rank for the prompt that the candidates' `pool` has matched, and books it under the
    # id if there is one; `expected` is its tokens of output, or kNone. Returns the candidate, or -1
    # and changes nothing if only the scheduler can serve it.
    cdef int64_t serve(self, candidates, Pool pool, str reservation_id, uint32_t expected
                       ) except? -2

    cdef bint reserve(self, candidates, Settings settings, Pool pool, size_t candidate,
                      str reservation_id, uint32_t expected) except -1


cdef class ImmediateSteps:
    cdef object reservations, scheduler
    cdef dict owner_of
    cdef list replicas, observers
    cdef Sample sample
    cdef dict leases         # session leases by reservation id; `reservations` ends these
    cdef dict retried        # bookings with an answer kept for retries; it ends these, too
    cdef string prefill_id   # scratch: the id of a booking

    # Ends the prefill of a reservation; repeating it is no error. Raises NotFound.
    cpdef int prefill_complete(self, str reservation_id) except -1
    # Ends a reservation; raises NotFound.
    cpdef int free(self, str reservation_id) except -1

    # The ledger that a reservation is booked in; None if `reservations` must take its steps.
    cdef Ledger ledger_of(self, str reservation_id)
    # The number of a reservation in a ledger; kNone if it has none, or books its prefill apart.
    cdef RequestId request_of(self, Ledger ledger, str reservation_id) except? 0xffffffff
