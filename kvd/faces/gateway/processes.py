"""/metrics of a gateway of several processes that share a port: one of them answers for all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from urllib.parse import parse_qsl

import trio

from kvd.errors import NotFound, Unavailable
from kvd.faces.common.monitoring import families_of, metrics
from kvd.faces.common.slices import whole
from kvd.gateway.siblings import Siblings
from kvd.http.messages import Request, Response
from kvd.http.routes import Route
from kvd.telemetry.merging import Merged
from kvd.telemetry.metrics import CONTENT_TYPE, METRICS_PATH, Source, by_label, render
from kvd.telemetry.stretches import SCRAPE


def metrics_route(siblings: Siblings, sources: Sequence[Source]) -> Route:
    """Returns the route of the metrics of all processes, or of one that the query names."""
    return Route("GET", METRICS_PATH, partial(merged_metrics, siblings, sources), hot=True)


async def merged_metrics(
    siblings: Siblings, sources: Sequence[Source], request: Request
) -> Response:
    """Answers the metrics of all processes, by label; `?process=` asks for one of them alone."""
    query = dict(parse_qsl(request.query.decode("latin-1"), keep_blank_values=True))
    asked, identity = query.get("process"), siblings.identity
    if asked is None:
        return Response(200, await _joined(siblings, sources), CONTENT_TYPE)
    if asked == identity.name:
        return await metrics(sources, request)
    if asked not in identity.sockets:
        raise NotFound(f"there is no such process, only {', '.join(identity.sockets)}")
    text = await siblings.metrics(asked)
    if text is None:
        raise Unavailable(f"the process {asked} does not answer", 1)
    return Response(200, text, CONTENT_TYPE)


async def _joined(siblings: Siblings, sources: Sequence[Source]) -> bytes:
    own = await whole(render(families_of(sources)), SCRAPE)
    texts = await siblings.every_metrics(own)
    merged = Merged()
    for name, text in texts.items():
        if text is not None:
            merged.add(name, text)
            await trio.lowlevel.checkpoint()
    up = {name: float(text is not None) for name, text in texts.items()}
    help = "Whether the process answered with its metrics"
    families = [by_label("kvd_process_up", "gauge", help, "process", up)]
    return merged.render() + b"".join(render(families))
