"""What a client's request wants: the model, the prompt as it stands there, whose session it is.

The body is read in one pass and goes on byte for byte; nothing of it is made anew. Long members,
as the messages of a conversation, stay the JSON that they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from zlib import crc32

from kvd.gateway.errors import GatewayError, Reason
from kvd.http.types import Headers
from kvd_core.json.scan import BodyScanner

# Longest session key that is kept as it is; of a longer one only a digest counts.
MAX_SESSION_BYTES = 256
I64_MAX = 2**63 - 1


class Api(Enum):
    """Which API a path belongs to, as far as its prompt and its errors differ."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"
    OTHER = "other"


# Members of a body that tell an engine whom to connect to or which of its ranks serves: a client
# that chose them would have power over the fleet.
FLEET_MEMBERS = (
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
)
FIELDS = (
    "model",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "cache_salt",
    "session_id",
    "prompt_cache_key",
    "metadata",
    "nvext",
    "priority",
)
# Members that decide about a prompt's tokens, handed to an engine's tokenizer as they stand.
CHAT_MEMBERS = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
PROMPT_MEMBERS = ("prompt", "add_special_tokens")
# Members with which /tokenize of an engine is known to say other tokens than are computed.
UNTOLD = ("documents", "reasoning_effort", "truncate_prompt_tokens")
SPANS = tuple(dict.fromkeys((*CHAT_MEMBERS, *PROMPT_MEMBERS, *UNTOLD, *FLEET_MEMBERS)))

SCANNER = BodyScanner({}, FIELDS, SPANS)

# The session of a request, by the first of these headers that is there.
SESSION_HEADERS = (
    b"x-session-id",
    b"x-claude-code-session-id",
    b"x-session-affinity",
    b"session-id",
    b"session_id",
    b"x-smg-routing-key",
)
AGENT_HEADER = b"x-claude-code-agent-id"
SESSION_NAMES = frozenset((*SESSION_HEADERS, AGENT_HEADER))


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a client, read."""

    api: Api
    model: str | None  # None: not said
    stream: bool
    spans: Mapping[str, bytes]  # members that decide about the tokens, as JSON
    session: str | None = None
    salt: str | None = None
    expected_output_tokens: int | None = None
    priority: int = 0
    hints: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> bytes:
        """The messages of a chat as a JSON array."""
        return self.spans["messages"]

    @property
    def token_ids(self) -> bytes | None:
        """The ids of the prompt's tokens as a JSON array, where the request has them itself."""
        prompt = self.spans.get("prompt")
        if prompt is None or not prompt.startswith(b"["):
            return None
        inside = prompt[1:].lstrip()
        if inside[:1].isdigit():
            return prompt
        if inside[:1] == b"[":
            return longest(prompt)
        return None


def longest(prompts: bytes) -> bytes | None:
    """Returns the longest of several prompts of token ids: it decides who serves all of them."""
    try:
        each = json.loads(prompts)
    except ValueError:  # a number of more digits than Python reads: the engine will say so
        return None
    if not each or not all(isinstance(prompt, list) for prompt in each):
        return None
    return json.dumps(max(each, key=len)).encode()


def read(api: Api, headers: Headers, body: bytes) -> Asked:
    """Reads a request with a JSON body; raises GatewayError."""
    try:
        members = SCANNER.scan(body)
    except (TypeError, ValueError) as error:
        raise GatewayError(Reason.INVALID_JSON, f"the body is not valid: {error}") from None
    for name in FLEET_MEMBERS if not members.keys().isdisjoint(FLEET_MEMBERS) else ():
        if members.get(name, b"null") != b"null":
            text = f"{name} is set by the gateway, not by clients"
            raise GatewayError(Reason.FORBIDDEN_PARAMETER, text, param=name)
    model = members.get("model")
    if model is not None and not isinstance(model, str):
        raise GatewayError(Reason.INVALID_JSON, "model must be a text", param="model")
    hints = _hints(members)
    spans = {name: value for name, value in members.items() if isinstance(value, bytes)}
    salt = members.get("cache_salt")
    return Asked(
        api,
        model,
        members.get("stream") is True,
        spans,
        session_of(headers, members),
        salt if isinstance(salt, str) else None,
        _expected_output(members, hints),
        _whole(hints.get("priority")) or 0,
        hints,
    )


def session_of(headers: Headers, members: Mapping[str, object]) -> str | None:
    """Returns the session that a request belongs to, None if nothing says so."""
    # The first of a name wins; most requests have none of them.
    said = {name: value for name, value in reversed(headers) if name in SESSION_NAMES}
    for name in SESSION_HEADERS if said else ():
        if value := said.get(name, b"").decode("latin-1").strip():
            if name == b"x-claude-code-session-id" and (agent := said.get(AGENT_HEADER)):
                value = f"{value}:{agent.decode('latin-1')}"  # a subagent has its own prompt
            return _bounded(value)
    metadata = members.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    for found in (
        members.get("session_id"),
        members.get("prompt_cache_key"),
        metadata.get("session_id"),
        _claude_session(metadata.get("user_id")),
    ):
        if isinstance(found, str) and found:
            return _bounded(found)
    return None


def _claude_session(user_id: object) -> str | None:
    """Returns the session in the user id that older Claude Code sends."""
    if not isinstance(user_id, str) or "_session_" not in user_id:
        return None
    return user_id.rpartition("_session_")[2]


def _bounded(session: str) -> str:
    encoded = session.encode("utf-8", "surrogateescape")
    if len(encoded) <= MAX_SESSION_BYTES and session.isprintable():
        return session
    return f"{len(encoded)}:{crc32(encoded):08x}"


def _hints(members: Mapping[str, object]) -> Mapping[str, Any]:
    nvext = members.get("nvext")
    hints = nvext.get("agent_hints") if isinstance(nvext, dict) else None
    return hints if isinstance(hints, dict) else {}


def _whole(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= I64_MAX:
        return value
    return None


def _expected_output(members: Mapping[str, object], hints: Mapping[str, Any]) -> int | None:
    """Returns the length of the output that a client expects, not the most that it allows."""
    return _whole(hints.get("osl"))
