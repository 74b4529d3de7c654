"""Replay servers of every kind: each yields its messages and when they arrive."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from tests.simulation.engine import Engine

END = (1 << 64) - 1
FEW = 3  # messages that a socket has room for; others are dropped, perhaps also the end marker
GOOD = ("good", "four_frames", "slow")
BAD = (
    *("silent", "no_end", "broken_off", "strays", "garbage", "dripping", "backwards", "empty"),
    *("few", "few_no_end", "dropping"),
)

# A server that has outlived its process, and answers with that one's batches.
OUTLIVED = "outlived"

Answer = Iterator[tuple[float, list[bytes]]]  # seconds after the request, frames


def answer(kind: str, chance: random.Random, engine: Engine, start: int) -> Answer:
    batches: Iterable[tuple[int, bytes]] = engine.ring
    if kind == OUTLIVED:
        batches = enumerate(engine.processes[-2].batches if len(engine.processes) > 1 else ())
    kept = [(seq, payload) for seq, payload in batches if seq >= start]
    at = 0.001
    for frames in _messages(kind, chance, engine, kept):
        yield at, frames
        at += PAUSE_S.get(kind, 0.0001)


PAUSE_S = {"slow": 0.5, "dripping": 0.3}


def _messages(
    kind: str, chance: random.Random, engine: Engine, kept: list[tuple[int, bytes]]
) -> Iterator[list[bytes]]:
    if kind in ("silent", "empty"):
        yield from [_frames(END, b"")] if kind == "empty" else []
        return
    if kind == "dripping":
        yield from [_frames(0, batch) for batch in engine.process.batches[:1]] * 200
        return
    if kind == "backwards":
        kept.reverse()
    if kind == "broken_off":
        kept = kept[: len(kept) // 2]
    if kind in ("few", "few_no_end"):
        kept = kept[:FEW]
    if kind == "dropping":
        kept = kept[:FEW] + [each for each in kept[FEW:] if chance.random() < 0.5]
    for seq, payload in kept:
        if kind == "strays":
            yield _stray(chance, engine)
        if kind == "garbage":
            yield chance.choice(([b""], [b"", b"\0" * 7, payload], [b"x"] * 5))
        yield (
            [b"", b"topic", *_frames(seq, payload)[1:]]
            if kind == "four_frames"
            else _frames(seq, payload)
        )
    if kind not in ("no_end", "broken_off", "few_no_end"):
        yield _frames(END, b"")


def _stray(chance: random.Random, engine: Engine) -> list[bytes]:
    """Returns any earlier batch of this process, mostly not one that was asked for."""
    batches = engine.process.batches
    seq = chance.randrange(len(batches))
    return _frames(seq, batches[seq])


def _frames(seq: int, payload: bytes) -> list[bytes]:
    return [b"", seq.to_bytes(8), payload]
