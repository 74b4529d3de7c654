"""Data sheet of the body scanner: the C++ scanner of a route and the class Python sees."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string cimport string


cdef extern from "json/scan.hpp" namespace "kvd::scanning" nogil:
    cdef enum class ScanResult(uint8_t):
        ok
        malformed  # not JSON
        wrong      # JSON, but not as the route needs it

    cdef enum class Element(uint8_t):
        u32        # 0 .. 2^32-1
        hash64     # -2^63 .. 2^64-1, negative ones as two's complement
        i64        # -2^63 .. 2^63-1, negative ones as two's complement

    cdef enum class ValueKind(uint8_t):
        absent
        null
        no         # false
        yes        # true
        integer
        real       # a number with a point or an exponent
        text       # without escapes: the bytes are the text
        escaped    # a text with escapes
        nested     # an array or object

    cdef cppclass Column[T]:
        const T* data()
        size_t size()

    cdef cppclass Value:
        ValueKind kind
        const uint8_t* begin  # in the body; of a text, without its quotes
        const uint8_t* end

    cdef cppclass BodyScan:
        void add_array(const string& name, Element element, cbool nullable) except +
        void add_field(const string& name) except +
        ScanResult scan(const uint8_t* body, size_t length) except +
        void begin(const uint8_t* body, size_t length) except +  # the same in steps ...
        cbool advance(size_t bytes) except +                     # ... until it returns true
        void adopt(BodyScan& other)                    # scans of the same body return its result
        void disown()                                  # from now on not any more
        ScanResult result()                            # of the last scan
        void forget()                                  # empties columns and values
        const string& message()                        # why the last scan was not ok
        size_t held_bytes()                            # memory kept for the next scan
        cbool present(size_t array)
        const Column[uint32_t]& narrow(size_t array)   # of an array of u32
        const Column[uint64_t]& wide(size_t array)     # of an array of hash64 or i64
        const Value& value(size_t field)
        const uint8_t* member(size_t field)            # its begin, if it has a value
        const string& unescaped(const Value& value) except +


cdef class BodyScanner:
    cdef BodyScan core
    cdef tuple array_names  # by position
    cdef tuple nullable     # whether each of the arrays may be null
    cdef tuple elements     # kinds of the arrays' elements: "u32", "hash64" or "i64", without ?
    cdef tuple field_names  # by position; the names of spans are last
    cdef Py_ssize_t first_span
    cdef Py_ssize_t nested_bytes  # most bytes of a field that is an array or object

    # The numbers of array `i` of the last body; `n` is set to their count, 0 if it had none.
    # They are valid until the next scan.
    cdef const uint32_t* u32(self, int i, size_t* n) except? NULL
    cdef const uint64_t* u64(self, int i, size_t* n) except? NULL

    cdef dict members(self)
    cdef int declare(self, BodyScan& core) except -1

    # Makes scans of a body that was scanned ahead return at once, until `disown`.
    cdef void adopt(self, ScanAhead ahead) noexcept
    cdef void disown(self) noexcept


cdef class ScanAhead:
    cdef BodyScan core
    cdef bytes body  # None: it has been adopted
