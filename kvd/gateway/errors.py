"""The gateway's own errors, in the form of the API that the client uses.

OpenAI's:     {"error": {"message", "type", "param", "code"}}
Anthropic's:  {"type": "error", "error": {"type", "message"}, "request_id"}

An engine's errors are never reworded: clients recover by their text.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import NamedTuple

from kvd.errors import KvdError
from kvd.http.messages import Headers, Response


class ErrorForm(Enum):
    """The form of an API's error responses."""

    OPENAI = "openai"
    RESPONSES = "responses"  # OpenAI's as well, but with other events in streams
    ANTHROPIC = "anthropic"


class ReasonAnswer(NamedTuple):
    """The response to a reason for refusal."""

    status: int
    openai_type: str
    code: str  # OpenAI's, and that of metrics
    anthropic_type: str
    retry_after_s: int | None = None


_INVALID = "invalid_request_error"


class Reason(Enum):
    """A reason why the gateway refuses a request."""

    MODEL_NOT_FOUND = ReasonAnswer(404, _INVALID, "model_not_found", "not_found_error")
    RESPONSE_NOT_FOUND = ReasonAnswer(404, _INVALID, "response_not_found", "not_found_error")
    PREVIOUS_NOT_FOUND = ReasonAnswer(
        404, _INVALID, "previous_response_not_found", "not_found_error"
    )
    UNKNOWN_URL = ReasonAnswer(404, _INVALID, "unknown_url", "not_found_error")
    METHOD_NOT_ALLOWED = ReasonAnswer(405, _INVALID, "method_not_allowed", "not_found_error")
    INVALID_JSON = ReasonAnswer(400, _INVALID, "invalid_json", _INVALID)
    INVALID_FORM = ReasonAnswer(400, _INVALID, "invalid_form", _INVALID)
    FORBIDDEN_PARAMETER = ReasonAnswer(400, _INVALID, "forbidden_parameter", _INVALID)
    BAD_REQUEST = ReasonAnswer(400, _INVALID, "bad_request", _INVALID)
    INVALID_API_KEY = ReasonAnswer(401, _INVALID, "invalid_api_key", "authentication_error")
    NOT_PERMITTED = ReasonAnswer(403, _INVALID, "not_permitted", "permission_error")
    TOO_LARGE = ReasonAnswer(413, _INVALID, "request_too_large", "request_too_large")
    UNSUPPORTED_MEDIA = ReasonAnswer(415, _INVALID, "unsupported_media_type", _INVALID)
    NO_UPSTREAM = ReasonAnswer(503, "server_error", "no_upstream", "overloaded_error", 1)
    # With a status after which the gateway that has sent the request back tries another engine.
    REQUEST_LOOP = ReasonAnswer(503, "server_error", "request_loop", "overloaded_error", 1)
    UPSTREAM_FAILED = ReasonAnswer(502, "server_error", "upstream_failed", "api_error")
    UPSTREAM_TIMEOUT = ReasonAnswer(504, "server_error", "upstream_timeout", "api_error")
    INTERNAL = ReasonAnswer(500, "server_error", "internal_error", "api_error")
    OVERLOADED = ReasonAnswer(503, "server_error", "overloaded", "overloaded_error", 1)


# The reasons for which the HTTP server itself refuses, by status; other 4xx are BAD_REQUEST.
OF_STATUS = {
    401: Reason.INVALID_API_KEY,
    403: Reason.NOT_PERMITTED,
    404: Reason.UNKNOWN_URL,
    405: Reason.METHOD_NOT_ALLOWED,
    413: Reason.TOO_LARGE,
    415: Reason.UNSUPPORTED_MEDIA,
    421: Reason.NOT_PERMITTED,
    500: Reason.INTERNAL,
    503: Reason.OVERLOADED,
}


# Bytes that are sent while a stream is silent; clients ignore them.
FILLERS = {
    ErrorForm.OPENAI: b": keep-alive\n\n",
    ErrorForm.RESPONSES: b": keep-alive\n\n",
    ErrorForm.ANTHROPIC: b'event: ping\ndata: {"type": "ping"}\n\n',
}


# A stream's last event, recognized by the tail of what was sent, as its data may be long.
LAST_EVENTS = {
    ErrorForm.OPENAI: re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]\s*$"),
    ErrorForm.RESPONSES: re.compile(
        rb'"type":\s*"(?:response\.(?:completed|incomplete|failed)|error)"[^\r\n]*\s*$'
    ),
    ErrorForm.ANTHROPIC: re.compile(rb'"type":\s*"(?:message_stop|error)"[^\r\n]*\s*$'),
}

MAX_TEXT = 1000  # characters of an error, which may repeat what the client has sent


class GatewayError(KvdError):
    """A request that the gateway answers itself, because no engine can or may."""

    def __init__(self, reason: Reason, text: str, param: str | None = None) -> None:
        super().__init__(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}...")
        self.reason = reason
        self.param = param


def openai_error(error: GatewayError) -> dict[str, object]:
    """Returns OpenAI's error object."""
    return {"error": _openai_members(error)}


def _openai_members(error: GatewayError) -> dict[str, object]:
    reason = error.reason.value
    members = {"message": str(error), "type": reason.openai_type, "param": error.param}
    return {**members, "code": reason.code}


def anthropic_error(error: GatewayError, request_id: str) -> dict[str, object]:
    """Returns Anthropic's error object."""
    return {
        "type": "error",
        "error": {"type": error.reason.value.anthropic_type, "message": str(error)},
        "request_id": request_id,
    }


def id_headers(form: ErrorForm, request_id: bytes) -> Headers:
    """Returns the headers by which a client of an API identifies its request."""
    headers = [(b"x-request-id", request_id)]
    return [*headers, (b"request-id", request_id)] if form is ErrorForm.ANTHROPIC else headers


def response(
    error: GatewayError, form: ErrorForm, request_id: bytes, status: int | None = None
) -> Response:
    """Returns the answer to a refused request; `status` replaces the one of its reason."""
    anthropic = form is ErrorForm.ANTHROPIC
    members = anthropic_error(error, request_id.decode()) if anthropic else openai_error(error)
    reason = error.reason.value
    headers = [(b"x-kvd-error", reason.code.encode()), *id_headers(form, request_id)]
    if reason.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % reason.retry_after_s))
    if error.reason is Reason.UPSTREAM_TIMEOUT:  # the engine has probably done the work
        headers.append((b"x-should-retry", b"false"))
    return Response(status or reason.status, json.dumps(members).encode(), headers=headers)


def is_whole(form: ErrorForm, tail: bytes) -> bool:
    """Returns whether a stream's last event has been sent: clients look for nothing else."""
    return tail.endswith((b"\n", b"\r")) and LAST_EVENTS[form].search(tail) is not None


def ended(tail: bytes, *, whole: bool) -> bytes | None:
    """Returns the bytes that end the event within which a stream broke off, by its `tail`.

    Returns None if clients would then take cut data for whole: nothing more can be sent. Unless the
    tail is the `whole` stream, a line that began before it counts as data.
    """
    if not tail or tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")):
        return b""
    if tail.endswith(b"\n"):
        return b"\n"
    if tail.endswith(b"\r"):  # one line feed alone may be the second half of this line's end
        return b"\n\n"
    *before, last = re.split(rb"[\r\n]", tail)
    is_data = not (before or whole) or not last.startswith((b":", b"event", b"id", b"retry"))
    return None if is_data else b"\n\n"


_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s*(\d{1,9})\b')


def event(error: GatewayError, form: ErrorForm, request_id: bytes, tail: bytes) -> bytes:
    """Returns the event that tells a stream's client that its answer broke off behind `tail`."""
    if form is ErrorForm.OPENAI:
        return b"data: %b\n\n" % json.dumps(openai_error(error)).encode()
    if form is ErrorForm.ANTHROPIC:
        members = anthropic_error(error, request_id.decode())
    else:
        sent = _SEQUENCE_NUMBER.findall(tail)
        number = int(sent[-1]) + 1 if sent else 0
        members = {**_openai_members(error), "type": "error", "sequence_number": number}
    return b"event: error\ndata: %b\n\n" % json.dumps(members).encode()
