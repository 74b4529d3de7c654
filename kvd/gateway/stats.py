"""Counts the outcomes of requests for /metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Ended(StrEnum):
    """The end of a request."""

    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    BROKEN = "broken"  # the engine broke off after the client had been sent a part
    REFUSED = "refused"  # the gateway answered it with an error


class TokenSource(StrEnum):
    """The source of a prompt's tokens."""

    IDS = "ids"  # the request had them
    MEMORY = "memory"  # the beginning of the conversation was known
    RENDER = "render"  # an engine rendered the whole request
    TOKENIZE = "tokenize"  # an engine tokenized the prompt
    NONE = "none"


class Decision(StrEnum):
    """The rule that decided which engine serves a request."""

    OVERLAP = "overlap"  # the cached part of its tokens, and load
    PREDICTED = "predicted"  # the same, but its cache is predicted: it publishes no events
    SESSION = "session"
    LOAD = "load"
    FALLBACK = "fallback"  # the load that this process knows, as no kvd has answered


class PrefillPath(StrEnum):
    """The way a prompt was computed for a model with prefill engines (kvd.gateway.pools)."""

    REMOTE = "remote"  # a prefill engine
    SHORT = "short"  # in this and the following: the engine that answers
    UNSUITED = "unsuited"
    FALLBACK = "fallback"


@dataclass(slots=True)
class GatewayStats:
    """Counts since the start."""

    ended: Counter[str] = field(default_factory=Counter)  # by Ended
    errors: Counter[str] = field(default_factory=Counter)  # the gateway's own, by code
    retries: Counter[str] = field(default_factory=Counter)  # on another engine, by cause
    token_sources: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)  # of answered requests, by PrefillPath
    prefill_failures: Counter[str] = field(default_factory=Counter)  # by cause
    # By source that gave no tokens.
    token_source_failures: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0  # of requests whose tokens are known
    matched_tokens: int = 0  # of these, expected to be cached where they were sent
    # For requests whose engine reported its cached tokens: those expected, and those reported.
    reported_matched_tokens: int = 0
    reported_cached_tokens: int = 0
    responses_forgotten: int = 0  # ids of responses that made room for others
    not_remembered: int = 0  # turns beyond MAX_LATER of kvd.gateway.tokens
    running: int = 0
