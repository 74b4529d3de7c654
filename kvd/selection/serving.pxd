# distutils: language = c++
"""Data sheet of what both ways to serve a selection have in common (serving.pyx)."""
from libc.stdint cimport uint64_t
from libcpp.string_view cimport string_view

from kvd_core.selector.selector cimport Pool
from kvd_core.selector.settings cimport Settings

cpdef uint64_t booked_tokens(
    Pool pool, Settings settings, size_t candidate
) except? 0xfffffffffffffffe
cpdef bytes opening(str selection_id, str reservation_id, str phase)
# The bytes of a text, which live as long as that.
cdef string_view utf8(str text) except *
