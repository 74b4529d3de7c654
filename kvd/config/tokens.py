"""The file of bearer tokens: who may ask, and for what.

    # name        scopes           token
    gateway       read,lifecycle   3q2-7wMnvXl0uTQkJ8sYhA
    gateway-new   read,lifecycle   b6JmZp0yVQf4tT1xWc9EKg   # both hold meanwhile
    operator      read,admin       Zk1p_8sHRW2uC5nXyB3vDQ

An error names the line and, if that could be read, the name, but never a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kvd.http.auth import Token
from kvd.http.permits import MAX_TOKEN_BYTES
from kvd.http.routes import Scope

MAX_BYTES = 64 * 1024  # longest file of tokens
MAX_TOKENS = 64  # tokens of a file: every request is compared with each, at 5 ns
# Shortest token: a random one of so many characters has 95 bits and cannot be guessed.
MIN_TOKEN_BYTES = 16

MAX_KEY_BYTES = 4096  # longest key of engines, which others choose: a JWT has some 1,000

# The folder in which systemd puts /etc/kvd/credentials/tokens: see systemd/kvd.service.
CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"
CREDENTIAL = "kvd_tokens"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_BYTES}}}")  # what a header can carry
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]+=*(?<=.{{{MIN_TOKEN_BYTES}}})", re.ASCII)
_SCOPES = {
    "read": Scope.READ,
    "lifecycle": Scope.LIFECYCLE,
    "admin": Scope.ADMIN,
    "generate": Scope.GENERATE,
}


def credential(environ: Mapping[str, str]) -> Path | None:
    """Returns the file of tokens that the service manager has passed, None without one."""
    if folder := environ.get(CREDENTIALS_VARIABLE):
        path = Path(folder, CREDENTIAL)
        try:
            path.stat()
        except FileNotFoundError:
            return None
        except OSError:
            pass  # reading it will say what is wrong
        return path
    return None


def read(path: Path) -> tuple[Token, ...]:
    """Returns the tokens of a file; raises OSError, and ValueError with a text of one line."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"the file is longer than {MAX_BYTES} bytes")
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8") from None  # without any of its content
    tokens = [token for number, line in enumerate(lines, 1) if (token := _token(number, line))]
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise ValueError(f"the file has {len(tokens)} tokens, expected 1 to {MAX_TOKENS}")
    for what, values in (
        ("name", [token.name for token in tokens]),
        ("token", [token.secret.decode() for token in tokens]),
    ):
        if len(set(values)) < len(values):
            raise ValueError(f"the file contains a {what} twice")
    return tuple(tokens)


def read_one(path: Path) -> bytes:
    """Returns the token that alone is in a file; raises OSError and ValueError."""
    with path.open("rb") as file:
        data = file.read(2 * MAX_TOKEN_BYTES)  # anything longer is no token
    secret = data.decode("latin-1").strip()
    _check(secret)
    return secret.encode()


def read_key(path: Path) -> bytes:
    """Returns the engines' key that alone is in a file; raises OSError and ValueError."""
    with path.open("rb") as file:
        data = file.read(2 * MAX_KEY_BYTES)  # as above
    key = data.decode("latin-1").strip()
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"a key must have 1 to {MAX_KEY_BYTES} visible ASCII characters, no blanks"
        )
    return key.encode()


def _check(secret: str) -> None:
    if not _TOKEN.fullmatch(secret) or len(secret) > MAX_TOKEN_BYTES:
        raise ValueError(
            f"a token must have {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} of the "
            "characters A-Z a-z 0-9 - . _ ~ + /"
        )


def _token(number: int, line: str) -> Token | None:
    words = re.sub(r"(^|\s)#.*", "", line).split()
    if not words:
        return None
    if len(words) != 3 or not _NAME.fullmatch(words[0]):
        raise ValueError(f"line {number}: expected NAME SCOPE[,SCOPE...] TOKEN")
    name, scope_names, secret = words
    scopes = Scope.OPEN
    for scope in scope_names.split(","):
        if scope not in _SCOPES:
            raise ValueError(f"line {number}, {name}: a scope must be one of {', '.join(_SCOPES)}")
        scopes |= _SCOPES[scope]
    try:
        _check(secret)
    except ValueError as error:
        raise ValueError(f"line {number}, {name}: {error}") from None
    return Token(name, scopes, secret.encode())
