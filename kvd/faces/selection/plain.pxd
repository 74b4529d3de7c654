# distutils: language = c++
"""Data sheet of the plain requests of the selection service (plain_selection.pyx)."""
from libcpp.string cimport string

from kvd_core.selector.choice_counts cimport ChoiceCounts
from kvd_core.base.draws cimport Draws
from kvd.http.fast_path cimport Answerer, Text
from kvd_core.ledger.ledger cimport Ledger, RequestId
from kvd_core.json.scan cimport BodyScanner
from kvd_core.selector.selector cimport Pool
from kvd_core.selector.settings cimport Settings


cdef class PlainPrompt(Answerer):
    cdef BodyScanner scanner
    cdef object selections   # kvd.selection.service.Selections, or like it
    cdef object reservations, scheduler   # its parts
    cdef dict fleets         # its fleets by (model, tenant)
    cdef bint reuses         # prompts given as tokens may share blocks in use
    cdef str model, tenant   # the default ones

    # The fleet that a body asks, None if the body is not plain.
    cdef object scanned(self, const char* body, size_t size)
    # Puts the prompt of the scanned body before a pool; False if it is not plain.
    cdef bint looked(self, Pool pool) except -1
    cdef bint looked_hashes(self, Pool pool) except -1
    cdef bint looked_tokens(self, Pool pool) except -1

cdef class PlainSelect(PlainPrompt):
    cdef Draws draws
    cdef ChoiceCounts counts
    cdef dict live           # fleets by reservation id
    cdef Ledger booked_in    # what the last answer has booked: where, as what, when
    cdef str booked_as
    cdef double booked_at

    cdef bint plain(self)
    cdef bytes chosen(self, fleet, Pool pool, str reservation_id, bint drawn)
    cdef bint book(self, fleet, Settings settings, Pool pool, size_t candidate,
                   str reservation_id) except -1
    cdef bytes opening(self, str reservation_id)

cdef class PlainLoads(PlainPrompt):
    pass

cdef class PlainStep(Answerer):
    cdef object selections
    cdef object reservations, scheduler   # its parts
    cdef dict live
    cdef dict leases         # of sessions, by reservation id: their end is told
    cdef string prefill             # scratch: the id of a booking

    # The ledger of the fleet that a reservation is booked in, None if it is to be left.
    cdef Ledger ledger_of(self, str reservation_id)
    # The number of a reservation in it, kNone without one and if its prefill is booked apart.
    cdef RequestId request_of(self, Ledger ledger, Text captured)

cdef class PlainPrefillComplete(PlainStep):
    pass

cdef class PlainFree(PlainStep):
    pass

cdef class PlainAllLoads(PlainStep):
    pass
