"""Serves one request: read its tokens, choose an engine, relay the answer, free the booking.

    read ─> tokens ─> choose and book ─> send ─> the answer begins ─> forward ─> end, free
                          ^                          │ nothing begun, or 429, 502, 503, 504
                          └──── another engine <─────┘

If the model has prefill engines, two engines may be chosen and booked (pools). Another engine is
tried only while nothing has been sent to the client, and at most MAX_TRIES in all. An answer with
status 500 is passed on, unless its engine just shuts down: a prompt that breaks one engine must not
meet the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import NamedTuple
from uuid import uuid4

from kvd.gateway import errors
from kvd.gateway.answers import (
    aborted,
    cached_tokens,
    fault,
    first_error,
    is_stream,
    lacks_model,
    paced,
    refuses,
    shuts_down,
)
from kvd.gateway.attempts import Attempt, ChosenEngine, EngineChooser
from kvd.gateway.chains import Chains
from kvd.gateway.choices import Choices
from kvd.gateway.errors import GatewayError, Reason, id_headers
from kvd.gateway.exchanges import FAILURE_TEXTS, Exchange, Exchanges
from kvd.gateway.heads import KEY_HEADERS, EngineHead, read_head, rendered, request_id_of
from kvd.gateway.pools import (
    ConcurrentPrefill,
    EngineRank,
    compute,
    handed_over,
    judge_host,
    meeting,
    taking_over,
)
from kvd.gateway.probing import EngineKind
from kvd.gateway.requests import Api, ClientRequest, passed_gateways, read
from kvd.gateway.stats import Decision, Ended, GatewayStats, TokenSource
from kvd.gateway.tokens import Tokens
from kvd.gateway.upstream import Upstream
from kvd.gateway.upstreams import Served, Upstreams
from kvd.http.relayed import RelayedRequest
from kvd.http.untasked import in_task
from kvd_core.relay.relay import Answer, Ending, ExchangeOutcome

# Stands in for a prefill engine where the engine that answers also does the prefill.
NO_PREFILL = nullcontext()
NOT_BOOKED = ""  # the reservation id of a request that is not booked
MAX_TRIES = 3  # engines that one request is sent to; then its retries end
JSON_LINE = b"content-type: application/json\r\n"
# Keeps proxies between the gateway and its client from buffering a stream.
UNBUFFERED = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
# Payload held before anything is sent to the client; most answers other than streams fit in it.
HOLD_BYTES = 64 * 1024
# APIs whose streams have a last event; streams of other APIs end with their connection.
ENDED_BY_EVENTS = frozenset((Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES))
# Outcomes after which another engine may be tried: this one has not begun to answer.
NOT_BEGUN = frozenset(
    (
        ExchangeOutcome.UNREACHABLE,
        ExchangeOutcome.CONNECT_TIME,
        ExchangeOutcome.NO_ANSWER,
        ExchangeOutcome.BROKEN,
        ExchangeOutcome.MALFORMED,
        ExchangeOutcome.NO_ROOM,
    )
)


class Sent(NamedTuple):
    """How an answer is being sent to a client."""

    events: bool
    chunked: bool
    delimited: bool  # by chunks or a length; else it ends with the connection
    persists: bool  # whether the client's connection stays open after a whole answer


Serve = Callable[[Api, RelayedRequest, bytes], Awaitable[bool]]


class Forwarder:
    """Serves the requests of a gateway's clients."""

    def __init__(
        self,
        upstreams: Upstreams,
        choices: Choices,
        exchanges: Exchanges,
        stats: GatewayStats,
        tokens: Tokens,
        chains: Chains,
        remote_tokens: int,
        *,
        decision_headers: bool = True,
    ) -> None:
        """A prompt goes to a prefill engine if every other would compute `remote_tokens` of it.

        With `decision_headers`, answers carry the `x-kvd-` headers that name the decision.
        """
        self._upstreams = upstreams
        self._choices = choices
        self._exchanges = exchanges
        self._stats = stats
        self._tokens = tokens
        self._chains = chains
        self._decision_headers = decision_headers
        self._prefix = f"gateway-{uuid4().hex[:12]}"
        self._counter = count(1)
        self._chooser = EngineChooser(
            upstreams, choices, stats, tokens, remote_tokens, self._prefix
        )

    def serve(self, api: Api, request: RelayedRequest) -> Awaitable[bool]:
        """Serves one request; returns whether its connection persists.

        Raises OSError if the client is gone.
        """
        return self._serve_any(api, request, self._serve)

    def serve_stored(self, request: RelayedRequest) -> Awaitable[bool]:
        """Serves a request about a stored response, at the engine that keeps it."""
        return self._serve_any(Api.RESPONSES, request, self._serve_stored)

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
        attempt = await self._attempt(api, request, request_id)
        for _ in range(MAX_TRIES):
            chosen = await self._chooser.choose(attempt)
            if chosen is None:
                if not self._is_renamed(attempt):
                    break
                attempt = await self._attempt(api, request, request_id)
                continue
            try:
                if chosen.prefill is None:
                    done = await self._send(request, attempt, chosen, attempt.body)
                else:
                    done = await self._send_both(request, attempt, chosen, chosen.prefill)
            finally:
                self._choices.free(chosen.reservation_id)
            if done is not None:
                return done
            if attempt.refused_again:
                break
        refused = attempt.refused
        if refused is None and isinstance(failure := attempt.prefill_failure, Answer):
            refused = failure if refuses(failure) is not None else None
        if refused is not None:
            return await self._pass_refusal(request, attempt, refused)
        raise _unanswered(attempt, f"no engine has answered: {attempt.failed or 'none is left'}")

    async def _attempt(self, api: Api, request: RelayedRequest, request_id: bytes) -> Attempt:
        """Reads a request, finds its model, engines and tokens; raises GatewayError."""
        asked = read(api, request.headers, request.body)
        self._refuse_if_back(asked.passed)
        served = self._served(asked.model, asked.adapter)
        engines = self._upstreams.serving(served)
        if not engines:
            text = f"no engine that serves {asked.model or served.model} can be used now"
            raise GatewayError(Reason.NO_UPSTREAM, text)
        keeper = self._keeper(asked, self._upstreams.keepers(served))
        basis = self._upstreams.basis(served)
        tokens = await self._tokens.find(asked, served, basis, request.body, engines)
        path = request.target.partition(b"?")[0]
        attempt = Attempt(
            asked,
            served,
            tokens,
            None if tokens is None else tokens.count,
            request_id,
            request.body,
            path,
            request.unless_left,
            bound=keeper,
            is_single=asked.is_single,
        )
        if tokens is None or asked.media:
            attempt.session = self._chains.session(asked, served, _tenant(request))
        return attempt

    def _refuse_if_back(self, passed: bytes) -> None:
        """Raises GatewayError if this gateway is among those that a request has passed."""
        if self._upstreams.gateway_id in passed:
            text = "the request has come back: gateways are engines of each other"
            raise GatewayError(Reason.REQUEST_LOOP, text)

    def _is_renamed(self, attempt: Attempt) -> bool:
        """Returns whether the requested name now stands for another model, with other engines."""
        if attempt.refused is not None or attempt.prefill_failure is not None:
            return False
        return self._upstreams.resolve_model(attempt.served.name) != attempt.served

    async def _serve_stored(self, api: Api, request: RelayedRequest, request_id: bytes) -> bool:
        self._refuse_if_back(passed_gateways(request.headers))
        path = request.target.partition(b"?")[0]
        name = path.split(b"/")[3].decode("latin-1")
        upstream = self._keeper_of(name)
        if upstream is None:
            text = f"no engine is known to keep the response {name}"
            raise GatewayError(Reason.RESPONSE_NOT_FOUND, text)
        assert upstream.facts is not None
        served = Served(upstream.facts.models[0].name)
        asked = ClientRequest(api, None, False, {})
        attempt = Attempt(
            asked,
            served,
            tokens=None,
            prompt_tokens=None,
            request_id=request_id,
            body=request.body,
            path=path,
            while_wanted=request.unless_left,
        )
        rank = upstream.facts.ranks.start
        chosen = ChosenEngine(upstream, rank, NOT_BOOKED, Decision.SESSION, 0, None, None)
        done = await self._send(request, attempt, chosen, request.body)
        if done is not None:
            return done
        if attempt.refused is not None:
            return await self._pass_refusal(request, attempt, attempt.refused)
        raise _unanswered(attempt, f"the engine has not answered: {attempt.failed}")

    def _keeper_of(self, response_id: str) -> Upstream | None:
        """Returns the engine that keeps a response, None if that is unknown or gone.

        Where only one engine can be asked, it may also know ids that the gateway does not.
        """
        engines = [one for one in self._upstreams if one.may_keep]
        worker_id = self._chains.keeper(response_id)
        if worker_id is None and len(engines) == 1:
            return engines[0]
        return next((one for one in engines if one.worker_id == worker_id), None)

    def _keeper(self, asked: ClientRequest, engines: Sequence[Upstream]) -> int | None:
        """Returns the worker that keeps the previous response of a request, None if any may serve.

        Raises GatewayError if that worker is unknown or gone. A vLLM or SGLang engine knows only
        its own responses; other servers may share them.
        """
        if asked.api is not Api.RESPONSES or asked.previous is None:
            return None
        kinds = [one.facts.kind for one in engines if one.facts is not None]
        keeper = self._chains.keeper(asked.previous)
        if keeper is None and (len(engines) == 1 or EngineKind.OPENAI in kinds):
            return None
        if keeper not in [one.worker_id for one in engines]:
            text = f"Previous response with id '{asked.previous}' not found."
            raise GatewayError(Reason.PREVIOUS_NOT_FOUND, text, param="previous_response_id")
        return keeper

    def _served(self, name: str | None, adapter: str | None) -> Served:
        """Returns the model that a name stands for, with an adapter if any; raises GatewayError."""
        if not name:
            name = self._upstreams.only_name()
            if name is None:
                if not self._upstreams.names:
                    self._refuse_if_unknown("any model")
                text = "the request names no model, and the engines do not serve exactly one"
                raise GatewayError(Reason.MODEL_NOT_FOUND, text, param="model")
        named = () if adapter is None else (f"{name}:{adapter}",)
        for each in (*named, name):
            if (served := self._upstreams.resolve_model(each)) is not None:
                return served
        self._refuse_if_unknown(name)
        text = f"The model `{name}` does not exist."
        raise GatewayError(Reason.MODEL_NOT_FOUND, text, param="model")

    def _refuse_if_unknown(self, name: str) -> None:
        """Raises GatewayError if an engine that is still to come or to be asked may have it."""
        if not self._upstreams.each:
            raise GatewayError(Reason.NO_UPSTREAM, "the gateway has no engine")
        if not self._upstreams.all_known():
            text = f"no engine is known to serve {name}, but not all have said what they serve"
            raise GatewayError(Reason.NO_UPSTREAM, text)

    async def _send_both(
        self, request: RelayedRequest, attempt: Attempt, chosen: ChosenEngine, prefill: EngineRank
    ) -> bool | None:
        """Sends the request to both chosen engines; returns None if others may be tried."""
        await in_task()
        if prefill.upstream.engine is None or chosen.upstream.engine is None:
            return None  # it has left meanwhile
        if _is_vllm(prefill):
            return await self._send_in_turn(request, attempt, chosen, prefill)
        body = meeting(attempt.asked, attempt.body, prefill)
        concurrent = ConcurrentPrefill(self._exchanges, request, prefill, attempt.request_id, body)
        done = await self._send(request, attempt, chosen, body, concurrent)
        if concurrent.failure is not None:
            return await self._without_prefill(request, attempt, prefill, concurrent.failure)
        return done

    async def _send_in_turn(
        self, request: RelayedRequest, attempt: Attempt, chosen: ChosenEngine, prefill: EngineRank
    ) -> bool | None:
        """Has the prefill engine compute the prompt, then the other engine take over and answer."""
        assert attempt.prefill_body is not None
        result = await compute(
            self._exchanges, request, prefill, attempt.request_id, attempt.prefill_body
        )
        params = handed_over(result) if isinstance(result, Answer) else None
        if params is None:
            return await self._without_prefill(request, attempt, prefill, result)
        assert isinstance(result, Answer)
        judge_host(params, prefill.upstream, chosen.upstream)
        if (cached := cached_tokens(result.held)) is not None:
            self._note_reported(attempt, chosen, cached)
        self._choices.note_prefilled(chosen.reservation_id)
        body = taking_over(attempt.asked, attempt.body, params)
        return await self._send(request, attempt, chosen, body, takes_over=True)

    async def _without_prefill(
        self,
        request: RelayedRequest,
        attempt: Attempt,
        prefill: EngineRank,
        result: Answer | Ending,
    ) -> bool | None:
        """Notes a failed prefill; passes its answer on if every engine would give the same."""
        if isinstance(result, Ending):
            self._note_not_begun(attempt, prefill.upstream, result)
            cause = prefill.upstream.outcome_of(result.outcome).name.lower()
        elif shuts_down(result):
            prefill.upstream.note_shutting_down()
            cause = "shutting_down"
        elif (refusal := refuses(result)) is not None:
            cause = refusal
        elif fault(result) is not None:
            return await self._pass_refusal(request, attempt, result)
        else:
            cause = "nothing_handed_over"
        self._stats.prefill_failures[cause] += 1
        attempt.prefill_failure = result
        attempt.tried |= {prefill.upstream.worker_id}
        return None

    async def _send(
        self,
        request: RelayedRequest,
        attempt: Attempt,
        chosen: ChosenEngine,
        body: bytes,
        concurrent: ConcurrentPrefill | None = None,
        *,
        takes_over: bool = False,
    ) -> bool | None:
        """Sends a body to the engine that answers; returns None if another try may be made.

        If an engine answers 500 while it `takes_over`, it may have found nothing to take over. The
        next try goes to the same engine, which then computes the prompt itself.
        """
        if chosen.upstream.engine is None:  # it has left while the prompt was computed for it
            return None
        head = chosen.upstream.head(request, attempt.request_id, len(body), chosen.dp_rank)
        async with request.borrow(self._exchanges.limits.client_s) as client_fd:
            with concurrent or NO_PREFILL, self._begin(chosen, head, body, client_fd) as exchange:
                del head, body  # frees them: `attempt` keeps what another try needs
                own = self._own_lines(attempt, chosen)  # made while the engine is at work
                answer = await (concurrent.begins(exchange) if concurrent else exchange.begins())
                if answer is None:
                    sent, ending = None, exchange.ending()
                else:
                    if self._is_declined(attempt, chosen.upstream, answer, takes_over=takes_over):
                        self._chooser.note_refused(attempt, chosen)
                        return None
                    sent = self._forward(request, attempt, chosen, exchange, answer, own)
                    del answer
                    ending = await exchange.ends()
                    if concurrent is not None and ending.outcome is ExchangeOutcome.COMPLETE:
                        await concurrent.ends()
        # Errors are raised out here: the nursery of `borrow` would wrap them in a group.
        if sent is None:
            if concurrent is None or concurrent.failure is None:
                self._note_not_begun(attempt, chosen.upstream, ending)
                self._chooser.note_refused(attempt, chosen)
                attempt.tried |= {chosen.upstream.worker_id}
            return None
        return await self._end(request, attempt, chosen, sent, ending)

    def _begin(self, chosen: ChosenEngine, head: bytes, body: bytes, client_fd: int) -> Exchange:
        engine = chosen.upstream.engine
        assert engine is not None
        return self._exchanges.begin(engine, head, body, HOLD_BYTES, client_fd)

    def _is_declined(
        self, attempt: Attempt, upstream: Upstream, answer: Answer, *, takes_over: bool
    ) -> bool:
        """Returns whether to withhold an answer from the client, as another try may do better."""
        if shuts_down(answer):
            upstream.note_shutting_down()
            self._stats.retries["shutting_down"] += 1
            attempt.refused = answer
            attempt.tried |= {upstream.worker_id}
            return True
        if takes_over and fault(answer) == 500:
            self._stats.prefill_failures["not_taken_over"] += 1
            attempt.prefill_failure, attempt.bound = answer, upstream.worker_id
            return True
        refusal = refuses(answer)
        if refusal is None and attempt.asked.model and lacks_model(answer):
            upstream.ask_anew()
            refusal = "model_gone"
        if refusal is None and aborted(answer):
            refusal = "aborted"
            if not answer.whole:  # a stream, which could not be passed on later
                self._stats.retries[refusal] += 1
                attempt.failed = "it gave the request up"
                attempt.tried |= {upstream.worker_id}
                return True
        if refusal is None:
            return False
        if attempt.refused is None:
            self._stats.retries[refusal] += 1
        elif is_stream(answer):  # passed on as an answer with the status of its error
            attempt.refused_again = True
        else:
            return False
        attempt.refused = answer
        attempt.tried |= {upstream.worker_id}
        return True

    def _forward(
        self,
        request: RelayedRequest,
        attempt: Attempt,
        chosen: ChosenEngine,
        exchange: Exchange,
        answer: Answer,
        own: bytes,
    ) -> Sent:
        """Forwards an answer, with `own` lines in its head, and frees what only a retry needs."""
        engine_head = read_head(answer.head)
        lines = paced(engine_head) + own
        if answer.events:
            lines += UNBUFFERED
            exchange.fill(errors.FILLERS[attempt.asked.api.errors])
        # The length that an engine announces lacks the fillers and error events added here.
        announced = None if answer.events else engine_head.length
        length = len(answer.held) if answer.whole else announced
        head, chunked, persists = request.answer_head(engine_head.status, lines, length)
        exchange.forward(head, chunked=chunked)
        self._choices.note_prefilled(chosen.reservation_id)
        if chosen.way is not None:
            self._stats.ways[chosen.way] += 1
        if fault(answer) not in (None, 500):  # 500: it may have computed the prompt
            self._chooser.note_refused(attempt, chosen)
        self._chains.note_answer(attempt.asked, chosen.upstream.worker_id, answer.held)
        if (later := attempt.later) is not None:
            computing = chosen.prefill or EngineRank(chosen.upstream, chosen.dp_rank)
            facts = computing.upstream.facts
            if facts is not None and not facts.events and fault(answer) is None:
                rank = computing.upstream.worker_id, computing.dp_rank
                computed = partial(self._choices.note_computed, attempt.served.model, rank)
                later = later._replace(computed=computed)
            self._tokens.ask_later(later)
        attempt.release()
        request.release()
        return Sent(answer.events, chunked, chunked or length is not None, persists)

    def _own_lines(self, attempt: Attempt, chosen: ChosenEngine) -> bytes:
        """Returns the lines that the gateway adds to the head of an answer."""
        lines = rendered(id_headers(attempt.asked.api.errors, attempt.request_id))
        return lines + _decision_lines(attempt, chosen) if self._decision_headers else lines

    def _note_not_begun(self, attempt: Attempt, upstream: Upstream, ending: Ending) -> None:
        """Notes an engine that has not answered; raises if no other engine may be tried."""
        outcome = upstream.outcome_of(ending.outcome)
        if outcome is ExchangeOutcome.CLIENT_GONE:
            raise ConnectionResetError("the client left before its answer")
        if outcome not in NOT_BEGUN:
            text = "the engine has sent nothing for too long"
            raise GatewayError(Reason.UPSTREAM_TIMEOUT, text)
        attempt.failed = FAILURE_TEXTS[outcome]
        self._stats.retries[outcome.name.lower()] += 1
        attempt.lacks_room = outcome is ExchangeOutcome.NO_ROOM
        if not attempt.lacks_room:
            upstream.note_gone(attempt.failed, outcome)

    async def _end(
        self,
        request: RelayedRequest,
        attempt: Attempt,
        chosen: ChosenEngine,
        sent: Sent,
        ending: Ending,
    ) -> bool:
        """Counts how an answer ended; returns whether the client's connection persists.

        The client of a stream that broke off is sent an event that says so.
        """
        request.sent_bytes = ending.forwarded
        if ending.outcome is ExchangeOutcome.COMPLETE:
            self._stats.ended[Ended.COMPLETE] += 1
            self._note_cached(attempt, chosen, ending.tail)
            return sent.persists
        if ending.outcome in (ExchangeOutcome.CLIENT_GONE, ExchangeOutcome.CLIENT_STALLED):
            raise ConnectionResetError("the client left during its answer")
        form = attempt.asked.api.errors
        is_whole = sent.events and errors.is_whole(form, ending.tail)
        if ending.outcome is ExchangeOutcome.CLOSED:  # how other APIs' streams end, whole or broken
            is_whole = is_whole or attempt.asked.api not in ENDED_BY_EVENTS
        if not is_whole or ending.outcome is not ExchangeOutcome.CLOSED:
            chosen.upstream.note_gone("it broke off an answer", ending.outcome)
        whole = ending.forwarded == len(ending.tail)
        end = errors.ended(ending.tail, whole=whole) if sent.events else None
        if is_whole:
            # The empty line without which clients drop the last event.
            if end and attempt.asked.api in ENDED_BY_EVENTS:
                await request.send_piece(end, chunked=sent.chunked)
            await request.send_end(chunked=sent.chunked)
            self._stats.ended[Ended.COMPLETE] += 1
            self._note_cached(attempt, chosen, ending.tail)
            return sent.persists
        if end is not None:
            broken = GatewayError(Reason.UPSTREAM_FAILED, "the engine broke off its answer")
            data = errors.event(broken, form, attempt.request_id, ending.tail)
            await request.send_piece(end + data, chunked=sent.chunked)
        self._stats.ended[Ended.BROKEN] += 1
        if not sent.delimited:
            request.reset_at_end()
        return False  # the end of the answer is not sent, so that the client sees it cut

    def _note_cached(self, attempt: Attempt, chosen: ChosenEngine, tail: bytes) -> None:
        """Counts the tokens expected to be cached, and those that the engine reports, if any."""
        if attempt.prompt_tokens is None:
            return
        self._stats.prompt_tokens += attempt.prompt_tokens
        self._stats.matched_tokens += chosen.matched_tokens
        # An engine that takes over reports all tokens handed over to it as cached.
        cached = cached_tokens(tail) if chosen.prefill is None else None
        if cached is not None:
            self._note_reported(attempt, chosen, cached)

    def _note_reported(self, attempt: Attempt, chosen: ChosenEngine, cached: int) -> None:
        """Counts the cached tokens that the engine which computed a prompt reports."""
        if attempt.prompt_tokens is None or not attempt.is_single:
            return
        count, expected = attempt.prompt_tokens, chosen.matched_tokens
        self._stats.reported_matched_tokens += expected
        self._stats.reported_cached_tokens += cached
        prefill = chosen.prefill is not None
        self._choices.note_cached(chosen.reservation_id, count, expected, cached, prefill=prefill)

    async def _pass_refusal(
        self, request: RelayedRequest, attempt: Attempt, answer: Answer
    ) -> bool:
        """Passes on the answer of the last engine that refused.

        An error in the first event of a stream becomes an answer with the status of that error, so
        that clients know that they may retry.
        """
        engine_head, body = read_head(answer.head), answer.held
        if is_stream(answer) and (error := first_error(body)) is not None:
            engine_head, body = EngineHead(error.status, JSON_LINE, None), error.data
        lines = paced(engine_head) + rendered(
            id_headers(attempt.asked.api.errors, attempt.request_id)
        )
        head, _, persists = request.answer_head(engine_head.status, lines, len(body))
        await request.send_piece(body, chunked=False, head=head)
        self._stats.ended[Ended.COMPLETE] += 1
        return persists


def _tenant(request: RelayedRequest) -> str:
    """Returns a prefix made from the client's key, which keeps its sessions apart from others'."""
    if not request.is_checked:
        return ""
    shown = b"\0".join(value for name, value in request.headers if name in KEY_HEADERS)
    return f"{hashlib.blake2b(shown, digest_size=8).hexdigest()}:"


def _unanswered(attempt: Attempt, text: str) -> GatewayError:
    """Returns the error of a request that no engine has answered."""
    if attempt.lacks_room:  # the engines may be well
        return GatewayError(Reason.OVERLOADED, "the gateway has no file descriptor or port left")
    if not attempt.tried:  # all engines have just left
        return GatewayError(Reason.NO_UPSTREAM, "no engine can be used now")
    return GatewayError(Reason.UPSTREAM_FAILED, text)


def _is_vllm(rank: EngineRank) -> bool:
    return rank.upstream.facts is not None and rank.upstream.facts.kind is EngineKind.VLLM


def _decision_lines(attempt: Attempt, chosen: ChosenEngine) -> bytes:
    """Returns the lines of the headers that name the engine and why it was chosen."""
    endpoint_and_decision = chosen.upstream.url.encode(), chosen.decision.encode()
    lines = b"x-kvd-endpoint: %b\r\nx-kvd-decision: %b\r\n" % endpoint_and_decision
    source = TokenSource.NONE
    if (tokens := attempt.tokens) is not None:
        source = tokens.source
        counts = chosen.matched_tokens, tokens.count
        lines += b"x-kvd-matched-tokens: %d\r\nx-kvd-prompt-tokens: %d\r\n" % counts
    if chosen.prefill is not None:
        lines += b"x-kvd-prefill: %b\r\n" % chosen.prefill.upstream.url.encode()
    elif chosen.way is not None:
        lines += b"x-kvd-prefill: %b\r\n" % chosen.way.encode()
    return lines + b"x-kvd-tokens: %b\r\n" % source.encode()
