"""Bytes that are written in place, once, for answers whose size is known only at the end.

All is inline: there is no module of this name.
"""

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF

cdef extern from "Python.h":
    PyObject* PyBytes_New "PyBytes_FromStringAndSize" (const char*, Py_ssize_t) except NULL
    int _PyBytes_Resize(PyObject** bytes, Py_ssize_t size) except -1


cdef inline bytes cut(PyObject* answer, Py_ssize_t size):
    # Shortens what `PyBytes_New` has returned to what was written; takes over the reference.
    _PyBytes_Resize(&answer, size)
    text = <bytes>answer
    Py_DECREF(text)
    return text
