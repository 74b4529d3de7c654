"""The interface by which the gateway chooses and books: in this process, or by a kvd (`remote`).

Question ──> choose ──> Placement, booked under the question's id
                           │ note_prefilled, note_cached, note_refused, free: its further steps
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
from kvd.wire.event_stream import EventStream
from kvd_core.selector.selector import Prompt

T = TypeVar("T")


class WhileWanted(Protocol):
    """Awaits something in a task, and gives up once nobody wants the answer any more."""

    async def __call__(self, waiting: Awaitable[T], /) -> T:
        """Returns the result; raises OSError on giving up."""


async def always_wanted(waiting: Awaitable[T]) -> T:
    return await waiting


class Question(NamedTuple):
    """Asks for a rank that serves a prompt."""

    model: str
    adapter: str | None
    block_size: int  # tokens, of the engines that serve the model
    lookup: PromptLookup  # matches the prompt against a pool
    reservation_id: str
    allowed: frozenset[int]  # workers that could serve it and have not been tried yet
    session: str | None  # decides where not all tokens are known
    priority_jump: float = 0.0  # seconds that it counts as older while it waits
    expected_output_tokens: int | None = None
    phase: Phase | None = None  # of disaggregated serving; None: the whole request
    while_wanted: WhileWanted = always_wanted  # awaits whatever the choice has to wait for

    @property
    def key(self) -> PartitionKey:
        """The model and tenant of the engines, as the selection service knows them."""
        return PartitionKey(self.model, DEFAULT_TENANT)


class Placement(NamedTuple):
    """A rank that was chosen for a prompt, and booked."""

    worker_id: int
    dp_rank: int
    prefill_tokens: int  # tokens of the prompt that are not expected to be cached there
    by_load: bool = False  # no kvd has answered: chosen by the loads that this process knows
    by_session: bool = False  # its session is there; a kvd elsewhere does not report this
    prefill: Placement | None = None  # the rank that prefills, if it is another one


class Choices(Protocol):
    """Chooses and books. Steps of a booking neither wait nor fail: a booking ends in any case."""

    async def run(self) -> None:
        """Keeps the choices going until it is cancelled."""

    async def met(self) -> None:
        """Waits until each kvd elsewhere has been asked once, whatever the outcome."""

    async def register(self, record: WorkerRecord) -> list[str]:
        """Lets an engine be chosen, with this description; returns why it cannot be, [] if it can.

        Raises KvdError if the description is refused.
        """

    async def deregister(self, worker_id: int) -> None:
        """Removes an engine from the choices, if it is registered."""

    async def choose(self, question: Question) -> Placement:
        """Chooses and books, at once or when a rank is free; raises KvdError if there is none.

        Raises OSError, without a booking, if the choice is no longer wanted.
        """

    def least_prefill_tokens(self, question: Question) -> int:
        """Returns the fewest tokens of a prompt that any of its engines would have to compute.

        If this process does not know what is cached, these are all tokens of the prompt.
        """

    def hears(self, record: WorkerRecord) -> bool | None:
        """Returns whether an engine's events are received; None if this process does not know."""

    def fault_of_events(self, record: WorkerRecord) -> str | None:
        """Returns why an engine's events cannot be received.

        Returns None if they are, or if this process does not know.
        """

    def note_prefilled(self, reservation_id: str) -> None:
        """Notes that a request's first token has come, or that its prefill elsewhere has ended."""

    def note_cached(
        self, reservation_id: str, prompt: int, expected: int, cached: int, *, prefill: bool = False
    ) -> None:
        """Notes a prompt's cached tokens: those expected, and those that its engine reports.

        With `prefill` the prefill engine reports them; this comes before `note_prefilled`.
        """

    def note_refused(self, reservation_id: str, prompt: Prompt) -> None:
        """Notes that an engine has refused a prompt, so that it is not going to be cached there.

        A kvd elsewhere is not notified: there it counts until its time is up.
        """

    def note_computed(self, model: str, rank: tuple[int, int], prompt: Prompt) -> None:
        """Notes all of a prompt that a rank without events computes, known in part when booked.

        A kvd elsewhere is not notified: there only that part counts as cached.
        """

    def note_emptied(self, record: WorkerRecord) -> None:
        """Notes that an engine has lost its cache: it forgets what is predicted of it.

        A kvd elsewhere is not notified: there it counts until its time is up.
        """

    def free(self, reservation_id: str) -> None:
        """Ends a booking."""

    def shown(self) -> list[dict[str, object]] | None:
        """Returns the kvds that choose, for /status; None if this process does."""

    def families(self) -> Iterator[Family]:
        """Yields metrics of the questions to those kvds."""


class LocalChoices:
    """Choices of the selection service in this process."""

    def __init__(self, selections: Selections, registry: Registry) -> None:
        """`registry` has the listeners of the engines."""
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
        if known is not None and not known.reasons:
            if known.record == record:
                return []
            await workers.delete(record.worker_id)
        return (await workers.put(record)).reasons

    async def deregister(self, worker_id: int) -> None:
        with suppress(NotFound):  # it was never registered
            await self._selections.workers.delete(worker_id)

    async def choose(self, question: Question) -> Placement:
        selections, key = self._selections, question.key
        candidates = selections.candidates.get(key)  # None while its only worker is replaced
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
        request = SelectRequest(
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
        bound = None if selections.affinity is None else selections.affinity.target(request)
        reply = selections.scheduler.select(request, question.lookup)
        if isinstance(reply, QueuedRequest):
            await in_task()
            waiting = selections.scheduler.wait(reply)
            chosen = read_placement(await question.while_wanted(waiting))
        else:
            chosen = read_placement(reply.answer)
        return chosen._replace(by_session=bound is not None and bound[0] == chosen.worker_id)

    def least_prefill_tokens(self, question: Question) -> int:
        candidates = self._selections.candidates.get(question.key)
        if candidates is None or not candidates.workers:  # the only worker is being replaced
            return 0
        question.lookup(candidates.pool)
        mask = candidates.pool.mask(question.allowed)
        return candidates.pool.least_prefill_tokens(self._selections.settings(question.key), mask)

    def hears(self, record: WorkerRecord) -> bool | None:
        return all(each is not None and each.connected for each in self._listeners(record))

    def fault_of_events(self, record: WorkerRecord) -> str | None:
        faults = (
            each.link.last_error
            for each in self._listeners(record)
            if each is not None and not each.connected
        )
        return next((fault for fault in faults if fault is not None), None)

    def _listeners(self, record: WorkerRecord) -> list[EventStream | None]:
        ranks = [RankKey(record.key, record.worker_id, rank) for rank in record.ranks]
        return [self._registry.find_listener(rank) for rank in ranks]

    def note_prefilled(self, reservation_id: str) -> None:
        with suppress(NotFound):  # its worker has left, with all that was booked there
            self._steps.prefill_complete(reservation_id)

    def note_cached(
        self, reservation_id: str, prompt: int, expected: int, cached: int, *, prefill: bool = False
    ) -> None:
        with suppress(NotFound):  # as above
            booked = reservation_id + PREFILL_SUFFIX if prefill else reservation_id
            key, live = self._selections.reservations.find(booked)
            rank = key, live.worker_id, live.dp_rank
            self._selections.regret.note_cached(rank, expected, cached)

    def note_refused(self, reservation_id: str, prompt: Prompt) -> None:
        with suppress(NotFound):  # as above
            self._selections.reservations.note_refused(reservation_id, prompt)

    def note_computed(self, model: str, rank: tuple[int, int], prompt: Prompt) -> None:
        candidates = self._selections.candidates.get(PartitionKey(model, DEFAULT_TENANT))
        candidate = None if candidates is None else candidates.pool.find(*rank)
        if candidates is not None and candidate is not None:
            candidates.pool.match_again(prompt)
            candidates.pool.predict(candidate, self._selections.clock())

    def note_emptied(self, record: WorkerRecord) -> None:
        if (candidates := self._selections.candidates.get(record.key)) is not None:
            for dp_rank in record.ranks:
                candidates.forget_predictions_of((record.worker_id, dp_rank))

    def free(self, reservation_id: str) -> None:
        with suppress(NotFound):  # as above
            self._steps.free(reservation_id)

    def shown(self) -> list[dict[str, object]] | None:
        return None

    def families(self) -> Iterator[Family]:
        return iter(())


def read_placement(answer: bytes) -> Placement:
    """Reads the answer to a selection; raises KeyError, TypeError or ValueError if it is none."""
    members = json.loads(answer)
    if not isinstance(members, dict):
        raise TypeError("not an object")
    prefill = members.get("prefill")
    return _placement_of(members)._replace(
        prefill=None if prefill is None else _placement_of(prefill)
    )


def _placement_of(members: Mapping[str, Any]) -> Placement:
    chosen = members["worker_id"], members["dp_rank"], members["effective_prefill_tokens"]
    if not all(type(each) is int and each >= 0 for each in chosen):  # a bool is none
        raise TypeError("not a placement")
    return Placement(*chosen)
