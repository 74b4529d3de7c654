# distutils: language = c++
"""Data sheet of the random numbers (draws.pyx)."""
from libc.stdint cimport uint64_t


cdef class Draws:
    cdef object random  # a random.Random
    cdef bytes drawn    # native u64s
    cdef Py_ssize_t taken
    cdef Py_ssize_t marked  # `taken` at the last `mark`, -1 without one

    cdef uint64_t peek(self, Py_ssize_t at) except? 0  # the number at this position from now on
    cdef str peek_uuid(self, Py_ssize_t at)            # a UUID of two numbers from there on
    cdef void take(self, Py_ssize_t count) noexcept    # takes numbers that `peek` has returned
    # Between `mark` and `unmark`, `rewind` returns all numbers taken since, to be drawn again.
    cdef void mark(self) noexcept
    cdef void rewind(self) noexcept
    cdef void unmark(self) noexcept
