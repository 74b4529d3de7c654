"""Lets pages of other origins use a face (Fetch, "CORS protocol").

Every answer to a page of an allowed origin names that origin, also the one to a preflight request:

    OPTIONS /v1/chat/completions                 204
    origin: https://chat.example                 access-control-allow-origin: https://chat.example
    access-control-request-method: POST          access-control-allow-methods: GET, POST, DELETE

Pages of other origins are refused by the rules of authorization, unless a route is open to all.
"""

from __future__ import annotations

from kvd.http.auth import Authorizer
from kvd.http.head import Head
from kvd.http.messages import Response

MAX_AGE_S = 600  # time for which a page need not send another preflight request
READABLE = b"x-request-id, retry-after, x-kvd-decision, x-kvd-matched-tokens, x-kvd-prompt-tokens"
_ORIGIN, _METHOD, _HEADERS = (
    b"origin",
    b"access-control-request-method",
    b"access-control-request-headers",
)


def welcome(authorizer: Authorizer, head: Head) -> None:
    """Makes the answer say that a page of the request's origin may read it, if that is allowed."""
    for name, value in head.headers:
        if name == _ORIGIN and authorizer.allows(value):
            head.lines = (
                b"access-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\n"
                b"vary: origin\r\n" % (value, READABLE)
            )


def preflight(head: Head) -> Response | None:
    """Returns the answer to a preflight request, None for any other request."""
    given = dict(head.headers)
    if head.method != "OPTIONS" or not head.lines or _METHOD not in given:
        return None
    return Response(
        204,
        b"",
        b"",
        [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", given.get(_HEADERS, b"authorization, content-type")),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        ],
    )
