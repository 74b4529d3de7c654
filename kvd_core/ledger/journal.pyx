# distutils: language = c++
"""Steps of requests on their way to a file, and back from it.

    ledgers ── each step ──> Journal ── take ──> bytes ──> a file
    others ──── put ────────────^                            └── read ──> Booked, Stepped,
                                                                         OtherRecord

`ledger/records.pxd` describes the ledgers' records; other writers have kinds of their own, with any
content. Ledgers write theirs without Python, so a journal costs a booking only a copy of its
hashes. A journal is bounded: see `ledger/record_buffer.hpp`.
"""

from collections import namedtuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stddef cimport ptrdiff_t, size_t
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.memory cimport make_unique

from kvd_core.ledger.records cimport kBookedBytes, kStepBytes
from kvd_core.ledger.trie cimport kNone

BOOKED = ord(b"B")
PREFILLED = ord(b"P")
ENDED = ord(b"E")
OUTPUT = ord(b"O")

Booked = namedtuple(
    "Booked",
    "ledger request_id key worker_id dp_rank tokens admitted_at expected_output_tokens"
    " output_blocks decayed_blocks fraction prefill_complete hashes",
)
Stepped = namedtuple("Stepped", "kind ledger request_id fraction")
OtherRecord = namedtuple("OtherRecord", "kind content")


cdef class Journal:
    """Records that wait to be written, in the order in which they were made."""

    def __cinit__(self, size_t limit):
        """At most `limit` bytes wait; records beyond that are dropped and counted."""
        self.buffer = make_unique[RecordBuffer](limit)
        self.c = self.buffer.get()

    def put(self, char kind, bytes content not None):
        """Adds a record of a caller's own kind; False, and counted, if there is no room."""
        cdef size_t n = PyBytes_GET_SIZE(content)
        cdef char* to = self.c.extend(kind, n)
        if to == NULL:
            return False
        memcpy(to, PyBytes_AS_STRING(content), n)
        return True

    def take(self):
        """Returns all waiting records and empties the journal."""
        cdef bytes taken = PyBytes_FromStringAndSize(self.c.bytes(), self.c.size())
        self.c.clear()
        return taken

    def pause(self):
        """Records nothing until `resume`, and counts nothing as dropped."""
        self.c.pause()

    def resume(self):
        """Records again."""
        self.c.resume()

    def __len__(self):
        """Bytes that wait."""
        return self.c.size()

    @property
    def dropped(self):
        """Records that found no room since the start."""
        return self.c.dropped()


cdef struct Reader:
    const char* at
    const char* end


cdef int need(Reader* reader, size_t n) except -1:
    if <size_t>(reader.end - reader.at) < n:
        raise ValueError("a record is shorter than its length field")
    return 0


cdef uint16_t get_u16(Reader* reader) noexcept:
    cdef uint16_t value
    memcpy(&value, reader.at, sizeof(value))
    reader.at += sizeof(value)
    return value


cdef uint32_t get_u32(Reader* reader) noexcept:
    cdef uint32_t value
    memcpy(&value, reader.at, sizeof(value))
    reader.at += sizeof(value)
    return value


cdef uint64_t get_u64(Reader* reader) noexcept:
    cdef uint64_t value
    memcpy(&value, reader.at, sizeof(value))
    reader.at += sizeof(value)
    return value


cdef double get_f64(Reader* reader) noexcept:
    cdef double value
    memcpy(&value, reader.at, sizeof(value))
    reader.at += sizeof(value)
    return value


cdef str get_text(Reader* reader, size_t n):
    need(reader, n)
    text = PyUnicode_DecodeUTF8(reader.at, n, NULL)
    reader.at += n
    return text


cdef object get_booked(Reader* reader):
    need(reader, kBookedBytes)
    cdef uint32_t ledger = get_u32(reader)
    cdef uint64_t worker_id = get_u64(reader)
    cdef uint32_t dp_rank = get_u32(reader)
    cdef size_t blocks = get_u32(reader)
    cdef uint64_t tokens = get_u64(reader)
    cdef double admitted = get_f64(reader)
    cdef uint32_t expected = get_u32(reader)
    cdef uint32_t outputs = get_u32(reader)
    cdef uint32_t decayed = get_u32(reader)
    cdef double fraction = get_f64(reader)
    cdef bint prefilling = reader.at[0] != 0
    reader.at += 1
    cdef size_t id_size = get_u16(reader)
    cdef size_t key_size = get_u16(reader)
    request_id = get_text(reader, id_size)
    key = get_text(reader, key_size) if key_size else None
    need(reader, blocks * sizeof(uint64_t))
    hashes = PyBytes_FromStringAndSize(reader.at, blocks * sizeof(uint64_t))
    reader.at += blocks * sizeof(uint64_t)
    return Booked(
        ledger, request_id, key, worker_id, dp_rank, tokens, admitted,
        None if expected == kNone else expected, outputs, decayed, fraction, not prefilling, hashes,
    )


cdef object get_step(Reader* reader, int kind):
    cdef bint is_output = kind == OUTPUT
    need(reader, kStepBytes + (sizeof(double) if is_output else 0))
    cdef uint32_t ledger = get_u32(reader)
    fraction = None
    cdef double weight
    if is_output:
        weight = get_f64(reader)
        fraction = weight if weight >= 0 else None
    cdef size_t id_size = get_u16(reader)
    return Stepped(kind, ledger, get_text(reader, id_size), fraction)


def pieces(bytes records not None, size_t max_bytes, size_t max_records):
    """Yields records in pieces of at most `max_bytes`, or of one record that is longer.

    A piece has at most `max_records`. ValueError for bytes that are not records.
    """
    cdef Reader all
    cdef const char* begun
    cdef uint32_t rest
    cdef size_t n = 0
    all.at = begun = PyBytes_AS_STRING(records)
    all.end = all.at + PyBytes_GET_SIZE(records)
    while all.at != all.end:
        need(&all, sizeof(uint32_t))
        rest = get_u32(&all)
        need(&all, rest)
        if n and (n == max_records or all.at + rest - begun > <ptrdiff_t>max_bytes):
            yield PyBytes_FromStringAndSize(begun, all.at - sizeof(uint32_t) - begun)
            begun = all.at - sizeof(uint32_t)
            n = 0
        all.at += rest
        n += 1
    if all.at != begun:
        yield PyBytes_FromStringAndSize(begun, all.at - begun)


def read(bytes records not None):
    """Yields the records in order: Booked, Stepped, or OtherRecord for another kind.

    ValueError for bytes that are not a record; what was yielded before them is valid.
    """
    cdef Reader all, one
    cdef uint32_t rest
    cdef int kind
    all.at = PyBytes_AS_STRING(records)
    all.end = all.at + PyBytes_GET_SIZE(records)
    while all.at != all.end:
        need(&all, sizeof(uint32_t))
        rest = get_u32(&all)
        need(&all, rest)
        if rest == 0:
            raise ValueError("a record without a kind")
        one.at = all.at + 1
        one.end = all.at + rest
        kind = <unsigned char>all.at[0]
        all.at += rest
        if kind == BOOKED:
            found = get_booked(&one)
        elif kind == PREFILLED or kind == ENDED or kind == OUTPUT:
            found = get_step(&one, kind)
        else:
            found = OtherRecord(kind, PyBytes_FromStringAndSize(one.at, one.end - one.at))
            one.at = one.end
        if one.at != one.end:
            raise ValueError("a record is longer than its length field")
        yield found
