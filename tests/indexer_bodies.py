"""Bodies for the indexer's POST routes: a fine one of each, and what makes it refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MODEL = "face:model"  # with the character that separates model and tenant in a dump
SOMEWHERE = "tcp://127.0.0.1:1"  # nobody listens there

# A fine body of every route that takes one, and the status it has here.
POSTS: dict[str, tuple[dict[str, Any], int]] = {
    "/register": (
        {"instance_id": 2, "endpoint": SOMEWHERE, "model_name": "new", "block_size": 4},
        201,
    ),
    "/unregister": ({"instance_id": 2, "model_name": "new"}, 404),
    "/query": ({"token_ids": [1, 2, 3, 4], "model_name": MODEL}, 200),
    "/query_by_hash": ({"block_hashes": [1, -1], "model_name": MODEL}, 200),
}


def deep(opening: bytes, closing: bytes, levels: int = 100_000) -> bytes:
    return opening * levels + b"1" + closing * levels


# What may stand for an unknown member's value in JSON, and what may not.
JSON_VALUES = {
    "arrays 100,000 deep": deep(b"[", b"]"),
    "objects 100,000 deep": deep(b'{"a":', b"}"),
    "5,000 digits": b"9" * 5000,
    "a huge exponent": b"1e999999",
    "the same name again": b'1, "x": 2',
    "surrogate pair": rb'"\ud83d\ude00"',
    "NUL, escaped": rb'"\u0000"',
}
NO_JSON_VALUES = {
    "nothing": b"",
    "NaN": b"NaN",
    "infinity": b"-Infinity",
    "leading zero": b"01",
    "plus sign": b"+1",
    "no digit after the point": b"1.",
    "no digit before the point": b".1",
    "no exponent": b"1e",
    "hexadecimal": b"0x1",
    "single quotes": b"'a'",
    "capital letters": b"TRUE",
    "a comment": b"1 /* one */",
    "a comma too many": b"1,",
    "control character": b'"\x1f"',
    "NUL": b'"\0"',
    "unknown escape": rb'"\x"',
    "lone surrogate": rb'"\ud800"',
    "surrogates the wrong way round": rb'"\ude00\ud83d"',
    "no UTF-8": b'"\xff"',
    "overlong UTF-8": b'"\xc0\x80"',
    "surrogate in UTF-8": b'"\xed\xa0\x80"',
    "arrays that do not end": b"[" * 100_000,
    "objects that do not end": b'{"a":' * 100_000,
}
WHOLE_BODIES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda fine: b"",
    "blank": lambda fine: b" \r\n\t",
    "truncated": lambda fine: fine[:-1],
    "twice": lambda fine: fine * 2,
    "with a byte order mark": lambda fine: b"\xef\xbb\xbf" + fine,
    "UTF-16": lambda fine: fine.decode().encode("utf-16"),
    "a form": lambda fine: b"model_name=m&block_size=4",
    "vertical tab": lambda fine: b"\v" + fine,
}
NO_OBJECTS = (b"null", b"true", b"5", b'"x"', b"[]", deep(b"[", b"]"))

U32 = ("18446744073709551616", "4294967296", "-1")
NO_INTEGERS = (
    "1.0",
    "-0",
    "1e0",
    "1e400",
    "true",
    '"1"',
    "[1]",
    "{}",
    "9" * 5000,
    "-" + "9" * 5000,
)
NO_TEXTS = ("1", "true", "[]", '{"a": "b"}')
NO_ARRAYS = ("null", "1", '"1"', "{}")


def elements(*numbers: str) -> list[str]:
    """Returns arrays with an element that is no number, or one of these, which are no good."""
    return [f"[1, {value}]" for value in (*NO_INTEGERS, "null", *numbers)]


# Per route and member: what is JSON and does not fit. Null is told apart: often it means absence.
UNFIT: dict[str, dict[str, tuple[str, ...]]] = {
    "/register": {
        "instance_id": (*NO_INTEGERS, "18446744073709551616", "-1", "null"),
        "block_size": (*NO_INTEGERS, *U32, "null"),
        "dp_rank": (*NO_INTEGERS, *U32),
        "endpoint": (*NO_TEXTS, "null"),
        "model_name": (*NO_TEXTS, "null"),
        "tenant_id": (*NO_TEXTS, "null"),
        "routing_group": (*NO_TEXTS, "null"),
        "replay_endpoint": NO_TEXTS,
        "additional_salt": NO_TEXTS,
        "additionalsalt": NO_TEXTS,
    },
    "/unregister": {
        "instance_id": (*NO_INTEGERS, "18446744073709551616", "-1", "null"),
        "dp_rank": (*NO_INTEGERS, *U32),
        "model_name": (*NO_TEXTS, "null"),
        "tenant_id": NO_TEXTS,
        "routing_group": NO_TEXTS,
    },
    "/query": {
        "token_ids": (*NO_ARRAYS, *elements(*U32)),
        "model_name": (*NO_TEXTS, "null"),
        "tenant_id": (*NO_TEXTS, "null"),
        "routing_group": (*NO_TEXTS, "null"),
        "lora_name": NO_TEXTS,
        "cache_salt": NO_TEXTS,
    },
    "/query_by_hash": {
        "block_hashes": (*NO_ARRAYS, *elements("18446744073709551616", "-9223372036854775809")),
        "model_name": (*NO_TEXTS, "null"),
        "tenant_id": (*NO_TEXTS, "null"),
        "cache_salt": NO_TEXTS,
    },
}
REQUIRED = {
    "/register": ("instance_id", "endpoint", "model_name", "block_size"),
    "/unregister": ("instance_id", "model_name"),
    "/query": ("token_ids", "model_name"),
    "/query_by_hash": ("block_hashes", "model_name"),
}
# Members with two names: both given, and different (the salt's may not even be equal).
CONTRADICTIONS = {
    "/register": (
        b'"tenant_id": "a", "routing_group": "b"',
        b'"additional_salt": "a", "additionalsalt": "a"',
    ),
    "/unregister": (b'"tenant_id": "a", "routing_group": "b"',),
    "/query": (b'"tenant_id": "a", "routing_group": "b"',),
    "/query_by_hash": (b'"tenant_id": "a", "routing_group": "b"',),
}
