"""Has other kvds choose: they are asked in order, and the engines are registered at each.

    choose ──> the first kvd that is up ──> booked there
                  │ gone, or late
                  v
               the next one ──> ... ──> none is left: by the load that this process knows of

What keeps a kvd up, and informed of engines and bookings, is in `kvd.gateway.remote_kvd`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import trio

from kvd.errors import Unavailable
from kvd.gateway.choices import Placement, Question, read_placement
from kvd.gateway.exchanges import Exchanges
from kvd.gateway.remote_kvd import Failed, RemoteKvd, dumps, refusal
from kvd.gateway.siblings import ProcessIdentity
from kvd.http.untasked import in_task
from kvd.net.dialing import Dialer
from kvd.selection.phases import PREFILL_SUFFIX, Phase, serves
from kvd.selection.worker_record import WorkerRecord
from kvd.telemetry.logs import RateLimit, get_logger
from kvd.telemetry.metrics import Family, by_label, counter, gauge
from kvd_core.ledger.ledger import Ledger
from kvd_core.relay.relay import Answer
from kvd_core.selector.selector import Pool, Prompt

DEFAULT_DEADLINE_S = 1.0  # time for the answer to a question, with the wait in that kvd's queue
REFUSALS_LOGGED_S = 30.0  # pause between two log lines about questions that one kvd refuses
U32_MAX = 2**32 - 1

# Outcomes of questions: those that no kvd has answered are decided by load.
OUTCOMES = ("answered", "refused", "failed", "late", "by_load")

log = get_logger(__name__)


class RemoteRefused(Failed):
    """A kvd refuses this question, but may answer others."""


class RemoteBooking(NamedTuple):
    """The kvd where a request is booked, and the id there."""

    kvd: RemoteKvd | None  # None: in this process alone
    booked_as: str  # its id there
    rank: tuple[int, int]  # worker id, dp rank


class RemoteChoices:
    """Choices by the first of several kvds that answers."""

    def __init__(
        self,
        urls: Sequence[str],
        exchanges: Exchanges,
        dialer: Dialer,
        deadline_s: float = DEFAULT_DEADLINE_S,
        token: bytes = b"",
        identity: ProcessIdentity | None = None,
    ) -> None:
        """If a kvd does not answer within `deadline_s`, the next one is asked.

        Reservations of former processes with this `identity` are ended: they may have been killed,
        and some before they could do the same.
        """
        self._records: dict[int, WorkerRecord] = {}
        self._kvds = [
            RemoteKvd(url, self._records, exchanges, dialer, deadline_s, token) for url in urls
        ]
        if identity is not None and identity.restarts:
            for kvd in self._kvds:
                kvd.free_by_prefix(identity.name_prefix, identity.prefix)
        self._deadline_s = deadline_s
        self._of_model: dict[str, frozenset[int]] = {}
        self._pools: dict[int, Pool] = {}  # by block size; without ranks, only to hash prompts
        self._bookings: dict[str, RemoteBooking] = {}
        self._loads: Counter[tuple[int, int]] = Counter()  # bookings of this process, by rank
        self._turn = 0
        self._sent = 0
        self.questions = Counter(dict.fromkeys(OUTCOMES, 0))
        self._refusals = RateLimit(REFUSALS_LOGGED_S)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for kvd in self._kvds:
                nursery.start_soon(kvd.maintain)
                nursery.start_soon(kvd.send_steps)

    async def met(self) -> None:
        for kvd in self._kvds:
            await kvd.met.wait()

    # ---- engines

    async def register(self, record: WorkerRecord) -> list[str]:
        self._records[record.worker_id] = record
        self._sort()
        await self._update_all()
        up = (kvd for kvd in self._kvds if kvd.problem is None)
        return next((kvd.reasons.get(record.worker_id, []) for kvd in up), [])

    async def deregister(self, worker_id: int) -> None:
        if self._records.pop(worker_id, None) is None:
            return
        self._sort()
        await self._update_all()

    async def _update_all(self) -> None:
        """Updates the engines at the kvds that are up, at the others when they are reached."""
        for kvd in self._kvds:
            if kvd.problem is None:
                await kvd.try_update(trio.current_time())
            else:
                kvd.failed.set()  # an update under way may still register the former engines

    def _sort(self) -> None:
        found: dict[str, set[int]] = {}
        for worker_id, record in self._records.items():
            found.setdefault(record.model_name, set()).add(worker_id)
        self._of_model = {model: frozenset(ids) for model, ids in found.items()}

    # ---- requests

    async def choose(self, question: Question) -> Placement:
        await in_task()
        prompt = self._hashed(question)
        for kvd in self._kvds:
            if kvd.problem is not None:
                continue
            try:
                with trio.fail_after(self._deadline_s):
                    placement, booked_as = await self._ask(kvd, question, prompt)
            except RemoteRefused as error:
                self.questions["failed"] += 1
                if self._refusals.admit(kvd.url, trio.current_time()) is not None:
                    log.warning("question_refused", url=kvd.url, reason=error)
                continue
            except (Failed, trio.TooSlowError) as error:
                self.questions["failed" if str(error) else "late"] += 1
                kvd.note_failed(str(error) or "it has not answered in time")
                continue
            except Unavailable:
                self.questions["refused"] += 1
                raise
            self.questions["answered"] += 1
            return self._note_booked(question, placement, kvd, booked_as)
        self.questions["by_load"] += 1
        return self._note_booked(question, self._by_load(question, prompt))

    def hears(self, record: WorkerRecord) -> bool | None:
        return None

    def fault_of_events(self, record: WorkerRecord) -> str | None:
        return None

    def least_prefill_tokens(self, question: Question) -> int:
        return self._hashed(question).isl_tokens

    def _hashed(self, question: Question) -> Prompt:
        pool = self._pools.get(question.block_size)
        if pool is None:
            pool = self._pools[question.block_size] = Pool(None, Ledger(), question.block_size)
        question.lookup(pool)
        return pool.hold()

    async def _ask(
        self, kvd: RemoteKvd, question: Question, prompt: Prompt
    ) -> tuple[Placement, str]:
        """Asks one kvd; returns its choice, and the id of the booking there.

        Raises Failed, or Unavailable if the kvd says that no rank is free.
        """
        while True:
            alone = question.allowed == self._of_model.get(question.model)
            unlimited = alone and question.model not in kvd.shared
            self._sent += 1  # a new id each time: the end of one booking must not end the next
            booked_as = f"{question.reservation_id}.{self._sent}"
            body = body_of(question, booked_as, prompt, None if unlimited else question.allowed)
            since = trio.current_time()
            is_booked = True  # it may be, until the answer says otherwise
            try:
                answer = await kvd.request("POST", "/select_and_reserve", body)
                is_booked = answer.status == 200
                if answer.status == 503:
                    if await kvd.try_update(since):  # it had been restarted
                        continue
                    raise Unavailable(refusal(answer))
                placement = _placement(answer)
                named = {placement.worker_id, (placement.prefill or placement).worker_id}
                if named <= question.allowed:
                    is_booked = False  # the caller will end the booking
                    return placement, booked_as
            finally:
                if is_booked:
                    kvd.put(booked_as, "DELETE")
            if not unlimited:
                raise Failed("the kvd chose an engine that was excluded")
            kvd.shared.add(question.model)

    def _by_load(self, question: Question, prompt: Prompt) -> Placement:
        """Returns the rank with the fewest requests of this process, equal ones in turn.

        Ranks that prefill for it are taken in turn.
        """
        self._turn += 1
        phase = question.phase
        if phase is Phase.BOTH:
            decode = self._least_loaded(question.allowed, Phase.DECODE, 0)
            prefill = self._least_loaded(question.allowed, Phase.PREFILL, prompt.isl_tokens)
            return decode._replace(prefill=prefill)
        return self._least_loaded(question.allowed, phase, prompt.isl_tokens)

    def _least_loaded(
        self, allowed: frozenset[int], phase: Phase | None, prefill_tokens: int
    ) -> Placement:
        ranks = [
            (worker_id, dp_rank)
            for worker_id in sorted(allowed & self._records.keys())
            if serves(self._records[worker_id].role, phase)
            for dp_rank in self._records[worker_id].ranks
        ]
        if not ranks:
            raise Unavailable("no engine is left to choose from")

        def order(at: int) -> tuple[int, int]:
            return self._loads[ranks[at]], (at - self._turn) % len(ranks)

        worker_id, dp_rank = ranks[min(range(len(ranks)), key=order)]
        return Placement(worker_id, dp_rank, prefill_tokens, by_load=True)

    def _note_booked(
        self,
        question: Question,
        placement: Placement,
        kvd: RemoteKvd | None = None,
        booked_as: str = "",
    ) -> Placement:
        rank = placement.worker_id, placement.dp_rank
        self._loads[rank] += 1
        self._bookings[question.reservation_id] = RemoteBooking(kvd, booked_as, rank)
        return placement

    # ---- steps of bookings

    def note_prefilled(self, reservation_id: str) -> None:
        self._put_step(reservation_id, "POST", "/prefill_complete")

    def note_cached(
        self, reservation_id: str, prompt: int, expected: int, cached: int, *, prefill: bool = False
    ) -> None:
        # The length may be an estimate, and the engine reports more.
        report = {"prompt_tokens": max(prompt, cached), "cached_tokens": cached}
        path = PREFILL_SUFFIX + "/report" if prefill else "/report"
        self._put_step(reservation_id, "POST", path, dumps(report).encode())

    def note_refused(self, reservation_id: str, prompt: Prompt) -> None:
        pass  # predictions of a kvd elsewhere end with their time

    def note_computed(self, model: str, rank: tuple[int, int], prompt: Prompt) -> None:
        pass  # as above

    def note_emptied(self, record: WorkerRecord) -> None:
        pass  # as above

    def free(self, reservation_id: str) -> None:
        self._put_step(reservation_id, "DELETE")
        booking = self._bookings.pop(reservation_id, None)
        if booking is not None:
            self._loads[booking.rank] -= 1
            if not self._loads[booking.rank]:
                del self._loads[booking.rank]

    def _put_step(
        self, reservation_id: str, method: str, step: str = "", body: bytes = b""
    ) -> None:
        booking = self._bookings.get(reservation_id)
        if booking is not None and booking.kvd is not None:
            booking.kvd.put(booking.booked_as, method, step, body)

    # ---- what operators see

    def shown(self) -> list[dict[str, object]] | None:
        return [
            {"url": kvd.url, "up": kvd.problem is None, "problem": kvd.problem}
            for kvd in self._kvds
        ]

    def families(self) -> Iterator[Family]:
        help = "Number of times a kvd elsewhere was asked to choose, by outcome"
        yield by_label("kvd_gateway_questions_total", "counter", help, "outcome", self.questions)
        up = sum(kvd.problem is None for kvd in self._kvds)
        states = {"up": up, "down": len(self._kvds) - up}
        help = "Number of kvds elsewhere, by state"
        yield by_label("kvd_gateway_kvds", "gauge", help, "standing", states)
        steps = [kvd.steps for kvd in self._kvds]
        help = "Number of steps of bookings that wait to be sent to a kvd elsewhere"
        yield gauge("kvd_gateway_waiting_steps", help, sum(map(len, steps)))
        help = "Number of steps of bookings never sent to a kvd elsewhere because too many waited"
        dropped = sum(each.dropped for each in steps)
        yield counter("kvd_gateway_dropped_steps_total", help, dropped)


def body_of(
    question: Question, booked_as: str, prompt: Prompt, allowed: frozenset[int] | None
) -> bytes:
    """Returns the body of a question; `allowed` None leaves the choice to all workers."""
    members: dict[str, object] = {"model_name": question.model, "reservation_id": booked_as}
    if question.adapter is not None:
        members["lora_name"] = question.adapter
    if question.phase is not None:
        members["phase"] = question.phase.value
    if question.session is not None:
        members["session_id"] = question.session
    if question.priority_jump:
        members["priority_jump"] = question.priority_jump
    if question.expected_output_tokens is not None:
        members["expected_output_tokens"] = min(question.expected_output_tokens, U32_MAX)
    if allowed is not None:
        members["allowed_worker_ids"] = sorted(allowed)
    return b"%b,%b}" % (dumps(members)[:-1].encode(), prompt.render())


def _placement(answer: Answer) -> Placement:
    if answer.status != 200:
        raise RemoteRefused(f"the kvd answers {answer.status}: {refusal(answer)}")
    try:
        return read_placement(answer.held)
    except (KeyError, RecursionError, TypeError, ValueError):
        raise Failed("the answer is not that of a kvd's selection service") from None
