# distutils: language = c++
"""Reads request bodies in one pass: long integer arrays into memory, a few members into Python.

json/scan.hpp has the picture, the invariants and the costs.
"""

import json
from math import isinf
from sys import maxsize

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t

ELEMENTS = {"u32": <int>Element.u32, "hash64": <int>Element.hash64, "i64": <int>Element.i64}

# Most bytes of a field that is an array or object, unless a route allows more: all other requests
# wait while it becomes a Python value, which takes up to 5 ms. 6,000 worker ids fit.
MAX_NESTED_BYTES = 131_072

# Bytes of a long body that are scanned in one step if they are regular integers, and a quarter of
# that in anything else: 0.5 to 1.5 ms.
AHEAD_BYTES = 1_048_576

# An integer of at most this many bytes fits 64 bits with certainty.
cdef Py_ssize_t SHORT_INTEGER = 18


cdef class BodyScanner:
    """The scanner of one route's bodies: its members are fixed, and its memory is used again.

    `arrays` maps members that are long arrays of integers to "u32" (0..2^32-1), "hash64"
    (-2^63..2^64-1, negative ones as two's complement) or "i64" (-2^63..2^63-1, likewise); with a
    question mark at the end, null is allowed and counts as absent. `fields` names the other members
    to read, and `spans` those whose JSON is returned as it is in the body. A field that is an array
    or object may have `nested_bytes` at most, or any length if that is None.
    For one thread, and not re-entrant: arrays are valid until the next scan. That also frees memory
    beyond 4 MiB an array (KEPT_BYTES).
    """

    def __cinit__(self, arrays, fields=(), spans=(), nested_bytes=MAX_NESTED_BYTES):
        self.array_names = tuple(arrays)
        self.elements = tuple(element.removesuffix("?") for element in arrays.values())
        self.field_names = (*fields, *spans)
        self.first_span = len(fields)
        self.nested_bytes = maxsize if nested_bytes is None else nested_bytes
        self.nullable = tuple(element.endswith("?") for element in arrays.values())
        names = self.array_names + self.field_names
        if len(set(names)) != len(names):
            raise ValueError("a member is named twice")
        for name, element in zip(self.array_names, self.elements):
            if element not in ELEMENTS:
                raise ValueError(f"{name}: {element!r} is none of {', '.join(ELEMENTS)}")
        self.declare(self.core)

    def scan(self, bytes body, ScanAhead ahead=None):
        """Returns the known members of a body: fields as Python values, arrays as their lengths,
        spans as bytes of JSON. None is the body that a compiled caller has just scanned. With
        `ahead`, a scan in steps that is complete, it takes that over.

        Other members are checked and skipped; absent ones are not in the dict. In a field, nested
        objects with a repeated key keep its last value.
        Raises ValueError for a body that is not strict JSON (RFC 8259 in UTF-8 without a byte order
        mark, lone surrogates, trailing bytes, or brackets 2^20 deep). Raises TypeError for JSON
        that is wrong: no object, a known member twice, an array with anything but integers in range
        (-0 is no integer, as for Dynamo), a field nested deeper than 128 levels, longer than is
        allowed or with a number that Python does not convert. The texts may be sent to clients. Of
        several problems, the first in reading order is reported; fields that are too long or
        unconvertible come last of all.
        """
        if ahead is not None:
            self.adopt(ahead)
            try:
                return self.scan(body)
            finally:
                self.disown()
        cdef ScanResult result = self.core.result() if body is None else self.core.scan(
            <const uint8_t*>PyBytes_AS_STRING(body), <size_t>PyBytes_GET_SIZE(body)
        )
        if result == ScanResult.malformed:
            raise ValueError(self.core.message().decode())
        if result == ScanResult.wrong:
            raise TypeError(self.core.message().decode())
        try:
            return self.members()
        except TypeError:
            self.core.forget()
            raise

    def ahead(self, bytes body not None):
        """Returns a ScanAhead of a body, for `scan` or a compiled caller that adopts it."""
        cdef ScanAhead ahead = ScanAhead.__new__(ScanAhead)
        self.declare(ahead.core)
        ahead.body = body
        ahead.core.begin(<const uint8_t*>PyBytes_AS_STRING(body), <size_t>PyBytes_GET_SIZE(body))
        return ahead

    def opened(self, bytes body not None):
        """Returns the body scanned last without its fields and spans, open for other members.

        It ends with a brace or a comma; nothing else has changed.
        """
        cdef const uint8_t* begin = <const uint8_t*>PyBytes_AS_STRING(body)
        cdef const Value* value
        cdef Py_ssize_t i, at = 0, end
        cdef list cuts = [], kept = []
        for i in range(len(self.field_names)):
            value = &self.core.value(i)
            if value.kind != ValueKind.absent:
                if not begin <= value.begin <= begin + PyBytes_GET_SIZE(body):
                    raise ValueError("not the body that was scanned last")
                end = value.end - begin + (begin[value.begin - begin - 1] == c'"')
                cuts.append((self.core.member(i) - begin, end))
        for cut, end in sorted(cuts):
            kept.append(body[at:cut])
            at = end
            while begin[at] in b" \t\r\n":
                at += 1
            at += begin[at] == c","
        kept.append(body[at:body.rindex(b"}")].rstrip())
        inside = b"".join(kept).rstrip()
        return inside if inside.endswith((b"{", b",")) else inside + b","

    def array(self, str name not None):
        """Returns the integers of an array in the last body, [] if it had none; hashes unsigned."""
        if name not in self.array_names:
            raise KeyError(name)
        cdef int i = self.array_names.index(name)
        cdef size_t n = 0, k
        cdef const uint32_t* narrow
        cdef const uint64_t* wide
        if self.elements[i] == "u32":
            narrow = self.u32(i, &n)
            return [narrow[k] for k in range(n)]
        wide = self.u64(i, &n)
        return [wide[k] for k in range(n)]

    def hashes(self):
        """Returns the first array of the last body, of 64 bits, as native u64s in one bytes."""
        cdef size_t n = 0
        cdef const uint64_t* first = self.u64(0, &n)
        return PyBytes_FromStringAndSize(<const char*>first, n * sizeof(uint64_t))

    def __sizeof__(self):
        return object.__sizeof__(self) + self.core.held_bytes()

    cdef const uint32_t* u32(self, int i, size_t* n) except? NULL:
        if self.elements[i] != "u32":
            raise TypeError(f"array {i} does not hold u32")
        n[0] = self.core.narrow(i).size()
        return self.core.narrow(i).data()

    cdef const uint64_t* u64(self, int i, size_t* n) except? NULL:
        if self.elements[i] == "u32":
            raise TypeError(f"array {i} does not hold 64 bits")
        n[0] = self.core.wide(i).size()
        return self.core.wide(i).data()

    cdef int declare(self, BodyScan& core) except -1:
        for name, element, nullable in zip(self.array_names, self.elements, self.nullable):
            core.add_array(name.encode(), <Element><int>ELEMENTS[element], nullable)
        for name in self.field_names:
            core.add_field(name.encode())
        return 0

    cdef void adopt(self, ScanAhead ahead) noexcept:
        if ahead.body is not None:
            self.core.adopt(ahead.core)
            ahead.body = None

    cdef void disown(self) noexcept:
        self.core.disown()

    cdef dict members(self):
        cdef dict members = {}
        cdef Py_ssize_t i
        cdef const Value* value
        for i in range(len(self.array_names)):
            if self.core.present(i):
                members[self.array_names[i]] = self.core.narrow(i).size() + self.core.wide(i).size()
        for i in range(len(self.field_names)):
            value = &self.core.value(i)
            if value.kind != ValueKind.absent:
                name = self.field_names[i]
                if i < self.first_span:
                    if (
                        value.kind == ValueKind.nested
                        and value.end - value.begin > self.nested_bytes
                    ):
                        raise TypeError(f"{name}: longer than {self.nested_bytes} bytes")
                    members[name] = python_value(self.core, value[0], name)
                else:
                    members[name] = json_of(value[0])
        return members


cdef class ScanAhead:
    """A scan of a long body in steps. Made by `BodyScanner.ahead`."""

    def __init__(self):
        raise TypeError("use BodyScanner.ahead")

    def advance(self, size_t some_bytes=AHEAD_BYTES):
        """Scans on for a step; returns whether the body is scanned."""
        return self.core.advance(some_bytes)


cdef bytes json_of(const Value& value):
    cdef bint quoted = value.kind == ValueKind.text or value.kind == ValueKind.escaped
    cdef const char* begin = <const char*>value.begin - quoted
    return PyBytes_FromStringAndSize(begin, value.end - value.begin + 2 * quoted)


cdef object python_value(BodyScan& core, const Value& value, str name):
    cdef const char* begin = <const char*>value.begin
    cdef Py_ssize_t length = value.end - value.begin
    if value.kind == ValueKind.text:
        return PyUnicode_DecodeUTF8(begin, length, NULL)
    if value.kind == ValueKind.null:
        return None
    if value.kind == ValueKind.yes:
        return True
    if value.kind == ValueKind.no:
        return False
    if value.kind == ValueKind.integer and length == 2 and begin[0] == c"-" and begin[1] == c"0":
        return -0.0  # no integer has that sign; Dynamo's reader makes it a float, too
    if value.kind == ValueKind.integer and length <= SHORT_INTEGER:
        return short_integer(begin, length)
    if value.kind == ValueKind.escaped:
        return core.unescaped(value).decode()
    return slow_value(value.kind, begin[:length], name)


cdef int64_t short_integer(const char* text, Py_ssize_t length) noexcept nogil:
    cdef bint negative = text[0] == c"-"
    cdef int64_t number = 0
    cdef Py_ssize_t i
    for i in range(negative, length):
        number = number * 10 + (text[i] - c"0")
    return -number if negative else number


cdef object slow_value(ValueKind kind, bytes text, str name):
    # The text is well-formed, so ValueError means a number with too many digits or beyond a double.
    try:
        if kind == ValueKind.integer:
            return int(text)
        if kind == ValueKind.real:
            return _finite(text)
        return (_SIGNED if b"-0" in text else _NESTED).decode(text.decode())
    except ValueError:
        raise TypeError(f"{name}: a number out of range") from None


def _finite(text):
    number = float(text)
    if isinf(number):
        raise ValueError
    return number


def _signed(text):
    return -0.0 if text == "-0" else int(text)


_NESTED = json.JSONDecoder(parse_float=_finite)
_SIGNED = json.JSONDecoder(parse_float=_finite, parse_int=_signed)  # slower, for a text with -0
# Most bytes of an object in an array: as long as a whole body on most routes.
MAX_OBJECT_BYTES = 2_097_152


def objects_of(bytes span not None):
    """Yields the objects of a span that is an array of them, each as its JSON.

    Raises TypeError, with a text that may be sent to clients, at a value that is no object, and at
    an object longer than MAX_OBJECT_BYTES.
    """
    cdef const char* text = PyBytes_AS_STRING(span)
    cdef Py_ssize_t at = 1, end
    if text[0] != c"[":
        raise TypeError("expected an array of objects")
    while True:
        while text[at] in b", \t\r\n":
            at += 1
        if text[at] == c"]":
            return
        if text[at] != c"{":
            raise TypeError("expected an array of objects")
        end = object_end(text, at)
        if end - at > MAX_OBJECT_BYTES:
            raise TypeError(f"an object longer than {MAX_OBJECT_BYTES} bytes")
        yield span[at:end]
        at = end


cdef Py_ssize_t object_end(const char* text, Py_ssize_t at) noexcept nogil:
    """Returns the end of the object at a position of valid JSON."""
    cdef Py_ssize_t depth = 0
    cdef bint quoted = False
    while True:
        if text[at] == c'"':
            quoted = not quoted
        elif quoted:
            at += text[at] == c"\\"
        elif text[at] == c"{":
            depth += 1
        elif text[at] == c"}":
            depth -= 1
        at += 1
        if depth == 0:
            return at
