# distutils: language = c++
"""Data sheet of the plain requests of the slot tracker (plain_slots.pyx)."""
from libc.stdint cimport uint64_t
from libcpp.string cimport string

from kvd.http.fast_path cimport Answerer
from kvd_core.ledger.ledger cimport Ledger
from kvd_core.json.scan cimport BodyScanner


cdef class PlainSlots(Answerer):
    cdef BodyScanner scanner
    cdef object slots   # kvd.slots.trackers.SlotTrackers, or like it
    cdef dict trackers  # its trackers by (model, tenant); each has a Ledger as `ledger`
    cdef str tenant     # the default one
    cdef object tracker  # that of the last request

    cdef Ledger scanned(self, const char* body, size_t size)


cdef class PlainAdd(PlainSlots):
    cdef object clock   # returns seconds
    cdef string booked_as  # what the last answer has booked: as what, where, when
    cdef object booked_in  # a tracker
    cdef double booked_at

cdef class PlainPrefillComplete(PlainSlots):
    pass

cdef class PlainFree(PlainSlots):
    pass

cdef class PlainProjection(PlainSlots):
    pass

cdef class PlainLoads(PlainSlots):
    pass
