"""Turns the bytes of a request head into what the server needs to know. No I/O.

llhttp decides what is well-formed HTTP/1.x. A server without a proxy in front of it must refuse
more (RFC 9112 §3.2, §6.3, §11.2): framing that two parsers could read differently, and malformed
hosts, which a later reader may misread.
"""

from __future__ import annotations

from urllib.parse import unquote

import httptools

from kvd.http.errors import Refusal
from kvd.http.fast_path import names_host
from kvd.http.limits import HttpLimits
from kvd.http.messages import Headers

HEAD_END = b"\r\n\r\n"
CHUNKED = -1  # `Head.length` of a body whose length is not announced

_SPOKEN = "HTTP/1.1 is spoken here"

_SETTLED = frozenset(
    (
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"expect",
        b"host",
        b"content-encoding",
    )
)


class Head:
    """The head of one request; class attributes have the values of most heads."""

    method = ""
    path = b""  # still percent-encoded
    query = b""
    http11 = True
    keep_alive = True
    expects_continue = False
    length = 0  # bytes of the body, or CHUNKED
    encoded = False  # the body has a content coding, such as gzip
    complete = False
    lines = b""  # header lines that any answer to this request gets
    _target = b""
    _settled: dict[bytes, bytes] | None = None  # headers in _SETTLED, joined where repeated

    def __init__(self) -> None:
        self.headers: Headers = []

    # Called by llhttp while it is fed.

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        name, value = name.lower(), value.rstrip(b" \t")  # RFC 9112 §5: no part of the value
        self.headers.append((name, value))
        if name in _SETTLED:
            self._note(name, value)

    def on_headers_complete(self) -> None:
        self.complete = True

    def _note(self, name: bytes, value: bytes) -> None:
        if self._settled is None:
            self._settled = {}
        before = self._settled.get(name)
        self._settled[name] = value if before is None else before + b"," + value

    # Called once llhttp has seen the whole head.

    def finish(self, parser: httptools.HttpRequestParser, limits: HttpLimits) -> None:
        """Derives path, framing and persistence.

        Raises:
            Refusal: the head is over a limit, or its framing or host is not one we accept.
        """
        if not self.complete:
            if parser.get_method() == b"PRI":  # as HTTP/2 begins (RFC 9113 §3.4)
                raise Refusal(400, f"HTTP/2 is not supported: {_SPOKEN}")
            raise Refusal(400, "malformed request head")
        self.method = parser.get_method().decode()
        version = parser.get_http_version()
        if version != "1.1":
            if version != "1.0":
                raise Refusal(400, f"HTTP/{version} is not supported: {_SPOKEN}")
            self.http11 = self.keep_alive = False
        if len(self._target) > limits.url_bytes:
            raise Refusal(414, f"the URL is longer than {limits.url_bytes} bytes")
        if len(self.headers) > limits.headers:
            raise Refusal(431, f"more than {limits.headers} headers")
        self._read_target(self._target)
        if self._settled is not None:
            self._read_host(self._settled.get(b"host", b""))
            self._read_framing(self._settled)

    def decoded_path(self) -> str:
        """Returns the path as text; bytes that are no UTF-8 become U+FFFD."""
        return unquote(self.path.decode("latin-1"))

    def _read_target(self, target: bytes) -> None:
        if not target.startswith(b"/"):
            target = _origin_form(target)
        self.path, _, self.query = target.partition(b"?")

    def _read_host(self, host: bytes) -> None:
        if not names_host(host.strip(b" \t")):
            text = "the host must be given once, as a name or an address, perhaps with a port"
            raise Refusal(400, text)

    def _read_framing(self, framing: dict[bytes, bytes]) -> None:
        length = framing.get(b"content-length")
        if b"transfer-encoding" in framing:
            self._read_coding(framing[b"transfer-encoding"], length)
        elif length is not None:
            length = length.strip(b" \t")
            if not length.isdigit():
                raise Refusal(400, "content-length must be given once, as digits")
            self.length = int(length)
        if b"connection" in framing:
            tokens = [token.strip() for token in framing[b"connection"].lower().split(b",")]
            wanted = self.http11 or b"keep-alive" in tokens
            self.keep_alive = wanted and b"close" not in tokens
        if b"expect" in framing and self.http11:
            if framing[b"expect"].strip().lower() != b"100-continue":
                raise Refusal(417, "the only expectation supported is 100-continue")
            self.expects_continue = self.length != 0
        if b"content-encoding" in framing:
            codings = framing[b"content-encoding"].lower().split(b",")
            self.encoded = not {coding.strip(b" \t") for coding in codings} <= {b"identity", b""}

    def _read_coding(self, coding: bytes, length: bytes | None) -> None:
        if length is not None:
            raise Refusal(400, "transfer-encoding and content-length exclude each other")
        if not self.http11 or coding.strip(b" \t").lower() != b"chunked":
            raise Refusal(400, "the only transfer-encoding supported is chunked, in HTTP/1.1")
        self.length = CHUNKED


def _origin_form(target: bytes) -> bytes:
    """Returns path and query of an absolute-form target, which a client sends to a proxy."""
    scheme, _, rest = target.partition(b"://")
    authority = rest.partition(b"/")[0].partition(b"?")[0]
    if not authority or scheme.lower() not in (b"http", b"https"):
        raise Refusal(400, "malformed request target")
    path = rest[len(authority) :]
    return path if path.startswith(b"/") else b"/" + path


class HeadParser:
    """Parses one head, given in pieces that together end exactly with its empty line."""

    def __init__(self) -> None:
        self._head = Head()
        self._parser = httptools.HttpRequestParser(self._head)

    def feed(self, piece: bytes) -> None:
        """Parses one piece; raises Refusal at the first byte that cannot belong to a head."""
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # An upgrade is an offer; we decline it by answering in HTTP/1.1.
        except httptools.HttpParserError as error:
            raise self.silenced(Refusal(400, f"malformed request: {error}")) from None

    def finish(self, limits: HttpLimits) -> Head:
        """Returns the head; raises Refusal if it is over a limit or not acceptable."""
        try:
            self._head.finish(self._parser, limits)
        except Refusal as refusal:
            raise self.silenced(refusal) from None
        return self._head

    def silenced(self, refusal: Refusal) -> Refusal:
        """Returns the refusal, which has no body if the request's method is HEAD."""
        refusal.silent = self._parser.get_method() == b"HEAD"
        return refusal
