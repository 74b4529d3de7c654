"""Has other kvds choose: they are asked in order, and the engines are registered at each.

    choose ──> the first kvd that is up ──> booked there
                  │ gone, or late
                  v
               the next one ──> ... ──> none is left: by the load that this process knows of

    DOWN ── reached, engines registered ──> UP ── a question fails ──> DOWN, reached again at once

A kvd that was restarted knows no engines. They are registered again when it refuses a question for
lack of them, or when the next read of its catalog shows that they are missing. Further steps of a
booking are sent in order, and no task waits for them; a kvd that misses some ends the booking when
it is too old.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import trio

from kvd.errors import Unavailable
from kvd.gateway.booking_steps import BookingSteps, StepsFailed
from kvd.gateway.choices import Placement, Question, read_placement
from kvd.gateway.exchanges import ExchangeFailed, Exchanges
from kvd.gateway.heads import own_head
from kvd.http.untasked import in_task
from kvd.net.dialing import Dialer, Unreachable, next_address
from kvd.selection.phases import PREFILL_SUFFIX, Phase, serves
from kvd.selection.worker_record import WorkerLifecycle, WorkerRecord
from kvd.telemetry.logs import RateLimit, get_logger
from kvd.telemetry.metrics import Family, by_label, counter, gauge
from kvd.wire.urls import parse_kvd
from kvd_core.ledger.ledger import Ledger
from kvd_core.relay.relay import Answer
from kvd_core.selector.selector import Pool, Prompt

DEFAULT_DEADLINE_S = 1.0  # time for the answer to a question, with the wait in that kvd's queue
CHECK_S = 5.0  # pause between two reads of a kvd's catalog
# Pause before the second try to reach a kvd that is down; each next one is twice as long.
RETRY_S = 0.1
# Longest such pause: a try only reads the kvd's catalog, and meanwhile requests go by load.
MAX_RETRY_S = 1.0
REFUSALS_LOGGED_S = 30.0  # pause between two log lines about questions that one kvd refuses
UPDATE_S = 10.0  # time to read the catalog and to register what is missing there
ANSWER_BYTES = 64 * 1024  # bytes of an answer about one request
CATALOG_BYTES = 64 * 1024 * 1024  # bytes of an answer about workers: 600 each and 200 a rank
U32_MAX = 2**32 - 1
NOT_YET = "it has not been reached yet"

# Outcomes of questions: those that no kvd has answered are decided by load.
OUTCOMES = ("answered", "refused", "failed", "late", "by_load")

_dumps = json.JSONEncoder(separators=(",", ":")).encode

log = get_logger(__name__)


class Failed(Exception):
    """A kvd has not answered, or not as a kvd does."""


class RemoteRefused(Failed):
    """A kvd refuses this question, but may answer others."""


class RemoteBooking(NamedTuple):
    """The kvd where a request is booked, and the id there."""

    kvd: Kvd | None  # None: in this process alone
    booked_as: str  # its id there
    rank: tuple[int, int]  # worker id, dp rank


@dataclass(eq=False, slots=True)
class Kvd:
    """One kvd elsewhere."""

    url: str
    host: str  # a Unix socket's path begins with a slash
    port: int
    authority: bytes
    engine: int | None = None  # its number in the relay, once its address is known
    address: str | None = None
    unreached: bool = False  # the last read of its catalog has failed at this address
    problem: str | None = NOT_YET  # why it is not asked; None: it is up
    # What this process has registered there, by worker id.
    registered: dict[int, WorkerRecord] = field(default_factory=dict)
    # Why it cannot choose a worker, by worker id.
    reasons: dict[int, list[str]] = field(default_factory=dict)
    # Models for which it also has workers that are not this gateway's.
    shared: set[str] = field(default_factory=set)
    changing: trio.Lock = field(default_factory=trio.Lock)
    updating: trio.CancelScope = field(default_factory=trio.CancelScope)
    # When the last read of its catalog began, and when the last one ended that found an engine
    # missing; trio's clock.
    checked_at: float = -1.0
    changed_at: float = -1.0
    failed: trio.Event = field(default_factory=trio.Event)  # its catalog is to be read now
    met: trio.Event = field(default_factory=trio.Event)  # it has been asked once
    reached: trio.Event = field(default_factory=trio.Event)

    def note_failed(self, why: str) -> None:
        """Marks it as down until it is reached, which is tried at once.

        An update under way would wait in vain, and with it the engine that is to be registered.
        """
        if self.problem != why:
            log.warning("kvd_lost", url=self.url, reason=why)
        if self.problem is None:
            self.reached = trio.Event()
            self.failed.set()
            self.updating.cancel()
        self.problem = why

    def note_reached(self, workers: int) -> None:
        if self.problem is not None:
            log.info("kvd_reached", url=self.url, workers=workers)
            self.problem = None
            self.reached.set()


class RemoteChoices:
    """Choices by the first of several kvds that answers."""

    def __init__(
        self,
        urls: Sequence[str],
        exchanges: Exchanges,
        dialer: Dialer,
        deadline_s: float = DEFAULT_DEADLINE_S,
        token: bytes = b"",
    ) -> None:
        """If a kvd does not answer within `deadline_s`, the next one is asked."""
        self._kvds = [_kvd(url) for url in urls]
        self._steps = {kvd: BookingSteps(partial(_connect, kvd), deadline_s) for kvd in self._kvds}
        self._exchanges = exchanges
        self._dialer = dialer
        self._deadline_s = deadline_s
        self._token = token
        self._records: dict[int, WorkerRecord] = {}
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
                nursery.start_soon(self._maintain, kvd)
                nursery.start_soon(self._send_steps, kvd)

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
                await self._try_update(kvd, trio.current_time())
            else:
                kvd.failed.set()  # an update under way may still register the former engines

    def _sort(self) -> None:
        found: dict[str, set[int]] = {}
        for worker_id, record in self._records.items():
            found.setdefault(record.model_name, set()).add(worker_id)
        self._of_model = {model: frozenset(ids) for model, ids in found.items()}

    async def _maintain(self, kvd: Kvd) -> None:
        retry_s = RETRY_S
        while True:
            kvd.failed = trio.Event()
            await self._try_update(kvd, trio.current_time(), revives=True)
            kvd.met.set()
            if kvd.problem is None:
                pause_s, retry_s = CHECK_S, RETRY_S
            else:
                pause_s, retry_s = retry_s, min(2 * retry_s, MAX_RETRY_S)
            with trio.move_on_after(pause_s):
                await kvd.failed.wait()

    async def _try_update(self, kvd: Kvd, since: float, *, revives: bool = False) -> bool:
        """Updates the engines at a kvd, unless its catalog has been read after `since`.

        If it is down, only a call that `revives` it does. Returns whether an engine has been
        missing, and was registered, after `since`.
        """
        async with kvd.changing:
            if kvd.checked_at <= since and (revives or kvd.problem is None):
                try:
                    with trio.fail_after(UPDATE_S) as kvd.updating:
                        await self._update(kvd)
                    kvd.unreached = False
                except (Failed, Unreachable, trio.TooSlowError) as error:
                    kvd.unreached = True
                    why = str(error)
                    if not why and trio.current_time() >= kvd.updating.deadline:
                        why = "it has not answered GET /workers in time"
                    if why:  # else it has been found gone meanwhile, and that is why
                        kvd.note_failed(why)
            return kvd.changed_at > since

    async def _update(self, kvd: Kvd) -> None:
        await self._resolve(kvd)
        began = trio.current_time()
        rows = {row["worker_id"]: row for row in await self._catalog(kvd)}
        lacked = False
        for worker_id in kvd.registered.keys() - self._records.keys():
            if worker_id in rows:
                await self._change(kvd, "DELETE", f"/workers/{worker_id}")
            del kvd.registered[worker_id]  # not if that failed: the next update tries again
            kvd.reasons.pop(worker_id, None)
        for worker_id, record in list(self._records.items()):
            row, members = rows.get(worker_id, {}), described(record)
            if row and kvd.registered.get(worker_id) != record and not matches(row, members):
                await self._change(kvd, "DELETE", f"/workers/{worker_id}")
                row = {}
            if not row:
                row = await self._change(kvd, "POST", "/workers", _dumps(members).encode())
                lacked = True
            kvd.registered[worker_id] = record
            is_complete = row.get("lifecycle") != WorkerLifecycle.INCOMPLETE
            kvd.reasons[worker_id] = [] if is_complete else row.get("not_schedulable_reasons", [])
        kvd.checked_at = began
        if lacked:
            kvd.changed_at = trio.current_time()
        kvd.note_reached(len(self._records))

    async def _catalog(self, kvd: Kvd) -> list[dict[str, Any]]:
        answer = await self._request(kvd, "GET", "/workers", limit=CATALOG_BYTES)
        return _rows(answer, "GET /workers")

    async def _change(self, kvd: Kvd, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """Changes a kvd's catalog; returns the worker, with reasons if it cannot be chosen."""
        answer = await self._request(kvd, method, path, body, CATALOG_BYTES)
        if answer.status in (400, 409, 422):
            reasons = [_refusal(answer)]
            return {"lifecycle": WorkerLifecycle.INCOMPLETE, "not_schedulable_reasons": reasons}
        if answer.status == 404 and method == "DELETE":  # another gateway was faster
            return {}
        rows = _rows(answer, f"{method} {path}")
        if len(rows) != 1:
            raise _no_kvd(f"{method} {path}")
        return rows[0]

    async def _resolve(self, kvd: Kvd) -> None:
        if kvd.host.startswith("/"):
            address = kvd.host
        else:
            found = await self._dialer.addresses(kvd.host)
            address = next_address(found, kvd.address, failed=kvd.unreached)
        relay = self._exchanges.relay
        if kvd.engine is None:
            kvd.engine = relay.add_engine(address, kvd.port)
        elif address != kvd.address:
            relay.move_engine(kvd.engine, address, kvd.port)
            self._steps[kvd].reconnect()
        kvd.address = address

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

    async def _ask(self, kvd: Kvd, question: Question, prompt: Prompt) -> tuple[Placement, str]:
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
                answer = await self._request(kvd, "POST", "/select_and_reserve", body)
                is_booked = answer.status == 200
                if answer.status == 503:
                    if await self._try_update(kvd, since):  # it had been restarted
                        continue
                    raise Unavailable(_refusal(answer))
                placement = _placement(answer)
                named = {placement.worker_id, (placement.prefill or placement).worker_id}
                if named <= question.allowed:
                    is_booked = False  # the caller will end the booking
                    return placement, booked_as
            finally:
                if is_booked:
                    self._put(kvd, booked_as, "DELETE")
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
        self, question: Question, placement: Placement, kvd: Kvd | None = None, booked_as: str = ""
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
        self._put_step(reservation_id, "POST", path, _dumps(report).encode())

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
            self._put(booking.kvd, booking.booked_as, method, step, body)

    def _put(
        self, kvd: Kvd, booked_as: str, method: str, step: str = "", body: bytes = b""
    ) -> None:
        path = f"/reservations/{booked_as}{step}"
        head = own_head(method, path, kvd.authority, len(body), self._token)
        self._steps[kvd].put(head + body)

    async def _send_steps(self, kvd: Kvd) -> None:
        with closing(self._steps[kvd]) as steps:
            try:
                while True:
                    await kvd.reached.wait()
                    try:
                        await steps.send()
                    except StepsFailed as error:
                        kvd.note_failed(str(error))
            finally:
                await self._send_last_steps(kvd, steps)

    async def _send_last_steps(self, kvd: Kvd, steps: BookingSteps) -> None:
        """Ends the bookings of the last requests, those cut by the stop among them."""
        steps.close()  # a row may be on its way there, and its answers on their way back
        if len(steps) and kvd.problem is None:
            with trio.move_on_after(self._deadline_s, shield=True), suppress(StepsFailed):
                await steps.send()

    async def _request(
        self, kvd: Kvd, method: str, path: str, body: bytes = b"", limit: int = ANSWER_BYTES
    ) -> Answer:
        """Returns a kvd's answer; raises Failed without one, or if it shows a fault of that kvd."""
        assert kvd.engine is not None
        head = own_head(method, path, kvd.authority, len(body), self._token)
        try:
            answer = await self._exchanges.ask(kvd.engine, head, body, limit)
        except ExchangeFailed as error:
            raise Failed(str(error)) from None
        if answer.status in (401, 403) or (answer.status >= 500 and answer.status != 503):
            raise Failed(f"the kvd answers {answer.status}: {_refusal(answer)}")
        return answer

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
        steps = self._steps.values()
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
    return b"%b,%b}" % (_dumps(members)[:-1].encode(), prompt.render())


def described(record: WorkerRecord) -> dict[str, Any]:
    """Returns the body that registers an engine at a kvd."""
    row = record.shown(WorkerLifecycle.SCHEDULABLE, [])
    del row["lifecycle"]
    return {name: value for name, value in row.items() if value not in (None, (), {})}


def matches(row: Mapping[str, Any], members: Mapping[str, Any]) -> bool:
    """Returns whether a kvd lists an engine as it is described."""
    return all(row.get(name) == value for name, value in members.items())


def _placement(answer: Answer) -> Placement:
    if answer.status != 200:
        raise RemoteRefused(f"the kvd answers {answer.status}: {_refusal(answer)}")
    try:
        return read_placement(answer.held)
    except (KeyError, RecursionError, TypeError, ValueError):
        raise Failed("the answer is not that of a kvd's selection service") from None


def _rows(answer: Answer, asked: str) -> list[dict[str, Any]]:
    """Returns the workers in the answer to a request: those of a list, or the only one."""
    if answer.status in (404, 405):  # another server's, or another face's
        raise _no_kvd(asked)
    if answer.status not in (200, 201):
        raise Failed(f"the kvd answers {answer.status}: {_refusal(answer)}")
    try:
        content = json.loads(answer.held)
        rows = content if isinstance(content, list) else [content]
        reasons = [each for row in rows for each in row.get("not_schedulable_reasons", ())]
        is_text = all(isinstance(each, str) for each in reasons)
        if is_text and all(isinstance(row["worker_id"], int) for row in rows):
            return rows
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        pass  # not a catalog of workers
    raise _no_kvd(asked)


def _no_kvd(asked: str) -> Failed:
    return Failed(f"its {asked} does not answer as that of a kvd's selection service does")


def _refusal(answer: Answer) -> str:
    """Returns a kvd's reason for refusing a request."""
    try:
        error = json.loads(answer.held)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (KeyError, RecursionError, TypeError, ValueError):
        return f"status {answer.status}"


def _kvd(url: str) -> Kvd:
    target = parse_kvd(url)
    return Kvd(url, target.host, target.port, target.authority.encode())


async def _connect(kvd: Kvd) -> trio.SocketStream:
    """Connects to a kvd that has been reached; raises OSError."""
    assert kvd.address is not None
    if kvd.address.startswith("/"):
        return await trio.open_unix_socket(kvd.address)
    return await trio.open_tcp_stream(kvd.address, kvd.port)
