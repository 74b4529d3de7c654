"""One request: tokens, a choice, a try or several, the answer on its way, the end of the booking.

    read ─> tokens ─> choose and book ─> send ─> the answer begins ─> forward ─> end, free
                          ^                          │ nothing begun, or 429, 502, 503, 504
                          └──── another engine <─────┘

Another engine is tried only while the client has been sent nothing, at most MAX_TRIES in all. An
answer of 500 is passed on: a prompt that breaks an engine must not meet the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from uuid import uuid4

from kvd.errors import KvdError, NotFound
from kvd.gateway import errors
from kvd.gateway.asking import Api, Asked, read
from kvd.gateway.errors import GatewayError, Reason
from kvd.gateway.exchanges import Exchange, Exchanges
from kvd.gateway.heads import EngineHead, read_head, request_head, request_id_of
from kvd.gateway.stats import Decision, Ended, GatewayStats
from kvd.gateway.tokens import BYTES_PER_TOKEN, Later, PromptTokens, Tokens
from kvd.gateway.upstreams import Served, Upstream, Upstreams
from kvd.http.relayed import RelayedRequest
from kvd.http.types import Headers, Response
from kvd.http.untasked import in_task
from kvd.model import DEFAULT_TENANT, PartitionKey
from kvd.selection.at_once import AtOnce, Booked, StepsAtOnce
from kvd.selection.requests import Constraints, Look, QueuedRequest, SelectRequest
from kvd.selection.service import Selections
from kvd_core.relay.relay import Answer, Ending, Outcome
from kvd_core.selector.selector import Pool

MAX_TRIES = 3  # engines that one request is sent to
# Payload that is held before a client is sent anything: answers that are no streams mostly fit.
HOLD_BYTES = 64 * 1024
# Statuses with which an engine says that it has done nothing, and another one may.
NOT_DONE = frozenset((429, 502, 503, 504))
# In the usage of an answer; an engine that keeps it for itself says null.
CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d{1,9})\b')
# Outcomes of which another engine knows nothing.
NOT_BEGUN = frozenset(
    (
        Outcome.UNREACHABLE,
        Outcome.CONNECT_TIME,
        Outcome.NO_ANSWER,
        Outcome.BROKEN,
        Outcome.MALFORMED,
    )
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Who serves a request, and what was expected of that."""

    upstream: Upstream
    dp_rank: int
    reservation_id: str
    decision: Decision
    matched_tokens: int  # of a prompt whose tokens are known


@dataclass(slots=True)
class Attempt:
    """What is known of a request while engines are tried."""

    asked: Asked
    served: Served
    tokens: PromptTokens | None
    request_id: bytes
    body: bytes
    tried: set[int] = field(default_factory=set)  # worker ids
    refused: Answer | None = None  # what the last one that refused has said
    failed: str | None = None  # why the last one that failed did
    later: Later | None = None  # the tokens to ask for once the answer has begun


class Forwarder:
    """Serves the requests of a gateway's clients."""

    def __init__(
        self,
        upstreams: Upstreams,
        selections: Selections,
        exchanges: Exchanges,
        stats: GatewayStats,
        tokens: Tokens,
    ) -> None:
        self._upstreams = upstreams
        self._selections = selections
        self._at_once, self._steps = AtOnce(selections), StepsAtOnce(selections)
        self._exchanges = exchanges
        self._stats = stats
        self._tokens = tokens
        self._prefix = f"gateway-{uuid4().hex[:12]}"
        self._counter = count(1)

    async def serve(self, api: Api, request: RelayedRequest) -> bool:
        """Serves one request; returns whether its connection persists.

        Raises OSError if the client is gone.
        """
        self._stats.running += 1
        try:
            return await self._serve(api, request)
        except GatewayError as error:
            self._stats.errors[error.reason.value.code] += 1
            self._stats.ended[Ended.REFUSED] += 1
            answer = errors.response(error, anthropic=api is Api.MESSAGES)
            return await request.respond(answer)
        except OSError:
            self._stats.ended[Ended.CLIENT_GONE] += 1
            raise
        finally:
            self._stats.running -= 1

    async def _serve(self, api: Api, request: RelayedRequest) -> bool:
        asked = read(api, request.headers, request.body)
        served = self._served(asked.model)
        engines = self._upstreams.serving(served)
        if not engines:
            text = f"no engine that serves {asked.model or served.model} can be used now"
            raise GatewayError(Reason.NO_UPSTREAM, text)
        tokens = await self._tokens.of(asked, served, request.body, engines)
        made = f"{self._prefix}-{next(self._counter)}"
        request_id = request_id_of(request.headers, made)
        attempt = Attempt(asked, served, tokens, request_id, request.body)
        for _ in range(min(MAX_TRIES, len(engines))):
            chosen = await self._choose(attempt)
            if chosen is None:
                break
            try:
                done = await self._try(request, attempt, chosen)
            finally:
                self._free(chosen.reservation_id)
            if done is not None:
                return done
            attempt.tried.add(chosen.upstream.worker_id)
        if attempt.refused is not None:
            return await self._pass_refusal(request, attempt.refused, attempt.request_id)
        raise GatewayError(
            Reason.UPSTREAM_FAILED, f"no engine has answered: {attempt.failed or 'none is left'}"
        )

    def _served(self, name: str | None) -> Served:
        """Returns what a model's name stands for; raises GatewayError."""
        if not name:
            name = self._upstreams.only_name()
            if name is None:
                text = "the request names no model, and there is not exactly one"
                raise GatewayError(Reason.MODEL_NOT_FOUND, text, param="model")
        served = self._upstreams.names.get(name)
        if served is None:
            text = f"The model `{name}` does not exist."
            raise GatewayError(Reason.MODEL_NOT_FOUND, text, param="model")
        return served

    async def _choose(self, attempt: Attempt) -> Chosen | None:
        """Chooses and books; None if nobody is left. Raises GatewayError."""
        asked, served = attempt.asked, attempt.served
        usable = {one.worker_id: one for one in self._upstreams.serving(served)}
        allowed = frozenset(usable.keys() - attempt.tried)
        if not allowed:
            return None
        reservation_id = f"{self._prefix}-{next(self._counter)}"
        key = PartitionKey(served.model, DEFAULT_TENANT)
        fleet = self._selections.fleets.get(key)  # none while its only worker is made anew
        everybody = fleet is not None and allowed == fleet.workers.keys()
        look: Look = partial(self._look, attempt, list(usable.values()))
        session = self._session(attempt)
        try:
            if (
                fleet is not None
                and everybody
                and self._at_once.suits(fleet, reservation_id, session)
            ):
                look(fleet.pool)
                expected = asked.expected_output_tokens
                booked = self._at_once.select(fleet, reservation_id, expected)
                if booked is not None:
                    return self._chosen(attempt, booked, reservation_id)
                look = has_looked
            selection = SelectRequest(
                key,
                self._selections.settings(key),
                reservation_id=reservation_id,
                constraints=None if everybody else Constraints(allowed),
                strict_priority=asked.priority,
                expected_output_tokens=asked.expected_output_tokens,
                lora_name=served.adapter,
                session_id=session,
            )
            reply = self._selections.scheduler.select(selection, look)
            if isinstance(reply, QueuedRequest):
                await in_task()
                rendered = await self._selections.scheduler.wait(reply)
            else:
                rendered = reply.answer
        except KvdError as error:
            raise GatewayError(Reason.NO_UPSTREAM, str(error)) from None
        said = json.loads(rendered)
        members = said["worker_id"], said["dp_rank"], said["effective_prefill_tokens"]
        return self._chosen(attempt, Booked(*members), reservation_id)

    def _session(self, attempt: Attempt) -> str | None:
        """Returns the session that binds a request: only where nothing better is known of it."""
        if attempt.tokens is not None or self._selections.affinity is None:
            return None
        return attempt.asked.session

    def _look(self, attempt: Attempt, engines: Sequence[Upstream], pool: Pool) -> None:
        """Puts the prompt before a pool, and has it remembered, the first time."""
        tokens, asked, served = attempt.tokens, attempt.asked, attempt.served
        if tokens is None:
            pool.look(b"", b"", max(1, len(attempt.body) // BYTES_PER_TOKEN))
            return
        tokens.look(pool, served.adapter, asked.salt)
        if not attempt.tried:
            attempt.later = self._tokens.note(asked, served, attempt.body, tokens, pool, engines)

    def _chosen(self, attempt: Attempt, booked: Booked, reservation_id: str) -> Chosen:
        # Engines may have come and gone while the request was queued.
        upstream = self._upstreams.each.get(booked.worker_id)
        if upstream is None:
            self._free(reservation_id)
            raise GatewayError(Reason.NO_UPSTREAM, "the engine that was chosen has just left")
        tokens = attempt.tokens
        decision = _decision(upstream, tokens)
        self._stats.decisions[decision] += 1
        matched = 0 if tokens is None else tokens.count - booked.prefill_tokens
        return Chosen(upstream, booked.dp_rank, reservation_id, decision, matched)

    async def _try(self, request: RelayedRequest, attempt: Attempt, chosen: Chosen) -> bool | None:
        """Sends the request to the engine that was chosen; None if another one may be tried."""
        upstream = chosen.upstream
        assert upstream.engine is not None and upstream.facts is not None
        own: Headers = []
        if len(upstream.facts.ranks) > 1:
            rank = chosen.dp_rank - upstream.facts.ranks.start  # it counts its own from 0
            own.append((b"x-data-parallel-rank", b"%d" % rank))
        head = request_head(
            request.method,
            request.target,
            request.headers,
            upstream.authority,
            len(request.body),
            attempt.request_id,
            own,
        )
        begin = partial(self._exchanges.begin, upstream.engine, head, request.body, HOLD_BYTES)
        async with request.lent() as client_fd:
            with begin(client_fd) as exchange:
                answer = await exchange.begins()
                if answer is None:
                    ending = exchange.ending()
                else:
                    self._prefilled(chosen.reservation_id)
                    if (refusal := _refuses(answer)) is not None and attempt.refused is None:
                        self._stats.retries[refusal] += 1
                        attempt.refused = answer
                        return None
                    chunked, persists = _forward(request, attempt, chosen, exchange, answer)
                    if attempt.later is not None:
                        self._tokens.ask_later(attempt.later)
                        attempt.later = None
                    ending = await exchange.ends()
        # Raised here, where no nursery of a lent socket makes a group of it.
        if answer is None:
            self._note_not_begun(attempt, upstream, ending)
            return None
        return await self._end(request, attempt, chosen, answer, ending, chunked, persists)

    def _note_not_begun(self, attempt: Attempt, upstream: Upstream, ending: Ending) -> None:
        """Takes note of an engine that has not answered; raises what keeps others from a try."""
        outcome = ending.outcome
        if outcome is Outcome.CLIENT_GONE:
            raise ConnectionResetError("the client left before its answer")
        if outcome not in NOT_BEGUN:
            text = f"the engine has sent nothing for too long ({upstream.url})"
            raise GatewayError(Reason.UPSTREAM_TIMEOUT, text)
        attempt.failed = outcome.name.lower().replace("_", " ")
        self._stats.retries[outcome.name.lower()] += 1
        upstream.note_gone(attempt.failed)

    async def _end(
        self,
        request: RelayedRequest,
        attempt: Attempt,
        chosen: Chosen,
        answer: Answer,
        ending: Ending,
        chunked: bool,
        persists: bool,
    ) -> bool:
        """Takes note of how an answer has ended; says whether the client's connection persists."""
        if ending.outcome is Outcome.COMPLETE:
            self._stats.ended[Ended.COMPLETE] += 1
            self._note_cached(attempt, chosen, ending.tail)
            return persists
        if ending.outcome in (Outcome.CLIENT_GONE, Outcome.CLIENT_STALLED):
            raise ConnectionResetError("the client left during its answer")
        self._stats.ended[Ended.BROKEN] += 1
        chosen.upstream.note_gone("it broke off an answer")
        if answer.events:
            broken = GatewayError(Reason.UPSTREAM_FAILED, "the engine broke off its answer")
            told = errors.event(broken, anthropic=attempt.asked.api is Api.MESSAGES)
            ended = ending.tail.endswith((b"\n\n", b"\r\n\r\n"))
            await request.send_piece(told if ended else b"\n\n" + told, chunked=chunked)
        return False  # without the end of the answer, so that the client sees it cut

    def _note_cached(self, attempt: Attempt, chosen: Chosen, tail: bytes) -> None:
        """Counts what was expected to be cached, beside what the engine says if it does."""
        if attempt.tokens is None:
            return
        self._stats.prompt_tokens += attempt.tokens.count
        self._stats.matched_tokens += chosen.matched_tokens
        cached = cached_tokens(tail)
        if cached is not None:
            self._stats.reported_matched_tokens += chosen.matched_tokens
            self._stats.reported_cached_tokens += cached
            key = PartitionKey(attempt.served.model, DEFAULT_TENANT)
            rank = key, chosen.upstream.worker_id, chosen.dp_rank
            self._selections.regret.note_cached(rank, chosen.matched_tokens, cached)

    async def _pass_refusal(
        self, request: RelayedRequest, answer: Answer, request_id: bytes
    ) -> bool:
        """Answers with what the last engine said that refused, as it said it."""
        said = read_head(answer.head)
        headers = [*_paced(said), (b"x-request-id", request_id)]
        self._stats.ended[Ended.COMPLETE] += 1
        return await request.respond(Response(said.status, answer.held, b"", headers))

    def _prefilled(self, reservation_id: str) -> None:
        with suppress(NotFound):  # its worker has left the fleet, with all that was booked there
            self._steps.prefill_complete(reservation_id)

    def _free(self, reservation_id: str) -> None:
        with suppress(NotFound):  # as above
            self._steps.free(reservation_id)


def has_looked(pool: Pool) -> None:
    """Does nothing: the pool has looked at the prompt already."""


def _decision(upstream: Upstream, tokens: PromptTokens | None) -> Decision:
    assert upstream.facts is not None
    if tokens is None:
        return Decision.LOAD
    return Decision.OVERLAP if upstream.facts.events else Decision.PREDICTED


def _forward(
    request: RelayedRequest, attempt: Attempt, chosen: Chosen, exchange: Exchange, answer: Answer
) -> tuple[bool, bool]:
    """Sends an answer on; says whether in chunks, and whether the connection persists after it."""
    said = read_head(answer.head)
    length = len(answer.held) if answer.whole else said.length
    headers = _paced(said) + _decision_headers(attempt, chosen)
    if answer.events:
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    head, chunked, persists = request.answer_head(said.status, headers, length)
    exchange.forward(head, chunked=chunked)
    return chunked, persists


def _refuses(answer: Answer) -> str | None:
    """Returns what an engine has refused with if another one may do better, else None."""
    status = event_error(answer.held) if answer.events else answer.status
    whole = answer.whole or answer.events
    return str(status) if whole and status in NOT_DONE else None


def _paced(said: EngineHead) -> Headers:
    """Returns the headers of an answer; one that refuses for now says when to come again."""
    paced = said.status not in (429, 503) or any(name == b"retry-after" for name, _ in said.headers)
    return said.headers if paced else [*said.headers, (b"retry-after", b"1")]


def cached_tokens(tail: bytes) -> int | None:
    """Returns the cached tokens in the usage at the end of an answer, None if it has none."""
    found = CACHED_TOKENS.findall(tail)
    return int(found[-1]) if found else None


def event_error(held: bytes) -> int | None:
    """Returns the status of an error that is the first event of a stream, None if it is no error.

    Engines that have begun to answer with 200 say in this way that they are overloaded.
    """
    if b'"error"' not in held:
        return None
    for line in held.splitlines():
        if line.startswith(b"data:"):
            try:
                told = json.loads(line[5:])
            except (ValueError, RecursionError):  # whatever it is, it is no error
                return None
            error = told.get("error") if isinstance(told, dict) else None
            code = error.get("code") if isinstance(error, dict) else None
            return code if isinstance(code, int) else None
    return None


def _decision_headers(attempt: Attempt, chosen: Chosen) -> Headers:
    headers: Headers = [
        (b"x-request-id", attempt.request_id),
        (b"x-kvd-endpoint", chosen.upstream.url.encode()),
        (b"x-kvd-decision", chosen.decision.encode()),
    ]
    if attempt.tokens is not None:
        headers += [
            (b"x-kvd-matched-tokens", b"%d" % chosen.matched_tokens),
            (b"x-kvd-prompt-tokens", b"%d" % attempt.tokens.count),
        ]
    rung = b"none" if attempt.tokens is None else attempt.tokens.rung.encode()
    headers.append((b"x-kvd-tokens", rung))
    return headers
