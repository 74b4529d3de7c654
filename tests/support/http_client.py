"""The client with which tests ask daemons: http.client's exchanges, httpx's responses.

    Client(base_url).post("/query", json=...) ── a kept connection ──> httpx.Response

httpx spends most of a request's CPU time on its URLs, cookies, redirects, pools and hooks. The
suite sends some 20,000 requests one after the other, and needs none of these. Tests of TLS, Unix
sockets and streamed answers use httpx itself.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from http.client import HTTPConnection, HTTPException
from json import dumps as json_text
from threading import get_ident
from typing import Any, Self
from urllib.parse import quote, urlencode

import httpx

PLAIN = "http://"
# What a test may write into a path as it is.
IN_PATHS = "/?&=%:;,~+!$'()*@[]#"
TIMEOUT_S = 30.0  # for a connection, and between two pieces of an answer; machines may be busy


class Response(httpx.Response):
    """A response that makes its request only when it is asked for: httpx's are costly."""

    make_request: Callable[[], httpx.Request]

    @cached_property
    def request(self) -> httpx.Request:
        return self.make_request()

    def raise_for_status(self) -> httpx.Response:
        if self.is_success:
            return self
        self._request = self.request
        return super().raise_for_status()


class Client:
    """Asks daemons over plain HTTP. Threads may share a client; each has connections of its own.

    Paths are appended to `base_url`; whole URLs are taken as they are.
    Raises httpx.ConnectError without a server, httpx.ReadTimeout after `timeout` seconds of
    silence, httpx.RemoteProtocolError for an answer that is cut off or is none.
    """

    def __init__(
        self,
        base_url: str = "",
        *,
        timeout: float = TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.base_url = base_url
        self.headers = dict(headers or {})
        self._timeout_s = timeout
        self._connections: dict[tuple[str, int], HTTPConnection] = {}  # by host and thread

    @property
    def port(self) -> int:
        return int(self.base_url.rpartition(":")[2])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._connections:
            self._connections.popitem()[1].close()

    def get(self, url: str, **more: Any) -> httpx.Response:
        return self.request("GET", url, **more)

    def post(self, url: str, **more: Any) -> httpx.Response:
        return self.request("POST", url, **more)

    def head(self, url: str, **more: Any) -> httpx.Response:
        return self.request("HEAD", url, **more)

    def patch(self, url: str, **more: Any) -> httpx.Response:
        return self.request("PATCH", url, **more)

    def put(self, url: str, **more: Any) -> httpx.Response:
        return self.request("PUT", url, **more)

    def delete(self, url: str, **more: Any) -> httpx.Response:
        return self.request("DELETE", url, **more)

    def request(
        self,
        method: str,
        url: str,
        *,
        content: bytes | str = b"",
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> httpx.Response:
        whole = url if "://" in url else self.base_url + url
        assert whole.startswith(PLAIN), whole
        host, _, path = whole.removeprefix(PLAIN).partition("/")
        path = quote(path, safe=IN_PATHS)
        if params:
            path += ("&" if "?" in path else "?") + urlencode(params, doseq=True)
        sent = {**self.headers, **(headers or {})}
        if json is not None:
            content = json_text(json, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            sent = {"content-type": "application/json", **sent}
        body = content.encode() if isinstance(content, str) else content
        connection = self._connection(host, self._timeout_s if timeout is None else timeout)
        try:
            connection.request(method, f"/{path}", body or None, sent)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, HTTPException) as error:
            connection.close()
            raise _as_of_httpx(error) from error
        response = Response(answer.status, headers=answer.getheaders(), content=data)
        response.make_request = partial(httpx.Request, method, whole, headers=sent, content=body)
        return response

    def _connection(self, host: str, timeout: float) -> HTTPConnection:
        """Returns the connection to a host; `request` opens it unless it is open."""
        key = host, get_ident()
        kept = self._connections.get(key)
        if kept is None:
            kept = self._connections[key] = HTTPConnection(host)
        kept.timeout = timeout
        if kept.sock is not None:
            if _is_readable(kept.sock):  # the server has closed it
                kept.close()
            else:
                kept.sock.settimeout(timeout)
        return kept


def _is_readable(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def _as_of_httpx(error: OSError | HTTPException) -> httpx.TransportError:
    if isinstance(error, TimeoutError):
        return httpx.ReadTimeout(str(error))
    if isinstance(error, ConnectionRefusedError):
        return httpx.ConnectError(str(error))
    return httpx.RemoteProtocolError(str(error))


def get(url: str, **more: Any) -> httpx.Response:
    """Asks once, by a connection of its own."""
    with Client() as client:
        return client.get(url, **more)


def post(url: str, **more: Any) -> httpx.Response:
    """Asks once, by a connection of its own."""
    with Client() as client:
        return client.post(url, **more)
