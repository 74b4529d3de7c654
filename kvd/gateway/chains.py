"""Finds the conversation that a request continues, where no token ids of its prompt are given.

    named     a session that the client names, or a response that it goes on from
    text      the longest beginning of its messages that was seen before: the session of that one
    new       a session of its own, made of its text

A session is bound to an engine by kvd.selection.affinity, which leaves one that has too many
requests. A response is known where it is kept: by the engine that made it alone.

The text is that of the request as it stands, but for marks that clients move from turn to turn.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable

from kvd.gateway.requests import Api, ClientRequest
from kvd.gateway.stats import GatewayStats
from kvd.gateway.upstreams import Served
from kvd_core.prompts.conversations import Strands

# Memory for beginnings of conversations without token ids: about 100,000.
TEXT_BYTES = 16 * 1024 * 1024
MAX_RESPONSES = 262_144  # responses of which it is known who keeps them, about 200 bytes each
RESPONSE_S = 3600.0  # time for which that is known
# The id of a response at the beginning of its answer, or in the first event of one.
RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w.:-]{1,200})"')

# The member of each API that has the messages, and the members with which the prompt begins.
CHAINED = {
    Api.CHAT: ("messages", ("tools", "chat_template_kwargs")),
    Api.MESSAGES: ("messages", ("tools", "system")),
    Api.RESPONSES: ("input", ("tools", "instructions")),
}
# Ask an engine to cache up to here; every turn has it at its end, and loses it with the next.
MARK = re.compile(rb'"cache_control"\s*:\s*(?:\{[^{}]*\}|null)')
COMMA = re.compile(rb"\s*,")
# Begins a text of the system prompt that is another one with every request, and that vLLM drops.
BILLING = "x-anthropic-billing-header"


class Chains:
    """The conversations and the responses that are known."""

    def __init__(self, stats: GatewayStats, clock: Callable[[], float]) -> None:
        self.strands = Strands(TEXT_BYTES)
        self.responses: OrderedDict[str, tuple[int, float]] = OrderedDict()  # worker, its end
        self._stats = stats
        self._clock = clock

    def session(self, asked: ClientRequest, served: Served, tenant: str) -> str | None:
        """Returns the session that a request belongs to, None if its text says nothing of one.

        Two of the same name or text are different ones if they are of different tenants.
        """
        if asked.session is not None:
            return f"{tenant}{asked.session}"
        name, others = CHAINED.get(asked.api, ("", ()))
        messages = asked.spans.get(name)
        if messages is None:
            return None
        context = (tenant, served.model, served.adapter, asked.salt, asked.api.value)
        begin = [(each or "").encode() for each in context]
        parts = [asked.spans.get(other, b"") for other in others]
        if asked.api is Api.MESSAGES:
            parts = [lasting(part) for part in parts]
            messages = lasting(messages)
        if not messages.startswith(b"["):
            messages = b"[%b]" % messages
        strand = self.strands.strand_of(b"\0".join([*begin, *parts]), messages)
        return None if strand is None else f"text-{strand:016x}"

    def note_answer(self, asked: ClientRequest, worker_id: int, held: bytes) -> None:
        """Notes where a response is kept, by the beginning of its answer."""
        found = RESPONSE_ID.search(held) if asked.api is Api.RESPONSES else None
        if found is None:
            return
        name = found[1].decode()
        self.responses.pop(name, None)
        if len(self.responses) >= MAX_RESPONSES:
            self.responses.popitem(last=False)
            self._stats.responses_forgotten += 1
        self.responses[name] = worker_id, self._clock() + RESPONSE_S

    def keeper(self, response_id: str) -> int | None:
        """Returns the worker that keeps a response, None if that is not known."""
        while self.responses and next(iter(self.responses.values()))[1] <= self._clock():
            self.responses.popitem(last=False)
        found = self.responses.get(response_id)
        return None if found is None else found[0]


def lasting(span: bytes) -> bytes:
    """Returns what the next turn will have, too, of a span as Anthropic's clients send it."""
    if b'"cache_control"' in span:
        span = _without_marks(span)
    if BILLING.encode() in span:
        span = _without_billing(span)
    return span


def _without_marks(span: bytes) -> bytes:
    pieces, at = [], 0
    for found in MARK.finditer(span):  # no text can have it: a quote in there is escaped
        piece = span[at : found.start()].rstrip(b", \t\r\n")
        at = found.end()
        if piece.endswith(b"{") and (comma := COMMA.match(span, at)):  # it was the first member
            at = comma.end()
        pieces.append(piece)
    return b"".join([*pieces, span[at:]])


def _without_billing(span: bytes) -> bytes:
    try:
        said = json.loads(span)
    except (ValueError, RecursionError):  # a number of more digits than Python reads, or too deep
        return span
    if isinstance(said, str):
        return b"" if said.startswith(BILLING) else span
    if not isinstance(said, list):
        return span
    return json.dumps([each for each in said if not _bills(each)]).encode()


def _bills(block: object) -> bool:
    """Returns whether a block of the system prompt, or a message of the system, is for accounts."""
    if not isinstance(block, dict):
        return False
    text = block.get("text") or (block.get("role") == "system" and block.get("content"))
    return isinstance(text, str) and text.startswith(BILLING)
