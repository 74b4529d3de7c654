"""The conductor answers by tokens and by sequence hashes as real engines' own caches do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.index.partitions import State
from kvd.model import PartitionKey, RankKey
from kvd.wire.envelope import StreamIdentity
from kvd.wire.standard_events import StandardEventStream
from kvd_core.base.hashing import local_hashes
from tests.captures.recording import NAMES, AgreementStats, Question, Recording, load
from tests.models.conductor_model import sequence_hashes

KEY = PartitionKey("m", "default")

DIFFERENT = {
    # Questions for which the events do not say enough, as in test_recordings.
    "sglang-0.5.3-hand": AgreementStats(agree=3, under=5),
    "vllm-0.9.2-ident": AgreementStats(agree=2, under=2),
    "vllm-0.14.1-ident": AgreementStats(agree=5, under=2),
    "vllm-0.33.0-offload-bare-chunk4": AgreementStats(agree=18, under=17),
    "sglang-0.5.23-eagle-bigram": AgreementStats(under=1),
}
QUESTIONS = 1189  # without images


class Fed:
    """Every rank of a recording as a publisher of the conductor."""

    def __init__(self, recording: Recording) -> None:
        self.block_size = size = recording.block_size
        state = State()
        self.publications: dict[tuple[int, int], StandardEventStream] = {}
        for instance, rank in recording.ranks:
            source = state.add_source(KEY, size, f"w{instance}", "", "", rank, store=False)
            terms = StreamIdentity(*KEY, size, "", "", rank, False)
            self.publications[instance, rank] = StandardEventStream(source, terms)
        conductor = state.sized[(*KEY, size)].conductor
        self.conductor = conductor
        for message in recording.messages:
            self.publications[message.rank].apply(message.payload)

    def held(self, question: Question) -> int:
        """Returns how many tokens the rank holds on any medium; both ways to ask must agree."""
        scope = question.lora_name or "", question.cache_salt or ""
        rows = self.conductor.match_tokens(question.tokens, *scope)
        hashes = sequence_hashes(question.tokens, self.block_size, 1337)
        assert self.conductor.match_hashes(hashes, *scope) == rows
        instance, rank = question.rank
        held: int = rows[f"w{instance}"]["DP"].get(str(rank), 0)
        return held


def wanted(question: Question) -> int:
    """Returns what the engine found on all of its media."""
    return next(
        question.figures[name] for name in ("disk", "cpu", "gpu") if name in question.figures
    )


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_the_engine(name: str) -> None:
    recording = load(name)
    fed = Fed(recording)
    fed.conductor.verify()
    assert not any(
        each.bad or each.mismatches or each.orphans for each in fed.publications.values()
    )
    asked = [question for question in recording.questions if not question.items]
    found = [(fed.held(question), wanted(question)) for question in asked]
    assert AgreementStats.of(found) == DIFFERENT.get(name, AgreementStats(agree=len(asked))), found


@pytest.mark.parametrize("name", ["vllm-0.33.0-hybrid", "vllm-0.33.0-twin"])
def test_window_groups_and_copies_are_the_same_across_faces(name: str) -> None:
    """The indexer answers for events of publishers, and the conductor for those of workers."""
    recording = load(name)
    size = recording.block_size
    published, registered = State(), State()
    takers: dict[tuple[int, int], list[Callable[[bytes], object]]] = {}
    for instance, rank in recording.ranks:
        source = published.add_source(KEY, size, str(instance), "", "", rank, store=False)
        publication = StandardEventStream(source, StreamIdentity(*KEY, size, "", "", rank, False))
        stream = registered.add_rank(RankKey(KEY, instance, rank), size)
        takers[instance, rank] = [publication.apply, stream.apply]
    for message in recording.messages:
        for take in takers[message.rank]:
            take(message.payload)
    index, part = published.partition(*KEY).index, registered.sized[(*KEY, size)].conductor
    for question in recording.questions:
        instance, rank = question.rank
        depths, _ = index.match(local_hashes(question.tokens, size))
        assert depths.get((instance, rank), (0, 0, 0))[0] * size == wanted(question)
        row = part.match_tokens(question.tokens)[str(instance)]
        assert row["DP"][str(rank)] == row["GPU"] == wanted(question)
    index.verify()


def test_no_question_is_missing() -> None:
    assert sum(not q.items for name in NAMES for q in load(name).questions) == QUESTIONS
