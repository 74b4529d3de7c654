"""The replay protocol of engines: a request for all batches from a number on, and its answer.

    request, to the engine's ROUTER     [empty] [first number, 8 bytes big-endian]
    answer, per batch                   [empty] [number] [payload]   until vLLM 0.25, SGLang 0.5.21
                                        [empty] [topic] [number] [payload]                    since
    the end                             the same with an empty payload and the number 2^64-1

The frame of a batch's number may also contain the 16 bytes of its publisher's id; newer engines
name the publisher in the payload (kvd_core/events/publisher.hpp). A payload may be empty: such a
message is a heartbeat or a barrier.

The engine answers with the batches that its buffer still holds, ascending, and may omit the end
(SGLang has been seen to). It also omits batches that its socket had no room for (vLLM, beyond 1,000
messages), so batches that are missing behind others are requested again. Batches that are missing
at the beginning of an answer are no longer in the buffer.

Only the part of an answer that fits the request is used (`CatchUp.take`): numbers in the wanted
range, ascending, each once.
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
    """The reason why a replay ended."""

    REACHED = "reached"  # the last wanted number has come, or a later one
    MARKER = "marker"  # the engine sent the end of its answer
    HOLE = "hole"  # numbers are missing behind others; they are requested again
    SILENT = "silent"  # no useful batch came for the idle time
    LATE = "late"  # the replay took too long, with the wait for a free place
    TOO_MUCH = "too_much"  # more messages or bytes than any buffer holds
    FAILED = "failed"  # the request could not be sent
    OTHER_ENGINE = "other_engine"  # the answer proves that the engine was restarted


def request(first: int) -> list[bytes]:
    """Returns the frames that ask for batches from the number `first` on."""
    return [b"", first.to_bytes(SEQ_BYTES, "big")]


class Replayed(NamedTuple):
    """A message of an answer."""

    seq: int
    payload: bytes
    publisher: bytes = b""  # 16 bytes, or none

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
