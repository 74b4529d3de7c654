"""The gateway's own calls and answers: docs/gateway.md.

Requests to its engines, under /v1, are OpenAI's API; use a client for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvd.client.calls import Call, How, asked
from kvd.client.common import EveryFace


@dataclass(frozen=True, slots=True)
class Upstream:
    """An engine behind the gateway; `problem` says why it is not used, `advice` what would help."""

    url: str
    worker_id: int
    standing: str
    role: str | None
    problem: str | None
    advice: str | None
    engine: str | None = None
    version: str | None = None
    models: tuple[str, ...] | None = None
    block_size: int | None = None
    blocks: int | None = None
    ranks: int | None = None
    events: Mapping[int, str] | None = None
    renders: bool | None = None


@dataclass(frozen=True, slots=True)
class UpstreamName:
    """A name whose addresses are engines, and the number of these addresses."""

    name: str
    addresses: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Chooser:
    """A kvd that chooses for the gateway."""

    url: str
    up: bool
    problem: str | None


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """Every engine, every name, and the kvds that choose."""

    upstreams: tuple[Upstream, ...]
    names: tuple[UpstreamName, ...]
    kvds: tuple[Chooser, ...] | None = None
    process: str | None = None


@dataclass(frozen=True, slots=True)
class GatewayReady:
    """Readiness for requests, and the number of engines that could serve them."""

    ready: bool
    serving: int


@dataclass(frozen=True, slots=True)
class AddedUpstream:
    """An engine that a call has added or removed."""

    url: str
    worker_id: int


class Gateway(EveryFace[How]):
    """Passes requests on to engines; these calls are about the engines."""

    @asked("GET /ready", repeatable=True, statuses=(200, 503))
    def ready(self) -> Call[GatewayReady]:
        """Returns whether a request could be served now."""
        return Call()

    @asked("GET /status", repeatable=True)
    def status(self) -> Call[GatewayStatus]:
        """Shows every engine, and every kvd that chooses for the gateway."""
        return Call()

    @asked("POST /upstreams")
    def add_upstream(self, url: str, *, role: str | None = None) -> Call[AddedUpstream]:
        """Adds an engine at an `http://` URL; with role `prefill`, one that only prefills."""
        return Call({"url": url, "role": role})

    @asked("DELETE /upstreams/{worker_id}")
    def remove_upstream(self, worker_id: int) -> Call[AddedUpstream]:
        """Removes an engine that a call has added."""
        return Call(segment=worker_id)
