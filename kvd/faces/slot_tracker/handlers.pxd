# distutils: language = c++
"""Data sheet of the slot tracker's hot handlers."""
from libcpp.string cimport string

from kvd.faces.common.reader cimport BodyReader
from kvd.http.hot cimport HotHandler


cdef class SlotHandler(HotHandler):
    cdef BodyReader body
    cdef object slots   # kvd.slots.trackers.SlotTrackers
    cdef dict trackers  # its trackers by (model, tenant); each has a Ledger as `ledger`
    cdef list replicas, observers  # those told of steps (kvd.slots.live_requests)

    # The tracker that the body names; raises NotFound.
    cdef object tracker(self)


cdef class AddHandler(SlotHandler):
    cdef object clock      # returns seconds
    cdef string booked_as  # what the last answer has booked: as what, where, when
    cdef object booked_in  # a tracker
    cdef double booked_at

cdef class PrefillCompleteHandler(SlotHandler):
    pass

cdef class FreeHandler(SlotHandler):
    pass

cdef class PotentialLoadsHandler(SlotHandler):
    pass

cdef class LoadsHandler(HotHandler):
    cdef object slots
