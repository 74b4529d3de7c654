"""Asks a running daemon over HTTP for the commands: one face after the other, without trio.

    settings ──> addresses of the faces ── the first that answers ──> FaceClient.ask ──> text

Why this is not `kvd.client`: docs/decisions/2026-11-21-small-http-client.md.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from http.client import (
    BadStatusLine,
    HTTPConnection,
    HTTPException,
    HTTPSConnection,
    RemoteDisconnected,
)
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar

from kvd._version import VERSION
from kvd.config.binds import Bind, Binds, UnixBind

# The gateway is the last: only clients may be able to reach it.
FACES = ("indexer", "slot-tracker", "selection", "conductor", "gateway")

TIMEOUT_S = 5.0  # time allowed for a connection, and between two pieces of an answer

# Addresses that reach a daemon which listens on a wildcard address.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}

# Statuses of answers whose error text says what is wrong with the request's body.
WRONG = (400, 404, 413, 422, 503)

# Hints for refusals, by status.
TOKEN_HINT = "; --token-file takes a file that contains only a bearer token of scope read"
OTHER_HINT = f"; this is no kvd, or not version {VERSION}"
HINTS = {
    401: TOKEN_HINT,
    403: TOKEN_HINT,
    404: OTHER_HINT,
    405: OTHER_HINT,
    421: "; ask for it by its IP address, or add the name to allowed_hosts",
}
CERTIFICATE_HINT = "; the setting tls_certfile (KVD_TLS_CERTFILE) names the daemon's own"
TLS_HINT = "; if it serves TLS, write tls: before the address"
START_HINT = (
    "start kvd (`kvd serve`, `systemctl start kvd`), or name the address of one that runs "
    "(--indexer-bind HOST:PORT, --config FILE)"
)

ALL_OFF = "every face is off"
EXIT_UNREACHABLE = 2  # exit code of a command if a face, or every face, cannot be asked

T = TypeVar("T")


class FaceRefused(Exception):
    """A face has refused a question; the text is its reason."""


class Unreached(Exception):
    """No face has answered; the text gives the reason for each."""


# Exceptions where an answer lacks what this version of kvd would have written.
OTHER_FORM = (KeyError, TypeError, AttributeError, RecursionError)


def reason(error: Exception) -> str:
    """Returns why a face cannot be asked, in words for people."""
    if isinstance(error, JSONDecodeError):
        return "the answer is not JSON: this is no kvd"
    if isinstance(error, OTHER_FORM):
        return f"the answer has another form ({error}): this is no kvd, or not version {VERSION}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}{CERTIFICATE_HINT}"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS"
    if isinstance(error, RemoteDisconnected):
        return f"it closed the connection without an answer{TLS_HINT}"
    if isinstance(error, BadStatusLine):
        return f"it does not speak HTTP: it began with {str(error)!r}"
    words = error.strerror if isinstance(error, OSError) else None
    return words or str(error) or type(error).__name__


def are_all_absent(errors: Collection[Exception | None]) -> bool:
    """Tells whether the faces could not be asked for the sole reason that nothing is there."""
    return all(isinstance(each, (ConnectionRefusedError, FileNotFoundError)) for each in errors)


class _UnixConnection(HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        # A path given as the host would be read as HOST:PORT.
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class FaceClient:
    """Asks the faces of one daemon."""

    def __init__(
        self,
        token: bytes = b"",
        certfile: Path | None = None,
        own_certfile: Path | None = None,
        own_keyfile: Path | None = None,
    ) -> None:
        """Takes the credentials for the faces: a bearer token, a client certificate and its key.

        `certfile` is the daemon's own certificate. The key may be in the file of the client
        certificate. Raises OSError for unusable files.
        """
        self._headers = {"Authorization": f"Bearer {token.decode()}"} if token else {}
        self._tls: ssl.SSLContext | None = None  # None: HTTPSConnection's default
        if certfile is not None or own_certfile is not None:
            self._tls = _trusting(certfile, own_certfile, own_keyfile)

    def ask(
        self, bind: Bind, path: str, timeout_s: float | None = None, body: bytes | None = None
    ) -> str:
        """Returns the answer to a GET of a path, or to a POST of a body in JSON.

        Raises:
            FaceRefused: the face says what is wrong with the body.
            OSError, HTTPException, ValueError, *OTHER_FORM: there is no answer, its status is not
                200, or it is not kvd's.
        """
        connection, headers = self._connection(bind), self._headers
        if body is not None:
            headers = {"Content-Type": "application/json", **headers}
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s or TIMEOUT_S)
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status == 200:
            return text
        error = json.loads(text)["error"]
        # Errors of the gateway have OpenAI's form.
        complaint = error["message"] if isinstance(error, dict) else error
        if body is not None and answer.status in WRONG:
            raise FaceRefused(complaint)
        raise OSError(f"{path}: {answer.status}, {complaint}{HINTS.get(answer.status, '')}")

    def _connection(self, bind: Bind) -> HTTPConnection:
        if isinstance(bind, UnixBind):
            return _UnixConnection(bind.path, TIMEOUT_S)
        host = EVERYWHERE.get(bind.host, bind.host)
        if bind.tls:
            return HTTPSConnection(host, bind.port, timeout=TIMEOUT_S, context=self._tls)
        return HTTPConnection(host, bind.port, timeout=TIMEOUT_S)


def _trusting(
    certfile: Path | None, own_certfile: Path | None, own_keyfile: Path | None
) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if certfile is not None:
        # The file is the daemon's own certificate: neither its issuer nor the name matters.
        with _using(certfile):
            context.load_verify_locations(certfile)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
    if own_certfile is not None:
        with _using(own_certfile if own_keyfile is None else own_keyfile):
            context.load_cert_chain(own_certfile, own_keyfile)
    return context


@contextmanager
def _using(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot use {path}: {error.strerror or error}") from None


def ask_first(binds: Mapping[str, Bind], ask: Callable[[str, Bind], T]) -> T:
    """Returns the result of `ask` for the first face that answers; raises Unreached.

    `ask` takes the face's name and address.
    """
    faults: dict[str, Exception] = {}
    for name, bind in binds.items():
        try:
            return ask(name, bind)
        except (OSError, HTTPException, ValueError, *OTHER_FORM) as error:
            faults[f"{name} {bind}"] = error
    reasons = "; ".join(f"{where}: {reason(error)}" for where, error in faults.items())
    if faults and are_all_absent(faults.values()):
        reasons += f"; {START_HINT}"
    raise Unreached(reasons or ALL_OFF)


def setting_of(face: str) -> str:
    """Returns the name of the setting that has a face's address."""
    return f"{face.replace('-', '_')}_bind"


def addresses(binds: Mapping[str, Any]) -> dict[str, Bind]:
    """Returns an address for each face that is not off, from the faces' settings.

    If a face has several, one without TLS is preferred: it needs no client certificate.
    """
    return {
        name: min(bind.each, key=lambda each: each.tls)
        for name, bind in binds.items()
        if isinstance(bind, Binds)
    }
