"""Files that settings name for their secrets: tokens, keys, passwords."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from stat import S_IROTH, S_IXOTH
from typing import Any, TypeVar

from kvd.config import tokens
from kvd.config.sources import reading
from kvd.wire.curve import MAX_KEYS_BYTES

MAX_PASSWORD_BYTES = 4096  # bytes of a file with the password of a server

# The settings of all such files.
SECRETS = (
    "tokens_file",
    "tls_keyfile",
    "curve_secret_key_file",
    "peers_token_file",
    "upstream_key_file",
    "upstream_tls_keyfile",
    "gateway_kvd_token_file",
    "state_password_file",
)

Parsed = TypeVar("Parsed")


def read_token(
    name: str, path: Path | None, read: Callable[[Path], bytes] = tokens.read_one
) -> bytes:
    """Returns the token that alone is in a file, empty without a file; raises `StartError`."""
    if path is None:
        return b""
    with reading(path, name):
        return read(path)


def read_keys(name: str, path: Path | None, parse: Callable[[str], Parsed]) -> Parsed | None:
    """Returns the CURVE keys of a file, None without a file; raises `StartError`."""
    if path is None:
        return None
    with reading(path, name), path.open("rb") as file:
        return parse(file.read(MAX_KEYS_BYTES).decode("ascii", "replace"))


def read_password(name: str, path: Path | None) -> str | None:
    """Returns the password in a file, None without a file; raises `StartError`."""
    if path is None:
        return None
    with reading(path, name), path.open("rb") as file:
        return file.read(MAX_PASSWORD_BYTES).decode().rstrip("\r\n")


def exposed(values: Mapping[str, Any]) -> list[Path]:
    """Returns the files of secrets that every user of this machine may read."""
    return [path for name in SECRETS if (path := values[name]) and _readable_by_all(path)]


def _readable_by_all(path: Path) -> bool:
    try:
        whole = path.resolve()
        folders = [each.stat().st_mode for each in whole.parents]
        return bool(whole.stat().st_mode & S_IROTH) and all(each & S_IXOTH for each in folders)
    except OSError:
        return False  # gone since it was read, or not for us: an attempt to read it says so
