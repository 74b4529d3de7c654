# distutils: language = c++
"""Data sheet of the slot tracker's hot handlers."""
from libcpp.string cimport string

from kvd.faces.common.reader cimport BodyReader
from kvd.http.hot cimport HotHandler
from kvd_core.ledger.ledger cimport Ledger
from kvd_core.ledger.types cimport RequestId


cdef class SlotHandler(HotHandler):
    cdef BodyReader body
    cdef object slots   # kvd.slots.trackers.SlotTrackers
    cdef dict trackers  # its trackers by (model, tenant); each has a Ledger as `ledger`
    cdef list replicas, observers  # those notified of steps (kvd.slots.live_requests)

    # The tracker that the body names; raises NotFound.
    cdef object tracker(self)


cdef class AddHandler(SlotHandler):
    cdef object clock      # returns seconds
    cdef string booked_as  # what the last answer has booked: as what, where, when
    cdef object booked_in  # a tracker
    cdef double booked_at

cdef class StepHandler(SlotHandler):
    # Takes the step of a request that only the ledger has to know of.
    cdef int take(self, Ledger ledger, RequestId live) except -1
    # Takes it where others are notified of it, or says why it cannot be taken.
    cdef int tell(self, tracker, str request_id) except -1

cdef class PrefillCompleteHandler(StepHandler):
    pass

cdef class FreeHandler(StepHandler):
    pass

cdef class PotentialLoadsHandler(SlotHandler):
    pass

cdef class LoadsHandler(HotHandler):
    cdef object slots
