# distutils: language = c++
"""Data sheet of the selection service's hot handlers."""
from libc.stdint cimport uint64_t
from libcpp.string cimport string

from kvd.faces.common.reader cimport BodyReader
from kvd.http.hot cimport HotHandler
from kvd.http.permits cimport Text
from kvd_core.base.draws cimport Draws
from kvd_core.ledger.ledger cimport Ledger, RequestId
from kvd_core.selector.choice_counts cimport ChoiceCounts
from kvd_core.selector.selector cimport Pool
from kvd_core.selector.settings cimport Settings


cdef class PromptReader(BodyReader):
    # The prompt of the last body: token ids with the first four, else hashes.
    cdef readonly bint by_tokens
    cdef str lora_name, cache_salt  # None: none
    cdef object unique              # a number for a prompt that shares no blocks in use, or None
    cdef bint eagle
    cdef int locals_                # which array says what ranks cache of it
    cdef readonly uint64_t isl_tokens

    # Reads the prompt of the scanned body; raises BadRequest without a whole one.
    cpdef int read_prompt(self, selections) except -1
    # Does the same where only the sequence hashes are needed, of a prompt chosen for before.
    cpdef int read_booked(self, selections) except -1
    # Has a pool look at the prompt that was read.
    cpdef int put_before(self, Pool pool) except -1

    cdef int read_tokens(self, selections) except -1
    cdef int check_lengths(self) except -1


cdef class PromptHandler(HotHandler):
    cdef PromptReader body
    cdef object selections   # kvd.selection.service.Selections
    cdef dict fleets         # its fleets by (model, tenant)

    # The model and tenant that the body names, as a tuple.
    cdef tuple place(self)
    # The pool that has looked at the body's prompt; raises Unserved without anyone in it.
    cdef Pool looked(self, place)

cdef class PotentialLoadsHandler(PromptHandler):
    pass

cdef class OverlapScoresHandler(PromptHandler):
    pass

cdef class SelectHandler(PromptHandler):
    cdef object reservations, scheduler  # parts of the selections
    cdef Draws draws
    cdef ChoiceCounts counts
    cdef dict live           # fleets by reservation id
    cdef bint looked_at      # the fleet's pool has looked at the prompt of the last body
    cdef object receipt      # of what the scheduler has booked with the last answer
    cdef object queued       # the selection that waits after the last body
    cdef Ledger booked_in    # what the last answer has booked: where (None: nothing), as what, when
    cdef str booked_as
    cdef double booked_at

    cdef bint is_usual(self) noexcept
    # The fleet that can serve a selection here and now, None for the scheduler.
    cdef object at_once(self, place, str session_id, str reservation_id)
    cdef bytes served(self, fleet, str selection_id, str reservation_id, expected)
    cdef bint book(self, fleet, Settings settings, Pool pool, size_t candidate,
                   str reservation_id, expected) except -1

cdef class ReservationHandler(HotHandler):
    cdef object reservations, scheduler  # parts of the selections
    cdef dict live
    cdef dict leases         # of sessions, by reservation id: their end is told
    cdef string prefill_id   # scratch: the id of a booking

    # The ledger of the fleet that a reservation is booked in, None for `reservations`.
    cdef Ledger ledger_of(self, str reservation_id)
    # The number of a reservation in it, kNone without one and if its prefill is booked apart.
    cdef RequestId request_of(self, Ledger ledger, const Text& captured)

cdef class PrefillCompleteHandler(ReservationHandler):
    pass

cdef class FreeHandler(ReservationHandler):
    pass

cdef class LoadsHandler(HotHandler):
    cdef object selections
