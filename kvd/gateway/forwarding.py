"""Serves one request: read it, choose an engine, relay the answer, free the booking.

    intake ─> choose and book ─> send ─> the answer begins ─> answering ─> free
                    ^                        │ nothing begun, or 429, 502, 503, 504
                    └──── another engine <───┘

If the model has prefill engines, two engines may be chosen and booked (pools). Another engine is
tried only while nothing has been sent to the client, and at most MAX_TRIES in all. An answer with
status 500 is passed on, unless its engine just shuts down: a prompt that breaks one engine must not
meet the next.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from itertools import count

from kvd.gateway import errors
from kvd.gateway.answering import Answering
from kvd.gateway.answers import (
    aborted,
    cached_tokens,
    fault,
    is_empty,
    is_stream,
    lacks_model,
    refuses,
    shuts_down,
)
from kvd.gateway.attempts import Attempt, ChosenEngine, EngineChooser
from kvd.gateway.chains import Chains
from kvd.gateway.choices import Choices
from kvd.gateway.errors import GatewayError, Reason
from kvd.gateway.exchanges import FAILURE_TEXTS, Exchange, Exchanges
from kvd.gateway.heads import request_id_of
from kvd.gateway.intake import Intake
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
from kvd.gateway.requests import Api
from kvd.gateway.stats import Ended, GatewayStats
from kvd.gateway.tokens import Tokens
from kvd.gateway.upstream import Upstream
from kvd.gateway.upstreams import Upstreams
from kvd.http.relayed import RelayedRequest
from kvd.http.untasked import in_task
from kvd_core.relay.relay import Answer, Ending, ExchangeOutcome

# Stands in for a prefill engine where the engine that answers also does the prefill.
NO_PREFILL = nullcontext()
MAX_TRIES = 3  # engines that one request is sent to; then its retries end
# Payload held before anything is sent to the client; most answers other than streams fit in it.
HOLD_BYTES = 64 * 1024
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
        prefix: str,
        *,
        decision_headers: bool = True,
    ) -> None:
        """A prompt goes to a prefill engine if every other would compute `remote_tokens` of it.

        Ids of reservations and requests begin with `prefix`, which no other process has. With
        `decision_headers`, answers carry the `x-kvd-` headers that name the decision.
        """
        self._choices = choices
        self._exchanges = exchanges
        self._stats = stats
        self._prefix = prefix
        self._counter = count(1)
        self._chooser = EngineChooser(upstreams, choices, stats, tokens, remote_tokens, prefix)
        self._intake = Intake(upstreams, tokens, chains)
        self._answering = Answering(
            choices, self._chooser, stats, tokens, chains, decision_headers=decision_headers
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
        request_id = request_id_of(request.headers, f"{self._prefix}{next(self._counter)}")
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
        attempt = await self._intake.attempt(api, request, request_id)
        for _ in range(MAX_TRIES):
            chosen = await self._chooser.choose(attempt)
            if chosen is None:
                if not self._intake.is_renamed(attempt):
                    break
                attempt = await self._intake.attempt(api, request, request_id)
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
            return await self._answering.pass_refusal(request, attempt, refused)
        raise _unanswered(attempt, f"no engine has answered: {attempt.failed or 'none is left'}")

    async def _serve_stored(self, api: Api, request: RelayedRequest, request_id: bytes) -> bool:
        attempt, chosen = self._intake.stored(api, request, request_id)
        done = await self._send(request, attempt, chosen, request.body)
        if done is not None:
            return done
        if attempt.refused is not None:
            return await self._answering.pass_refusal(request, attempt, attempt.refused)
        raise _unanswered(attempt, f"the engine has not answered: {attempt.failed}")

    async def _send_both(
        self, request: RelayedRequest, attempt: Attempt, chosen: ChosenEngine, prefill: EngineRank
    ) -> bool | None:
        """Sends the request to both chosen engines; returns None if others may be tried."""
        await in_task()
        if prefill.upstream.engine is None or chosen.upstream.engine is None:
            return None  # it has left meanwhile
        if _is_vllm(prefill):
            return await self._send_in_turn(request, attempt, chosen, prefill)
        body = await meeting(attempt.asked, attempt.body, prefill)
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
            self._answering.note_reported(attempt, chosen, cached)
        self._choices.note_prefilled(chosen.reservation_id)
        body = await taking_over(attempt.asked, attempt.body, params)
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
            self._note_not_begun(attempt, prefill.upstream, result.outcome)
            cause = prefill.upstream.outcome_of(result.outcome).name.lower()
        elif shuts_down(result):
            prefill.upstream.note_shutting_down()
            cause = "shutting_down"
        elif (refusal := refuses(result)) is not None:
            cause = refusal
        elif fault(result) is not None:
            return await self._answering.pass_refusal(request, attempt, result)
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
                own = self._answering.own_lines(attempt, chosen)  # made while the engine is at work
                answer = await (concurrent.begins(exchange) if concurrent else exchange.begins())
                if answer is None:
                    sent, ending = None, exchange.ending()
                else:
                    if self._is_declined(attempt, chosen.upstream, answer, takes_over=takes_over):
                        self._chooser.note_refused(attempt, chosen)
                        return None
                    sent = self._answering.forward(request, attempt, chosen, exchange, answer, own)
                    del answer
                    ending = await exchange.ends()
                    if concurrent is not None and ending.outcome is ExchangeOutcome.COMPLETE:
                        await concurrent.ends()
        # Errors are raised out here: the nursery of `borrow` would wrap them in a group.
        if sent is None:
            if concurrent is None or concurrent.failure is None:
                self._note_not_begun(attempt, chosen.upstream, ending.outcome)
                self._chooser.note_refused(attempt, chosen)
                attempt.tried |= {chosen.upstream.worker_id}
            return None
        return await self._answering.end(request, attempt, chosen, sent, ending)

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
        if attempt.body and is_empty(answer):  # of a stored response there may be no more events
            self._note_not_begun(attempt, upstream, ExchangeOutcome.BROKEN)
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

    def _note_not_begun(
        self, attempt: Attempt, upstream: Upstream, outcome: ExchangeOutcome
    ) -> None:
        """Notes an engine that has not answered; raises if no other engine may be tried."""
        outcome = upstream.outcome_of(outcome)
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


def _unanswered(attempt: Attempt, text: str) -> GatewayError:
    """Returns the error of a request that no engine has answered."""
    if attempt.lacks_room:  # the engines may be well
        return GatewayError(Reason.OVERLOADED, "the gateway has no file descriptor or port left")
    if not attempt.tried:  # all engines have just left
        return GatewayError(Reason.NO_UPSTREAM, "no engine can be used now")
    return GatewayError(Reason.UPSTREAM_FAILED, text)


def _is_vllm(rank: EngineRank) -> bool:
    return rank.upstream.facts is not None and rank.upstream.facts.kind is EngineKind.VLLM
