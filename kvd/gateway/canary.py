"""The canary: tests whether an engine's events match what it computes.

    text of this moment ── /tokenize ──> ids ── /v1/completions, one token ──> the engine caches it
                                                                                   │ its KV events
    the ids' blocks are found at that engine in the index? <── within SEEN_S ──────┘

If an event endpoint belongs to another engine, or the block size differs, every choice goes wrong
without a sign. The text is new each time, as engines publish nothing for blocks already cached.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from uuid import uuid4

import trio

from kvd.gateway.choices import Choices, Question
from kvd.gateway.exchanges import ExchangeFailed, Exchanges
from kvd.gateway.heads import own_head
from kvd.gateway.probing import Facts
from kvd.selection.worker_record import WorkerRecord
from kvd_core.json.scan import BodyScanner
from kvd_core.selector.selector import Pool

BLOCKS = 3  # blocks of a canary's prompt
TRIES = 2  # failed canaries before an engine's events are not believed
ANSWER_S = 10.0  # time for one answer: an engine that has just started may compile first
SEEN_S = 5.0  # time for the events of a canary to come
POLL_S = 0.02  # pause between two checks whether a canary's blocks are indexed
MAX_TOKENS = 4096  # tokens of a canary's prompt: engines with larger blocks are not tested
ANSWER_BYTES = 256 * 1024  # bytes of an engine's answer to one question

SCANNER = BodyScanner({"token_ids": "u32"})

# Posts members to a path of an engine; returns its answer, None if it does not succeed in time.
Ask = Callable[[str, dict[str, Any]], Awaitable[Any]]


class Canary:
    """Asks engines to prove that their tokens and their events agree."""

    def __init__(self, exchanges: Exchanges, choices: Choices) -> None:
        self._exchanges = exchanges
        self._choices = choices

    async def agrees(
        self, engine: int, authority: bytes, key: bytes, record: WorkerRecord, facts: Facts
    ) -> bool | None:
        """Returns whether an engine's events agree with its tokens.

        Returns None if that cannot be found out: the engine publishes no events, a kvd elsewhere
        receives them, or the engine does not generate from token ids.
        """
        if not facts.events or facts.role is not None:
            return None
        ask = partial(self._ask, engine, authority, key)
        for _ in range(TRIES):
            agrees = await self._try(ask, record, facts)
            if agrees is not False:
                return agrees
        return False

    async def _try(self, ask: Ask, record: WorkerRecord, facts: Facts) -> bool | None:
        model, size = facts.models[0].name, facts.block_size
        count = BLOCKS * size + 1  # the last token is always computed
        if not await self._heard(record) or count > MAX_TOKENS:
            return None
        text = f"{uuid4().hex} " + "the canary sings " * count
        answer = await ask("/tokenize", {"model": model, "prompt": text})
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(ids, list) or len(ids) < count:
            return None
        prompt = ids[:count]
        request = {"model": model, "prompt": prompt, "max_tokens": 1}
        if await ask("/v1/completions", request) is None:
            return None
        body = json.dumps({"token_ids": prompt}).encode()
        return await self._seen(record, size, body)

    async def _heard(self, record: WorkerRecord) -> bool:
        """Waits for a connection to its events; False if that takes too long or is not known."""
        with trio.move_on_after(SEEN_S):
            while (hears := self._choices.hears(record)) is False:  # noqa: ASYNC110 - once at start
                await trio.sleep(POLL_S)
            return hears is True
        return False

    async def _seen(self, record: WorkerRecord, block_size: int, body: bytes) -> bool:
        """Waits until the index has all tokens but the last at this engine; False if late."""

        def lookup(pool: Pool) -> None:
            SCANNER.scan(body)
            pool.match_tokens(SCANNER, 0)

        question = Question(
            record.model_name,
            None,
            block_size,
            lookup,
            reservation_id="",  # nothing is booked
            allowed=frozenset({record.worker_id}),
            session=None,
        )
        with trio.move_on_after(SEEN_S):
            while self._choices.least_prefill_tokens(question) > 1:  # noqa: ASYNC110 - as above
                await trio.sleep(POLL_S)
            return True
        return False

    async def _ask(
        self, engine: int, authority: bytes, key: bytes, path: str, members: dict[str, Any]
    ) -> Any:
        """Returns an engine's answer as `Ask` describes it."""
        body = json.dumps(members).encode()
        head = own_head("POST", path, authority, len(body), key)
        with trio.move_on_after(ANSWER_S):
            try:
                answer = await self._exchanges.ask(engine, head, body, ANSWER_BYTES)
                return json.loads(answer.held) if answer.status == 200 else None
            except (ExchangeFailed, ValueError, RecursionError):  # proves nothing
                return None
        return None
