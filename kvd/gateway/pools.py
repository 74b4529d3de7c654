"""Two engines for one request: one computes the prompt, the other takes it over and answers.

    vLLM     request, one token ──> prefill ── kv_transfer_params
                                                       v
             request with these ──────────────────> decode ──> the answer

    SGLang   request, where they meet ──┬──> prefill ──> an answer that nobody needs
                                        └──> decode ──> the answer

    way        when
    remote     a prefill engine and one that takes over from it are well
    short      computing the uncached rest of the prompt is faster than handing it over
    unsuited   the answer needs what only the computing engine knows, or would be computed twice
    fallback   no prefill engine could be used, or the chosen one has failed

In the last three cases one engine also computes the prompt, as every vLLM engine can. SGLang's
decode engines cannot: if a model has no others, every request is handed over, and after a failed
prefill it gets another prefill engine.

Both engines are chosen and booked in one step (kvd.selection.phases): the prefill engine by cached
tokens and the tokens being prefilled, the engine that answers by the blocks in use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import SystemRandom
from types import TracebackType
from typing import NamedTuple

import trio

from kvd.gateway.answers import fault
from kvd.gateway.errors import GatewayError, Reason
from kvd.gateway.exchanges import Exchange, Exchanges
from kvd.gateway.probing import EngineKind
from kvd.gateway.requests import FLEET_MEMBERS, MAX_PROMPTS, ClientRequest, count_texts
from kvd.gateway.upstream import Upstream
from kvd.http.relayed import RelayedRequest
from kvd.http.scanning import scanned_ahead
from kvd.selection.worker_record import Role
from kvd.telemetry.logs import get_logger
from kvd.wire.hosts import literal
from kvd_core.json.scan import BodyScanner
from kvd_core.relay.relay import Answer, Ending, ExchangeOutcome

# Prompts with fewer tokens that are not cached are computed by the engine that answers.
DEFAULT_REMOTE_TOKENS = 2048
# Bytes of a prefill engine's answer: several times the block numbers of a million tokens.
HANDED_BYTES = 16 * 1024 * 1024
# Time for one engine of an SGLang pair to end after the other has failed or is done, seconds.
LOST_S = 1.0

# For each path that generates, the members that limit the answer; the first is always sent.
LIMITS = {
    b"/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    b"/v1/completions": ("max_tokens",),
    b"/v1/messages": ("max_tokens",),
    b"/v1/responses": ("max_output_tokens",),
}
# Members that a prefill engine of vLLM is not sent: its answer is one token, which nobody reads.
NOT_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "min_completion_tokens",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "store",
    "n",
)
# With these members only the engine that computed the prompt, or keeps a state, can answer.
UNSUITED = ("echo", "prompt_logprobs", "use_beam_search", "previous_response_id", "background")
OFF = (b"null", b"false")
HAND_OVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PARAMS = "kv_transfer_params"
SCANNER = BodyScanner({}, (), (PARAMS,))
# The members that a prefill engine of vLLM is not sent, or not as they are, by path.
CHANGED = {
    path: BodyScanner({}, (), (*NOT_FOR_PREFILL, *UNSUITED, *limits, "stream", PARAMS))
    for path, limits in LIMITS.items()
}
OF_FLEET = BodyScanner({}, (), FLEET_MEMBERS)
# Bits of a room's number. Rooms are below 2^63; a request with n answers has n rooms in a row.
ROOM_BITS = 62
RANDOM = SystemRandom()  # other gateways choose rooms at the same engines

log = get_logger(__name__)


class EngineRank(NamedTuple):
    """A rank of an engine."""

    upstream: Upstream
    dp_rank: int


@dataclass(frozen=True, slots=True)
class EligibleEngines:
    """The engines that may serve a request now, by what they can do of it."""

    prefills: Sequence[Upstream]
    takers: Sequence[Upstream]  # engines that take over from the prefill engines
    alone: Sequence[Upstream]  # engines that can serve the whole request
    alone_ids: frozenset[int]  # their worker ids

    @property
    def pairs(self) -> Sequence[Upstream]:
        """All engines that can serve it in pairs, empty if there is no pair."""
        return [*self.prefills, *self.takers] if self.prefills and self.takers else []


def eligible_engines(engines: Iterable[Upstream], path: bytes) -> EligibleEngines:
    """Sorts engines by what they can do of a request to `path`."""
    prefills: list[Upstream] = []
    others: list[Upstream] = []
    for each in engines:
        (prefills if each.role is Role.PREFILL else others).append(each)
    if path not in LIMITS:
        return EligibleEngines((), (), others, worker_ids(others))
    alone = [each for each in others if not _only_decodes(each)]
    if not prefills:
        return EligibleEngines((), (), alone, worker_ids(alone))
    # All prefill engines of a model are of one kind (Upstreams).
    kinds = {_kind(each) for each in prefills}
    takers = [each for each in others if _kind(each) in kinds and _takes_over(each)]
    return EligibleEngines(prefills, takers, alone, worker_ids(alone))


def worker_ids(engines: Iterable[Upstream]) -> frozenset[int]:
    return frozenset(each.worker_id for each in engines)


def _kind(upstream: Upstream) -> EngineKind:
    assert upstream.facts is not None
    return upstream.facts.kind


def _takes_over(upstream: Upstream) -> bool:
    return _kind(upstream) is EngineKind.VLLM or _only_decodes(upstream)


def _only_decodes(upstream: Upstream) -> bool:
    """Returns whether an engine refuses a prompt that no prefill engine hands over."""
    return _kind(upstream) is EngineKind.SGLANG and upstream.role is Role.DECODE


async def prefill_body(asked: ClientRequest, path: bytes, body: bytes) -> bytes | None:
    """Returns the body for a prefill engine of vLLM, None if the request is unsuited.

    It is that of the request, changed to ask for one token and no stream.
    """
    scanner = CHANGED[path]
    ahead = await scanned_ahead(scanner, body)
    try:
        given = scanner.scan(body, ahead)
    except (TypeError, ValueError):  # it has a member twice: the engine that answers will judge it
        return None
    if not asked.is_single or any(given.get(each, b"null") not in OFF for each in UNSUITED):
        return None
    always, *others = LIMITS[path]
    limits = dict.fromkeys((always, *(name for name in others if name in given)), 1)
    members = limits | {"stream": False, PARAMS: HAND_OVER}
    return scanner.opened(body) + json.dumps(members, separators=(",", ":"))[1:].encode()


def handed_over(answer: Answer) -> bytes | None:
    """Returns a prefill engine's parameters for the engine that takes over, None if it has none.

    They stay JSON: only the engines know what they mean.
    """
    if answer.status != 200 or not answer.whole:
        return None
    try:
        params = SCANNER.scan(answer.held).get(PARAMS)
    except (TypeError, ValueError):
        return None
    return params if isinstance(params, bytes) and params.startswith(b"{") else None


def judge_host(params: bytes, prefill: Upstream, decode: Upstream) -> None:
    """Warns, once, if a prefill engine names a host that only its own machine reaches.

    The other engine then computes the prompt again, or fails, and nothing else shows why.
    """
    if prefill.host_judged or prefill.address == decode.address:
        return
    prefill.host_judged = True
    try:
        host = str(json.loads(params).get("remote_host"))
        address = literal(host)
    except (ValueError, RecursionError):  # the engine that takes over says what is wrong
        return
    if host == "localhost" or (address is not None and address.is_loopback):
        log.warning("prefill_unreachable", url=prefill.url, host=host)


async def taking_over(asked: ClientRequest, body: bytes, params: bytes) -> bytes:
    """Returns the body for the engine that takes over, with these parameters added."""
    return await _with(asked, body, b'"%b":%b' % (PARAMS.encode(), params))


async def meeting(asked: ClientRequest, body: bytes, engine_rank: EngineRank) -> bytes:
    """Returns the body for both engines of an SGLang pair, which says where they meet.

    Raises GatewayError if it has more than MAX_PROMPTS prompts.
    """
    facts = engine_rank.upstream.facts
    assert facts is not None
    host, port = engine_rank.upstream.target.host, facts.bootstrap_port
    count = _prompts(asked)
    members: dict[str, object]
    if count is None:
        members = {"host": host, "port": port, "room": _room(engine_rank)}
    else:
        members = {
            "host": [host] * count,
            "port": [port] * count,
            "room": [_room(engine_rank) for _ in range(count)],
        }
    named = {f"bootstrap_{name}": value for name, value in members.items()}
    return await _with(asked, body, json.dumps(named, separators=(",", ":"))[1:-1].encode())


def _room(engine_rank: EngineRank) -> int:
    """Returns a bootstrap room that no other request has.

    Its number modulo the number of ranks is the rank that prefills.
    """
    ranks = engine_rank.upstream.facts.ranks if engine_rank.upstream.facts is not None else range(1)
    turn = RANDOM.getrandbits(ROOM_BITS) // len(ranks)
    return turn * len(ranks) + engine_rank.dp_rank - ranks.start


def _prompts(asked: ClientRequest) -> int | None:
    """Returns how many prompts a list of them has, None for a single one.

    Raises GatewayError beyond MAX_PROMPTS: a room for each of millions would take minutes.
    """
    prompt = asked.spans.get("prompt", b"")
    if asked.has_texts:
        count = count_texts(prompt)
    elif prompt.startswith(b"[") and prompt[1:].lstrip().startswith(b"["):
        count = prompt.count(b"[") - 1
    else:
        return None
    if count > MAX_PROMPTS:
        raise GatewayError(Reason.TOO_LARGE, f"there are more than {MAX_PROMPTS} prompts")
    return count


async def _with(asked: ClientRequest, body: bytes, more: bytes) -> bytes:
    """Returns a body with more members, its own unchanged but without any of FLEET_MEMBERS."""
    if not asked.spans.keys().isdisjoint(FLEET_MEMBERS):  # these are null: else it was refused
        OF_FLEET.scan(body, await scanned_ahead(OF_FLEET, body))
        return b"%b%b}" % (OF_FLEET.opened(body), more)
    inside = body[: body.rindex(b"}")].rstrip()
    return b"%b%b%b}" % (inside, b"" if inside.endswith(b"{") else b",", more)


async def compute(
    exchanges: Exchanges,
    request: RelayedRequest,
    engine_rank: EngineRank,
    request_id: bytes,
    body: bytes,
) -> Answer | Ending:
    """Has a prefill engine of vLLM compute a prompt; returns its answer, or how it failed.

    If the client leaves meanwhile, the prefill is aborted.
    """
    upstream = engine_rank.upstream
    assert upstream.engine is not None
    head = upstream.head(request, request_id, len(body), engine_rank.dp_rank)
    async with request.borrow(exchanges.limits.client_s) as client_fd:
        with exchanges.begin(upstream.engine, head, body, HANDED_BYTES, client_fd) as exchange:
            return await exchange.begins() or exchange.ending()


class ConcurrentPrefill:
    """A prefill engine of SGLang at work while the engine that answers waits to take over.

    Entering the context sends its request, leaving the context aborts it.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        request: RelayedRequest,
        engine_rank: EngineRank,
        request_id: bytes,
        body: bytes,
    ) -> None:
        engine = engine_rank.upstream.engine
        assert engine is not None
        # The room determines the rank.
        head = engine_rank.upstream.head(request, request_id, len(body), None)
        self._begin = partial(exchanges.begin, engine, head, body, HANDED_BYTES)
        self._result: Answer | Ending | None = None  # None: it is at work
        self.failure: Answer | Ending | None = None  # why there is nothing to take over

    def __enter__(self) -> ConcurrentPrefill:
        self._exchange = self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exchange.__exit__(kind, error, traceback)

    async def begins(self, other: Exchange) -> Answer | None:
        """Waits for the answer's beginning from `other`, the engine that takes over.

        Returns None if that engine ends without an answer, or has nothing to take over. An engine
        that has lost its partner answers with 500, and the partner's own end, which comes as soon,
        tells which of the two has failed. If the prefill engine broke off, the prompt may have been
        handed over before, and then the answer comes as soon as well.
        """
        answer, begun = None, False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._await_answer, nursery.cancel_scope)
            answer = await other.begins()
            begun = True
            nursery.cancel_scope.cancel()
        if not begun and self._may_have_handed_over():
            with trio.move_on_after(LOST_S):
                answer = await other.begins()
                begun = True
        elif answer is not None and fault(answer) == 500:
            await self._wait(LOST_S)
            begun = not isinstance(self._result, Ending)
        if begun:
            return answer if other.waits else None  # the client may have left meanwhile
        self.failure = self._result
        return None

    def _may_have_handed_over(self) -> bool:
        if isinstance(self._result, Answer):
            return fault(self._result) == 500
        return self._result is not None and self._result.outcome is ExchangeOutcome.BROKEN

    async def ends(self) -> None:
        """Waits a little for the end of its answer, so that its connection can be kept."""
        await self._wait(LOST_S)

    async def _wait(self, seconds: float) -> None:
        with trio.move_on_after(seconds) as scope:
            await self._await_answer(scope)

    async def _await_answer(self, scope: trio.CancelScope) -> None:
        """Waits for its whole answer, and cancels the scope if that is a failure."""
        if self._result is None:
            self._result = await self._exchange.begins() or self._exchange.ending()
        if isinstance(self._result, Ending) or fault(self._result) is not None:
            scope.cancel()
