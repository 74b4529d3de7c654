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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any
from uuid import uuid4

from kvd.errors import KvdError, NotFound
from kvd.gateway import errors
from kvd.gateway.asking import Api, Asked, read
from kvd.gateway.chains import Chains
from kvd.gateway.errors import GatewayError, Reason, id_headers
from kvd.gateway.exchanges import Exchange, Exchanges
from kvd.gateway.heads import KEY_HEADERS, EngineHead, read_head, request_head, request_id_of
from kvd.gateway.probing import Kind
from kvd.gateway.stats import Decision, Ended, GatewayStats
from kvd.gateway.tokens import BYTES_PER_TOKEN, PromptTokens, Tokens
from kvd.gateway.upstreams import Served, Standing, Upstream, Upstreams
from kvd.http.relayed import RelayedRequest
from kvd.http.types import Headers, Response
from kvd.model import DEFAULT_TENANT, PartitionKey
from kvd.selection.requests import Constraints, QueuedRequest, SelectRequest
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
    session: str | None = None  # where its tokens are not known
    keeper: int | None = None  # the only worker that may serve it, if there is one
    tried: set[int] = field(default_factory=set)  # worker ids
    refused: Answer | None = None  # what the last one that refused has said
    failed: str | None = None  # why the last one that failed did


Serve = Callable[[Api, RelayedRequest, bytes], Awaitable[bool]]


class Forwarder:
    """Serves the requests of a gateway's clients."""

    def __init__(
        self,
        upstreams: Upstreams,
        selections: Selections,
        exchanges: Exchanges,
        stats: GatewayStats,
        tokens: Tokens,
        chains: Chains,
        *,
        tells: bool = True,
    ) -> None:
        """Clients are told of decisions if it `tells`."""
        self._upstreams = upstreams
        self._selections = selections
        self._exchanges = exchanges
        self._stats = stats
        self._tokens = tokens
        self._chains = chains
        self._tells = tells
        self._prefix = f"gateway-{uuid4().hex[:12]}"
        self._counter = count(1)

    async def serve(self, api: Api, request: RelayedRequest) -> bool:
        """Serves one request; returns whether its connection persists.

        Raises OSError if the client is gone.
        """
        return await self._serve_any(api, request, self._serve)

    async def serve_stored(self, request: RelayedRequest) -> bool:
        """Serves a request about a response that an engine keeps, in the same way."""
        return await self._serve_any(Api.RESPONSES, request, self._serve_stored)

    async def _serve_any(self, api: Api, request: RelayedRequest, serve: Serve) -> bool:
        self._stats.running += 1
        request_id = request_id_of(request.headers, f"{self._prefix}-{next(self._counter)}")
        try:
            return await serve(api, request, request_id)
        except GatewayError as error:
            self._stats.errors[error.reason.value.code] += 1
            self._stats.ended[Ended.REFUSED] += 1
            return await request.respond(errors.response(error, api.errors, request_id))
        except OSError:
            self._stats.ended[Ended.CLIENT_GONE] += 1
            raise
        finally:
            self._stats.running -= 1

    async def _serve(self, api: Api, request: RelayedRequest, request_id: bytes) -> bool:
        asked = read(api, request.headers, request.body)
        served = self._served(asked.model)
        engines = self._upstreams.serving(served)
        if not engines:
            text = f"no engine that serves {asked.model or served.model} can be used now"
            raise GatewayError(Reason.NO_UPSTREAM, text)
        keeper = self._keeper(asked, engines)
        tokens = await self._tokens.of(asked, served, request.body, engines)
        attempt = Attempt(asked, served, tokens, request_id, request.body, keeper=keeper)
        if tokens is None:
            attempt.session = self._chains.session(asked, served, _tenant(request))
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
            return await self._pass_refusal(request, attempt)
        raise GatewayError(
            Reason.UPSTREAM_FAILED, f"no engine has answered: {attempt.failed or 'none is left'}"
        )

    async def _serve_stored(self, api: Api, request: RelayedRequest, request_id: bytes) -> bool:
        name = request.target.split(b"/")[3].partition(b"?")[0].decode("latin-1")
        worker_id = self._chains.keeper(name)
        upstream = None if worker_id is None else self._upstreams.each.get(worker_id)
        if upstream is None or upstream.standing is not Standing.SERVING:
            text = f"no engine is known to keep the response {name}"
            raise GatewayError(Reason.RESPONSE_NOT_FOUND, text)
        assert upstream.facts is not None
        served = Served(upstream.facts.models[0].name)
        attempt = Attempt(Asked(api, None, False, {}), served, None, request_id, request.body)
        chosen = Chosen(upstream, upstream.facts.ranks.start, "", Decision.SESSION, 0)
        done = await self._try(request, attempt, chosen)
        if done is not None:
            return done
        if attempt.refused is not None:
            return await self._pass_refusal(request, attempt)
        raise GatewayError(Reason.UPSTREAM_FAILED, f"the engine has not answered: {attempt.failed}")

    def _keeper(self, asked: Asked, engines: Sequence[Upstream]) -> int | None:
        """Returns the worker that keeps what a request goes on from; raises GatewayError.

        None of vLLM and SGLang knows the responses of another; of other servers that is not known.
        """
        kinds = [one.facts.kind for one in engines if one.facts is not None]
        if asked.api is not Api.RESPONSES or asked.previous is None:
            return None
        keeper = self._chains.keeper(asked.previous)
        if keeper is None and (len(engines) == 1 or Kind.OPENAI in kinds):
            return None
        if keeper not in [one.worker_id for one in engines]:
            text = f"Previous response with id '{asked.previous}' not found."
            raise GatewayError(Reason.PREVIOUS_NOT_FOUND, text, param="previous_response_id")
        return keeper

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
        if attempt.keeper is not None:
            allowed &= {attempt.keeper}
        if not allowed:
            return None
        reservation_id = f"{self._prefix}-{next(self._counter)}"
        key = PartitionKey(served.model, DEFAULT_TENANT)
        fleet = self._selections.fleets.get(key)  # none while its only worker is made anew
        everybody = fleet is not None and allowed == fleet.workers.keys()
        selection = SelectRequest(
            key,
            self._selections.settings(key),
            reservation_id=reservation_id,
            constraints=None if everybody else Constraints(allowed),
            priority_jump=_priority_jump(asked, usable.values()),
            expected_output_tokens=asked.expected_output_tokens,
            lora_name=served.adapter,
            session_id=attempt.session if self._selections.affinity is not None else None,
        )
        bound = self._bound(selection)
        try:
            look = partial(self._look, attempt, list(usable.values()))
            reply = self._selections.scheduler.select(selection, look)
            if isinstance(reply, QueuedRequest):
                rendered = await self._selections.scheduler.wait(reply)
            else:
                rendered = reply.answer
        except KvdError as error:
            raise GatewayError(Reason.NO_UPSTREAM, str(error)) from None
        answer = json.loads(rendered)
        # Engines may have come and gone while the request was queued.
        upstream = self._upstreams.each.get(answer["worker_id"])
        if upstream is None:
            self._free(reservation_id)
            raise GatewayError(Reason.NO_UPSTREAM, "the engine that was chosen has just left")
        is_bound = answer["worker_id"] in (attempt.keeper, bound)
        return self._chosen(attempt, upstream, answer, reservation_id, is_bound=is_bound)

    def _bound(self, selection: SelectRequest) -> int | None:
        """Returns the worker that a request's session is bound to, None without any."""
        affinity = self._selections.affinity
        bound = None if affinity is None else affinity.target(selection)
        return None if bound is None else bound[0]

    def _look(self, attempt: Attempt, engines: Sequence[Upstream], pool: Pool) -> None:
        """Puts the prompt before a pool, and has it remembered, the first time."""
        tokens, asked, served = attempt.tokens, attempt.asked, attempt.served
        if tokens is None:
            size = 0 if asked.api is Api.FORM else len(attempt.body)  # a file is no prompt
            pool.look(b"", b"", max(1, size // BYTES_PER_TOKEN))
            return
        tokens.look(pool, served.adapter, asked.salt)
        if not attempt.tried:
            self._tokens.note(asked, served, attempt.body, tokens, pool, engines)

    def _chosen(
        self,
        attempt: Attempt,
        upstream: Upstream,
        answer: Mapping[str, Any],
        reservation_id: str,
        *,
        is_bound: bool,
    ) -> Chosen:
        tokens = attempt.tokens
        decision = _decision(upstream, tokens, is_bound=is_bound)
        self._stats.decisions[decision] += 1
        return Chosen(
            upstream,
            answer["dp_rank"],
            reservation_id,
            decision,
            0 if tokens is None else tokens.count - answer["effective_prefill_tokens"],
        )

    async def _try(self, request: RelayedRequest, attempt: Attempt, chosen: Chosen) -> bool | None:
        """Sends the request to the engine that was chosen; None if another one may be tried."""
        upstream = chosen.upstream
        assert upstream.engine is not None and upstream.facts is not None
        own, without = _credentials(request, attempt.asked.api, upstream.key)
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
            without,
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
                    worker_id = upstream.worker_id
                    self._chains.note_answer(attempt.asked, worker_id, answer.held)
                    told = _decision_headers(attempt, chosen) if self._tells else []
                    chunked, persists = _forward(request, attempt, exchange, answer, told)
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
            raise GatewayError(Reason.UPSTREAM_TIMEOUT, "the engine has sent nothing for too long")
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
        if answer.events and (end := errors.ended(ending.tail)) is not None:
            broken = GatewayError(Reason.UPSTREAM_FAILED, "the engine broke off its answer")
            form = attempt.asked.api.errors
            told = errors.event(broken, form, attempt.request_id, ending.tail)
            await request.send_piece(end + told, chunked=chunked)
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

    async def _pass_refusal(self, request: RelayedRequest, attempt: Attempt) -> bool:
        """Answers with what the last engine said that refused, as it said it."""
        assert attempt.refused is not None
        said = read_head(attempt.refused.head)
        headers = [*_paced(said), *id_headers(attempt.asked.api.errors, attempt.request_id)]
        self._stats.ended[Ended.COMPLETE] += 1
        return await request.respond(Response(said.status, attempt.refused.held, b"", headers))

    def _prefilled(self, reservation_id: str) -> None:
        with suppress(NotFound):  # its worker has left the fleet, with all that was booked there
            self._selections.reservations.prefill_complete(reservation_id)

    def _free(self, reservation_id: str) -> None:
        with suppress(NotFound):  # as above
            self._selections.reservations.free(reservation_id)


def _tenant(request: RelayedRequest) -> str:
    """Returns what tells the sessions of a client from those of others, where each has a key."""
    if not request.is_checked:
        return ""
    shown = b"\0".join(value for name, value in request.headers if name in KEY_HEADERS)
    return f"{blake2b(shown, digest_size=8).hexdigest()}:"


def _credentials(request: RelayedRequest, api: Api, key: bytes) -> tuple[Headers, frozenset[bytes]]:
    """Returns which key an engine is shown, if not what the client shows, and what is left out.

    A key that was checked here is the gateway's own, and nobody else's to see.
    """
    if request.is_checked:
        return [(b"authorization", b"Bearer " + key)] if key else [], KEY_HEADERS
    said = dict(request.headers)
    if api is Api.MESSAGES and b"authorization" not in said and b"x-api-key" in said:
        return [(b"authorization", b"Bearer " + said[b"x-api-key"])], frozenset()
    return [], frozenset()  # engines of both kinds read no other header than that


def _priority_jump(asked: Asked, engines: Iterable[Upstream]) -> float:
    """Returns how many seconds older a request counts while it waits.

    What it tells the engines counts as it does there: with vLLM lower numbers go first.
    """
    if asked.priority_jump is not None:
        return asked.priority_jump
    vllm = any(one.facts is not None and one.facts.kind is Kind.VLLM for one in engines)
    return float(max(0, -asked.priority if vllm else asked.priority))


def _decision(upstream: Upstream, tokens: PromptTokens | None, *, is_bound: bool) -> Decision:
    assert upstream.facts is not None
    if is_bound:
        return Decision.SESSION
    if tokens is None:
        return Decision.LOAD
    return Decision.OVERLAP if upstream.facts.events else Decision.PREDICTED


def _forward(
    request: RelayedRequest, attempt: Attempt, exchange: Exchange, answer: Answer, told: Headers
) -> tuple[bool, bool]:
    """Sends an answer on; says whether in chunks, and whether the connection persists after it."""
    said = read_head(answer.head)
    length = len(answer.held) if answer.whole else said.length
    headers = _paced(said) + id_headers(attempt.asked.api.errors, attempt.request_id) + told
    if answer.events:
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    head, chunked, persists = request.answer_head(said.status, headers, length)
    if answer.events:
        exchange.fill(errors.FILLERS[attempt.asked.api.errors])
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
