"""The one place where a failure becomes a response: always `{"error": text}`, in JSON as a rule.

Some faces promise their clients a code besides, `"reason"`. A handler that refuses a request sets
the code itself; for refusals of the server, the face has one code for each status.

Some faces take bodies of other forms than JSON. A failure then has the form of the request's body,
if the server has come so far as to find the route.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from kvd.errors import KvdError, Misdirected, Unavailable
from kvd.http.messages import Form, Headers, Response, content_type
from kvd.index.served_models import EVERYTHING, ServedModels

INTERNAL_ERROR = "internal error"  # all a client learns about a bug; the log has the traceback
TOO_SLOW = "the request took too long"  # of a handler that has not begun its answer in time


class Refusal(Exception):
    """The server itself refuses a request and closes the connection; `str()` is for the client."""

    def __init__(self, status: int, text: str, headers: Headers | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or []
        self.silent = False  # for a HEAD, whose answer has no body
        # Of the request, once its head is read:
        self.path = b""
        self.asked: Headers = []


class Failures:
    """Words the failures of one face.

    `reasons` are its codes by status, none for a face without codes; `forms` are the forms of
    bodies other than JSON, by content type.
    """

    def __init__(
        self,
        reasons: Mapping[int, str] = MappingProxyType({}),
        forms: Mapping[str, Form] = MappingProxyType({}),
        served: ServedModels = EVERYTHING,
    ) -> None:
        """Failures about models outside `served` become redirections to their owner (421)."""
        self._reasons = reasons
        self._forms = forms
        self._served = served

    def body(self, status: int, text: str, details: Mapping[str, object] | None = None) -> bytes:
        """Returns the body of a failure; `details` are further members, or override the code."""
        return json.dumps(self._members(status, text, details)).encode()

    def _members(
        self, status: int, text: str, details: Mapping[str, object] | None
    ) -> dict[str, object]:
        members: dict[str, object] = {"error": text}
        if status in self._reasons:
            members["reason"] = self._reasons[status]
        return members | dict(details or {})

    def response(
        self,
        status: int,
        text: str,
        details: Mapping[str, object] | None = None,
        headers: Headers | None = None,
        path: bytes = b"",
    ) -> Response:
        """Returns the response to a failure, in the form of the request body by its `headers`.

        `path` is the request's, if it is known.
        """
        form = self._forms.get(content_type(headers or []))
        if form is None:
            return Response(status, self.body(status, text, details))
        return Response(status, form.write(self._members(status, text, details)), form.content_type)

    def refused(self, refusal: Refusal) -> Response:
        """Returns the response to a request that the server itself refuses."""
        response = self.response(refusal.status, str(refusal))
        response.headers.extend(refusal.headers)
        return response

    def too_large(self, limit: int, headers: Headers) -> Response:
        """Returns the response to a body of more than `limit` bytes."""
        return self.response(413, f"the body is longer than {limit} bytes", headers=headers)

    def expected(self, failure: KvdError, headers: Headers) -> Response:
        """Returns the response to an expected failure of a handler."""
        if (partition := failure.partition) is not None:
            if not self._served.serves(partition):
                failure = self._served.elsewhere(partition)
            elif failure.counts_as_unknown:
                self._served.note_unknown(partition)
        response = self.response(failure.status, str(failure), failure.details, headers)
        if isinstance(failure, Unavailable) and failure.retry_after_s is not None:
            response.headers.append((b"retry-after", b"%d" % failure.retry_after_s))
        if isinstance(failure, Misdirected) and failure.owner is not None:
            response.headers.append((b"x-kvd-owner", failure.owner.encode()))
        return response


PLAIN = Failures()  # of a face without codes
