"""hash.hpp for Cython users: hashes of blocks, without Python objects.

Names: `tokens` are u32, `local` and `out` are u64.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp.string_view cimport string_view


cdef extern from "base/hash.hpp" namespace "kvd" nogil:
    const uint64_t kBaseSeed  # seed of sequence hashes and of local hashes without LoRA and salt

    uint64_t lora_term(string_view name) noexcept  # 0 for an empty name
    uint64_t salt_term(string_view salt) noexcept  # 0 for an empty salt
    uint64_t local_hash_seed(string_view lora_name, string_view salt) noexcept

    # Block i: tokens[i*block_size .. i*block_size + block_size)
    void c_local_hashes "kvd::local_hashes"(
        const uint32_t* tokens, size_t n_blocks, size_t block_size, uint64_t seed, uint64_t* out
    ) noexcept
    # Block i: tokens[i*block_size .. i*block_size + block_size]; block_size counts pairs
    void c_eagle_hashes "kvd::eagle_hashes"(
        const uint32_t* tokens, size_t n_blocks, size_t block_size, uint64_t seed, uint64_t* out
    ) noexcept
    # One block of n_tokens with n multimodal objects, mm ascending
    uint64_t c_local_hash_mm "kvd::local_hash_mm"(
        const uint32_t* tokens, size_t n_tokens, const uint64_t* mm, size_t n, uint64_t seed
    ) except +
    void c_sequence_hashes "kvd::sequence_hashes"(
        const uint64_t* local, size_t n, uint64_t* out
    ) noexcept
