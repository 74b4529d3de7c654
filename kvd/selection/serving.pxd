# distutils: language = c++
"""Data sheet of the functions that both ways to serve a selection share (serving.pyx)."""
from libc.stdint cimport uint64_t
from libcpp.string_view cimport string_view

from kvd_core.selector.selector cimport Pool
from kvd_core.selector.settings cimport Settings

cpdef uint64_t booked_tokens(
    Pool pool, Settings settings, size_t candidate
) except? 0xfffffffffffffffe
cpdef bytes opening(str selection_id, str reservation_id, str phase)
# The UTF-8 bytes of a text; they live as long as the text.
cdef string_view utf8(str text) except *
