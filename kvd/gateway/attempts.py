"""Chooses the next engine for a request among the healthy ones not tried yet.

    its eligible engines (pools) ──> way ──> Question ──> Placement, booked ──> ChosenEngine

An Attempt is all that is known of a request while engines are tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

from kvd.errors import KvdError
from kvd.gateway.choices import Choices, Placement, Question, WhileWanted, always_wanted
from kvd.gateway.errors import GatewayError, Reason
from kvd.gateway.pools import (
    LIMITS,
    EligibleEngines,
    EngineRank,
    eligible_engines,
    prefill_body,
    worker_ids,
)
from kvd.gateway.probing import EngineKind
from kvd.gateway.requests import Api, ClientRequest
from kvd.gateway.stats import Decision, GatewayStats, PrefillPath
from kvd.gateway.tokens import BYTES_PER_TOKEN, Later, PromptTokens, Tokens
from kvd.gateway.upstream import Upstream
from kvd.gateway.upstreams import Served, Upstreams
from kvd.selection.phases import Phase
from kvd_core.prompts.conversations import data_bytes
from kvd_core.relay.relay import Answer, Ending
from kvd_core.selector.selector import Pool, Prompt

MAX_CHOICES = 3  # choices in a row of engines that have left by the time the choice is made
# Stands in for a request, by API, once its answer is on its way: only the API is still needed.
ANSWERED = {api: ClientRequest(api, None, False, {}) for api in Api}


class ChosenEngine(NamedTuple):
    """The engine that serves a request, and the cached tokens expected there."""

    upstream: Upstream
    dp_rank: int
    reservation_id: str
    decision: Decision
    matched_tokens: int  # 0 for a prompt whose tokens are not known
    way: PrefillPath | None  # None: its model has no prefill engine
    prefill: EngineRank | None  # the rank that computes the prompt for `upstream`; None: itself


@dataclass(slots=True)
class Attempt:
    """The state of a request while engines are tried."""

    asked: ClientRequest
    served: Served
    tokens: PromptTokens | None
    prompt_tokens: int | None  # None: not known
    request_id: bytes
    body: bytes
    path: bytes
    while_wanted: WhileWanted
    tried: frozenset[int] = frozenset()  # worker ids
    refused: Answer | None = None  # the answer of the last engine that refused
    refused_again: bool = False  # a second engine has refused: no further one is tried
    failed: str | None = None  # why the last engine that failed did so
    lacks_room: bool = False  # that was because this process has no descriptor or port left
    later: Later | None = None  # the tokens to ask for once the answer has begun
    prompt: tuple[Prompt, int] | None = None  # as a pool matched it, and the pool's block size
    prefill_body: bytes | None = None  # for a prefill engine of vLLM, once it is needed
    # How the last exchange ended that should have handed over the prompt and did not.
    prefill_failure: Answer | Ending | None = None
    bound: int | None = None  # the only worker that may still be tried; None: any
    session: str | None = None  # decides where not all tokens of the prompt are known
    is_single: bool = True  # the cached tokens that its engine reports are those of its prompt

    def release(self) -> None:
        """Frees what only another try would need: it may be most of a long answer's memory."""
        self.asked = ANSWERED[self.asked.api]
        self.body, self.prefill_body, self.path = b"", None, b""
        self.tokens, self.prompt, self.later = None, None, None
        self.refused, self.prefill_failure = None, None
        self.while_wanted = always_wanted

    @property
    def tokens_needed(self) -> int:
        """Returns the context that the prompt and its answer need, as far as that is known."""
        if self.prompt_tokens is None:
            return 0
        return self.prompt_tokens + (self.asked.expected_output_tokens or 1)

    def held_by(self, engines: Sequence[Upstream]) -> Sequence[Upstream]:
        """Returns the engines whose context is long enough; all, to refuse it, if none's is."""
        return [one for one in engines if self.tokens_needed <= _context(one)] or engines

    def may_try(self, upstream: Upstream) -> bool:
        worker_id = upstream.worker_id
        return worker_id not in self.tried and self.bound in (None, worker_id)


class EngineChooser:
    """Chooses and books engines for requests."""

    def __init__(
        self,
        upstreams: Upstreams,
        choices: Choices,
        stats: GatewayStats,
        tokens: Tokens,
        remote_tokens: int,
        prefix: str,
    ) -> None:
        """A prompt goes to a prefill engine if every other would compute `remote_tokens` of it.

        Names of reservations begin with `prefix`, which no other process has.
        """
        self._upstreams = upstreams
        self._choices = choices
        self._stats = stats
        self._tokens = tokens
        self._remote_tokens = remote_tokens
        self._prefix = prefix
        # For requests not tried yet, by model and whether they generate: the engines that serve,
        # their eligible engines, and the tokens of the longest request that all of them take.
        self._eligible_by_kind: dict[
            tuple[Served, bool], tuple[Sequence[Upstream], EligibleEngines, float]
        ] = {}
        self._counter = count(1)

    async def choose(self, attempt: Attempt) -> ChosenEngine | None:
        """Chooses and books an engine; returns None if none is left.

        Raises GatewayError, or OSError if the client leaves meanwhile.
        """
        for _ in range(MAX_CHOICES):
            is_bound = attempt.bound is not None
            engines_of = self._upstreams.keepers if is_bound else self._upstreams.serving
            serving = engines_of(attempt.served)
            eligible = self._eligible(attempt, serving)
            try:
                way = await self._way(attempt, eligible)
                engines = eligible.pairs if way is PrefillPath.REMOTE else eligible.alone
                if not engines:
                    if serving and not attempt.tried:
                        text = "needs both a prefill engine and one that takes over from it"
                        raise GatewayError(Reason.NO_UPSTREAM, f"{attempt.served.model} {text}")
                    return None
                phase = Phase.BOTH if way is PrefillPath.REMOTE else None
                allowed = eligible.alone_ids if engines is eligible.alone else worker_ids(engines)
                question = self._question(attempt, engines, allowed, phase)
                placement = await self._choices.choose(question)
            except GatewayError:
                raise
            except KvdError as error:
                raise GatewayError(Reason.NO_UPSTREAM, str(error)) from None
            chosen = self._chosen(attempt, placement, question.reservation_id, way, eligible)
            if chosen is not None:
                return chosen
            self._choices.free(question.reservation_id)
        raise GatewayError(Reason.NO_UPSTREAM, "the chosen engine has just been removed")

    def note_refused(self, attempt: Attempt, chosen: ChosenEngine) -> None:
        """Notes that the chosen engine has not computed the prompt, and is not going to.

        Of two engines, the one that prefills may have computed it all the same.
        """
        known = attempt.prompt if attempt.tokens is not None else None
        if known is not None and chosen.prefill is None:
            self._choices.note_refused(chosen.reservation_id, known[0])

    def _eligible(self, attempt: Attempt, serving: Sequence[Upstream]) -> EligibleEngines:
        if attempt.tried or attempt.bound is not None:
            left = [one for one in serving if attempt.may_try(one)]
            return eligible_engines(attempt.held_by(left), attempt.path)
        kind = attempt.served, attempt.path in LIMITS
        known = self._eligible_by_kind.get(kind)
        if known is None or known[0] is not serving:
            if known is not None:  # an engine has changed, so any model's eligible ones may have
                self._eligible_by_kind.clear()
            eligible = eligible_engines(serving, attempt.path)
            known = self._eligible_by_kind[kind] = serving, eligible, _shortest_context(serving)
        if attempt.tokens_needed <= known[2]:
            return known[1]
        return eligible_engines(attempt.held_by(serving), attempt.path)

    async def _way(self, attempt: Attempt, eligible: EligibleEngines) -> PrefillPath | None:
        """Returns the way a prompt is computed, None if its model has no prefill engine."""
        if attempt.path not in LIMITS or not self._upstreams.prefills(attempt.served):
            return None
        if not eligible.pairs or (attempt.prefill_failure is not None and eligible.alone):
            return PrefillPath.FALLBACK
        if not eligible.alone:
            return PrefillPath.REMOTE
        question = self._question(attempt, eligible.alone, eligible.alone_ids, None)
        if self._choices.least_prefill_tokens(question) < self._remote_tokens:
            return PrefillPath.SHORT
        if attempt.prefill_body is None:
            attempt.prefill_body = await prefill_body(attempt.asked, attempt.path, attempt.body)
        return PrefillPath.UNSUITED if attempt.prefill_body is None else PrefillPath.REMOTE

    def _question(
        self,
        attempt: Attempt,
        engines: Sequence[Upstream],
        allowed: frozenset[int],
        phase: Phase | None,
    ) -> Question:
        facts, asked = engines[0].facts, attempt.asked
        assert facts is not None
        return Question(
            attempt.served.model,
            attempt.served.adapter,
            facts.block_size,
            partial(self._match, attempt, engines),
            f"{self._prefix}{next(self._counter)}",
            allowed,
            attempt.session,
            _priority_jump(asked, facts.kind),
            asked.expected_output_tokens,
            phase,
            attempt.while_wanted,
        )

    def _match(self, attempt: Attempt, engines: Sequence[Upstream], pool: Pool) -> None:
        """Matches the prompt against a pool; on the first try it is also remembered."""
        if attempt.prompt is not None and attempt.prompt[1] == pool.block_size:
            return pool.match_again(attempt.prompt[0])
        tokens, asked, served = attempt.tokens, attempt.asked, attempt.served
        if tokens is None:
            size = 0 if asked.api is Api.FORM else len(attempt.body)  # a file is no prompt
            if asked.media:
                size -= data_bytes(attempt.body)
            pool.match(b"", b"", max(1, size // BYTES_PER_TOKEN))
        else:
            tokens.match(pool, served.adapter, asked.salt)
            if not attempt.tried:
                basis = self._upstreams.basis(served)
                attempt.later = self._tokens.note(
                    asked, served, basis, attempt.body, tokens, pool, engines
                )
            if not asked.reads_cache:
                pool.match(b"", b"", tokens.count)
        attempt.prompt = pool.hold(), pool.block_size

    def _chosen(
        self,
        attempt: Attempt,
        placement: Placement,
        reservation_id: str,
        way: PrefillPath | None,
        eligible: EligibleEngines,
    ) -> ChosenEngine | None:
        """Returns the engine of a placement; None if it has left, or lacks a prefill engine."""
        tokens = attempt.tokens
        computes = placement.prefill or placement
        # Engines may have come and gone while the request was queued.
        upstream = self._upstreams.each.get(placement.worker_id)
        computing = self._upstreams.each.get(computes.worker_id)
        if upstream is None or upstream.facts is None:
            return None
        if computing is None or computing.facts is None:
            return None
        if way is PrefillPath.REMOTE and placement.prefill is None:
            if upstream not in eligible.alone:
                return None
            way = PrefillPath.FALLBACK
        decision = _decision(attempt, computing, placement)
        self._stats.decisions[decision] += 1
        return ChosenEngine(
            upstream,
            placement.dp_rank,
            reservation_id,
            decision,
            0 if tokens is None else tokens.count - computes.prefill_tokens,
            way,
            None if placement.prefill is None else EngineRank(computing, computes.dp_rank),
        )


def _context(upstream: Upstream) -> float:
    context = None if upstream.facts is None else upstream.facts.context
    return math.inf if context is None else context


def _shortest_context(engines: Sequence[Upstream]) -> float:
    return min(map(_context, engines), default=math.inf)


def _priority_jump(asked: ClientRequest, kind: EngineKind) -> float:
    """Returns by how many seconds a request counts as older while it waits.

    `priority` means what it means to the engine: with vLLM lower numbers go first.
    """
    if asked.priority_jump is not None:
        return asked.priority_jump
    return float(max(0, -asked.priority if kind is EngineKind.VLLM else asked.priority))


def _decision(attempt: Attempt, upstream: Upstream, placement: Placement) -> Decision:
    assert upstream.facts is not None
    if placement.by_load:
        return Decision.FALLBACK
    if placement.by_session or attempt.bound is not None:
        return Decision.SESSION
    if attempt.tokens is None:
        return Decision.LOAD
    return Decision.OVERLAP if upstream.facts.events else Decision.PREDICTED
