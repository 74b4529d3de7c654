# distutils: language = c++
"""Data sheet of the body reader: members of a request's body, read from C."""
from libc.stdint cimport uint64_t
from libcpp.string cimport string
from libcpp.string_view cimport string_view

from kvd.http.permits cimport Text
from kvd_core.json.scan cimport BodyScanner, ValueKind, Value


cdef class BodyReader(BodyScanner):
    cdef string id_text  # the last id that had escapes, decoded

    cdef bint scans(self, const char* body, size_t size) except -1  # False: not a valid body

    # Scans a body; raises BadJson or Invalid.
    cdef int read(self, const char* body, size_t size) except -1

    # Members by the position of their field. A wrong type or a value out of range raises Invalid,
    # with the texts of kvd.faces.common.bodies.
    cdef int require_array(self, int array) except -1
    cdef bint is_unset(self, int field) noexcept     # absent or null
    cdef str text(self, int field)
    cdef str optional_text(self, int field)         # None for an absent member or null
    cdef bint optional_flag(self, int field) except -1
    cdef uint64_t uint(self, int field, uint64_t maximum) except? 0xfffffffffffffffe
    cdef str tenant(self, int field)                # from `field`, or the next: its newer name
    # A text's bytes, valid until the next body is read or the next id is asked for.
    cdef string_view id_bytes(self, int field) except *

    cdef dict known(self)


# Reads a whole number from 0 to `maximum` as it is spelled; False for anything else.
cdef bint natural(const Value& value, uint64_t maximum, uint64_t* number) noexcept

# The text that fills the placeholder of the path; raises BadRequest if it is not UTF-8.
cdef str segment(const Text& captured)
