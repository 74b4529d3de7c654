"""The families of the gateway's /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvd.gateway.chains import Chains
from kvd.gateway.exchanges import Exchanges
from kvd.gateway.stats import GatewayStats
from kvd.gateway.tokens import Tokens
from kvd.gateway.upstream import UpstreamState
from kvd.gateway.upstreams import Upstreams
from kvd.telemetry.metrics import Family, by_label, counter, gauge


def gateway_families(
    upstreams: Upstreams,
    exchanges: Exchanges,
    tokens: Tokens,
    chains: Chains,
    stats: GatewayStats,
) -> Iterator[Family]:
    """Yields the metrics of requests, of engines and of the relay."""
    yield from _request_families(stats)
    yield from _token_families(stats)
    yield from _memory_families(tokens, chains, stats)
    yield from _engine_families(upstreams)
    yield from _relay_families(exchanges)


def _request_families(stats: GatewayStats) -> Iterator[Family]:
    of_requests = (
        ("relayed_requests", "requests for engines, by how they ended", "outcome", stats.ended),
        ("refusals", "requests that the gateway refused, by code", "code", stats.errors),
        ("retries", "requests sent to another engine, by cause", "cause", stats.retries),
        ("prompts", "prompts, by the source of their token ids", "source", stats.token_sources),
        (
            "tokenize_failures",
            "questions for the tokens of a prompt that an engine did not answer in time, by source",
            "source",
            stats.token_source_failures,
        ),
        ("decisions", "choices of an engine, by the rule that decided", "by", stats.decisions),
        (
            "ways",
            "answered requests of models with prefill engines, by way of computing the prompt",
            "way",
            stats.ways,
        ),
        (
            "prefill_failures",
            "prompts that a prefill engine did not compute, by cause",
            "cause",
            stats.prefill_failures,
        ),
    )
    for name, what, label, values in of_requests:
        help = f"Number of {what}"
        yield by_label(f"kvd_gateway_{name}_total", "counter", help, label, values)
    yield gauge("kvd_gateway_running_requests", "Number of requests in progress", stats.running)


def _token_families(stats: GatewayStats) -> Iterator[Family]:
    for name, help, value in (
        ("prompt_tokens", "Number of prompt tokens in answered requests with known token ids",
         stats.prompt_tokens),
        ("matched_tokens", "Number of prompt tokens expected to be cached at the chosen engine",
         stats.matched_tokens),
        ("reported_matched_tokens",
         "Number of tokens expected to be cached in requests whose engine reported the real number",
         stats.reported_matched_tokens),
        ("reported_cached_tokens",
         "Number of cached tokens that engines reported for one answer to one prompt",
         stats.reported_cached_tokens),
    ):  # fmt: skip
        yield counter(f"kvd_gateway_{name}_total", help, value)


def _memory_families(tokens: Tokens, chains: Chains, stats: GatewayStats) -> Iterator[Family]:
    """Yields the metrics of what is remembered of conversations and responses."""
    known, strands = tokens.conversations, chains.strands
    for kind, name, help, value in (
        (gauge, "conversations", "Number of remembered conversations", len(known)),
        (gauge, "conversations_bytes", "Total size of the remembered conversations in bytes",
         known.size_bytes),
        (counter, "conversations_forgotten_total",
         "Number of conversations forgotten to make room for others", known.forgotten),
        (gauge, "texts", "Number of remembered beginnings of conversations without token ids",
         len(strands)),
        (counter, "texts_forgotten_total",
         "Number of beginnings of conversations forgotten to make room for others",
         strands.forgotten),
        (gauge, "responses", "Number of responses that clients can continue from",
         len(chains.responses)),
        (counter, "responses_forgotten_total",
         "Number of responses forgotten to make room for others", stats.responses_forgotten),
        (counter, "turns_not_remembered_total",
         "Number of turns not remembered because too many were waiting for their tokens",
         stats.not_remembered),
    ):  # fmt: skip
        yield kind(f"kvd_gateway_{name}", help, value)


def _engine_families(upstreams: Upstreams) -> Iterator[Family]:
    states = Counter({state.value: 0 for state in UpstreamState})
    states.update(upstream.state.value for upstream in upstreams)
    help = "Number of engines, by state"
    yield by_label("kvd_gateway_upstreams", "gauge", help, "standing", states)


_RELAY_HELP = {
    "begun": "Number of requests sent to engines, the gateway's own questions included",
    "connected": "Number of connections made to engines",
    "reused": "Number of requests sent on a kept connection",
    "sent_again": "Number of requests sent again because the kept connection had closed",
    "receives": "Number of pieces of answers passed on to clients as they came",
    "payload_bytes": "Number of bytes of answers passed on to clients",
    "fillers": "Number of comments sent to clients while their engines were silent",
    "pauses": "Number of times an engine was not read because its client did not keep up",
}


def _relay_families(exchanges: Exchanges) -> Iterator[Family]:
    for name, value in exchanges.relay.stats().items():
        yield counter(f"kvd_gateway_relay_{name}_total", _RELAY_HELP[name], value)
