"""Hashes of blocks against golden vectors of Dynamo 1.6.1 and against the xxhash package."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvd_core.base.hashing import eagle_hashes, local_hash_mm, local_hashes, sequence_hashes

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
NAMES = st.one_of(st.none(), st.text(max_size=20))


def oracle(tokens: list[int], lora: str | None, salt: str | None, mm: list[int]) -> int:
    seed = 1337
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode(), seed=0)
    if salt:
        seed += xxhash.xxh3_64_intdigest(salt.encode(), seed=1)
    content = struct.pack(f"<{len(tokens)}I{len(mm)}Q", *tokens, *sorted(mm))
    return xxhash.xxh3_64_intdigest(content, seed=seed % 2**64)


@pytest.mark.parametrize(
    ("tokens", "block_size", "lora", "salt", "hashes"),
    [
        (
            range(1, 17),
            4,
            None,
            None,
            [14643705804678351452, 16777012769546811212, 483935686894639516, 135165725823939817],
        ),
        (range(1, 33), 16, None, None, [16863443419780771464, 2287610619914608821]),
        ([7, 8], 1, None, None, [11011797887259449313, 3506949431103013350]),
        (range(1, 65), 64, None, None, [17732852320395450624]),
        (range(1, 257), 256, None, None, [6483570558441252529]),
        ([0] * 16, 16, None, None, [5523182284766269584]),
        ([2**32 - 1] * 4, 4, None, None, [12410542959481710713]),
        ([128000, 9906, 1917, 0], 4, None, None, [2861335496493652048]),
        (range(1, 5), 4, "adapter", None, [5402321046179341001]),
        (range(1, 9), 4, "alpha-7b", None, [16548428770143335509, 14084073444636004547]),
        (range(1, 5), 4, None, "s1", [3402648387515217860]),
        (range(1, 5), 4, "adapter", "s1", [6518450053014844988]),
        (range(1, 5), 4, "", "", [14643705804678351452]),
        (range(1, 8), 4, None, None, [14643705804678351452]),
        ([], 4, None, None, []),
    ],
)
def test_local_hashes_are_those_of_dynamo(tokens, block_size, lora, salt, hashes):
    assert local_hashes(tokens, block_size, lora, salt) == hashes


def test_salted_chain_is_that_of_dynamo():
    assert local_hashes(range(1, 9), 4, None, "s1") == [3402648387515217860, 5797218295650403483]


@pytest.mark.parametrize(
    ("tokens", "mm", "expected"),
    [
        ([1, 2, 3, 4], [77], 17706306829523047431),
        ([5, 6, 7, 8], [9, 3], 9060655950894929171),
        ([5, 6, 7, 8], [2**63 + 1], 15765287454461572818),
        ([1, 2, 3, 4], [], 14643705804678351452),
    ],
)
def test_objects_of_a_block_count_in_any_order(tokens, mm, expected):
    assert local_hash_mm(tokens, mm) == local_hash_mm(tokens, mm[::-1]) == expected


@pytest.mark.parametrize(
    ("tokens", "hashes"),
    [
        (range(1, 10), [1914873892905420881, 1929047464662796003]),
        (range(1, 6), [1914873892905420881]),
        (range(1, 9), [1914873892905420881]),
        (range(1, 5), []),
        ([], []),
    ],
)
def test_eagle_windows_overlap_by_one_token(tokens, hashes):
    assert eagle_hashes(tokens, 4) == hashes


def test_sequence_hashes_roll_over_the_chain():
    assert sequence_hashes(local_hashes(range(1, 17), 4)) == [
        14643705804678351452,
        4945711292740353085,
        12583592247330656132,
        1921452330601040443,
    ]
    assert sequence_hashes([]) == []


@given(st.lists(U32, max_size=80), st.integers(1, 20), NAMES, NAMES)
def test_local_hashes_agree_with_xxhash(tokens, block_size, lora, salt):
    whole = len(tokens) // block_size * block_size
    assert local_hashes(tokens, block_size, lora, salt) == [
        oracle(tokens[i : i + block_size], lora, salt, []) for i in range(0, whole, block_size)
    ]


@given(st.lists(U32, max_size=80), st.integers(1, 20), NAMES, NAMES)
def test_eagle_hashes_agree_with_xxhash(tokens, block_size, lora, salt):
    starts = range(0, len(tokens) - block_size, block_size)
    assert eagle_hashes(tokens, block_size, lora, salt) == [
        oracle(tokens[i : i + block_size + 1], lora, salt, []) for i in starts
    ]


@given(st.lists(U32, max_size=1200), st.lists(U64, max_size=40), NAMES, NAMES)
def test_mm_hashes_agree_with_xxhash(tokens, mm, lora, salt):
    assert local_hash_mm(tokens, mm, lora, salt) == oracle(tokens, lora, salt, mm)


@given(st.lists(U64, max_size=20))
def test_sequence_hashes_agree_with_xxhash(local):
    expected = local[:1]
    for block in local[1:]:
        pair = struct.pack("<QQ", expected[-1], block)
        expected.append(xxhash.xxh3_64_intdigest(pair, seed=1337))
    assert sequence_hashes(local) == expected


@pytest.mark.parametrize("token", [1.0, "1", None, b"1", [1]])
def test_a_token_that_is_no_integer_is_a_type_error(token):
    with pytest.raises(TypeError, match="a token must be an integer"):
        local_hashes([1, token], 1)


@pytest.mark.parametrize("token", [-1, 2**32, 2**64])
def test_a_token_out_of_range_is_an_overflow_error(token):
    with pytest.raises(OverflowError):
        local_hashes([token], 1)


@pytest.mark.parametrize("block", [-1, 2**64])
def test_a_hash_out_of_range_is_an_overflow_error(block):
    with pytest.raises(OverflowError):
        sequence_hashes([block])


@pytest.mark.parametrize(
    ("block_size", "error"), [(0, ValueError), (-4, ValueError), (1.5, TypeError), ("4", TypeError)]
)
def test_a_block_size_must_be_a_positive_integer(block_size, error):
    with pytest.raises(error, match="block_size"):
        local_hashes([1], block_size)


def test_names_must_be_text():
    with pytest.raises(TypeError, match="lora_name"):
        local_hashes([1], 1, b"adapter")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cache_salt"):
        local_hashes([1], 1, None, 5)  # type: ignore[arg-type]


def test_a_block_larger_than_memory_has_no_hash():
    assert local_hashes([1, 2, 3], 2**63) == []
    with pytest.raises(OverflowError):
        local_hashes([1, 2, 3], 2**64)
