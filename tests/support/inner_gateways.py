"""A gateway in the test's own process, whose parts a test can inspect."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import trio

from kvd.faces.gateway.routes import gateway_routes
from kvd.gateway.chains import Chains
from kvd.gateway.choices import LocalChoices
from kvd.gateway.dns_names import Wanted
from kvd.gateway.exchanges import Exchanges, RelayLimits
from kvd.gateway.forwarding import Forwarder
from kvd.gateway.stats import GatewayStats
from kvd.gateway.tokens import Tokens
from kvd.gateway.tunnels import UpstreamTls
from kvd.gateway.upstream import UpstreamState
from kvd.gateway.upstreams import Upstreams
from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.net.dialing import Dialer
from kvd.selection.options import RouterOptions
from kvd.selection.service import Selections
from tests.support.serving import Running, serving
from tests.support.zmtp_fakes import NOT_MY_FAULT_S, until

BODY_LIMIT = 1 << 20


@dataclass
class InnerGateway:
    """A running gateway."""

    upstreams: Upstreams
    choices: LocalChoices
    selections: Selections
    stats: GatewayStats
    tokens: Tokens
    exchanges: Exchanges
    running: Running

    def serving(self) -> set[str]:
        """Returns the URLs of the engines that serve."""
        return {one.url for one in self.upstreams if one.state is UpstreamState.SERVING}

    async def until_serving(self, *urls: str) -> None:
        """Waits until these engines serve, and no others."""
        await until(lambda: self.serving() == set(urls))


@asynccontextmanager
async def inner_gateway(
    *wanted: Wanted,
    dialer: Dialer | None = None,
    tls: UpstreamTls | None = None,
    limits: RelayLimits | None = None,
) -> AsyncIterator[InnerGateway]:
    """Yields a gateway of engines that publish nothing."""
    unused: Any = None
    limits = limits or RelayLimits()
    state = State()
    registry = Registry(state, unused)
    router, clocks = RouterOptions(session_affinity_ttl_s=60), (trio.current_time, time.time_ns)
    selections = Selections(state, registry, router, 1.0, Random(0), *clocks)
    choices = LocalChoices(selections, registry)
    exchanges, stats = Exchanges(limits), GatewayStats()
    tokens = Tokens(exchanges, stats, 1 << 20, NOT_MY_FAULT_S)
    behind = exchanges, choices, dialer or Dialer(), b"", tls or UpstreamTls()
    upstreams = Upstreams("1234", wanted, *behind, proves=False)
    chains = Chains(stats, trio.current_time)
    forwarder = Forwarder(upstreams, choices, exchanges, stats, tokens, chains, 0, "gateway-")
    parts: Sequence[Any] = exchanges, upstreams, tokens
    async with trio.open_nursery() as nursery:
        for part in parts:
            nursery.start_soon(part.run)
        routes = gateway_routes(upstreams, choices, forwarder, BODY_LIMIT)
        async with serving(routes=routes) as running:
            yield InnerGateway(upstreams, choices, selections, stats, tokens, exchanges, running)
        nursery.cancel_scope.cancel()
