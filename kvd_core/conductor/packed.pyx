# distutils: language = c++
"""Reads msgpack bodies of requests: a map whose members are texts, numbers, and arrays of numbers.

An array becomes bytes; no Python object is made for its elements.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport INT32_MAX, uint8_t, uint32_t
from libc.string cimport memcpy


class Unread(bytes):
    """A value of another kind, as its bytes in the body."""


def read_members(bytes body not None, dict arrays not None):
    """Returns the members of a body, in its order.

    Values are None, int, str or Unread. The members that `arrays` names, with 4 or 8 bytes an
    element, are arrays of signed 32-bit or any 64-bit integers, or a little-endian bin of these.
    They are returned as such bytes; if an element is faulty, as (why, its index) with
    "invalid_type" or "out_of_range".

    ValueError for a body that is not a map from distinct texts to values.
    """
    cdef const uint8_t* begin = <const uint8_t*>PyBytes_AS_STRING(body)
    cdef CCursor* at = new CCursor(begin, begin + PyBytes_GET_SIZE(body))
    try:
        members = _members(at, arrays)
        if at.broken() or at.left() != 0:
            raise ValueError("the body is not one msgpack value")
        return members
    finally:
        del at


cdef dict _members(CCursor* at, dict arrays):
    cdef uint32_t count = 0
    cdef string_view key
    cdef dict members = {}
    if not at.map(&count):
        raise ValueError("the body is not a msgpack map")
    while count != 0 and not at.broken():
        count -= 1
        if not at.text(&key):
            raise ValueError("a member of the body has no text as its name")
        try:
            name = key.data()[: key.size()].decode()
        except UnicodeDecodeError:
            raise ValueError("the name of a member is not UTF-8") from None
        if name in members:
            raise ValueError(f"member `{name}` is given twice")
        members[name] = _array(at, arrays[name]) if name in arrays else _value(at)
    return members


cdef _value(CCursor* at):
    cdef const uint8_t* start = at.at()
    cdef string_view text
    cdef CInteger number
    if at.nil():
        return None
    if at.integer(&number):
        return <int64_t>number.bits if number.negative else number.bits
    if at.text(&text):
        try:
            return text.data()[: text.size()].decode()
        except UnicodeDecodeError:
            pass  # then it is no text
    else:
        at.skip()
    return Unread(PyBytes_FromStringAndSize(<const char*>start, at.at() - start))


cdef _array(CCursor* at, size_t width):
    cdef uint32_t count = 0, i
    cdef string_view packed
    cdef CInteger number
    cdef char* out
    if at.bin(&packed):
        return packed.data()[: packed.size()]
    if not at.array(&count):
        return _value(at)
    if not at.expect(count):
        return b""
    cdef bytes found = PyBytes_FromStringAndSize(NULL, count * width)
    out = PyBytes_AS_STRING(found)
    for i in range(count):
        if not at.integer(&number):
            at.skip(count - i)
            return "invalid_type", i
        if width == 4 and not fits(number):
            at.skip(count - i - 1)
            return "out_of_range", i
        memcpy(out + i * width, &number.bits, width)
    return found


cdef bint fits(CInteger number) noexcept:
    """Returns whether a number fits into 32 bits with a sign."""
    return ~number.bits <= INT32_MAX if number.negative else number.bits <= INT32_MAX
