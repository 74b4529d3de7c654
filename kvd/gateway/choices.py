"""The interface by which the gateway chooses and books: this process, or another kvd (`remote`).

Question ──> choose ──> Placement, booked under the question's id
                           │ note_prefilled, note_cached, free: steps of the booking's life
Worker   ──> register, deregister: the engines that can be chosen
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import trio

from kvd.errors import NotFound
from kvd.http.untasked import in_task
from kvd.index.registry import Registry
from kvd.model import DEFAULT_TENANT, PartitionKey, RankKey
from kvd.selection.immediate import ImmediateSelection, ImmediateSteps
from kvd.selection.phases import PREFILL_SUFFIX, Phase
from kvd.selection.requests import Constraints, PromptLookup, QueuedRequest, SelectRequest
from kvd.selection.service import Selections
from kvd.selection.worker_record import WorkerRecord
from kvd.telemetry.metrics import Family

T = TypeVar("T")


class WhileWanted(Protocol):
    """Awaits something in a task, and gives it up once nobody wants the answer any more."""

    async def __call__(self, waiting: Awaitable[T], /) -> T:
        """Returns what is awaited; raises OSError if it was given up."""


async def always_wanted(waiting: Awaitable[T]) -> T:
    return await waiting


class Question(NamedTuple):
    """A prompt that wants a rank."""

    model: str
    adapter: str | None
    block_size: int  # tokens, of the engines that serve the model
    lookup: PromptLookup  # puts the prompt before a pool
    reservation_id: str
    allowed: frozenset[int]  # workers that could serve it and have not been tried yet
    session: str | None  # decides where nothing better is known
    priority_jump: float = 0.0  # seconds that it counts as older while it waits
    expected_output_tokens: int | None = None
    phase: Phase | None = None  # of disaggregated serving; None: the whole request
    while_wanted: WhileWanted = always_wanted  # what the choice waits for is awaited by it

    @property
    def key(self) -> PartitionKey:
        """The fleet of the model's engines."""
        return PartitionKey(self.model, DEFAULT_TENANT)


class Placement(NamedTuple):
    """A rank that was chosen for a prompt, and booked."""

    worker_id: int
    dp_rank: int
    prefill_tokens: int  # of the prompt, not expected to be cached there
    by_load: bool = False  # no kvd has answered: chosen by what this process knows of loads
    by_session: bool = False  # where its session is; a kvd elsewhere does not say so
    prefill: Placement | None = None  # who prefills, where that is another one


class Choices(Protocol):
    """Chooses and books. Steps of bookings neither wait nor fail: their end comes anyway."""

    async def run(self) -> None:
        """Keeps the choices going until it is cancelled."""

    async def met(self) -> None:
        """Waits until the part or kvd that chooses has been asked once, whatever the outcome."""

    async def register(self, record: WorkerRecord) -> list[str]:
        """Has an engine be chosen, as it is described now; returns why it cannot be, [] if it can.

        Raises KvdError for a description that is refused.
        """

    async def deregister(self, worker_id: int) -> None:
        """Has an engine not be chosen any more, if it ever was."""

    async def choose(self, question: Question) -> Placement:
        """Chooses and books, at once or when a rank is free; raises KvdError if there is none.

        Raises OSError, and nothing is booked, if the choice is not wanted any more.
        """

    def least_prefill_tokens(self, question: Question) -> int:
        """Returns the tokens of a prompt that each of its engines would have to compute, at least.

        Those of all of it where what is cached is not known here.
        """

    def hears(self, record: WorkerRecord) -> bool | None:
        """Returns whether an engine's events are listened to; None where that is not known here."""

    def note_prefilled(self, reservation_id: str) -> None:
        """Takes note of a request's first token, or of the end of its prefill elsewhere."""

    def note_cached(
        self, reservation_id: str, prompt: int, expected: int, cached: int, *, prefill: bool = False
    ) -> None:
        """Takes the cached tokens of a prompt, as they were expected and as its engine says.

        With `prefill` that is the engine that prefills for another one, before the end of that.
        """

    def free(self, reservation_id: str) -> None:
        """Ends a booking."""

    def shown(self) -> list[dict[str, object]] | None:
        """Returns the kvds that choose, for /status; None if this process does."""

    def families(self) -> Iterator[Family]:
        """Yields metrics of the way to those kvds."""


class LocalChoices:
    """Choices of the selection service in this process."""

    def __init__(self, selections: Selections, registry: Registry) -> None:
        """The `registry` has the listeners of their engines."""
        self._selections = selections
        self._registry = registry
        self._at_once, self._steps = ImmediateSelection(selections), ImmediateSteps(selections)

    async def run(self) -> None:
        await trio.sleep_forever()

    async def met(self) -> None:
        await trio.lowlevel.checkpoint()

    async def register(self, record: WorkerRecord) -> list[str]:
        workers = self._selections.workers
        known = workers.entries.get(record.worker_id)
        if known is not None and known.record == record:
            return []
        if known is not None and not known.reasons:
            await workers.delete(record.worker_id)
        return (await workers.put(record)).reasons

    async def deregister(self, worker_id: int) -> None:
        with suppress(NotFound):  # it never was one
            await self._selections.workers.delete(worker_id)

    async def choose(self, question: Question) -> Placement:
        selections, key = self._selections, question.key
        candidates = selections.candidates.get(key)  # none while its only worker is made anew
        everybody = candidates is not None and question.allowed == candidates.workers.keys()
        session = None if selections.affinity is None else question.session
        usual = everybody and question.phase is None
        if (
            candidates is not None
            and usual
            and self._at_once.suits(candidates, question.reservation_id, session)
        ):
            question.lookup(candidates.pool)
            expected = question.expected_output_tokens
            booked = self._at_once.select(candidates, question.reservation_id, expected)
            if booked is not None:
                return Placement(*booked)
        ask = SelectRequest(
            key,
            selections.settings(key),
            question.phase,
            reservation_id=question.reservation_id,
            constraints=None if everybody else Constraints(question.allowed),
            priority_jump=question.priority_jump,
            expected_output_tokens=question.expected_output_tokens,
            lora_name=question.adapter,
            session_id=session,
        )
        bound = None if selections.affinity is None else selections.affinity.target(ask)
        reply = selections.scheduler.select(ask, question.lookup)
        if isinstance(reply, QueuedRequest):
            await in_task()
            waiting = selections.scheduler.wait(reply)
            chosen = placement(await question.while_wanted(waiting))
        else:
            chosen = placement(reply.answer)
        return chosen._replace(by_session=bound is not None and bound[0] == chosen.worker_id)

    def least_prefill_tokens(self, question: Question) -> int:
        candidates = self._selections.candidates.get(question.key)
        if candidates is None or not candidates.workers:  # it is being made anew
            return 0
        question.lookup(candidates.pool)
        mask = candidates.pool.mask(question.allowed)
        return candidates.pool.least_prefill_tokens(self._selections.settings(question.key), mask)

    def hears(self, record: WorkerRecord) -> bool | None:
        ranks = [RankKey(record.key, record.worker_id, rank) for rank in record.ranks]
        found = [self._registry.find_listener(rank) for rank in ranks]
        return all(each is not None and each.connected for each in found)

    def note_prefilled(self, reservation_id: str) -> None:
        with suppress(NotFound):  # its worker has left the fleet, with all that was booked there
            self._steps.prefill_complete(reservation_id)

    def note_cached(
        self, reservation_id: str, prompt: int, expected: int, cached: int, *, prefill: bool = False
    ) -> None:
        with suppress(NotFound):  # as above
            booked = reservation_id + PREFILL_SUFFIX if prefill else reservation_id
            key, live = self._selections.reservations.find(booked)
            rank = key, live.worker_id, live.dp_rank
            self._selections.regret.note_cached(rank, expected, cached)

    def free(self, reservation_id: str) -> None:
        with suppress(NotFound):  # as above
            self._steps.free(reservation_id)

    def shown(self) -> list[dict[str, object]] | None:
        return None

    def families(self) -> Iterator[Family]:
        return iter(())


def placement(answer: bytes) -> Placement:
    """Reads the answer to a selection; raises KeyError, TypeError or ValueError for any other."""
    said = json.loads(answer)
    if not isinstance(said, dict):
        raise TypeError("not an object")
    prefill = said.get("prefill")
    return _placement_of(said)._replace(prefill=None if prefill is None else _placement_of(prefill))


def _placement_of(said: Mapping[str, Any]) -> Placement:
    return Placement(said["worker_id"], said["dp_rank"], said["effective_prefill_tokens"])
