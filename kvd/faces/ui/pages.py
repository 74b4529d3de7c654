"""The page at /ui: static files of this package, public, under a strict policy.

They hold no data and are the same for everybody, and a browser cannot show a token with what a page
is made of: so they are open to all. Everything that they show comes by routes that want a token.

The policy lets nothing run or load but these files, from nowhere but here, and no page frame this
one. Names in files are relative, so that it works behind a proxy under another path, too.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from kvd.faces.common.schemas import UI_FILES
from kvd.http.messages import Headers, Request, Response
from kvd.http.routes import Route, Scope

FOLDER = Path(__file__).with_name("files")
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Headers = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # after an upgrade no page is of two versions
]


def page_routes() -> tuple[Route, ...]:
    return tuple(
        Route("GET", path, partial(show, name, kind.encode()), scope=Scope.OPEN)
        for path, (name, kind) in UI_FILES.items()
    )


def show(name: str, kind: bytes, request: Request) -> Response:
    return Response(200, _content(name), kind, list(HEADERS))


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()
