# distutils: language = c++
"""Random numbers drawn in bulk, so that a single one needs no call into Python.

They come from the given source, in its order: a number that is read with `peek` and not taken
is drawn by the next caller.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.string cimport memcpy

cdef enum:
    kBulk = 512  # numbers drawn at once: 8 us every 512 selections, 4 KiB

cdef const char* HEX = b"0123456789abcdef"


cdef class Draws:
    """A source of uniform u64s, for one thread."""

    def __init__(self, random not None):
        """Takes a random.Random, or any object with its `randbytes`."""
        self.random = random
        self.drawn = b""
        self.marked = -1

    def next(self):
        """Draws a u64."""
        cdef uint64_t number = self.peek(0)
        self.take(1)
        return number

    def uuid(self):
        """Draws two numbers and returns them as a UUID of version 4, in its usual form."""
        text = self.peek_uuid(0)
        self.take(2)
        return text

    def undrawn(self, call not None):
        """Returns the result of `call()`; the numbers that it draws will be drawn again."""
        self.mark()
        try:
            return call()
        finally:
            self.rewind()
            self.unmark()

    cdef uint64_t peek(self, Py_ssize_t at) except? 0:
        cdef uint64_t number
        cdef Py_ssize_t used
        cdef Py_ssize_t begin = (self.taken + at) * <Py_ssize_t>sizeof(uint64_t)
        if begin + <Py_ssize_t>sizeof(uint64_t) > PyBytes_GET_SIZE(self.drawn):
            used = self.taken if self.marked < 0 else self.marked
            left = self.drawn[used * sizeof(uint64_t) :]
            self.drawn = left + <bytes?>self.random.randbytes(kBulk * sizeof(uint64_t))
            self.taken -= used
            self.marked = min(self.marked, 0)
            begin = (self.taken + at) * <Py_ssize_t>sizeof(uint64_t)
        memcpy(&number, PyBytes_AS_STRING(self.drawn) + begin, sizeof(number))
        return number

    cdef void take(self, Py_ssize_t count) noexcept:
        self.taken += count

    cdef void mark(self) noexcept:
        self.marked = self.taken

    cdef void rewind(self) noexcept:
        self.taken = self.marked

    cdef void unmark(self) noexcept:
        self.marked = -1

    cdef str peek_uuid(self, Py_ssize_t at):
        cdef uint64_t halves[2]
        cdef char text[36]
        cdef char* to = text
        cdef int digit
        halves[0] = self.peek(at)
        halves[1] = self.peek(at + 1)
        halves[0] = halves[0] & ~<uint64_t>0xf000 | 0x4000  # version 4
        halves[1] = halves[1] & ~(<uint64_t>3 << 62) | <uint64_t>1 << 63  # variant of RFC 9562
        for digit in range(32):
            if digit == 8 or digit == 12 or digit == 16 or digit == 20:
                to[0] = c"-"
                to += 1
            to[0] = HEX[halves[digit // 16] >> (60 - digit % 16 * 4) & 15]
            to += 1
        return text[:36].decode("ascii")
