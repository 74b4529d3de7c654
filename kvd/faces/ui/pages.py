"""The page at /ui: static files of this package, open to all, under a strict policy.

The files need no token, because browsers send none when they load the parts of a page. They hold no
data and are the same for everybody; all that they show comes from routes that want a token.

The policy allows the page to run and load only these files, from this server, and forbids other
pages to frame it. Addresses in the files are relative, so that it also works behind a proxy under
another path.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from kvd.faces.common.paths import UI_FILES
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
    (b"cache-control", b"no-cache"),  # so that no page mixes two versions after an upgrade
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
