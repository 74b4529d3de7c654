# distutils: language = c++
"""Writes JSON as msgpack, a part at a time (conductor/repack.hpp)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE


cdef class Repack:
    """One JSON text on its way to be msgpack.

    A text in it of 64 KiB or more may be refused: nothing that is read has such.
    """

    def __cinit__(self, bytes text not None):
        self.text = text

    def read(self, size_t length):
        """Reads so many bytes of it; returns whether there are more.

        ValueError("json") where the text is none.
        """
        cdef size_t size = PyBytes_GET_SIZE(self.text)
        cdef const uint8_t* begin = <const uint8_t*>PyBytes_AS_STRING(self.text)
        length = min(length, size - self.at)
        try:
            self.c.feed(begin + self.at, length)
            self.at += length
            if self.at == size:
                self.c.feed(<const uint8_t*>b" ", 1)  # behind which even a bare number is whole
        except ValueError:
            raise ValueError("json") from None
        return self.at != size

    def packed(self):
        """The value as msgpack, once all is read; ValueError("json") unless it is whole."""
        cdef const vector[uint8_t]* whole = self.c.whole()
        if whole == NULL:
            raise ValueError("json")
        return PyBytes_FromStringAndSize(<const char*>whole.data(), whole.size())
