# distutils: language = c++
"""Writes JSON as msgpack, a part at a time (conductor/repack.hpp)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE


cdef class Repack:
    """One JSON text that is being written as msgpack.

    A string of 64 KiB or more in it may be refused: no member that is read is so long.
    """

    def __cinit__(self, bytes text not None):
        self.text = text

    def read(self, size_t length):
        """Reads the next `length` bytes of the text; returns whether there are more.

        ValueError("json") if the text is malformed.
        """
        cdef size_t size = PyBytes_GET_SIZE(self.text)
        cdef const uint8_t* begin = <const uint8_t*>PyBytes_AS_STRING(self.text)
        length = min(length, size - self.at)
        try:
            self.c.feed(begin + self.at, length)
            self.at += length
            if self.at == size:
                self.c.feed(<const uint8_t*>b" ", 1)  # completes even a bare number
        except ValueError:
            raise ValueError("json") from None
        return self.at != size

    def packed(self):
        """Returns the value as msgpack, once all is read; ValueError("json") if it is not whole."""
        cdef const vector[uint8_t]* whole = self.c.whole()
        if whole == NULL:
            raise ValueError("json")
        return PyBytes_FromStringAndSize(<const char*>whole.data(), whole.size())
