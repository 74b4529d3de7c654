"""Hashes of blocks as Python integers; the hot paths use base/hash.hpp directly.

  tokens ──local_hashes──▶ [b0, b1, ...] ──sequence_hashes──▶ [s0, s1, ...]

Invariants
 1. A partial last block has no hash.
 2. Results are unsigned 64-bit; invalid elements raise before any block is hashed.
Cost: about 8 ns a token, nearly all of it for unpacking the list.
"""

from __future__ import annotations

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp.algorithm cimport sort
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector

from kvd_core.base.hashing cimport (
    c_eagle_hashes,
    c_local_hash_mm,
    c_local_hashes,
    c_sequence_hashes,
    local_hash_seed,
)


def local_hashes(tokens, block_size, lora_name=None, cache_salt=None):
    """Returns the local hash of each whole block of tokens.

    tokens: integers 0 .. 2^32 - 1; block_size: tokens, at least 1. None and "" name no adapter
    and no salt. Raises TypeError, ValueError (block_size) or OverflowError (token out of range).
    """
    cdef vector[uint32_t] unpacked = _u32s(tokens)
    cdef size_t size = _block_size(block_size)
    cdef vector[uint64_t] hashes = vector[uint64_t](unpacked.size() // size)
    cdef uint64_t seed = _seed(lora_name, cache_salt)
    with nogil:
        c_local_hashes(unpacked.data(), hashes.size(), size, seed, hashes.data())
    return hashes


def eagle_hashes(tokens, block_size, lora_name=None, cache_salt=None):
    """Returns the local hash of each whole block of token pairs, given as the raw tokens.

    A block is block_size overlapping pairs, so n blocks need n * block_size + 1 tokens.
    Arguments and errors as in local_hashes.
    """
    cdef vector[uint32_t] unpacked = _u32s(tokens)
    cdef size_t size = _block_size(block_size)
    cdef size_t pairs = unpacked.size() - 1 if unpacked.size() else 0
    cdef vector[uint64_t] hashes = vector[uint64_t](pairs // size)
    cdef uint64_t seed = _seed(lora_name, cache_salt)
    with nogil:
        c_eagle_hashes(unpacked.data(), hashes.size(), size, seed, hashes.data())
    return hashes


def local_hash_mm(tokens, mm_hashes, lora_name=None, cache_salt=None):
    """Returns the local hash of one block that holds multimodal objects, in any order.

    tokens: all tokens of the block, for EAGLE one more than the block size; mm_hashes: unsigned
    64-bit. Errors as in local_hashes.
    """
    cdef vector[uint32_t] unpacked = _u32s(tokens)
    cdef vector[uint64_t] objects = _u64s(mm_hashes)
    sort(objects.begin(), objects.end())
    return c_local_hash_mm(
        unpacked.data(),
        unpacked.size(),
        objects.data(),
        objects.size(),
        _seed(lora_name, cache_salt),
    )


def sequence_hashes(local):
    """Returns the rolling hash of each prefix of a chain of local hashes (unsigned 64-bit)."""
    cdef vector[uint64_t] blocks = _u64s(local)
    cdef vector[uint64_t] hashes = vector[uint64_t](blocks.size())
    with nogil:
        c_sequence_hashes(blocks.data(), blocks.size(), hashes.data())
    return hashes


cdef vector[uint32_t] _u32s(values) except *:
    cdef vector[uint32_t] out
    for value in values:
        if not isinstance(value, int):
            raise TypeError(f"a token must be an integer, not {type(value).__name__}")
        out.push_back(value)  # raises OverflowError outside 0 .. 2^32 - 1
    return out


cdef vector[uint64_t] _u64s(values) except *:
    cdef vector[uint64_t] out
    for value in values:
        if not isinstance(value, int):
            raise TypeError(f"a hash must be an integer, not {type(value).__name__}")
        out.push_back(value)  # raises OverflowError outside 0 .. 2^64 - 1
    return out


cdef size_t _block_size(value) except 0:
    if not isinstance(value, int):
        raise TypeError(f"block_size must be an integer, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"block_size must be at least 1, not {value}")
    return value


cdef uint64_t _seed(lora_name, cache_salt) except *:
    cdef bytes lora = _text("lora_name", lora_name)
    cdef bytes salt = _text("cache_salt", cache_salt)
    return local_hash_seed(
        string_view(<const char*>lora, len(lora)), string_view(<const char*>salt, len(salt))
    )


cdef bytes _text(name, value):
    if value is None:
        return b""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str or None, not {type(value).__name__}")
    return value.encode()
