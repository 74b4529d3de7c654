"""Reads a client's request: the model, the prompt, the session.

The body is read in one pass and forwarded byte for byte. Long members, such as the messages of a
conversation, stay JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple
from zlib import crc32

from kvd.gateway.errors import ErrorForm, GatewayError, Reason
from kvd.gateway.multipart import field_of
from kvd.gateway.probing import GATEWAY_HEADER
from kvd.http.messages import Headers
from kvd_core.json.scan import BodyScanner, ScanAhead
from kvd_core.prompts.conversations import has_media

# Longest session key that is kept as it is; a longer one is replaced by a digest.
MAX_SESSION_BYTES = 256
U32_MAX = 2**32 - 1


class Api(StrEnum):
    """The API of a path, as far as prompts and errors differ."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    COUNT = "count"  # of the tokens of messages: an engine computes and caches nothing for it
    RESPONSES = "responses"
    FORM = "form"  # a body of multipart/form-data, in which audio files come
    OTHER = "other"

    @property
    def errors(self) -> ErrorForm:
        """Returns the form of its errors."""
        return _FORMS.get(self, ErrorForm.OPENAI)


_FORMS = {
    Api.MESSAGES: ErrorForm.ANTHROPIC,
    Api.COUNT: ErrorForm.ANTHROPIC,
    Api.RESPONSES: ErrorForm.RESPONSES,
}


# Members of a body that say to which host an engine connects, or which of its ranks serves: a
# client that could set them would have power over the fleet.
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
    "lora_path",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "cache_salt",
    "session_id",
    "prompt_cache_key",
    "conversation",
    "previous_response_id",
    "metadata",
    "nvext",
    "priority",
    "echo",
    "logprobs",
    "prompt_logprobs",
    "n",
)
# Members that determine a prompt's tokens; they go to an engine's tokenizer unchanged.
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
# Names of a conversation's parts in the other APIs.
OTHER_MEMBERS = ("system", "instructions", "input")
MEDIA_MEMBERS = ("messages", "input")  # those that may have images and sounds
# Members with which an engine's /tokenize is known to return other tokens than it computes.
TRUNCATES = "truncate_prompt_tokens"
UNLISTED = ("documents", "reasoning_effort", TRUNCATES)
TOOL_CHOICE = "tool_choice"  # if it is "none", some engines leave the tools out of the prompt
SPANS = tuple(
    dict.fromkeys(
        (
            *CHAT_MEMBERS,
            *PROMPT_MEMBERS,
            *OTHER_MEMBERS,
            *UNLISTED,
            TOOL_CHOICE,
            *FLEET_MEMBERS,
        )
    )
)

# Bytes of a member of FIELDS that is an object or an array: all other requests wait while it is
# parsed. Clients of engines send a few hundred bytes.
MAX_NESTED_BYTES = 256 * 1024
# Prompts in a request. Of more token ids the longest is not looked for: the tokens are not known.
# More of any kind are refused where two engines need a room to meet for each.
MAX_PROMPTS = 4096
MAX_TEXTS_BYTES = 1024 * 1024  # bytes of several text prompts, to find the longest one

SCANNER = BodyScanner({}, FIELDS, SPANS, MAX_NESTED_BYTES)

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
PRIORITY_HEADER = b"x-vllm-priority"  # wins over `priority` in the body, as in the engine
_NUMBER = re.compile(rb"-?\d{1,9}")
READ_HEADERS = frozenset((*SESSION_HEADERS, AGENT_HEADER, PRIORITY_HEADER, GATEWAY_HEADER))
SESSION_MEMBERS = frozenset(("session_id", "prompt_cache_key", "conversation", "metadata"))


class ClientRequest(NamedTuple):
    """One request of a client, read."""

    api: Api
    model: str | None  # None: the request names none
    stream: bool
    spans: Mapping[str, bytes]  # members that determine the tokens, as JSON
    session: str | None = None
    salt: str | None = None
    previous: str | None = None  # id of the response that this one follows
    expected_output_tokens: int | None = None
    priority: int = 0  # as the engine reads it
    priority_jump: float | None = None  # seconds by which the request asks to count as older
    media: bool = False  # it has images or sounds, whose tokens do not say which they are
    reads_cache: bool = True  # else its engine computes the whole prompt, whatever is cached
    wants_one: bool = True  # it asks for one answer to each prompt
    adapter: str | None = None  # SGLang's way to name one beside its base model
    passed: bytes = b""  # ids of the gateways that it has passed, with commas between them

    def sets(self, *names: str) -> bool:
        """Returns whether any of these members has a value; null stands for none."""
        return any(self.spans.get(name, b"null") != b"null" for name in names)

    @property
    def is_single(self) -> bool:
        """Whether it asks for one answer to one prompt.

        Of several prompts or answers, engines report the cached tokens of only one.
        """
        prompt = self.spans.get("prompt", b"")
        if not self.wants_one or not prompt.startswith(b"["):
            return self.wants_one
        if self.has_texts:
            return count_texts(prompt) == 1
        return prompt.count(b"[") <= 2

    @property
    def messages(self) -> bytes:
        """The messages of a chat as a JSON array."""
        return self.spans["messages"]

    @property
    def token_ids(self) -> bytes | None:
        """The ids of the prompt's tokens as a JSON array; None if the prompt is no such array.

        Also None if the engine is to truncate the prompt, as it then computes only its end.
        """
        prompt = self.spans.get("prompt")
        if prompt is None or not prompt.startswith(b"["):
            return None
        if self.sets(TRUNCATES):
            return None
        inside = prompt[1:].lstrip()
        if inside[:1].isdigit():
            return prompt
        if inside[:1] == b"[":
            return longest_ids(inside)
        return None

    @property
    def has_texts(self) -> bool:
        """Whether the prompt is an array of texts, as far as its beginning shows."""
        prompt = self.spans.get("prompt", b"")
        return prompt.startswith(b"[") and prompt[1:].lstrip().startswith(b'"')

    @property
    def prompt_text(self) -> bytes | None:
        """The text of the prompt as a JSON string, None if the prompt is no text."""
        prompt = self.spans.get("prompt", b"")
        if prompt.startswith(b"["):
            return longest_text(prompt)
        return prompt if prompt.startswith(b'"') else None


def count_texts(prompts: bytes) -> int:
    """Returns how many texts a valid JSON array of them has, faster than by parsing it."""
    unescaped = prompts.replace(rb"\\", b"").replace(rb"\"", b"")
    return unescaped.count(b'"') // 2


def longest_ids(prompts: bytes) -> bytes | None:
    """Returns the longest of several prompts of token ids: it decides which engine serves all.

    The text between the brackets is not checked here.
    """
    if prompts.count(b"[") > MAX_PROMPTS:
        return None
    longest = max(prompts.split(b"]"), key=lambda ids: ids.count(b","))
    begin = longest.rfind(b"[")
    return None if begin < 0 else longest[begin:] + b"]"


def longest_text(prompts: bytes) -> bytes | None:
    """Returns the longest of several text prompts, None if any is no text."""
    if len(prompts) > MAX_TEXTS_BYTES:
        return None
    try:
        each = json.loads(prompts)
    except ValueError:  # a number among them has more digits than Python parses
        return None
    if not each or not all(isinstance(text, str) for text in each):
        return None
    return json.dumps(max(each, key=len)).encode()


def read(api: Api, headers: Headers, body: bytes, ahead: ScanAhead | None = None) -> ClientRequest:
    """Reads a request; raises GatewayError. A long body may have been scanned `ahead`."""
    known = _known_headers(headers)
    passed = known.get(GATEWAY_HEADER, b"")
    if api is Api.FORM:
        named = field_of(headers, body, "model")
        return ClientRequest(api, named, False, {}, session_of(known, {}), passed=passed)
    try:
        members = SCANNER.scan(body, ahead)
    except (TypeError, ValueError) as error:
        raise GatewayError(Reason.INVALID_JSON, f"the body is not valid: {error}") from None
    spans = {name: value for name, value in members.items() if isinstance(value, bytes)}
    for name in FLEET_MEMBERS if not spans.keys().isdisjoint(FLEET_MEMBERS) else ():
        if spans.get(name, b"null") != b"null":
            text = f"{name} is set by the gateway, not by clients"
            raise GatewayError(Reason.FORBIDDEN_PARAMETER, text, param=name)
    model = members.get("model")
    if model is not None and not isinstance(model, str):
        raise GatewayError(Reason.INVALID_JSON, "model must be a string", param="model")
    hints = _hints(members) if "nvext" in members else {}
    return ClientRequest(
        api,
        model,
        members.get("stream") is True,
        spans,
        session_of(known, members),
        _text(members.get("cache_salt")),
        _text(members.get("previous_response_id")),
        _expected_output(members, hints),
        _priority(known.get(PRIORITY_HEADER, b""), members),
        _priority_jump(hints) if hints else None,
        any(has_media(spans[name]) for name in MEDIA_MEMBERS if name in spans),
        not _asks_for_logprobs_of_prompt(api, members),
        members.get("n") in (None, 1),
        _text(members.get("lora_path")),
        passed,
    )


def passed_gateways(headers: Headers) -> bytes:
    """Returns the ids of the gateways that a request has passed, with commas between them."""
    return _known_headers(headers).get(GATEWAY_HEADER, b"")


def _known_headers(headers: Headers) -> dict[bytes, bytes]:
    """Returns the headers that this module reads; most requests have none of them.

    Of several headers with one name the first wins.
    """
    return {name: value for name, value in reversed(headers) if name in READ_HEADERS}


def session_of(headers: Mapping[bytes, bytes], members: Mapping[str, object]) -> str | None:
    """Returns the session that a request belongs to, None if nothing says so."""
    for name in SESSION_HEADERS if headers else ():
        if value := headers.get(name, b"").decode("latin-1").strip():
            if name == b"x-claude-code-session-id" and (agent := headers.get(AGENT_HEADER)):
                value = f"{value}:{agent.decode('latin-1')}"  # a subagent has its own prompt
            return _bounded(value)
    if members.keys().isdisjoint(SESSION_MEMBERS):
        return None
    metadata = members.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    for found in (
        members.get("session_id"),
        members.get("prompt_cache_key"),
        _conversation(members.get("conversation")),
        metadata.get("session_id"),
        _claude_session(metadata.get("user_id")),
    ):
        if isinstance(found, str) and found:
            return _bounded(found)
    return None


def _conversation(conversation: object) -> object:
    """Returns the id of a stored conversation, which comes alone or in an object."""
    return conversation.get("id") if isinstance(conversation, dict) else conversation


def _claude_session(user_id: object) -> str | None:
    """Returns the session in the user id that older versions of Claude Code send."""
    if not isinstance(user_id, str) or "_session_" not in user_id:
        return None
    return user_id.rpartition("_session_")[2]


def _bounded(session: str) -> str:
    encoded = session.encode()
    if len(encoded) <= MAX_SESSION_BYTES and session.isprintable():
        return session
    return f"{len(encoded)}:{crc32(encoded):08x}"


def _hints(members: Mapping[str, object]) -> Mapping[str, Any]:
    nvext = members.get("nvext")
    hints = nvext.get("agent_hints") if isinstance(nvext, dict) else None
    return hints if isinstance(hints, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return min(value, U32_MAX)
    return None


def _expected_output(members: Mapping[str, object], hints: Mapping[str, Any]) -> int | None:
    """Returns how long a client expects the output to be, at most as long as it allows.

    A small limit says much, as no output is longer. A large one does no harm: the load of an output
    fades towards its expected end, and hardly at all if that is far away.
    """
    limit = None
    # The first of these wins, as in the engines.
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if name in members and (limit := _count(members[name])) is not None:
            break
    hinted = _count(hints.get("osl"))
    return limit if hinted is None else min(hinted, limit or hinted)


def _asks_for_logprobs_of_prompt(api: Api, members: Mapping[str, object]) -> bool:
    """Returns whether the answer has log probabilities of the prompt's tokens.

    Engines compute these anew, as caches do not have them. With `echo` the prompt is a part of the
    answer; in a chat vLLM then computes them, asked for or not.
    """
    if members.get("prompt_logprobs") is not None:
        return True
    return members.get("echo") is True and (api is Api.CHAT or members.get("logprobs") is not None)


def _priority(header: bytes, members: Mapping[str, object]) -> int:
    if _NUMBER.fullmatch(header):
        return int(header)
    value = members.get("priority")
    return value if isinstance(value, int) and abs(value) <= U32_MAX else 0


def _priority_jump(hints: Mapping[str, Any]) -> float | None:
    """Reads the hints of an agent as the selection service does."""
    for name in ("latency_sensitivity", "priority"):
        value = hints.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(min(max(value, 0), U32_MAX))
    return None
