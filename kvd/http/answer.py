"""Calls a handler and turns every outcome, exceptions included, into a response."""

from __future__ import annotations

from typing import cast

from kvd.errors import KvdError, UnsupportedMedia
from kvd.http.errors import INTERNAL_ERROR, Failures
from kvd.http.messages import JSON, Headers, Request, Response
from kvd.http.routes import Route
from kvd.telemetry.logs import get_logger

log = get_logger(__name__)

_METHODS_WITH_JSON = frozenset(("POST", "PUT", "PATCH"))


def answer_now(
    route: Route, request: Request, failures: Failures, raised: Exception | None = None
) -> Response:
    """Returns the response of a handler that does not wait; its exceptions become responses.

    `raised` is the exception of an earlier call: then the handler is not called again.
    """
    try:
        if raised is not None:
            raise raised
        if not route.any_type:
            require_json(request)
        return cast(Response, route.handler(request))
    except Exception as error:
        return _response_to(error, request, failures)
    finally:
        raised = None  # its traceback holds this frame, which holds the body


async def answer(route: Route, request: Request, failures: Failures) -> Response:
    """Returns the response of any handler; its exceptions become responses."""
    try:
        if not route.any_type:
            require_json(request)
        result = route.handler(request)
        return result if isinstance(result, Response) else await result
    except Exception as error:
        return _response_to(error, request, failures)


def require_json(request: Request) -> None:
    """Raises UnsupportedMedia if the request has a body that is not announced as JSON."""
    if request.body and request.method in _METHODS_WITH_JSON and not is_json(request.headers):
        raise UnsupportedMedia("Expected request with `Content-Type: application/json`")


def is_json(headers: Headers) -> bool:
    """Returns whether the body is announced as JSON."""
    for name, value in headers:
        if name == b"content-type":
            return value == JSON or _is_json_type(value)
    return False


def _is_json_type(value: bytes) -> bool:
    essence = value.partition(b";")[0].strip().lower()
    return essence == JSON or (essence.startswith(b"application/") and essence.endswith(b"+json"))


def _response_to(error: Exception, request: Request, failures: Failures) -> Response:
    if isinstance(error, KvdError):
        return failures.expected(error, request.headers)
    return unexpected(request.method, request.path, request.headers, failures)


def unexpected(method: str, path: str, headers: Headers, failures: Failures) -> Response:
    """Logs the exception being handled, a bug, and returns the response; `path` is the route's."""
    log.exception("handler_failed", method=method, path=path)
    return failures.response(500, INTERNAL_ERROR, headers=headers)
