"""/health and /metrics of every face."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from kvd.faces.common.slices import written
from kvd.http.messages import JSON, Request, Response
from kvd.http.routes import Route, Scope
from kvd.telemetry.metrics import CONTENT_TYPE, METRICS_PATH, Family, Source, render
from kvd.telemetry.stretches import SCRAPE


def health(body: bytes, request: Request) -> Response:
    """Answers 200 as long as the daemon runs, in whatever state."""
    return Response(200, body, content_type=JSON if body else b"")


def health_route(body: bytes = b"") -> Route:
    """Returns the route of /health."""
    return Route("GET", "/health", partial(health, body), hot=True, scope=Scope.OPEN)


async def metrics(sources: Sequence[Source], request: Request) -> Response:
    """Answers in Prometheus' text format; other tasks run while the answer is written."""
    return Response(200, await written(render(families_of(sources)), SCRAPE), CONTENT_TYPE)


def families_of(sources: Sequence[Source]) -> Iterator[Family | None]:
    """Yields the families of all sources, and None where other tasks may run."""
    for source in sources:
        yield from source()


def metrics_route(sources: Sequence[Source]) -> Route:
    """Returns the route of /metrics; each scrape calls all `sources`."""
    return Route("GET", METRICS_PATH, partial(metrics, sources), hot=True)
