"""Sends a client its answer: an engine's, as it comes, or the refusal of the last engine tried.

the answer begins ──> forward ──> relayed ──> end: whole, or the client is told that it is cut
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from kvd.gateway import errors
from kvd.gateway.answers import cached_tokens, fault, first_error, is_stream, paced
from kvd.gateway.attempts import Attempt, ChosenEngine, EngineChooser
from kvd.gateway.chains import Chains
from kvd.gateway.choices import Choices
from kvd.gateway.errors import GatewayError, Reason, id_headers
from kvd.gateway.exchanges import Exchange
from kvd.gateway.heads import EngineHead, read_head, rendered
from kvd.gateway.pools import EngineRank
from kvd.gateway.probing import EngineKind
from kvd.gateway.requests import Api
from kvd.gateway.stats import Ended, GatewayStats, TokenSource
from kvd.gateway.tokens import Tokens
from kvd.http.relayed import RelayedRequest
from kvd_core.relay.relay import Answer, Ending, ExchangeOutcome

JSON_LINE = b"content-type: application/json\r\n"
# Keeps proxies between the gateway and its client from buffering a stream.
UNBUFFERED = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
# APIs whose streams have a last event; streams of other APIs end with their connection.
ENDED_BY_EVENTS = frozenset((Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES))
# Those whose last event is [DONE]. vLLM and SGLang always send it; some other servers do not.
MARKED = frozenset((Api.CHAT, Api.COMPLETIONS))


class Sent(NamedTuple):
    """How an answer is being sent to a client."""

    events: bool
    chunked: bool
    delimited: bool  # by chunks or a length; else it ends with the connection
    persists: bool  # whether the client's connection stays open after a whole answer


class Answering:
    """Answers clients, and notes what the answers tell."""

    def __init__(
        self,
        choices: Choices,
        chooser: EngineChooser,
        stats: GatewayStats,
        tokens: Tokens,
        chains: Chains,
        *,
        decision_headers: bool,
    ) -> None:
        """With `decision_headers`, answers carry the `x-kvd-` headers that name the decision."""
        self._choices = choices
        self._chooser = chooser
        self._stats = stats
        self._tokens = tokens
        self._chains = chains
        self._decision_headers = decision_headers

    def own_lines(self, attempt: Attempt, chosen: ChosenEngine) -> bytes:
        """Returns the lines that the gateway adds to the head of an answer."""
        lines = rendered(id_headers(attempt.asked.api.errors, attempt.request_id))
        return lines + _decision_lines(attempt, chosen) if self._decision_headers else lines

    def forward(
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
        # A stream has no length here: fillers and error events are added, and its end is kept back
        # if it is not whole.
        length = len(answer.held) if answer.whole else engine_head.length
        length = None if answer.events else length
        facts = chosen.upstream.facts
        is_known = facts is not None and facts.kind is not EngineKind.OPENAI
        marked = answer.events and is_known and attempt.asked.api in MARKED
        head, chunked, persists = request.answer_head(engine_head.status, lines, length)
        exchange.forward(head, chunked=chunked, marked=marked)
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

    async def end(
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

    async def pass_refusal(self, request: RelayedRequest, attempt: Attempt, answer: Answer) -> bool:
        """Passes on the answer of the last engine that refused.

        An error in what is held back of a stream becomes an answer with the status of that error,
        so that clients know that they may retry.
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

    def note_reported(self, attempt: Attempt, chosen: ChosenEngine, cached: int) -> None:
        """Counts the cached tokens that the engine which computed a prompt reports."""
        if attempt.prompt_tokens is None or not attempt.is_single:
            return
        count, expected = attempt.prompt_tokens, chosen.matched_tokens
        self._stats.reported_matched_tokens += expected
        self._stats.reported_cached_tokens += cached
        prefill = chosen.prefill is not None
        self._choices.note_cached(chosen.reservation_id, count, expected, cached, prefill=prefill)

    def _note_cached(self, attempt: Attempt, chosen: ChosenEngine, tail: bytes) -> None:
        """Counts the tokens expected to be cached, and those that the engine reports, if any."""
        if attempt.prompt_tokens is None:
            return
        self._stats.prompt_tokens += attempt.prompt_tokens
        self._stats.matched_tokens += chosen.matched_tokens
        # An engine that takes over reports all tokens handed over to it as cached.
        cached = cached_tokens(tail) if chosen.prefill is None else None
        if cached is not None:
            self.note_reported(attempt, chosen, cached)


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
