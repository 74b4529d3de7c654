# distutils: language = c++
"""Known beginnings of conversations, for Python; prompts/conversations.hpp has the picture."""
from collections import namedtuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector

from kvd_core.base.hashing cimport c_sequence_hashes

cdef extern from "prompts/conversations.hpp" namespace "kvd::prompts" nogil:
    struct Blocks:
        vector[uint64_t] local_hashes
        uint32_t tokens

    struct CRecalled "kvd::prompts::Recalled":
        const Blocks* known
        size_t rest

    cppclass CConversations "kvd::prompts::Conversations":
        CConversations(size_t max_bytes) except +
        size_t size()
        size_t bytes()
        uint64_t forgotten()
        CRecalled recall(string_view context, string_view messages) except +
        bool remember(string_view context, string_view messages, const uint64_t* local_hashes,
                      size_t blocks, uint32_t tokens) except +

    cppclass CStrands "kvd::prompts::Strands":
        CStrands(size_t max_bytes) except +
        size_t size()
        uint64_t forgotten()
        bool strand_of(string_view context, string_view messages, uint64_t& strand) except +

cdef extern from "prompts/messages.hpp" namespace "kvd::prompts" nogil:
    bool c_has_media "kvd::prompts::has_media"(const char* at, const char* end)
    size_t c_data_bytes "kvd::prompts::data_bytes"(const char* at, const char* end)

# The longest known beginning of a conversation: the local and the sequence hashes of its whole
# blocks as native u64s, its tokens, and how many bytes of messages follow it.
Recalled = namedtuple("Recalled", ("local_hashes", "sequence_hashes", "tokens", "rest"))


cdef string_view viewed(bytes data):
    return string_view(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))


def has_media(bytes messages not None):
    """Returns whether messages in JSON have images, sounds or other parts that are no text."""
    cdef const char* at = PyBytes_AS_STRING(messages)
    return c_has_media(at, at + PyBytes_GET_SIZE(messages))


def data_bytes(bytes body not None):
    """Returns how many bytes of a text in JSON are the data of images and sounds."""
    cdef const char* at = PyBytes_AS_STRING(body)
    return c_data_bytes(at, at + PyBytes_GET_SIZE(body))


cdef class Conversations:
    """Conversations that were seen, in at most `max_bytes` bytes; the longest unused go first."""

    cdef CConversations* core

    def __cinit__(self, size_t max_bytes):
        self.core = new CConversations(max_bytes)

    def __dealloc__(self):
        del self.core

    def __len__(self):
        return self.core.size()

    @property
    def size_bytes(self):
        """Returns the size of all of them."""
        return self.core.bytes()

    @property
    def forgotten(self):
        """Returns the number of conversations that made room for others."""
        return self.core.forgotten()

    def recall(self, bytes context not None, bytes messages not None):
        """Returns the longest known beginning of a JSON array of messages, None without any."""
        cdef CRecalled found = self.core.recall(viewed(context), viewed(messages))
        if found.known == NULL:
            return None
        cdef const vector[uint64_t]* hashes = &found.known.local_hashes
        cdef size_t size = hashes.size() * sizeof(uint64_t)
        cdef bytes local = PyBytes_FromStringAndSize(<const char*>hashes.data(), size)
        cdef bytes sequence = PyBytes_FromStringAndSize(NULL, size)
        c_sequence_hashes(
            hashes.data(), hashes.size(), <uint64_t*>PyBytes_AS_STRING(sequence)
        )
        return Recalled(local, sequence, found.known.tokens, found.rest)

    def remember(self, bytes context not None, bytes messages not None,
                 bytes local_hashes not None, uint32_t tokens):
        """Notes what all of the messages are; returns False if they do not fit.

        local_hashes: native u64s, one for each whole block; tokens: how many they are in all.
        """
        return self.core.remember(
            viewed(context), viewed(messages), <const uint64_t*>PyBytes_AS_STRING(local_hashes),
            PyBytes_GET_SIZE(local_hashes) // sizeof(uint64_t), tokens,
        )


cdef class Strands:
    """Finds the conversation that a request continues, in at most `max_bytes` bytes."""

    cdef CStrands* core

    def __cinit__(self, size_t max_bytes):
        self.core = new CStrands(max_bytes)

    def __dealloc__(self):
        del self.core

    def __len__(self):
        return self.core.size()

    @property
    def forgotten(self):
        """Returns the number of beginnings that made room for others."""
        return self.core.forgotten()

    def strand_of(self, bytes context not None, bytes messages not None):
        """Returns the number of the conversation that a JSON array of messages is of.

        It is that of its longest known beginning, a new one without any, and None without messages.
        """
        cdef uint64_t strand = 0
        return strand if self.core.strand_of(viewed(context), viewed(messages), strand) else None
