# distutils: language = c++
"""Data sheet of the random numbers (draws.pyx)."""
from libc.stdint cimport uint64_t


cdef class Draws:
    cdef object random  # a random.Random
    cdef bytes drawn    # native u64s
    cdef Py_ssize_t taken
    cdef Py_ssize_t marked  # as many were taken at `mark`, -1 without one

    cdef uint64_t peek(self, Py_ssize_t at) except? 0  # a number that stays, the `at`th from now
    cdef str peek_uuid(self, Py_ssize_t at)            # likewise, of two numbers
    cdef void take(self, Py_ssize_t count) noexcept    # numbers that `peek` has shown
    # Between `mark` and `unmark`, `rewind` has all numbers drawn once more that were taken since.
    cdef void mark(self) noexcept
    cdef void rewind(self) noexcept
    cdef void unmark(self) noexcept
