"""Responses made from the outcomes of handlers."""

from __future__ import annotations

import gc
import weakref

from kvd.errors import Invalid
from kvd.http.answer import answer_now
from kvd.http.errors import Failures
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope


def test_a_failure_needs_no_collector_to_go() -> None:
    """Its traceback keeps the frames, and so the request with its body, alive until it goes."""
    route = Route("POST", "/", lambda _: Response(200, b""), scope=Scope.READ)
    request = Request("POST", "/", b"", [], b"{}", b"")
    gc.disable()
    try:
        failure = Invalid("no")
        kept = weakref.ref(failure)
        assert answer_now(route, request, Failures(), failure).status == 422
        del failure
        assert kept() is None
    finally:
        gc.enable()
