"""One kvd elsewhere that chooses for the gateway: whether it is up, and knows all engines.

    DOWN ── reached, engines registered ──> UP ── a question fails ──> DOWN, reached again at once

A kvd that was restarted knows no engines. They are registered again when it refuses a question for
lack of them, or when the next read of its catalog shows that they are missing. Further steps of a
booking are sent in order, and no task waits for them; a kvd that misses some ends the booking when
it is too old.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

import trio

from kvd.gateway.booking_steps import BookingSteps, StepsFailed
from kvd.gateway.exchanges import ExchangeFailed, Exchanges
from kvd.gateway.heads import own_head
from kvd.net.dialing import Dialer, Unreachable, next_address
from kvd.selection.worker_record import WorkerLifecycle, WorkerRecord
from kvd.telemetry.logs import get_logger
from kvd.wire.urls import parse_kvd
from kvd_core.relay.relay import Answer

CHECK_S = 5.0  # pause between two reads of a kvd's catalog
# Pause before the second try to reach a kvd that is down; each next one is twice as long.
RETRY_S = 0.1
# Longest such pause: a try only reads the kvd's catalog, and meanwhile requests go by load.
MAX_RETRY_S = 1.0
UPDATE_S = 10.0  # time to read the catalog and to register what is missing there
ANSWER_BYTES = 64 * 1024  # bytes of an answer about one request
CATALOG_BYTES = 64 * 1024 * 1024  # bytes of an answer about workers: 600 each and 200 a rank
NOT_YET = "it has not been reached yet"


dumps = json.JSONEncoder(separators=(",", ":")).encode

log = get_logger(__name__)


class Failed(Exception):
    """A kvd has not answered, or not as a kvd does."""


class RemoteKvd:
    """One kvd elsewhere."""

    def __init__(
        self,
        url: str,
        records: Mapping[int, WorkerRecord],
        exchanges: Exchanges,
        dialer: Dialer,
        deadline_s: float,
        token: bytes,
    ) -> None:
        """`records` are those of the engines to be registered there, by worker id.

        Steps of bookings have to be answered within `deadline_s`.
        """
        target = parse_kvd(url)
        self.url = url
        self.problem: str | None = NOT_YET  # why it is not asked; None: it is up
        # Why it cannot choose a worker, by worker id.
        self.reasons: dict[int, list[str]] = {}
        # Models for which it also has workers that are not this gateway's.
        self.shared: set[str] = set()
        self.failed = trio.Event()  # its catalog is to be read now
        self.met = trio.Event()  # it has been asked once
        self.steps = BookingSteps(self._connect, deadline_s)
        self._host = target.host  # a Unix socket's path begins with a slash
        self._port = target.port
        self._authority = target.authority.encode()
        self._records = records
        self._exchanges = exchanges
        self._dialer = dialer
        self._deadline_s = deadline_s
        self._token = token
        self._engine: int | None = None  # its number in the relay, once its address is known
        self._address: str | None = None
        self._unreached = False  # the last read of its catalog has failed at this address
        # What this process has registered there, by worker id.
        self._registered: dict[int, WorkerRecord] = {}
        self._changing = trio.Lock()
        self._updating = trio.CancelScope()
        # When the last read of its catalog began, and when the last one ended that found an engine
        # missing; trio's clock.
        self._checked_at = -1.0
        self._changed_at = -1.0
        self._reached = trio.Event()

    def note_failed(self, why: str) -> None:
        """Marks it as down until it is reached, which is tried at once.

        An update under way would wait in vain, and with it the engine that is to be registered.
        """
        if self.problem != why:
            log.warning("kvd_lost", url=self.url, reason=why)
        if self.problem is None:
            self._reached = trio.Event()
            self.failed.set()
            self._updating.cancel()
        self.problem = why

    def note_reached(self, workers: int) -> None:
        if self.problem is not None:
            log.info("kvd_reached", url=self.url, workers=workers)
            self.problem = None
            self._reached.set()

    async def maintain(self) -> None:
        """Keeps it up and its catalog right, until it is cancelled."""
        retry_s = RETRY_S
        while True:
            self.failed = trio.Event()
            await self.try_update(trio.current_time(), revives=True)
            self.met.set()
            if self.problem is None:
                pause_s, retry_s = CHECK_S, RETRY_S
            else:
                pause_s, retry_s = retry_s, min(2 * retry_s, MAX_RETRY_S)
            with trio.move_on_after(pause_s):
                await self.failed.wait()

    async def try_update(self, since: float, *, revives: bool = False) -> bool:
        """Updates the engines there, unless its catalog has been read after `since`.

        If it is down, only a call that `revives` it does. Returns whether an engine has been
        missing, and was registered, after `since`.
        """
        async with self._changing:
            if self._checked_at <= since and (revives or self.problem is None):
                try:
                    with trio.fail_after(UPDATE_S) as self._updating:
                        await self._update()
                    self._unreached = False
                except (Failed, Unreachable, trio.TooSlowError) as error:
                    self._unreached = True
                    why = str(error)
                    if not why and trio.current_time() >= self._updating.deadline:
                        why = "it has not answered GET /workers in time"
                    if why:  # else it has been found gone meanwhile, and that is why
                        self.note_failed(why)
            return self._changed_at > since

    async def _update(self) -> None:
        await self._resolve()
        began = trio.current_time()
        rows = {row["worker_id"]: row for row in await self._catalog()}
        lacked = False
        for worker_id in self._registered.keys() - self._records.keys():
            if worker_id in rows:
                await self._change("DELETE", f"/workers/{worker_id}")
            del self._registered[worker_id]  # not if that failed: the next update tries again
            self.reasons.pop(worker_id, None)
        for worker_id, record in list(self._records.items()):
            row, members = rows.get(worker_id, {}), described(record)
            if row and self._registered.get(worker_id) != record and not matches(row, members):
                await self._change("DELETE", f"/workers/{worker_id}")
                row = {}
            if not row:
                row = await self._change("POST", "/workers", dumps(members).encode())
                lacked = True
            self._registered[worker_id] = record
            is_complete = row.get("lifecycle") != WorkerLifecycle.INCOMPLETE
            self.reasons[worker_id] = [] if is_complete else row.get("not_schedulable_reasons", [])
        self._checked_at = began
        if lacked:
            self._changed_at = trio.current_time()
        self.note_reached(len(self._records))

    async def _catalog(self) -> list[dict[str, Any]]:
        answer = await self.request("GET", "/workers", limit=CATALOG_BYTES)
        return _rows(answer, "GET /workers")

    async def _change(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """Changes its catalog; returns the worker, with reasons if it cannot be chosen."""
        answer = await self.request(method, path, body, CATALOG_BYTES)
        if answer.status in (400, 409, 422):
            reasons = [refusal(answer)]
            return {"lifecycle": WorkerLifecycle.INCOMPLETE, "not_schedulable_reasons": reasons}
        if answer.status == 404 and method == "DELETE":  # another gateway was faster
            return {}
        rows = _rows(answer, f"{method} {path}")
        if len(rows) != 1:
            raise _no_kvd(f"{method} {path}")
        return rows[0]

    async def _resolve(self) -> None:
        if self._host.startswith("/"):
            address = self._host
        else:
            found = await self._dialer.addresses(self._host)
            address = next_address(found, self._address, failed=self._unreached)
        relay = self._exchanges.relay
        if self._engine is None:
            self._engine = relay.add_engine(address, self._port)
        elif address != self._address:
            relay.move_engine(self._engine, address, self._port)
            self.steps.reconnect()
        self._address = address

    async def request(
        self, method: str, path: str, body: bytes = b"", limit: int = ANSWER_BYTES
    ) -> Answer:
        """Returns its answer; raises Failed without one, or if it shows a fault of that kvd."""
        assert self._engine is not None
        head = own_head(method, path, self._authority, len(body), self._token)
        try:
            answer = await self._exchanges.ask(self._engine, head, body, limit)
        except ExchangeFailed as error:
            raise Failed(str(error)) from None
        if answer.status in (401, 403) or (answer.status >= 500 and answer.status != 503):
            raise Failed(f"the kvd answers {answer.status}: {refusal(answer)}")
        return answer

    def put(self, booked_as: str, method: str, step: str = "", body: bytes = b"") -> None:
        """Queues a step of a booking."""
        self._put(method, f"/reservations/{booked_as}{step}", body)

    def free_by_prefix(self, prefix: str, spared: str) -> None:
        """Queues the end of all bookings whose ids begin with `prefix`, but not with `spared`."""
        self._put("DELETE", f"/reservations?prefix={prefix}&spared={spared}", b"")

    def _put(self, method: str, path: str, body: bytes) -> None:
        head = own_head(method, path, self._authority, len(body), self._token)
        self.steps.put(head + body)

    async def send_steps(self) -> None:
        """Sends the steps of bookings while it is up, until it is cancelled; then the last ones."""
        with closing(self.steps) as steps:
            try:
                while True:
                    await self._reached.wait()
                    try:
                        await steps.send()
                    except StepsFailed as error:
                        self.note_failed(str(error))
            finally:
                await self._send_last_steps(steps)

    async def _send_last_steps(self, steps: BookingSteps) -> None:
        """Ends the bookings of the last requests, those cut by the stop among them."""
        steps.close()  # a row may be on its way there, and its answers on their way back
        if len(steps) and self.problem is None:
            with trio.move_on_after(self._deadline_s, shield=True), suppress(StepsFailed):
                await steps.send()

    async def _connect(self) -> trio.SocketStream:
        """Connects once it has been reached; raises OSError."""
        assert self._address is not None
        if self._address.startswith("/"):
            return await trio.open_unix_socket(self._address)
        return await trio.open_tcp_stream(self._address, self._port)


def described(record: WorkerRecord) -> dict[str, Any]:
    """Returns the body that registers an engine at a kvd."""
    row = record.shown(WorkerLifecycle.SCHEDULABLE, [])
    del row["lifecycle"]
    return {name: value for name, value in row.items() if value not in (None, (), {})}


def matches(row: Mapping[str, Any], members: Mapping[str, Any]) -> bool:
    """Returns whether a kvd lists an engine as it is described."""
    return all(row.get(name) == value for name, value in members.items())


def _rows(answer: Answer, asked: str) -> list[dict[str, Any]]:
    """Returns the workers in the answer to a request: those of a list, or the only one."""
    if answer.status in (404, 405):  # another server's, or another face's
        raise _no_kvd(asked)
    if answer.status not in (200, 201):
        raise Failed(f"the kvd answers {answer.status}: {refusal(answer)}")
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


def refusal(answer: Answer) -> str:
    """Returns a kvd's reason for refusing a request."""
    try:
        error = json.loads(answer.held)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (KeyError, RecursionError, TypeError, ValueError):
        return f"status {answer.status}"
