"""Reads what an engine's answer tells the gateway: a refusal, a fault, an end, cached tokens."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from kvd.gateway.heads import EngineHead
from kvd_core.relay.relay import Answer

# Statuses by which an engine says that it has not served a request; another engine may.
NOT_DONE = frozenset((429, 502, 503, 504))
# Errors of Anthropic's API name no status.
ANTHROPIC_STATUSES = {"overloaded_error": 503, "rate_limit_error": 429}
# In the usage of an answer, by OpenAI's and by Anthropic's name; null if the engine does not report
# it.
CACHED_TOKENS = re.compile(rb'"cache(?:d|_read_input)_tokens":\s*(\d{1,9})\b')
# In the body of a 404 for an unknown model; vLLM sets "param" since 0.14.
MODEL_GONE = re.compile(
    rb'"param":\s*"model"|"model_not_found"|The model `[^`]{1,1000}` does not exist'
)

# Python's words for work that a process takes on no more. While vLLM ends what is under way, for
# its --shutdown-timeout, it says so to each new request, and to health checks that it is well.
# Nothing but the whole message counts: other messages may repeat what the client has sent.
SHUTS_DOWN = re.compile(
    rb'"message":\s*"cannot schedule new futures after (?:interpreter )?shutdown"'
)
# So vLLM ends what is under way if it has no time for that; SGLang's requests may end so as well.
ABORTED = re.compile(rb'"finish_reason":\s*"abort"')


class EventError(NamedTuple):
    """An error that an engine reports in an event."""

    status: int
    data: bytes  # a JSON object


def refuses(answer: Answer) -> str | None:
    """Returns the status of a refusal after which another engine may do better, else None."""
    whole = answer.whole or is_stream(answer)
    return str(status) if whole and (status := fault(answer)) in NOT_DONE else None


def shuts_down(answer: Answer) -> bool:
    """Returns whether an engine has not begun a request because it is about to end."""
    return answer.status == 500 and answer.whole and SHUTS_DOWN.search(answer.held) is not None


def aborted(answer: Answer) -> bool:
    """Returns whether an engine has given up a request that it had taken on."""
    begins = answer.status == 200 and (answer.whole or answer.events)
    return begins and ABORTED.search(answer.held) is not None


def is_empty(answer: Answer) -> bool:
    """Returns whether a stream has ended before its first event.

    So it looks behind a proxy that hides the death of its engine.
    """
    return is_stream(answer) and answer.whole and not answer.held


def lacks_model(answer: Answer) -> bool:
    """Returns whether an engine says that it does not serve the requested model."""
    return answer.status == 404 and answer.whole and MODEL_GONE.search(answer.held) is not None


def fault(answer: Answer) -> int | None:
    """Returns the status of an answer that is an error, None for any other."""
    if is_stream(answer):
        error = first_error(answer.held)
        return None if error is None else error.status
    return answer.status if answer.status >= 400 else None


def is_stream(answer: Answer) -> bool:
    """Returns whether an answer is, by its head, a stream that has begun well."""
    return answer.events and answer.status == 200


def first_error(held: bytes) -> EventError | None:
    """Returns the first error among the events with which a stream begins, None without any.

    Engines that have already sent status 200 report in this way that they are overloaded.
    """
    if b'"error"' not in held:
        return None
    for line in held.splitlines():
        if line.startswith(b"data:"):
            try:
                data = json.loads(line[5:])
            except (ValueError, RecursionError):  # not JSON, so not an error either
                continue
            error = data.get("error") if isinstance(data, dict) else None
            code = _status_of(error) if isinstance(error, dict) else None
            if isinstance(code, int) and 400 <= code <= 599:
                return EventError(code, line[5:].strip())
    return None


def _status_of(error: dict[str, object]) -> object:
    kind = error.get("type")
    return error.get("code") or (ANTHROPIC_STATUSES.get(kind) if isinstance(kind, str) else None)


def paced(head: EngineHead) -> bytes:
    """Returns the headers of an answer, with `retry-after` if its 429 or 503 lacks one."""
    if head.status not in (429, 503) or b"\nretry-after:" in b"\n" + head.lines:
        return head.lines
    return head.lines + b"retry-after: 1\r\n"


def cached_tokens(tail: bytes) -> int | None:
    """Returns the cached tokens in the usage at the end of an answer, None if it has none."""
    found = CACHED_TOKENS.findall(tail)
    return int(found[-1]) if found else None
