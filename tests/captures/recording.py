"""The recordings of this folder, and how an indexer's answers compare with them."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd_core.base.hashing import local_hash_mm

FOLDER = Path(__file__).parent / "recordings"
SUFFIX = ".json.xz"
NAMES = sorted(path.name.removesuffix(SUFFIX) for path in FOLDER.glob("*" + SUFFIX))

# The engine's figures, and the member of an instance's row that has to equal them.
FIGURES = {
    "expect_tokens": "gpu",
    "expect_tokens_gpu_then_cpu": "cpu",
    "expect_tokens_all_tiers": "disk",
}

Rank = tuple[int, int]  # instance, dp rank
Answer = dict[str, Any]  # of /query


@dataclass(frozen=True)
class Message:
    rank: Rank
    topic: bytes
    seq: int
    payload: bytes


@dataclass(frozen=True)
class Question:
    """A prompt, and how much of it the engine itself found in its cache."""

    rank: Rank
    tokens: list[int]
    lora_name: str | None
    cache_salt: str | None
    items: list[tuple[str, int, int]]  # images and sounds: id, offset and length in tokens
    figures: dict[str, int]  # member of a row -> tokens

    def hashes(self, block_size: int) -> list[int]:
        """Returns local hashes: the only way to ask for a prompt with images."""
        starts = range(0, len(self.tokens) - block_size + 1, block_size)
        return [
            local_hash_mm(
                self.tokens[start : start + block_size],
                self._items_within(start, start + block_size),
                self.lora_name,
                self.cache_salt,
            )
            for start in starts
        ]

    def _items_within(self, start: int, stop: int) -> list[int]:
        """Returns the items of one block; a digest is hashed by its first 16 digits."""
        return [
            int(item[:16], 16)
            for item, offset, length in self.items
            if offset < stop and offset + length > start
        ]


@dataclass(frozen=True)
class Recording:
    """One engine process: all that it sent, and what it held in the end."""

    name: str
    block_size: int
    messages: list[Message]
    questions: list[Question]
    timeline: list[dict[str, Any]]

    @property
    def ranks(self) -> list[Rank]:
        return sorted({message.rank for message in self.messages})


def load(name: str) -> Recording:
    members = json.loads(lzma.decompress((FOLDER / (name + SUFFIX)).read_bytes()))
    return Recording(
        name,
        members["block_size"],
        [
            Message(_rank(stream), bytes.fromhex(topic), seq, bytes.fromhex(payload))
            for stream, topic, seq, payload in members["messages"]
        ],
        [_question(case) for case in members.get("expected", [])],
        members.get("timeline", []),
    )


@dataclass(frozen=True)
class AgreementStats:
    """Numbers of figures that agree with the engine's, credit too little and credit too much."""

    agree: int = 0
    under: int = 0
    over: int = 0

    @classmethod
    def of(cls, figures: Iterable[tuple[int, int]]) -> AgreementStats:
        """Returns the stats of (answered, wanted) pairs."""
        signs = Counter((held > wanted) - (held < wanted) for held, wanted in figures)
        return cls(agree=signs[0], under=signs[-1], over=signs[1])


def judge(
    recording: Recording, ask: Callable[[Question], Answer]
) -> tuple[AgreementStats, list[str]]:
    """Asks all questions; returns the stats, and a line for each figure that differs."""
    compared = [
        (figure, held, wanted, question)
        for question in recording.questions
        for figure, held, wanted in _compare(question, ask(question))
    ]
    stats = AgreementStats.of((held, wanted) for _, held, wanted, _ in compared)
    wrong = [
        f"{figure} {held}, engine {wanted}: rank {question.rank}, salt {question.cache_salt}"
        for figure, held, wanted, question in compared
        if held != wanted
    ]
    return stats, wrong


def _compare(question: Question, answer: Answer) -> Iterator[tuple[str, int, int]]:
    instance, dp_rank = map(str, question.rank)
    row = answer["instances"].get(instance, {})
    # The device's figure is the rank's own; those of lower tiers are the instance's.
    device = answer["scores"].get(instance, {}).get(dp_rank, 0)
    assert device == row.get("dp", {}).get(dp_rank, 0)
    for figure, wanted in question.figures.items():
        yield figure, device if figure == "gpu" else row.get(figure, 0), wanted


def _question(case: dict[str, Any]) -> Question:
    return Question(
        _rank(case["stream"]),
        case["tokens"],
        case.get("lora_name"),
        case.get("cache_salt"),
        case.get("mm") or [],
        {figure: case[wanted] for wanted, figure in FIGURES.items() if wanted in case},
    )


def _rank(stream: str) -> Rank:
    """`w1.dp3` is rank 3 of instance 1."""
    instance, dp_rank = stream.split(".")
    return int(instance.removeprefix("w")), int(dp_rank.removeprefix("dp"))
