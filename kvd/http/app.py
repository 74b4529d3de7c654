"""The Quart-trio application: every route of a face, for the cold ones and for the TLS listener.

Quart's own answers are HTML; here every failure is `{"error": text}`, as on the hot routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import quart
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from kvd.http.answer import answer
from kvd.http.asgi import AsgiApp
from kvd.http.errors import INTERNAL_ERROR, error_response, too_large
from kvd.http.guard import admitted, observed
from kvd.http.limits import HttpLimits
from kvd.http.types import Observer, Request, Response, Route

_View = Callable[[], Awaitable[quart.Response]]


def build_app(
    routes: tuple[Route, ...], limits: HttpLimits, observe: Observer | None = None
) -> AsgiApp:
    """Returns an ASGI application that answers `routes`, 404, 405 and nothing else."""
    app = QuartTrio(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max(route.body_limit for route in routes)
    app.config["BODY_TIMEOUT"] = limits.body_seconds
    app.config["RESPONSE_TIMEOUT"] = None  # the servers bound each send; a dump may take long
    app.url_map.merge_slashes = False  # another spelling is another path, not a redirection
    for route in routes:
        app.add_url_rule(
            route.path,
            endpoint=f"{route.method} {route.path}",
            view_func=_view(route),
            methods=[route.method],
            provide_automatic_options=False,
        )
    app.register_error_handler(HTTPException, _render_exception)
    bounded = admitted(
        app, {route.path: route.admission for route in routes if route.admission is not None}
    )
    if observe is None:
        return bounded
    return observed(bounded, frozenset(route.path for route in routes), observe)


def _view(route: Route) -> _View:
    async def view() -> quart.Response:
        body = await quart.request.get_data(cache=False, as_text=False, parse_form_data=False)
        if len(body) > route.body_limit:
            return _render(too_large(route.body_limit))
        request = Request(
            method=quart.request.method,
            path=route.path,
            query=quart.request.query_string,
            headers=list(quart.request.scope["headers"]),
            body=body,
        )
        return _render(await answer(route, request))

    return view


def _render(response: Response) -> quart.Response:
    rendered = quart.Response(response.body, response.status)
    if response.content_type:
        rendered.content_type = response.content_type.decode()
    else:
        del rendered.headers["content-type"]
    for name, value in response.headers:
        rendered.headers.add(name.decode(), value.decode("latin-1"))
    return rendered


async def _render_exception(error: HTTPException) -> quart.Response:
    status = error.code or 500
    text = INTERNAL_ERROR if status == 500 else error.name.lower()
    rendered = _render(error_response(status, text))
    if isinstance(error, MethodNotAllowed):
        rendered.headers["allow"] = ", ".join(sorted(error.valid_methods or ()))
    return rendered
