"""Follows a prompt through its index: how far each rank caches it, why no further, its past."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import trio

from kvd.faces.explain.questions import ExplainRequest, HashedPrompt
from kvd.index.partitions import Partition, State
from kvd_core.index.prefix_index import TIERS
from kvd_core.index.trace import Happened, Trace, Traced, seeds

SLICE_CHANGES = 16_384  # changes examined between two checkpoints, 0.3 ms
MAX_STEPS = 4096  # changes of the prompt's blocks that are kept, counted before they are joined
MAX_TENANTS = 16  # other tenants of the model that are searched
GATHERED_S = 1.0  # changes of neighbouring blocks within this time are shown as one event

TracedRank = tuple[int | str, int]  # worker id, dp rank

_subject = attrgetter("kind", "worker_id", "dp_rank", "tiers")  # of an event


class Elsewhere(NamedTuple):
    """How far the prompt's tokens are cached under another salt, adapter or tenant."""

    why: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Event:
    """A change of blocks [begin, end) of the prompt, or of everything that a rank held."""

    began_at: float  # seconds; the first change
    kind: str
    worker_id: int | str
    dp_rank: int
    tiers: list[str]
    begin: int
    end: int
    changes: int


@dataclass(frozen=True, slots=True)
class Traces:
    """The traces of a prompt's blocks on some ranks."""

    rows: dict[TracedRank, Traced]
    events: list[Event]  # the oldest first
    left_out: int  # number of older changes, which `events` lacks
    elsewhere: dict[TracedRank, Elsewhere]


NOTHING = Traces({}, [], 0, {})


async def find_traces(
    state: State,
    partition: Partition,
    question: ExplainRequest,
    prompt: HashedPrompt,
    ranks: Iterable[TracedRank],
) -> Traces:
    """Follows a prompt on these ranks, in slices; leaves out ranks that the index lacks."""
    trace = Trace(partition.index, prompt.plain, prompt.salted, MAX_STEPS)
    for worker_id, dp_rank in ranks:
        worker = partition.workers.get(worker_id)
        if worker is not None and dp_rank in worker.ranks():
            trace.add(worker, dp_rank)
    while trace.advance(SLICE_CHANGES):
        await trio.lowlevel.checkpoint()
    elsewhere: dict[TracedRank, Elsewhere] = {}
    for each in _elsewhere(state, partition, question, prompt):
        for traced_rank, found in each.items():
            if found.blocks > elsewhere.get(traced_rank, found._replace(blocks=0)).blocks:
                elsewhere[traced_rank] = found
        await trio.lowlevel.checkpoint()
    happened = trace.happened()
    return Traces(trace.rows(), list(_gathered(happened)), trace.left_out, elsewhere)


def _elsewhere(
    state: State, partition: Partition, question: ExplainRequest, prompt: HashedPrompt
) -> Iterator[dict[TracedRank, Elsewhere]]:
    """Yields where the same tokens are cached under another salt, adapter or tenant."""
    if question.rehashed is not None:
        size, blocks = partition.block_size, prompt.blocks
        adapter, salt = question.own_terms
        for terms in {(0, 0), *seeds(partition.index)} - {(adapter, salt)}:
            first = question.rehashed(size, terms, 1)
            if not _held(partition, first):
                yield {}
                continue
            why = "other_salt" if terms[0] == adapter else "other_adapter"
            held = _held(partition, question.rehashed(size, terms, blocks))
            yield {traced_rank: Elsewhere(why, depth) for traced_rank, depth in held.items()}
    others = [
        each
        for each in state.partitions_of(partition.key.model_name, None)
        if each is not partition and each.block_size == partition.block_size
    ]
    for other in others[:MAX_TENANTS]:
        held = _held(other, prompt.salted or prompt.plain)
        yield {traced_rank: Elsewhere("other_tenant", depth) for traced_rank, depth in held.items()}


def _held(partition: Partition, hashes: bytes) -> dict[TracedRank, int]:
    """Returns how many blocks of a prompt each rank caches."""
    found, _ = partition.index.match(array("Q", hashes))
    return {traced_rank: depths[-1] for traced_rank, depths in found.items()}


def _gathered(happened: Iterable[Happened]) -> Iterator[Event]:
    """Yields changes as events; joins those of neighbouring blocks at about the same time."""
    last: Event | None = None
    for each in happened:
        whole = each.begin == each.end  # all that the rank held on these tiers
        tiers = [tier for bit, tier in enumerate(TIERS) if each.tiers >> bit & 1]
        if not whole:
            tiers = [TIERS[each.tiers]]
        event = Event(
            each.at, each.kind, each.worker_id, each.dp_rank, tiers, each.begin, each.end, 1
        )
        joined = None if last is None or whole else _joined(last, event)
        if joined is None and last is not None:
            yield last
        last = joined or event
    if last is not None:
        yield last


def _joined(one: Event, two: Event) -> Event | None:
    """Returns two events as one, None if they cannot be joined."""
    same = _subject(one) == _subject(two)
    meet = one.begin in (two.begin, two.end) or one.end in (two.begin, two.end)
    if not same or not meet or one.begin == one.end or two.began_at - one.began_at > GATHERED_S:
        return None
    begin, end = min(one.begin, two.begin), max(one.end, two.end)
    return replace(one, begin=begin, end=end, changes=one.changes + 1)
