"""Finds the conversation that a request continues, if the tokens of its prompt are not known.

    named     a session that the client names, or a response that it goes on from
    text      the session of the conversation with whose messages the request's messages begin; of
              several the longest
    new       a session of its own, made from its text

kvd.selection.affinity binds a session to an engine, and leaves an engine that has too many
requests. A response is known only to the engine that made it.

The text is taken from the request unchanged, except for marks that clients move from turn to turn.
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

# Memory for beginnings of conversations without token ids: about 400,000.
TEXT_BYTES = 16 * 1024 * 1024
MAX_RESPONSES = 262_144  # responses whose engine is remembered, about 200 bytes each
RESPONSE_S = 3600.0  # time for which the engine of a response is remembered
# The id of a response, at the beginning of its answer or in its first event.
RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w.:-]{1,200})"')

# The member of each API that has the messages, and the members with which the prompt begins.
CHAINED = {
    Api.CHAT: ("messages", ("tools", "chat_template_kwargs")),
    Api.MESSAGES: ("messages", ("tools", "system")),
    Api.RESPONSES: ("input", ("tools", "instructions")),
}
# Asks an engine to cache the prompt up to here. Clients move it to the end of each new turn.
MARK = re.compile(rb'"cache_control"\s*:\s*(?:\{[^{}]*\}|null)')
COMMA = re.compile(rb"\s*,")
# Begins a text of the system prompt that differs in every request, and that vLLM drops.
BILLING = "x-anthropic-billing-header"


class Chains:
    """The conversations and the responses that are known."""

    def __init__(self, stats: GatewayStats, clock: Callable[[], float]) -> None:
        self.strands = Strands(TEXT_BYTES)
        self.responses: OrderedDict[str, tuple[int, float]] = OrderedDict()  # worker, expiry time
        self._stats = stats
        self._clock = clock

    def session(self, asked: ClientRequest, served: Served, tenant: str) -> str | None:
        """Returns the session that a request belongs to, None if its text cannot show one.

        Sessions with the same name or text are different if their tenants are.
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
        """Notes the worker that keeps a response, whose id is at the beginning of the answer."""
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
    """Returns the part of a span from an Anthropic client that the next turn will repeat."""
    if b'"cache_control"' in span:
        span = _without_marks(span)
    if BILLING.encode() in span:
        span = _without_billing(span)
    return span


def _without_marks(span: bytes) -> bytes:
    pieces, at = [], 0
    for found in MARK.finditer(span):  # none is inside a text, whose quotes are escaped
        piece = span[at : found.start()].rstrip(b", \t\r\n")
        at = found.end()
        if piece.endswith(b"{") and (comma := COMMA.match(span, at)):  # it was the first member
            at = comma.end()
        pieces.append(piece)
    return b"".join([*pieces, span[at:]])


def _without_billing(span: bytes) -> bytes:
    try:
        content = json.loads(span)
    except (ValueError, RecursionError):  # too many digits for Python, or nested too deeply
        return span
    if isinstance(content, str):
        return b"" if content.startswith(BILLING) else span
    if not isinstance(content, list):
        return span
    return json.dumps([each for each in content if not _bills(each)]).encode()


def _bills(block: object) -> bool:
    """Returns whether a block of the system prompt, or a system message, is a billing header."""
    if not isinstance(block, dict):
        return False
    text = block.get("text") or (block.get("role") == "system" and block.get("content"))
    return isinstance(text, str) and text.startswith(BILLING)
