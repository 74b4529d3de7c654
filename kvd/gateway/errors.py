"""The gateway's own errors, in the form of the API that was asked.

OpenAI's:     {"error": {"message", "type", "param", "code"}}
Anthropic's:  {"type": "error", "error": {"type", "message"}}

What an engine says is never worded anew: clients recover by the text of its errors.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import NamedTuple

from kvd.errors import KvdError
from kvd.http.types import Headers, Response


class Refusal(NamedTuple):
    """How a reason is told."""

    status: int
    openai_type: str
    code: str  # OpenAI's, and that of metrics
    anthropic_type: str
    retry_after_s: int | None = None


_INVALID = "invalid_request_error"


class Reason(Enum):
    """Why the gateway refuses."""

    MODEL_NOT_FOUND = Refusal(404, _INVALID, "model_not_found", "not_found_error")
    UNKNOWN_URL = Refusal(404, _INVALID, "unknown_url", "not_found_error")
    INVALID_JSON = Refusal(400, _INVALID, "invalid_json", _INVALID)
    FORBIDDEN_PARAMETER = Refusal(400, _INVALID, "forbidden_parameter", _INVALID)
    OVERLOADED = Refusal(429, "rate_limit_error", "overloaded", "rate_limit_error", 1)
    NO_UPSTREAM = Refusal(503, "server_error", "no_upstream", "overloaded_error", 1)
    UPSTREAM_FAILED = Refusal(502, "server_error", "upstream_failed", "api_error")
    UPSTREAM_TIMEOUT = Refusal(504, "server_error", "upstream_timeout", "api_error")


class GatewayError(KvdError):
    """A request that the gateway answers itself, because no engine can or may."""

    def __init__(self, reason: Reason, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.param = param


def openai_error(error: GatewayError) -> dict[str, object]:
    """Returns the members of OpenAI's error object."""
    told = error.reason.value
    members = {"message": str(error), "type": told.openai_type, "param": error.param}
    return {"error": {**members, "code": told.code}}


def anthropic_error(error: GatewayError) -> dict[str, object]:
    """Returns the members of Anthropic's error object."""
    return {
        "type": "error",
        "error": {"type": error.reason.value.anthropic_type, "message": str(error)},
    }


def response(error: GatewayError, *, anthropic: bool) -> Response:
    """Returns the answer to a request that is refused."""
    members = anthropic_error(error) if anthropic else openai_error(error)
    told = error.reason.value
    headers: Headers = [(b"x-kvd-error", told.code.encode())]
    if told.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % told.retry_after_s))
    if error.reason is Reason.UPSTREAM_TIMEOUT:  # the work has probably been done once
        headers.append((b"x-should-retry", b"false"))
    return Response(told.status, json.dumps(members).encode(), headers=headers)


def event(error: GatewayError, *, anthropic: bool) -> bytes:
    """Returns the event that tells a stream's client that its answer broke off."""
    if anthropic:
        return b"event: error\ndata: %b\n\n" % json.dumps(anthropic_error(error)).encode()
    return b"data: %b\n\n" % json.dumps(openai_error(error)).encode()
