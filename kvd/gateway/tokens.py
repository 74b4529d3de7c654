"""Finds a prompt's token ids, in the first of these sources that has them.

    ids        the request has them
    memory     the beginning of the conversation was seen before: its blocks are known, and about
               how many tokens follow
    render     an engine returns the tokens of the whole request (vLLM with --enable-scale-out)
    tokenize   an engine returns the tokens of the prompt or the messages
    none       session and load decide which engine serves

The tokens of an image do not say which image it is, so two prompts with different images would
count as one. Of a prompt with images or sounds only the beginning of text is known, from memory.

Engines are asked in turn, each question with a deadline. kvd applies no chat templates: only the
engine's own is always right. After a turn was served from memory its tokens are asked for in the
background, so that the next turn is known up to the end of this one.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import trio

from kvd.gateway.exchanges import GONE, ExchangeFailed, Exchanges
from kvd.gateway.heads import own_head
from kvd.gateway.probing import EngineKind, Facts
from kvd.gateway.requests import (
    CHAT_MEMBERS,
    PROMPT_MEMBERS,
    TOOL_CHOICE,
    TRUNCATES,
    UNLISTED,
    Api,
    ClientRequest,
)
from kvd.gateway.stats import GatewayStats, TokenSource
from kvd.gateway.upstream import Upstream
from kvd.gateway.upstreams import Served
from kvd.http.untasked import Untasked, in_task
from kvd_core.json.scan import BodyScanner
from kvd_core.prompts.conversations import Conversations, Recalled, data_bytes
from kvd_core.selector.selector import Pool, Prompt

DEFAULT_TOKENIZE_S = 0.1  # time in which engines may return the tokens of a prompt
MAX_ASKED = 2  # engines that are asked for the tokens of a prompt, one after the other
RENDER_PATHS = {
    Api.CHAT: "/v1/chat/completions/render",
    Api.COMPLETIONS: "/v1/completions/render",
    Api.MESSAGES: "/v1/messages/render",
    Api.RESPONSES: "/v1/responses/render",
}
# The first version of vLLM with these paths; it has had the others for longer.
RENDERED_SINCE = {Api.MESSAGES: (0, 29), Api.RESPONSES: (0, 30)}
VERSION_NUMBER = re.compile(r"[0-9]{1,9}")  # an engine may report any text as its version
TOKENIZED = (Api.CHAT, Api.COMPLETIONS)  # the APIs that /tokenize supports
# Bytes of an engine's answer to a question for tokens: a million ids.
TOKENS_BYTES = 16 * 1024 * 1024
# Turns whose tokens are still to be asked for in the background; further ones are not remembered.
MAX_LATER = 256
ASKING_LATER = 1  # turns asked for at a time: under load, more would slow down the requests
# Shortest time for the tokens of a turn in the background: no less than a request waits for them,
# and up to twice as long.
LATER_S = 0.25
BYTES_PER_TOKEN = 4  # estimates the length of a text whose tokens are not known

# Members that determine a chat's tokens, except the messages.
DECIDING = frozenset((*CHAT_MEMBERS, *UNLISTED, TOOL_CHOICE)) - {"messages"}

# A member of a message by its former name, which vLLM still reads in a chat, but not in /tokenize.
# The quotes of a text are escaped, so this is never inside one.
FORMER_REASONING = re.compile(rb'"reasoning_content"(?=\s*:\s*[^\sn])')

# Members that determine the tokens of a completion's prompt.
PROMPT_DECIDING = frozenset((*PROMPT_MEMBERS, *UNLISTED))

TOKENS, TOKEN_IDS = 0, 1  # numbers of the scanner's arrays


class TokenReader:
    """Reads JSON objects with tokens; does not read the same one twice in a row."""

    def __init__(self) -> None:
        self.scanner = BodyScanner({"tokens": "u32?", "token_ids": "u32?"})
        self._read: bytes | None = None  # the body whose tokens are in the scanner's arrays
        self._members: dict[str, object] = {}

    def members(self, body: bytes) -> dict[str, object]:
        """Returns how many tokens each member has; raises as the scanner does."""
        if body is not self._read:
            self._read = None
            self._members = self.scanner.scan(body)
            self._read = body
        return self._members

    def match(self, body: bytes, pool: Pool, adapter: str | None, salt: str | None) -> None:
        """Matches the tokens of an object against a pool, and forgets it, as it may be long."""
        array = TOKENS if "tokens" in self.members(body) else TOKEN_IDS
        self._read = None
        pool.match_tokens(self.scanner, array, adapter, salt)


READER = TokenReader()


class PromptTokens(Protocol):
    """The tokens of a prompt, as far as they are known."""

    @property
    def source(self) -> TokenSource: ...
    @property
    def count(self) -> int: ...

    def match(self, pool: Pool, adapter: str | None, salt: str | None) -> None:
        """Matches the prompt against a pool; raises KvdError if it is too long."""


@dataclass(frozen=True, slots=True)
class JsonTokens:
    """The tokens of a prompt in a JSON object, as `tokens` or as `token_ids`."""

    source: TokenSource
    body: bytes
    count: int

    def match(self, pool: Pool, adapter: str | None, salt: str | None) -> None:
        READER.match(self.body, pool, adapter, salt)


@dataclass(slots=True)
class RecalledTokens:
    """The known beginning of a conversation."""

    recalled: Recalled
    count: int
    source = TokenSource.MEMORY

    def match(self, pool: Pool, adapter: str | None, salt: str | None) -> None:
        pool.match(self.recalled.local_hashes, self.recalled.sequence_hashes, self.count)


class Later(NamedTuple):
    """A turn whose tokens are asked for in the background."""

    asked: ClientRequest
    served: Served
    basis: bytes  # of the pool's blocks, as `Upstreams.basis` returns it
    body: bytes
    pool: Pool
    engines: Sequence[Upstream]
    # Called with all of its prompt, where a cache is predicted from what is known of prompts.
    computed: Callable[[Prompt], None] | None = None


class Tokens:
    """Finds the tokens of prompts, and remembers conversations."""

    def __init__(
        self,
        exchanges: Exchanges,
        stats: GatewayStats,
        memory_bytes: int,
        tokenize_s: float = DEFAULT_TOKENIZE_S,
    ) -> None:
        """Remembers nothing if `memory_bytes` is 0; engines have `tokenize_s` seconds in all."""
        self.conversations = Conversations(memory_bytes)
        self._exchanges = exchanges
        self._stats = stats
        self._turn = 0
        self._tokenize_s = tokenize_s
        self._later_s = max(LATER_S, tokenize_s)
        self._later: deque[Later] = deque()
        self._asking: set[Untasked] = set()  # without a task: they only wait for the relay

    async def run(self) -> None:
        """Gives up background questions that take too long, until it is cancelled."""
        before: set[Untasked] = set()
        try:
            while True:
                await trio.sleep(self._later_s)
                self._give_up(before & self._asking)
                before = set(self._asking)
        finally:
            self._later.clear()
            self._give_up(set(self._asking))

    async def find(
        self,
        asked: ClientRequest,
        served: Served,
        basis: bytes,
        body: bytes,
        engines: Sequence[Upstream],
    ) -> PromptTokens | None:
        """Returns the tokens of a request's prompt, None if no source has them in time."""
        found = self._recall(asked, served, basis)
        if found is None and not asked.media:
            await in_task()
            found = await self._ask(asked, body, engines)
        self._stats.token_sources[TokenSource.NONE if found is None else found.source] += 1
        return found

    def note(
        self,
        asked: ClientRequest,
        served: Served,
        basis: bytes,
        body: bytes,
        tokens: PromptTokens,
        pool: Pool,
        engines: Sequence[Upstream],
    ) -> Later | None:
        """Remembers a prompt that the pool has just matched, or returns a turn to ask for later."""
        if asked.media or not remembers(asked):
            return None
        if tokens.source is not TokenSource.MEMORY:
            self._remember(asked, served, basis, pool, tokens.count)
            return None
        assert isinstance(tokens, RecalledTokens)
        if tokens.recalled.rest <= 1:  # only the bracket at the end of the messages is new
            return None
        return Later(asked, served, basis, body, pool, engines)

    def ask_later(self, later: Later) -> None:
        """Asks for the tokens of a turn in the background, now that its answer has begun."""
        if len(self._later) >= MAX_LATER:
            self._stats.not_remembered += 1
            return
        self._later.append(later)
        self._ask_next()

    def _ask_next(self) -> None:
        while self._later and len(self._asking) < ASKING_LATER:
            asking = Untasked(self._ask_now(self._later.popleft()))
            self._asking.add(asking)
            self._step(asking)

    def _advance(self, asking: Untasked) -> None:
        self._step(asking)
        self._ask_next()

    def _step(self, asking: Untasked) -> None:
        try:
            asking.step().subscribe(partial(self._advance, asking))
        except StopIteration:
            self._asking.discard(asking)

    def _give_up(self, asking: set[Untasked]) -> None:
        for each in asking:
            each.close()
            self._asking.discard(each)
        self._ask_next()

    def _recall(self, asked: ClientRequest, served: Served, basis: bytes) -> PromptTokens | None:
        if not remembers(asked):
            return None
        found = self.conversations.recall(context_of(asked, served, basis), asked.messages)
        if found is None:
            return None
        rest = found.rest
        if asked.media:
            rest -= data_bytes(asked.messages[-rest:])
        return RecalledTokens(found, found.tokens + rest // BYTES_PER_TOKEN)

    def _remember(
        self, asked: ClientRequest, served: Served, basis: bytes, pool: Pool, count: int
    ) -> None:
        hashes, context = pool.hold().local_hashes, context_of(asked, served, basis)
        self.conversations.remember(context, asked.messages, hashes, count)

    async def _ask_now(self, later: Later) -> None:
        found = await self._ask_some(later.asked, later.body, later.engines)
        if found is not None:
            found.match(later.pool, later.served.adapter, None)
            self._remember(later.asked, later.served, later.basis, later.pool, found.count)
            if later.computed is not None:
                later.computed(later.pool.hold())

    async def _ask(
        self, asked: ClientRequest, body: bytes, engines: Sequence[Upstream]
    ) -> JsonTokens | None:
        if (ids := asked.token_ids) is not None:
            return read_tokens(TokenSource.IDS, b'{"token_ids":%b}' % ids)
        if not engines or asked.api not in RENDER_PATHS:
            return None
        with trio.move_on_after(self._tokenize_s):
            return await self._ask_some(asked, body, engines)
        return None

    async def _ask_some(
        self, asked: ClientRequest, body: bytes, engines: Sequence[Upstream]
    ) -> JsonTokens | None:
        """Asks one engine, and another one, if there is any, if it does not answer."""
        self._turn += 1
        for number in range(min(MAX_ASKED, len(engines))):
            upstream = engines[(self._turn + number) % len(engines)]
            if upstream.engine is None:  # it has left meanwhile
                continue
            try:
                return await self._ask_engine(asked, body, upstream)
            except ExchangeFailed as error:  # the next engine may answer
                outcome = upstream.outcome_of(error.outcome)
                if outcome in GONE:
                    upstream.note_gone(str(error), outcome)
        return None

    async def _ask_engine(
        self, asked: ClientRequest, body: bytes, upstream: Upstream
    ) -> JsonTokens | None:
        """Asks one engine; raises ExchangeFailed if it does not answer."""
        assert upstream.facts is not None
        if renders(upstream.facts, asked):
            asks = prompt_alone(asked) if asked.has_texts else body
            if asks is None:
                return None
            return await self._question(upstream, TokenSource.RENDER, RENDER_PATHS[asked.api], asks)
        if upstream.facts.kind is EngineKind.OPENAI or asked.api not in TOKENIZED:
            return None
        if asked.sets(*UNLISTED):
            return None
        if (asks := question(asked, upstream.facts.kind)) is None:
            return None
        return await self._question(upstream, TokenSource.TOKENIZE, "/tokenize", asks)

    async def _question(
        self, upstream: Upstream, source: TokenSource, path: str, body: bytes
    ) -> JsonTokens | None:
        assert upstream.engine is not None
        head = own_head("POST", path, upstream.authority, len(body), upstream.key)
        found = None
        try:
            answer = await self._exchanges.ask(upstream.engine, head, body, TOKENS_BYTES)
            if answer.status == 200:
                found = read_tokens(source, unwrapped(answer.held))
        finally:
            self._stats.token_source_failures[source] += found is None
        return found


def renders(facts: Facts, asked: ClientRequest) -> bool:
    """Returns whether an engine can render a request as a whole."""
    if not facts.renders or asked.previous is not None:
        return False
    since = RENDERED_SINCE.get(asked.api)
    return since is None or tuple(map(int, VERSION_NUMBER.findall(facts.version)[:2])) >= since


def remembers(asked: ClientRequest) -> bool:
    """Returns whether a conversation can be remembered.

    With a salt its blocks differ; if the engine truncates it, the next turn begins elsewhere.
    """
    if asked.api is not Api.CHAT or asked.salt is not None or asked.sets(TRUNCATES):
        return False
    return "messages" in asked.spans


def context_of(asked: ClientRequest, served: Served, basis: bytes) -> bytes:
    """Returns all that determines the blocks, except the messages."""
    members = [
        b"%b:%b" % (name.encode(), value)  # in the scanner's order, whatever the body's is
        for name, value in asked.spans.items()
        if name in DECIDING
    ]
    return b"\0".join((served.model.encode(), (served.adapter or "").encode(), basis, *members))


def question(asked: ClientRequest, kind: EngineKind) -> bytes | None:
    """Returns the body for /tokenize: the members that determine the tokens.

    Of several text prompts it has the longest. Returns None if there is no text.
    """
    spans = dict(asked.spans)
    if asked.api is not Api.CHAT:
        if (text := asked.prompt_text) is None:
            return None
        spans["prompt"] = text
    elif kind is EngineKind.VLLM and "messages" in spans:
        spans["messages"] = FORMER_REASONING.sub(b'"reasoning"', spans["messages"])
    names = CHAT_MEMBERS if asked.api is Api.CHAT else PROMPT_MEMBERS
    return _object({name: spans[name] for name in names if name in spans})


def prompt_alone(asked: ClientRequest) -> bytes | None:
    """Returns the body that asks to render the longest of several texts; None if one is no text."""
    if (text := asked.prompt_text) is None:
        return None
    spans = {name: value for name, value in asked.spans.items() if name in PROMPT_DECIDING}
    spans["prompt"] = text
    if asked.model is not None:
        spans["model"] = json.dumps(asked.model).encode()
    return _object(spans)


def _object(members: Mapping[str, bytes]) -> bytes:
    """Returns an object in JSON, of members whose values are JSON already."""
    parts = [b'"%b":%b' % (name.encode(), value) for name, value in members.items()]
    return b"{%b}" % b",".join(parts)


def unwrapped(body: bytes) -> bytes:
    """Returns the object in a list of one, as rendered completions are; else the body itself."""
    stripped = body.strip()
    return stripped[1:-1] if stripped.startswith(b"[") else stripped


def read_tokens(source: TokenSource, body: bytes) -> JsonTokens | None:
    """Returns the tokens in a JSON object, None if it does not have the ids of one prompt."""
    try:
        members = READER.members(body)
    except (TypeError, ValueError):
        return None
    found = members.get("tokens") or members.get("token_ids")
    return JsonTokens(source, body, found) if isinstance(found, int) and found else None
