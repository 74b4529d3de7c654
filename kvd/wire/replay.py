"""The replay protocol of engines: ask for the batches from a number on, read what is answered.

    request, to the engine's ROUTER     [empty] [first number, 8 bytes big-endian]
    answer, per batch                   [empty] [number] [payload]   until vLLM 0.25, SGLang 0.5.21
                                        [empty] [topic] [number] [payload]                    since
    the end                             the same with an empty payload and the number 2^64-1

Behind a batch's number, in the same frame, may stand the 16 bytes of its publisher; newer engines
name it in the payload (kvd_core/events/publisher.hpp). A payload may be empty: a beat or a barrier.

The engine answers with what its buffer still holds, ascending, and may leave out the end (SGLang
has been seen to). It also leaves out what its socket had no room for (vLLM, beyond 1,000 messages):
so what is missing behind something that came is asked for again. What is missing at the beginning
of an answer is not there any more.

An answer is only ever believed as far as it fits the question (`CatchUp.take`):
numbers in the wanted range, ascending, each once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvd_core.events.decoder import publisher as publisher_of

SEQ_BYTES = 8
PUBLISHER_BYTES = 16
NUMBER_BYTES = (SEQ_BYTES, SEQ_BYTES + PUBLISHER_BYTES)
END_SEQ = 2**64 - 1  # the number of the end, and of no batch
ANSWER_FRAMES = (3, 4)


class ReplayEnd(StrEnum):
    """The reason why a replay was over."""

    REACHED = "reached"  # the last number asked for has come, or a later one
    MARKER = "marker"  # the engine says that it has no more
    HOLE = "hole"  # numbers were left out behind some that came; these are asked for again
    SILENT = "silent"  # nothing of use came for the idle time
    LATE = "late"  # the whole took too long, with the wait for a turn
    TOO_MUCH = "too_much"  # more messages or bytes than any buffer holds
    FAILED = "failed"  # no socket could be had
    OTHER_ENGINE = "other_engine"  # what came proves that the engine was started again


def request(first: int) -> list[bytes]:
    """Returns the frames that ask for batches from the number `first` on."""
    return [b"", first.to_bytes(SEQ_BYTES, "big")]


class Replayed(NamedTuple):
    """A message of an answer."""

    seq: int
    payload: bytes
    publisher: bytes = b""  # 16, or none

    @property
    def is_end(self) -> bool:
        return self.seq == END_SEQ and not self.payload


def read_answer(frames: list[bytes]) -> Replayed | None:
    """Returns the message in an answer's frames, None where they are malformed."""
    if len(frames) not in ANSWER_FRAMES or frames[0] or len(frames[-2]) not in NUMBER_BYTES:
        return None
    number, payload = frames[-2], frames[-1]
    publisher = number[SEQ_BYTES:] or publisher_of(payload)
    return Replayed(int.from_bytes(number[:SEQ_BYTES], "big"), payload, publisher)
