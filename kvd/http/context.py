"""What all connections of a face share: authorization, counts, failures, access log."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.http.access import UNKNOWN, AccessLog
from kvd.http.auth import AccessPolicy, Authorizer
from kvd.http.errors import PLAIN, Failures, Refusal
from kvd.http.head import Head
from kvd.http.routes import Route
from kvd.telemetry.counts import RequestCounts


def _open_to_all() -> Authorizer:
    return Authorizer(AccessPolicy())


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Authorization of clients, the counts of requests, and the texts of failures."""

    authorizer: Authorizer = field(default_factory=_open_to_all)
    counts: RequestCounts = field(default_factory=RequestCounts)
    failures: Failures = PLAIN
    access: AccessLog = field(default_factory=AccessLog)
    for_pages: bool = False  # pages of other origins may read answers (http/pages.py)

    def note_refused(self, head: Head, route: Route | None, refusal: Refusal) -> None:
        """Reports a request refused before its handler runs, and adds headers to the refusal."""
        method, status = head.method, refusal.status
        if route is not None:
            self.counts.observe(route.path, method, status, 0.0)
        if self.access.enabled:
            path = None if route is None else route.path
            refusal.path, refusal.asked = head.path, head.headers
            echo = self.access.note(method, path, status, 0.0, self._length(refusal), head.headers)
            refusal.headers = [*refusal.headers, *echo]

    def note_no_head(self, refusal: Refusal) -> None:
        """Logs a request that is refused for its head, of which nothing is believed."""
        if self.access.enabled:
            self.access.note(UNKNOWN, None, refusal.status, 0.0, self._length(refusal), [])

    def _length(self, refusal: Refusal) -> int:
        """Returns how many bytes the body of the answer has, 0 where there is no answer."""
        body = self.failures.refused(refusal).body
        assert isinstance(body, bytes)
        return 0 if refusal.silent else len(body)
