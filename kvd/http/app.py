"""The Quart-trio application: every route of a face, for the cold ones and for the TLS listener.

Quart's own answers are HTML; here every failure is `{"error": text}`, as on the hot routes. Its
router decodes paths before it compares them and is not asked (see table.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import quart
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from kvd.http.answer import answer
from kvd.http.asgi import KNOWN, AsgiApp
from kvd.http.context import ServerContext
from kvd.http.errors import INTERNAL_ERROR, Failures
from kvd.http.limits import HttpLimits
from kvd.http.middleware import admitted, logged, observed
from kvd.http.table import Found, RouteTable
from kvd.http.types import Headers, Request, Response, Route

NotFound = Callable[[bytes], str]  # what is said of a raw path that is no route's


def nowhere(path: bytes) -> str:
    return "not found"


def build_app(
    routes: tuple[Route, ...],
    limits: HttpLimits,
    context: ServerContext,
    not_found: NotFound = nowhere,
) -> AsgiApp:
    """Returns an ASGI application that answers `routes`, 404, 405 and nothing else."""
    failures = context.failures
    table = RouteTable(routes)
    app = QuartTrio(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max(route.body_limit for route in routes)
    app.config["BODY_TIMEOUT"] = limits.body_seconds
    app.config["RESPONSE_TIMEOUT"] = None  # the servers bound each send; a dump may take long

    @app.before_request
    async def serve() -> quart.Response:
        path = quart.request.scope["raw_path"]
        found = table.find(quart.request.method, path)
        if found is None:
            headers = list(quart.request.scope["headers"])
            return _refused(table.methods(path), failures, partial(not_found, path), headers)
        return await _answered(found, failures)

    async def render_exception(error: HTTPException) -> quart.Response:
        """Words what Quart itself refuses: a body that is too large, or too slow."""
        status = error.code or 500
        text = INTERNAL_ERROR if status == 500 else error.name.lower()
        return _render(failures.response(status, text))

    app.register_error_handler(HTTPException, render_exception)
    served = admitted(app, table, failures)
    if context.observe is not None:
        served = observed(served, table, context.observe)
    return logged(served, table, context.access)


async def _answered(found: Found, failures: Failures) -> quart.Response:
    route, captured = found
    body = b""
    if route.body_limit:
        body = await quart.request.get_data(cache=False, as_text=False, parse_form_data=False)
    if len(body) > route.body_limit:
        return _render(failures.too_large(route.body_limit, list(quart.request.scope["headers"])))
    request = Request(
        method=quart.request.method,
        path=route.path,
        query=quart.request.query_string,
        headers=list(quart.request.scope["headers"]),
        body=body,
        captured=captured,
        known=quart.request.scope.get("state", {}).get(KNOWN, False),
    )
    return _render(await answer(route, request, failures))


def _refused(
    methods: list[str], failures: Failures, not_found: Callable[[], str], headers: Headers
) -> quart.Response:
    """Returns the answer to a request without a route; `methods` are those its path has."""
    if not methods:
        return _render(failures.response(404, not_found(), headers=headers))
    rendered = _render(failures.response(405, "method not allowed", headers=headers))
    rendered.headers["allow"] = ", ".join(methods)
    return rendered


def _render(response: Response) -> quart.Response:
    rendered = quart.Response(response.body, response.status)
    if response.content_type:
        rendered.content_type = response.content_type.decode()
    else:
        del rendered.headers["content-type"]
    for name, value in response.headers:
        rendered.headers.add(name.decode(), value.decode("latin-1"))
    return rendered
