"""An index that is fed the messages of real engines answers as the engines' own caches did."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from kvd_core.base.hashing import eagle_hashes
from kvd_core.index.prefix_index import IngestStats, PrefixIndex, Stream, Worker
from kvd_core.json.scan import BodyScanner
from tests.captures.recording import (
    NAMES,
    AgreementStats,
    Answer,
    Message,
    Question,
    Rank,
    Recording,
    judge,
    load,
)

QUERY = BodyScanner({"token_ids": "u32"})
QUERY_BY_HASH = BodyScanner({"block_hashes": "hash64"})

# Questions that no indexer could answer correctly, because the engines' events do not say enough.
UNDECIDABLE = {
    # Parts of a split tree node, and blocks that follow its first page, look like roots.
    "sglang-0.5.3-hand": AgreementStats(agree=3, under=5),
    # These releases' events have neither salts nor images. Blocks with and without a salt look
    # alike, so an unused salt finds some; and prompts with images find nothing.
    "vllm-0.9.2-ident": AgreementStats(agree=3, under=3, over=1),
    "vllm-0.14.1-ident": AgreementStats(agree=6, under=4, over=1),
    # Events name only the last of every four blocks, and no chunk size: too little host memory.
    "vllm-0.33.0-offload-bare-chunk4": AgreementStats(agree=53, under=17),
    # Its blocks hold pairs of tokens, which a question by tokens does not find (see below).
    "sglang-0.5.23-eagle-bigram": AgreementStats(under=1),
}

TIMELINES = {
    "dynamo-mocker-1.6.1-vllm": AgreementStats(agree=23),
    "dynamo-mocker-1.6.1-trtllm": AgreementStats(agree=23),
    # The mocker finds blocks in host memory that it never announced.
    "dynamo-mocker-1.6.1-vllm-host": AgreementStats(agree=7, under=16),
}

RECORDINGS = 51
FIGURES = 1795


class Fed:
    """An index with a registered worker for every instance of a recording."""

    def __init__(self, recording: Recording) -> None:
        self.block_size = recording.block_size
        self.counters = IngestStats()
        self.index = PrefixIndex(recording.block_size, self.counters)
        workers: dict[int, Worker] = {}
        self._streams = {rank: self._register(workers, rank) for rank in recording.ranks}

    def _register(self, workers: dict[int, Worker], rank: Rank) -> Stream:
        instance, dp_rank = rank
        if instance not in workers:
            workers[instance] = self.index.add_worker(instance)
        workers[instance].register(dp_rank)
        return workers[instance].stream(dp_rank)

    def feed(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._streams[message.rank].apply(message.payload)

    def ask(self, question: Question) -> Answer:
        if question.items:
            return self.ask_hashes(question.hashes(self.block_size))
        return self.ask_tokens(question.tokens, question.lora_name, question.cache_salt)

    def ask_tokens(
        self, tokens: list[int], lora_name: str | None = None, cache_salt: str | None = None
    ) -> Answer:
        QUERY.scan(json.dumps({"token_ids": tokens}).encode())
        return json.loads(self.index.query_tokens(QUERY, 0, lora_name, cache_salt))

    def ask_hashes(self, hashes: list[int]) -> Answer:
        QUERY_BY_HASH.scan(json.dumps({"block_hashes": hashes}).encode())
        return json.loads(self.index.query_hashes(QUERY_BY_HASH, 0))


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_the_engine(name: str) -> None:
    recording = load(name)
    fed = Fed(recording)
    fed.feed(recording.messages)
    fed.index.verify()
    totals = fed.counters.as_dict()
    assert not any(totals["bad"].values()), totals
    assert not any(totals["ignored"].values()), totals
    stats, wrong = judge(recording, fed.ask)
    everything = AgreementStats(
        agree=sum(len(question.figures) for question in recording.questions)
    )
    assert stats == UNDECIDABLE.get(name, everything), "\n".join(wrong)


@pytest.mark.parametrize("name", TIMELINES)
def test_answers_meanwhile_are_those_of_the_engine(name: str) -> None:
    recording = load(name)
    fed = Fed(recording)
    applied, found = 0, []
    for moment in recording.timeline:
        fed.feed(recording.messages[applied : moment["after_messages"]])
        applied = moment["after_messages"]
        held = fed.ask_tokens(moment["prompt"])["scores"]["0"]["0"]
        found.append((held, moment["cached_tokens"]))
    assert AgreementStats.of(found) == TIMELINES[name], found


def test_pairs_of_tokens_are_found_by_their_hashes() -> None:
    recording = load("sglang-0.5.23-eagle-bigram")
    fed = Fed(recording)
    fed.feed(recording.messages)
    (question,) = recording.questions
    answer = fed.ask_hashes(eagle_hashes(question.tokens, recording.block_size))
    assert answer["scores"] == {"0": {"0": question.figures["gpu"]}}


def test_no_recording_is_missing() -> None:
    figures = [len(question.figures) for name in NAMES for question in load(name).questions]
    assert (len(NAMES), sum(figures)) == (RECORDINGS, FIGURES)
    assert UNDECIDABLE.keys() | TIMELINES.keys() <= set(NAMES)
