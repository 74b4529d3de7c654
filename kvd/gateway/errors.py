"""The gateway's own errors, in the form of the API that was asked.

OpenAI's:     {"error": {"message", "type", "param", "code"}}
Anthropic's:  {"type": "error", "error": {"type", "message"}}

What an engine says is never worded anew: clients recover by the text of its errors.
"""

from __future__ import annotations

import json
from enum import Enum

from kvd.errors import KvdError
from kvd.http.types import Headers, Response


class Reason(Enum):
    """Why the gateway refuses: status, OpenAI's type and code, Anthropic's type, retry-after."""

    MODEL_NOT_FOUND = (404, "invalid_request_error", "model_not_found", "not_found_error", None)
    UNKNOWN_URL = (404, "invalid_request_error", "unknown_url", "not_found_error", None)
    INVALID_JSON = (400, "invalid_request_error", "invalid_json", "invalid_request_error", None)
    FORBIDDEN_PARAMETER = (
        400,
        "invalid_request_error",
        "forbidden_parameter",
        "invalid_request_error",
        None,
    )
    OVERLOADED = (429, "rate_limit_error", "overloaded", "rate_limit_error", 1)
    NO_UPSTREAM = (503, "server_error", "no_upstream", "overloaded_error", 1)
    UPSTREAM_FAILED = (502, "server_error", "upstream_failed", "api_error", None)
    UPSTREAM_TIMEOUT = (504, "server_error", "upstream_timeout", "api_error", None)

    @property
    def status(self) -> int:
        return self.value[0]

    @property
    def code(self) -> str:
        return self.value[2]


class GatewayError(KvdError):
    """A request that the gateway answers itself, because no engine can or may."""

    def __init__(self, reason: Reason, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.param = param


def openai_error(error: GatewayError) -> dict[str, object]:
    """Returns the members of OpenAI's error object."""
    _, kind, code, _, _ = error.reason.value
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": code}}


def anthropic_error(error: GatewayError) -> dict[str, object]:
    """Returns the members of Anthropic's error object."""
    return {"type": "error", "error": {"type": error.reason.value[3], "message": str(error)}}


def response(error: GatewayError, *, anthropic: bool) -> Response:
    """Returns the answer to a request that is refused."""
    members = anthropic_error(error) if anthropic else openai_error(error)
    headers: Headers = [(b"x-kvd-error", error.reason.code.encode())]
    retry_after = error.reason.value[4]
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % retry_after))
    if error.reason is Reason.UPSTREAM_TIMEOUT:  # the work has probably been done once
        headers.append((b"x-should-retry", b"false"))
    return Response(error.reason.status, json.dumps(members).encode(), headers=headers)


def event(error: GatewayError, *, anthropic: bool) -> bytes:
    """Returns the event that tells a stream's client that its answer broke off."""
    if anthropic:
        return b"event: error\ndata: %b\n\n" % json.dumps(anthropic_error(error)).encode()
    return b"data: %b\n\n" % json.dumps(openai_error(error)).encode()
