"""The connection to a daemon: addresses, tokens, TLS."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakSet

import httpx

from kvd._version import VERSION
from kvd.client.exchanges import MAX_ATTEMPTS

Where = str | PathLike[str]  # the path of a file

UNIX = "unix:"

# Longest time of a call with all its attempts and pauses: a selection may wait 25 s for a rank.
TIMEOUT_S = 30.0
CONNECT_S = 5.0  # part of a call's time in which its connection has to be made
LONGEST_WAIT_S = 86400.0  # of a blocking call with an endless timeout: poll(2) takes no such time
FREE_S = 5.0  # longest time for freeing a reservation, which delays a cancelled caller
# Longest answer that is kept. A dump of a large index is longer; a setting allows it.
MAX_ANSWER_BYTES = 256 * 1024 * 1024
# Most open connections to one address; further calls wait for one of them. Selections have
# connections of their own, since they may wait for a rank that other calls have to free.
MAX_CONNECTIONS = 100
MAX_WAITING_CONNECTIONS = 1000
MAX_IDLE_CONNECTIONS = 20  # connections of either kind that are kept open for later calls
IDLE_S = 5.0  # time for which idle connections are kept open

# Errors of attempts without an answer: of requests that were never sent, and of all requests.
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
LOST = (*NOT_SENT, httpx.NetworkError, httpx.RemoteProtocolError)
LATE = (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout)

# The steps of httpcore that make a socket.
CONNECTED = frozenset(
    f"connection.{step}.complete" for step in ("connect_tcp", "connect_unix_socket", "start_tls")
)

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")


class Address(NamedTuple):
    """The address of one face: a base URL, and the path of the Unix socket that leads there."""

    url: str
    socket: str | None
    has_tls: bool

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`; raises ValueError.

        Behind a proxy the URL may have a path.
        """
        if text.startswith(UNIX):
            if not text.removeprefix(UNIX):
                raise ValueError(f"{text}: the path of the socket is missing")
            return cls("http://localhost", text.removeprefix(UNIX), False)
        try:
            parts = urlsplit(text)
            _ = parts.port, httpx.URL(text)  # raise for impossible ports and characters
        except (ValueError, httpx.InvalidURL) as error:
            raise ValueError(f"{text}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{text}: expected http://HOST:PORT, https://HOST:PORT or unix:PATH")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError(f"{text}: expected no user, query or fragment")
        return cls(text.rstrip("/"), None, parts.scheme == "https")


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """A client's credentials, the authorities that it trusts, and its timeouts."""

    token: str | None
    ca_file: Where | None
    cert_file: Where | None
    key_file: Where | None
    timeout_s: float
    max_answer_bytes: int

    def client_options(self) -> dict[str, Any]:
        """Returns the arguments for httpx's clients."""
        headers = {"user-agent": f"kvd-client/{VERSION}", "accept-encoding": "identity"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        return {"headers": headers, "trust_env": False, "follow_redirects": False}

    def transport_options(self, address: Address) -> dict[str, Any]:
        """Returns the arguments for httpx's transports; raises OSError for unusable files."""
        # Without TLS no certificates are read, as reading them takes as long as many calls.
        verify = self._tls() if address.has_tls else False
        return {"verify": verify, "uds": address.socket, "trust_env": False}

    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


class WakingTransport(httpx.HTTPTransport):
    """Connections of threads; closing it wakes those that wait for an answer.

    Closing a socket would let a thread wait on that already reads from it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._changing = Lock()
        self._is_closed = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions["trace"] = self._note
        return super().handle_request(request)

    def close(self) -> None:
        with self._changing:
            self._is_closed = True
            for each in self._sockets:
                _shut_down(each)
        super().close()

    def _note(self, step: str, details: Mapping[str, Any]) -> None:
        if step in CONNECTED:
            made = details["return_value"].get_extra_info("socket")
            with self._changing:
                self._sockets.add(made)
                if self._is_closed:
                    _shut_down(made)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # the daemon has ended this connection
        # The method of an SSLSocket would first end TLS: another thread might send its token plain.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def limits(connections: int) -> httpx.Limits:
    """Returns the limits of a pool with so many connections."""
    return httpx.Limits(
        max_connections=connections,
        max_keepalive_connections=MAX_IDLE_CONNECTIONS,
        keepalive_expiry=IDLE_S,
    )


def read_token(token: str | None, token_file: Where | None) -> str | None:
    """Returns the token, if there is one.

    Raises ValueError for two tokens or an impossible one, OSError for an unusable file.
    """
    if token_file is not None:
        if token is not None:
            raise ValueError("token and token_file: give one of them")
        token = Path(token_file).read_text().strip()
    if token is not None and not _TOKEN.fullmatch(token):
        raise ValueError("the token contains a character that tokens cannot have")
    return token


def check_attempts(attempts: int) -> int:
    if not 1 <= attempts <= MAX_ATTEMPTS:
        raise ValueError(f"attempts: expected 1 to {MAX_ATTEMPTS}")
    return attempts


def check_timeout(timeout_s: float) -> float:
    if not timeout_s > 0:
        raise ValueError("timeout_s: expected more than 0 seconds")
    return timeout_s
