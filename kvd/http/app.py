"""The Quart-trio application of a face: Quart's routing, error handlers and streams over `Route`s.

Quart answers in HTML by itself; here every failure is `{"error": text}`, as on the hot routes. Its
router sees a path as it is spelled, before percent-decoding (docs/decisions,
paths-compare-as-spelled).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import quart
import trio
from quart.routing import QuartRule
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound
from werkzeug.routing import BaseConverter

from kvd.errors import KvdError
from kvd.http.answer import require_json, unexpected
from kvd.http.asgi import FOUND, KNOWN, AsgiApp, Send
from kvd.http.context import ServerContext
from kvd.http.errors import INTERNAL_ERROR, Failures
from kvd.http.limits import HttpLimits
from kvd.http.messages import Headers, Request, Response
from kvd.http.middleware import surrounded
from kvd.http.routes import Route, WrongPath, nowhere
from kvd.http.table import Found, RouteTable
from kvd.telemetry.stretches import REQUESTS

View = Callable[..., Awaitable[quart.Response]]


class SpelledRequest(TrioRequest):
    """A request whose path is still percent-encoded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spelled = self.scope["raw_path"].decode("latin-1")
        # Werkzeug drops further slashes at the beginning, unless they are spelled as %2F.
        name = spelled.lstrip("/")
        self.path = "/" + "%2F" * (len(spelled) - len(name) - 1) + name


class CountedExchange(TrioASGIHTTPConnection):
    """One request and its answer; the steps of its Quart task count as those of requests."""

    async def handle_request(  # type: ignore[override]  # that of quart-trio, which is untyped
        self, nursery: trio.Nursery, request: quart.Request, send: Send
    ) -> None:
        try:
            await REQUESTS.steps_of(super().handle_request(nursery, request, send))
        finally:
            # The traceback of a 404 or 405 leads back to the request: a cycle, which might wait
            # long for a full collection, and which anybody can make.
            request.routing_exception = None


class Segment(BaseConverter):
    """Passes on one segment of a path as it is spelled."""

    def to_python(self, value: str) -> bytes:
        return value.encode("latin-1")


class Segments(Segment):
    """Passes on the rest of a path as it is spelled."""

    regex = "[^/].*"
    part_isolating = False


class ReadRule(QuartRule):
    """A rule that matches paths and never builds URLs.

    Werkzeug compiles two functions to build them, which took most of an application's start.
    """

    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        return _write_url


def _write_url(rule: ReadRule, **values: Any) -> tuple[str, str]:
    raise NotImplementedError


def build_app(
    routes: tuple[Route, ...],
    limits: HttpLimits,
    context: ServerContext,
    not_found: WrongPath = nowhere,
) -> AsgiApp:
    """Returns an ASGI application that serves `routes` and answers all else with 404 or 405."""
    table = RouteTable(routes)
    app = QuartTrio(__name__, static_folder=None)
    app.request_class = SpelledRequest
    app.asgi_http_class = CountedExchange
    app.url_rule_class = ReadRule
    app.url_map.merge_slashes = False
    app.url_map.converters |= {"segment": Segment, "segments": Segments}
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.config["MAX_CONTENT_LENGTH"] = max(route.body_limit for route in routes)
    app.config["BODY_TIMEOUT"] = limits.body_s
    app.config["RESPONSE_TIMEOUT"] = None  # the servers bound each send; a dump may take long
    for route in routes:
        kind = "segments" if route.deep else "segment"
        rule = re.sub(r"{(\w+)}", rf"<{kind}:\1>", route.path)
        view = _view(route, context.failures)
        endpoint = f"{route.method} {route.path}"
        app.add_url_rule(rule, endpoint, view, methods=[route.method])
        if route.method == "GET" and not route.answers_head:  # Quart adds HEAD to every GET
            for added in app.url_map.iter_rules(endpoint):
                assert added.methods is not None
                added.methods.discard("HEAD")
    _word_failures(app, context.failures, not_found)
    return surrounded(app, table, context)


def _view(route: Route, failures: Failures) -> View:
    """Returns the function that Quart calls for a route's requests."""

    async def view(**segments: bytes) -> quart.Response:
        body = b""
        if route.body_limit:
            body = await quart.request.get_data(cache=False, as_text=False, parse_form_data=False)
        if len(body) > route.body_limit:
            return _rendered(failures.too_large(route.body_limit, _headers()))
        request = Request(
            method=quart.request.method,
            path=route.path,
            query=quart.request.query_string,
            headers=_headers(),
            body=body,
            captured=next(iter(segments.values()), b""),
            known=quart.request.scope["state"].get(KNOWN, False),
        )
        if not route.any_type:
            require_json(request)
        result = route.handler(request)
        return _rendered(result if isinstance(result, Response) else await result)

    return view


def _word_failures(app: QuartTrio, failures: Failures, not_found: WrongPath) -> None:
    """Makes Quart answer its own refusals, and exceptions of handlers, in the face's words."""

    @app.errorhandler(HTTPException)
    async def refused(error: HTTPException) -> quart.Response:
        """Answers an unknown path or method, and a body that is too large or too slow."""
        text = (error.name or INTERNAL_ERROR).lower()
        path = quart.request.scope["raw_path"]
        if isinstance(error, NotFound):
            text = not_found(path)
        refusal = failures.response(error.code or 500, text, headers=_headers(), path=path)
        rendered = _rendered(refusal)
        if isinstance(error, MethodNotAllowed):
            rendered.headers["allow"] = ", ".join(sorted(error.valid_methods or ()))
        return rendered

    @app.errorhandler(KvdError)
    async def failed(error: KvdError) -> quart.Response:
        return _rendered(failures.expected(error, _headers()))

    @app.errorhandler(Exception)
    async def broken(error: Exception) -> quart.Response:
        found: Found = quart.request.scope["state"][FOUND]
        return _rendered(unexpected(quart.request.method, found.route.path, _headers(), failures))


def _headers() -> Headers:
    return list(quart.request.scope["headers"])


def _rendered(response: Response) -> quart.Response:
    rendered = quart.Response(response.body, response.status)
    if response.content_type:
        rendered.content_type = response.content_type.decode()
    else:
        del rendered.headers["content-type"]
    for name, value in response.headers:
        rendered.headers.add(name.decode(), value.decode("latin-1"))
    return rendered
