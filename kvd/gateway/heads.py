"""Heads of requests and answers, as they go on to the other side (RFC 9110 §7.6.1).

Fields that belong to one connection are dropped, with those that `connection` names; so are fields
with which a client would choose an engine's rank, which are the gateway's to set. All others pass
as they came.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvd.http.relayed import RelayedRequest
from kvd.http.types import Headers

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"expect",
    )
)
# Written anew for each side.
OURS = frozenset((b"host", b"content-length", b"x-request-id"))
# Name an engine or a rank to whoever believes them.
FLEET_HEADERS = frozenset(
    (
        b"x-data-parallel-rank",
        b"x-prefiller-host-port",
        b"x-encoder-hosts-ports",
        b"x-data-parallel-host-port",
        b"x-gateway-destination-endpoint",
        b"cookie",
    )
)
NOT_SENT = HOP_BY_HOP | OURS | FLEET_HEADERS
NOT_RETURNED = HOP_BY_HOP | frozenset(
    (b"server", b"date", b"content-length", b"x-request-id", b"request-id")
)
KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))  # show a client's key
MAX_REQUEST_ID = 128  # bytes of a client's x-request-id that is kept


class EngineHead(NamedTuple):
    """What an engine's answer says before its body."""

    status: int
    headers: Headers  # that go on to the client
    length: int | None  # of the body, if the engine says so


def request_id_of(headers: Headers, made: str) -> bytes:
    """Returns the client's x-request-id if it can be passed on, else the one that was made."""
    for name, value in headers:
        fits = name == b"x-request-id" and 0 < len(value) <= MAX_REQUEST_ID
        if fits and all(0x21 <= byte <= 0x7E for byte in value):
            return value
    return made.encode()


def request_head(
    method: str,
    target: bytes,
    headers: Headers,
    authority: bytes,
    length: int,
    request_id: bytes,
    more: Iterable[tuple[bytes, bytes]] = (),
    without: frozenset[bytes] = frozenset(),
) -> bytes:
    """Returns the head of a client's request as an engine gets it.

    `target` is path and query; `more` are headers of the gateway's own, which win; those named in
    `without` are left out.
    """
    more = list(more)
    dropped = NOT_SENT | without | _named_by_connection(headers) | {name for name, _ in more}
    lines = [
        b"%b: %b" % (name, value)
        for name, value in headers
        if name not in dropped and not name.startswith((b"x-kvd-", b"x-smg-"))
    ]
    lines += [b"%b: %b" % each for each in more]
    lines += [b"x-request-id: " + request_id, b"host: " + authority, b"content-length: %d" % length]
    return b"%b %b HTTP/1.1\r\n%b\r\n\r\n" % (method.encode(), target, b"\r\n".join(lines))


def credentials(request: RelayedRequest, key: bytes) -> tuple[Headers, frozenset[bytes]]:
    """Returns which key an engine is shown, if not what the client shows, and what is left out.

    A key that was checked here is the gateway's own, and nobody else's to see.
    """
    if request.is_checked:
        return [(b"authorization", b"Bearer " + key)] if key else [], KEY_HEADERS
    said = dict(request.headers)
    if b"x-api-key" in said and b"authorization" not in said:  # engines read no other header
        return [(b"authorization", b"Bearer " + said[b"x-api-key"])], frozenset()
    return [], frozenset()


def own_head(method: str, path: str, authority: bytes, length: int, key: bytes = b"") -> bytes:
    """Returns the head of a request of the gateway's own, with a bearer `key` if there is one."""
    shown = b"authorization: Bearer %b\r\n" % key if key else b""
    body = b"content-type: application/json\r\ncontent-length: %d\r\n" % length if length else b""
    return b"%b %b HTTP/1.1\r\nhost: %b\r\naccept: */*\r\n%b%b\r\n" % (
        method.encode(),
        path.encode(),
        authority,
        body,
        shown,
    )


def read_head(head: bytes) -> EngineHead:
    """Reads the head of an engine's answer, which the relay has found well-formed."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    headers = []
    for line in lines:
        name, _, value = line.partition(b":")
        headers.append((name.lower(), value.strip(b" \t")))
    dropped = NOT_RETURNED | _named_by_connection(headers)
    length = next((int(value) for name, value in headers if name == b"content-length"), None)
    passed = [
        each
        for each in headers
        if each[0] not in dropped and not each[0].startswith((b"x-kvd-", b"access-control-"))
    ]
    return EngineHead(int(first[9:12]), passed, length)


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return frozenset()
    return frozenset(each.strip().lower() for value in values for each in value.split(b","))
