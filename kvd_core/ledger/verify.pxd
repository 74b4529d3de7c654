# cython: language_level=3
"""Checks every invariant of ledgers that share loads."""

from kvd_core.ledger.types cimport SharedLoads

# AssertionError says what is wrong.
cdef int verify(SharedLoads* loads) except -1
