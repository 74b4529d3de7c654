# distutils: language = c++
"""Reads members of request bodies for hot handlers: the usual valid ones in compiled code.

Such a member costs some ten nanoseconds. Any other goes to the function of kvd.faces.common.bodies
that reads this kind of member for cold handlers: it accepts rare valid forms, and raises the error
for invalid ones.
"""
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport uint8_t, uint64_t
from libcpp.string_view cimport string_view

from kvd.http.permits cimport Text
from kvd_core.json.scan cimport BodyScanner, ScanResult, Value, ValueKind

from kvd.errors import Invalid
from kvd.faces.common import bodies
from kvd.model import DEFAULT_TENANT

cdef ptrdiff_t MAX_DIGITS = 20  # digits of 2^64 - 1
cdef uint64_t HIGHEST_TENTH = 0xffffffffffffffff // 10
cdef str TENANT = DEFAULT_TENANT


cdef class BodyReader(BodyScanner):
    """Scans the bodies of a hot route and reads the values of their members."""

    cdef bint scans(self, const char* body, size_t size) except -1:
        return self.core.scan(<const uint8_t*>body, size) == ScanResult.ok

    cdef int read(self, const char* body, size_t size) except -1:
        if not self.scans(body, size):
            bodies.scan(self, None)  # raises; to scan a long body again takes some milliseconds
        return 0

    cdef int require_array(self, int array) except -1:
        if not self.core.present(array):
            bodies.require(self.known(), self.array_names[array])
        return 0

    cdef bint is_unset(self, int field) noexcept:
        cdef ValueKind kind = self.core.value(field).kind
        return kind == ValueKind.absent or kind == ValueKind.null

    cdef str text(self, int field):
        cdef const Value* value = &self.core.value(field)
        if value.kind == ValueKind.text:
            return PyUnicode_DecodeUTF8(<const char*>value.begin, value.end - value.begin, NULL)
        return bodies.text(self.known(), self.field_names[field])

    cdef str optional_text(self, int field):
        return None if self.is_unset(field) else self.text(field)

    cdef bint optional_flag(self, int field) except -1:
        if self.is_unset(field):
            return False
        return bodies.flag(self.known(), self.field_names[field])

    cdef uint64_t uint(self, int field, uint64_t maximum) except? 0xfffffffffffffffe:
        cdef uint64_t number
        if natural(self.core.value(field), maximum, &number):
            return number
        return bodies.uint(self.known(), self.field_names[field], maximum)

    cdef str tenant(self, int field):
        if self.core.value(field + 1).kind == ValueKind.absent:
            return TENANT if self.core.value(field).kind == ValueKind.absent else self.text(field)
        return bodies.tenant(self.known())

    cdef string_view id_bytes(self, int field) except *:
        cdef const Value* value = &self.core.value(field)
        if value.kind == ValueKind.text:
            return string_view(<const char*>value.begin, value.end - value.begin)
        self.id_text = self.text(field).encode()
        return string_view(self.id_text)

    cdef dict known(self):
        """Returns the members as Python values; raises Invalid if one cannot be converted."""
        try:
            return self.members()
        except TypeError as error:
            raise Invalid(str(error)) from None


cdef bint natural(const Value& value, uint64_t maximum, uint64_t* number) noexcept:
    cdef const uint8_t* digit = value.begin
    cdef uint64_t sum = 0, next
    if value.kind != ValueKind.integer or digit[0] == c"-" or value.end - digit > MAX_DIGITS:
        return False
    while digit != value.end:
        next = sum * 10 + (digit[0] - c"0")
        if sum > HIGHEST_TENTH or next < sum * 10:
            return False
        sum = next
        digit += 1
    number[0] = sum
    return sum <= maximum


cdef str segment(const Text& captured):
    try:
        return PyUnicode_DecodeUTF8(captured.begin, captured.size, NULL)
    except UnicodeDecodeError:
        return bodies.decoded(captured.begin[:captured.size])
