"""The tokens of a prompt, by a ladder of which each rung costs more or knows less.

    ids        the request has them
    render     an engine says the tokens of the whole request (vLLM with --enable-scale-out)
    tokenize   an engine says those of the prompt or the messages
    none       who serves is decided by session and load

Engines are asked in turn, each question with a deadline. There are no chat templates here: an
engine's template is the only one that is always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from kvd.gateway.asking import CHAT_MEMBERS, PROMPT_MEMBERS, UNTOLD, Api, Asked
from kvd.gateway.exchanges import ExchangeFailed, Exchanges
from kvd.gateway.heads import own_head
from kvd.gateway.probing import Kind
from kvd.gateway.stats import GatewayStats, Rung
from kvd.gateway.upstreams import Upstream
from kvd_core.json.scan import BodyScanner
from kvd_core.selector.selector import Pool

TOKENIZE_S = 0.1  # time for the tokens of a text
RENDER_PATHS = {Api.CHAT: "/v1/chat/completions/render", Api.COMPLETIONS: "/v1/completions/render"}
# Bytes of an engine's answer to a question for tokens: a million ids.
TOKENS_BYTES = 16 * 1024 * 1024

SCANNER = BodyScanner({"tokens": "u32?", "token_ids": "u32?"})
TOKENS, TOKEN_IDS = 0, 1  # its arrays


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The tokens of a prompt as a JSON object that has them under one of two names."""

    rung: Rung
    body: bytes
    count: int

    def look(self, pool: Pool, adapter: str | None, salt: str | None) -> None:
        """Puts the prompt before a pool; raises KvdError for one that is too long."""
        array = TOKENS if "tokens" in SCANNER.scan(self.body) else TOKEN_IDS
        pool.look_tokens(SCANNER, array, adapter, salt)


class Tokens:
    """Finds the tokens of prompts."""

    def __init__(self, exchanges: Exchanges, stats: GatewayStats) -> None:
        self._exchanges = exchanges
        self._stats = stats
        self._turn = 0

    async def of(
        self, asked: Asked, body: bytes, engines: Sequence[Upstream]
    ) -> PromptTokens | None:
        """Returns the tokens of a request's prompt, None if nobody says them in time."""
        found = await self._find(asked, body, engines)
        self._stats.rungs[Rung.NONE if found is None else found.rung] += 1
        return found

    async def _find(
        self, asked: Asked, body: bytes, engines: Sequence[Upstream]
    ) -> PromptTokens | None:
        if (ids := asked.token_ids) is not None:
            return prompt_tokens(Rung.IDS, b'{"token_ids":%b}' % ids)
        if not engines or asked.api not in RENDER_PATHS:
            return None
        self._turn += 1
        upstream = engines[self._turn % len(engines)]
        assert upstream.facts is not None
        if upstream.facts.renders:
            return await self._ask(upstream, Rung.RENDER, RENDER_PATHS[asked.api], body)
        if upstream.facts.kind is Kind.OPENAI or not asked.spans.keys().isdisjoint(UNTOLD):
            return None
        return await self._ask(upstream, Rung.TOKENIZE, "/tokenize", question(asked))

    async def _ask(
        self, upstream: Upstream, rung: Rung, path: str, body: bytes
    ) -> PromptTokens | None:
        assert upstream.engine is not None
        head = own_head("POST", path, upstream.authority, len(body), upstream.key)
        found = None
        try:
            with trio.move_on_after(TOKENIZE_S):
                answer = await self._exchanges.ask(upstream.engine, head, body, TOKENS_BYTES)
                if answer.status == 200:
                    found = prompt_tokens(rung, unwrapped(answer.held))
        except ExchangeFailed:
            pass  # counted below; health checks and requests find out what is wrong with it
        self._stats.rung_failures[rung] += found is None
        return found


def question(asked: Asked) -> bytes:
    """Returns the body for /tokenize: the members that decide about the tokens, as they stand."""
    names = CHAT_MEMBERS if asked.api is Api.CHAT else PROMPT_MEMBERS
    parts = [
        b'"%b":%b' % (name.encode(), asked.spans[name]) for name in names if name in asked.spans
    ]
    return b"{%b}" % b",".join(parts)


def unwrapped(body: bytes) -> bytes:
    """Returns the first object of a list of them, as completions are rendered; else the body."""
    stripped = body.strip()
    return stripped[1:-1] if stripped.startswith(b"[") else stripped


def prompt_tokens(rung: Rung, body: bytes) -> PromptTokens | None:
    """Returns the tokens in an object, None if it does not hold the ids of one prompt's."""
    try:
        members = SCANNER.scan(body)
    except (TypeError, ValueError):
        return None
    found = members.get("tokens") or members.get("token_ids")
    return PromptTokens(rung, body, found) if isinstance(found, int) and found else None
