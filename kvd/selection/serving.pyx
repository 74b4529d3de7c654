# distutils: language = c++
"""Functions shared by both ways to serve a selection: the hot handler's and the scheduler's."""
import json

from libc.stdint cimport uint64_t
from libcpp.string_view cimport string_view

from kvd_core.selector.selector cimport Pool
from kvd_core.selector.settings cimport Settings

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL


cpdef uint64_t booked_tokens(
    Pool pool, Settings settings, size_t candidate
) except? 0xfffffffffffffffe:
    """Returns the tokens to prefill that a booking on a candidate counts.

    The booking is of the prompt that the pool has matched.
    """
    if not settings.c.track_prefill:
        return 0
    return pool.effective_tokens_of(&settings.c, candidate)


cpdef bytes opening(str selection_id, str reservation_id, str phase):
    """Returns the beginning of an answer: a brace, and each given member followed by a comma."""
    cdef bytes text = b"{"
    if selection_id is not None:
        text = b'{"selection_id":%b,' % quoted(selection_id)
    if reservation_id is not None:
        text = text + b'"reservation_id":%b,' % quoted(reservation_id)
    if phase is not None:
        text = text + b'"phase":%b,' % quoted(phase)
    return text


cdef bytes quoted(str text):
    """Returns a text as json.dumps writes it."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return b'"%b"' % text.encode()
    return json.dumps(text).encode()


cdef string_view utf8(str text) except *:
    cdef Py_ssize_t size = 0
    cdef const char* begin = PyUnicode_AsUTF8AndSize(text, &size)
    return string_view(begin, size)
