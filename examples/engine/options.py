"""What a simulated engine pretends to be, and how fast it is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """What goes wrong with one request; each is used up by the next request that generates."""

    CLOSE = "close"  # the connection is reset before a byte of the answer
    AFTER_HEAD = "after-head"  # closed after the head
    AFTER_EVENT = "after-event"  # closed after the first event, or the first half of the body
    IN_EVENT = "in-event"  # closed in the middle of the second event
    AFTER_DONE = "after-done"  # closed between [DONE] and the end of the body
    EMPTY = "empty"  # a stream ends as it should, but before its first event
    UNMARKED = "unmarked"  # the body ends as it should, but without [DONE]
    SILENCE = "silence"  # no answer at all
    HALF_CLOSED = "half-closed"  # no answer, and nothing more is sent; the connection stays open
    GARBAGE = "garbage"  # something that is not HTTP
    LONG_HEAD = "long-head"  # a head longer than any reader accepts
    ERROR_EVENT = "error-event"  # status 200, and an error as the first event of the stream
    BYTES = "bytes"  # the answer comes byte by byte
    ABORTS = "aborts"  # an answer that is not streamed says that it was given up
    SHUTS_DOWN = "shuts-down"  # a 500 in the words of an engine that is about to end
    KEEPS_NOTHING = "keeps-nothing"  # it offers nothing of a prompt to the other engine (vllm)
    FORGETS = "forgets"  # it forgets a prompt that it has just offered to another engine (vllm)
    REFUSE_429 = "429"
    REFUSE_500 = "500"
    REFUSE_503 = "503"


@dataclass(slots=True)
class EngineOptions:
    """One engine."""

    model: str = "demo"
    adapters: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # further names of its model
    root: str | None = None  # where it has loaded the model from, if not by its name
    kind: str = "vllm"  # or sglang
    blocks: int = 4096  # of its KV cache
    host_blocks: int = 0  # of its second tier, in host memory; sglang only
    max_model_len: int = 131_072
    prefill_s: float = 0.0  # per token that is computed
    step_s: float = 0.0  # per token that is generated
    events: bool = True  # it publishes what it caches
    renders: bool = False  # it has vLLM's render routes
    mode: str = "null"  # sglang's disaggregation_mode: null, prefill or decode
    retry_after: str | None = None  # that header of a 429 or 503
    chunks: bool = True  # else a stream ends with its connection, as behind proxies of HTTP/1.0
    idle_s: float = 5.0  # a kept connection without a request is closed after that
    faults: deque[Fault] = field(default_factory=deque)
