"""The replay protocol of engines: ask for the batches from a number on, read what is answered.

    request, to the engine's ROUTER     [empty] [first number, 8 bytes big-endian]
    answer, per batch                   [empty] [number] [payload]   until vLLM 0.25, SGLang 0.5.21
                                        [empty] [topic] [number] [payload]                    since
    the end                             the same with an empty payload (number 2^64-1)

The engine answers with what its buffer still holds, ascending, and may leave out the end (SGLang
has been seen to). It also leaves out what its socket had no room for (vLLM, beyond 1,000 messages):
so what is missing behind something that came is asked for again. What is missing at the beginning
of an answer is not there any more.

An answer is only ever believed as far as it fits the question (`Listener.take_replayed`): numbers
in the wanted range, ascending, each once.
"""

from __future__ import annotations

from enum import StrEnum

SEQ_BYTES = 8
END_SEQ = 2**64 - 1  # the number of the end, and of no batch
ANSWER_FRAMES = (3, 4)


class ReplayEnd(StrEnum):
    """Why a replay was over."""

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


def read_answer(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Returns number and payload of an answer's message, None where it is none."""
    if len(frames) not in ANSWER_FRAMES or frames[0] or len(frames[-2]) != SEQ_BYTES:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
