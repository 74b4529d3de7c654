"""Keys for CURVE, ZMQ's encryption and authentication: 32 bytes as 40 characters of Z85."""

from __future__ import annotations

import re

from kvd.errors import BadRequest

KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")

MAX_KEYS_BYTES = 1024 * 1024  # longest file of keys: room for many times 1,024 replicas


def check_server_key(key: str | None) -> None:
    """Raises BadRequest unless the key has the form of a public key; None, for no CURVE, passes."""
    if key is not None and not KEY.fullmatch(key):
        raise BadRequest("invalid curve_server_key: expected the 40 characters of a public key")


def parse_secret(text: str) -> str:
    """Returns the secret key that a file contains; the text of a ValueError never shows it."""
    key = text.strip()
    if not KEY.fullmatch(key):
        raise ValueError("expected the 40 characters of a secret key, and nothing else")
    return key


def parse_keys(text: str) -> frozenset[str]:
    """Returns the keys of a file: the first word of each line; the rest of the line is a remark.

    Empty lines and lines whose first word is `#` are skipped.
    """
    keys = set()
    for number, line in enumerate(text.splitlines(), 1):
        key, *_ = line.split() or ["#"]
        if key == "#":
            continue
        if not KEY.fullmatch(key):
            raise ValueError(f"line {number}: expected the 40 characters of a public key")
        keys.add(key)
    return frozenset(keys)
