"""Chooses who serves a prompt, now or when somebody can.

Between choosing a rank and booking it nothing is awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import trio

from kvd.errors import BadRequest, KvdError, Unavailable
from kvd.model import PartitionKey
from kvd.scheduling.options import RouterOptions
from kvd.scheduling.queue import Urgency
from kvd.selection.affinity import Affinity
from kvd.selection.asks import Answered, Ask, Held, Look
from kvd.selection.bookings import Bookings
from kvd.selection.fleet import Fleet, members_json, schedulable
from kvd_core import selector
from kvd_core.draws import Draws


class Choices:
    """The selections of all fleets."""

    def __init__(
        self,
        fleets: Mapping[PartitionKey, Fleet],
        options: RouterOptions,
        bookings: Bookings,
        draws: Draws,
        clock: Callable[[], float],
        affinity: Affinity | None = None,
    ) -> None:
        self.held = 0
        self.refused_held = 0  # at the bound
        self._fleets = fleets
        self._options = options
        self._bookings = bookings
        self._draws = draws
        self._clock = clock
        self._affinity = affinity
        self._stopping = False

    def select(self, ask: Ask, look: Look) -> bytes | Held:
        """Selects, and books if asked to; returns the answer, or the selection held.

        Raises Unavailable without anyone eligible or with all of them overloaded, BadRequest for
        constraints that contradict each other, Conflict on a reservation id that lives.
        """
        if (again := self._bookings.retries.find(ask.retry)) is not None:
            return again.answer
        fleet = schedulable(self._fleets, ask.key)
        constraints = ask.constraints
        if constraints is not None and constraints.pinned is not None:
            worker_id = constraints.pinned[0]
            if constraints.allowed is not None and worker_id not in constraints.allowed:
                raise BadRequest(f"pinned worker {worker_id} is not in allowed worker set")
        self._bookings.check_new(ask.reservation_id)  # before it waits for that
        look(fleet.pool)
        if not fleet.queue.waits(constraints):
            answered = self._choose(fleet, ask)
            if answered is not None:
                return answered.answer
        return self._hold(fleet, ask)

    async def wait(self, held: Held) -> bytes:
        """Returns the answer of a selection that is held, once there is one; raises as `select`.

        Whatever ends the wait, the selection is in no queue afterwards. What was booked with an
        answer that nobody will see is given back.
        """
        try:
            with trio.move_on_after(self._options.max_wait_s):
                await held.done.wait()
        except trio.Cancelled:
            self.take_back(held)  # it may have been served since
            raise
        finally:
            assert held.waiting is not None
            fleet = self._fleets[held.ask.key]
            fleet.queue.remove(held.waiting)
            if not len(fleet.queue):
                fleet.ledger.loads.eased = None
            self.held -= 1
        if held.answer is None:
            raise Unavailable("all workers are busy", retry_after_s=1)
        if isinstance(held.answer, KvdError):
            raise held.answer
        return held.answer

    def take_back(self, held: Held) -> None:
        """Ends what is booked with an answer that its client cannot be given."""
        if held.receipt is not None:
            self._bookings.take_back(held.receipt)

    def _hold(self, fleet: Fleet, ask: Ask) -> Held:
        if self._stopping:
            raise Unavailable("the service is stopping")
        if self.held >= self._options.max_held:
            self.refused_held += 1
            raise Unavailable(f"{self.held} selections wait already", retry_after_s=1)
        held = Held(ask, fleet.pool.hold())
        least = min(
            fleet.pool.effective_prefill_tokens(at, ask.settings) for at in range(len(fleet.pool))
        )
        urgency = Urgency(ask.strict_priority, ask.priority_jump, least)
        held.waiting = fleet.queue.push(ask.constraints, held, urgency, self._clock())
        fleet.ledger.loads.eased = partial(self.turn, fleet)  # for what other faces end
        self.held += 1
        return held

    def _choose(self, fleet: Fleet, ask: Ask) -> Answered | None:
        """Chooses for the prompt that the pool has looked at; None if all are busy."""
        if (again := self._bookings.retries.find(ask.retry)) is not None:
            return again  # both have waited
        self._bookings.check_new(ask.reservation_id)
        eligible = fleet.eligible(ask.constraints)
        chosen = self._follow(fleet, ask, eligible)
        if ask.affinity is not None and (wanted := fleet.targets(ask.affinity, eligible)):
            chosen = fleet.pool.choose(ask.settings, wanted, self._draws.next())
        if chosen < 0:  # who is liked best is not waited for
            chosen = fleet.pool.choose(ask.settings, eligible, self._draws.next())
        if chosen == selector.BUSY:
            return None
        if chosen == selector.NONE:
            raise Unavailable("no endpoints available to route work")
        if chosen == selector.OVERLOADED:
            raise Unavailable("all workers are overloaded", retry_after_s=1)
        if ask.reservation_id is None:
            return Answered(self._answer(fleet, ask, chosen))
        receipt = self._bookings.book(fleet, ask, chosen, ask.reservation_id)
        answered = Answered(self._answer(fleet, ask, chosen), receipt)
        self._bookings.retries.note(ask.retry, answered)
        return answered

    def _follow(self, fleet: Fleet, ask: Ask, eligible: bytes | None) -> int:
        """Returns the rank that the request's session is bound to, NONE if that cannot serve it.

        Once one is not busy the session's is taken, busy or not, as on the original.
        """
        bound = None if self._affinity is None else self._affinity.target(ask)
        wanted = None if bound is None else fleet.targets(bound, eligible)
        if wanted is None or fleet.pool.refusal(ask.settings, eligible) != 0:
            return selector.NONE
        settings = ask.settings.replace(queue_threshold=None)
        return fleet.pool.choose(settings, wanted, self._draws.next())

    def _answer(self, fleet: Fleet, ask: Ask, chosen: int) -> bytes:
        named: dict[str, Any] = {}
        if ask.selection_id is not None:
            named["selection_id"] = ask.selection_id
        if ask.reservation_id is not None:
            named["reservation_id"] = ask.reservation_id
        members = fleet.piece(chosen)
        if ask.explain:
            rows = fleet.pool.explain(ask.settings, fleet.eligible(ask.constraints))
            members += members_json({"candidates": [row._asdict() for row in rows]})
        return fleet.pool.render_answer(b"{" + members_json(named), members, chosen, ask.settings)

    def stop(self) -> None:
        """Answers those that wait, now and from now on, that nobody will serve them."""
        self._stopping = True
        self.turn_all()

    # ---- what moves those that wait

    def turn_all(self) -> None:
        """Serves all that can be served now."""
        if self.held:
            for fleet in self._fleets.values():
                self.turn(fleet)

    def turn(self, fleet: Fleet) -> None:
        """Serves the selections that can be served now, in their order."""
        if len(fleet.queue):
            for _ in fleet.queue.release(lambda held: self._serve(fleet, held)):
                pass

    def _serve(self, fleet: Fleet, held: Held) -> bool:
        try:
            if self._stopping:
                raise Unavailable("the service is stopping")
            if not fleet.workers:
                raise Unavailable("no schedulable workers are available")
            fleet.pool.look_again(held.prompt)
            answered = self._choose(fleet, held.ask)
        except KvdError as error:
            held.settle(error)
            return True
        if answered is None:
            return False
        held.settle(answered)
        return True
