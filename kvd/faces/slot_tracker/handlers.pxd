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
    cdef list replicas, observers  # to be notified of steps (kvd.slots.live_requests)

    # The tracker that the body names; raises NotFound.
    cdef object tracker(self)


cdef class AddHandler(SlotHandler):
    cdef object clock      # returns seconds
    # The booking of the last answer: its request id, its tracker (None if nothing was booked), and
    # its time in seconds.
    cdef string booked_as
    cdef object booked_in
    cdef double booked_at

cdef class StepHandler(SlotHandler):
    # Takes a request's step in the ledger alone.
    cdef int take(self, Ledger ledger, RequestId live) except -1
    # Takes it by `SlotTrackers`, which notifies replicas and observers, and raises failures.
    cdef int track(self, tracker, str request_id) except -1

cdef class PrefillCompleteHandler(StepHandler):
    pass

cdef class FreeHandler(StepHandler):
    pass

cdef class PotentialLoadsHandler(SlotHandler):
    cdef object kept  # the rows of the last answer, if it is written in pieces

cdef class LoadsHandler(HotHandler):
    cdef object slots
