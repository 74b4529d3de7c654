"""The clients: one blocks, one runs on trio; they differ only in how they wait.

Client, AsyncClient ── indexer, slot_tracker, ... ──> faces of calls (`calls.Asked`)
      │                                                  │ an Exchange
      │ reserve                                          v
      └── books, hands out a Choice, frees ──> an asker: one address, httpx below
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from functools import cached_property
from threading import BoundedSemaphore
from typing import Any, Generic, NamedTuple, Self, TypeVar, Unpack

import httpx
import trio

from kvd.client.calls import Asker, Blocking, How, Trio
from kvd.client.choices import Choice, new_reservation_id
from kvd.client.conductor import Conductor
from kvd.client.connecting import (
    CONNECT_S,
    FREE_S,
    LATE,
    LONGEST_WAIT_S,
    LOST,
    MAX_ANSWER_BYTES,
    MAX_CONNECTIONS,
    MAX_WAITING_CONNECTIONS,
    NOT_SENT,
    TIMEOUT_S,
    Address,
    ConnectionSettings,
    WakingTransport,
    Where,
    check_attempts,
    check_timeout,
    limits,
    read_token,
)
from kvd.client.decisions import Selection
from kvd.client.errors import ClientError, Refused
from kvd.client.exchanges import MAX_ATTEMPTS, NOT_FOUND, ClientStats, Exchange, Reply
from kvd.client.gateway import Gateway
from kvd.client.indexer import Indexer
from kvd.client.selecting import Wish
from kvd.client.selection import SelectionService
from kvd.client.slot_tracker import SlotTracker

T = TypeVar("T")


class _Faces(ABC, Generic[How]):
    """The faces of a kvd, each called at its own address."""

    def __init__(
        self,
        *,
        indexer: str = "http://127.0.0.1:8090",
        slot_tracker: str = "http://127.0.0.1:8091",
        selection: str = "http://127.0.0.1:8092",
        conductor: str = "http://127.0.0.1:13333",
        gateway: str = "http://127.0.0.1:8080",
        token: str | None = None,
        token_file: Where | None = None,
        ca_file: Where | None = None,
        cert_file: Where | None = None,
        key_file: Where | None = None,
        timeout_s: float = TIMEOUT_S,
        attempts: int = MAX_ATTEMPTS,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """Takes addresses and credentials; connects with the first call.

        Addresses are `http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`, by default those of
        `kvd serve` on this machine. `token`, or the content of `token_file`, is sent to all faces.
        `ca_file` has the authorities that the daemon's certificate is checked against, instead of
        the system's; `cert_file` and `key_file` are the client's own certificate. `timeout_s`
        limits a call with all its attempts; repeatable calls have up to `attempts`. Proxies of the
        environment are not used.

        Raises ValueError for an invalid address, token, timeout or number of attempts, OSError for
        an unusable token file; the first call over TLS raises OSError for the other files.
        """
        self.stats = ClientStats()
        self._askers: list[Any] = []  # of all faces that were called, to be closed
        self._addresses = {
            "indexer": Address.parse(indexer),
            "slot_tracker": Address.parse(slot_tracker),
            "selection": Address.parse(selection),
            "conductor": Address.parse(conductor),
            "gateway": Address.parse(gateway),
        }
        shown = read_token(token, token_file)
        self._settings = ConnectionSettings(
            shown, ca_file, cert_file, key_file, check_timeout(timeout_s), max_answer_bytes
        )
        self._attempts = check_attempts(attempts)

    def _booking(self, reservation_id: str, wish: Wish) -> Exchange[Selection]:
        """Returns the exchange that books under an id; repeated, it finds the booking."""
        service: SelectionService[Any] = self.selection
        return SelectionService.select_and_reserve.exchange(
            service, reservation_id=reservation_id, idempotency_key=reservation_id, **wish
        )

    def _freeing(self, reservation_id: str) -> Exchange[None]:
        service: SelectionService[Any] = self.selection
        return SelectionService.free.exchange(service, reservation_id)

    def _note_unfreed(self, error: ClientError) -> bool:
        """Returns whether a reservation that could not be freed has ended all the same.

        If not, it lasts until it expires. That is counted and not raised, so as not to replace the
        caller's own result or exception.
        """
        has_ended = isinstance(error, Refused) and error.status == NOT_FOUND
        self.stats.unfreed += not has_ended
        return has_ended

    @abstractmethod
    def _asker(self, face: str) -> Asker:
        """Returns the asker for a face's address."""

    @cached_property
    def indexer(self) -> Indexer[How]:
        """The calls of the KV indexer."""
        return Indexer(self._asker("indexer"))

    @cached_property
    def slot_tracker(self) -> SlotTracker[How]:
        """The calls of the slot tracker."""
        return SlotTracker(self._asker("slot_tracker"))

    @cached_property
    def selection(self) -> SelectionService[How]:
        """The calls of the selection service."""
        return SelectionService(self._asker("selection"))

    @cached_property
    def conductor(self) -> Conductor[How]:
        """The calls of the conductor."""
        return Conductor(self._asker("conductor"))

    @cached_property
    def gateway(self) -> Gateway[How]:
        """The gateway's own calls; use OpenAI's client for requests to its engines."""
        return Gateway(self._asker("gateway"))


# Calls wait for a connection in front of httpx's pools, not inside: for each call waiting inside, a
# pool checks all its connections whenever any call begins or ends, which takes seconds for hundreds
# of calls.

# ---- blocking


class BlockingPool(NamedTuple):
    """A pool of connections, and a semaphore that admits as many calls."""

    http: httpx.Client
    room: BoundedSemaphore


class BlockingAsker:
    """Makes calls to one address and blocks meanwhile; threads may share it."""

    def __init__(
        self, address: Address, settings: ConnectionSettings, attempts: int, stats: ClientStats
    ) -> None:
        self.attempts = attempts
        self.stats = stats
        self._settings = settings
        self._url = address.url
        options, shown = settings.transport_options(address), settings.client_options()
        self._http, self._waiting = (
            BlockingPool(
                httpx.Client(
                    transport=WakingTransport(**options, limits=limits(connections)), **shown
                ),
                BoundedSemaphore(connections),
            )
            for connections in (MAX_CONNECTIONS, MAX_WAITING_CONNECTIONS)
        )

    def close(self) -> None:
        self._http.http.close()
        self._waiting.http.close()

    def ask(self, exchange: Exchange[T], timeout_s: float | None = None) -> T:
        """Returns the answer; `timeout_s` is the client's unless given."""
        limit_s = self._settings.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                reply = self._send(exchange, deadline)
            except LOST as error:
                pause_s = exchange.lost(error, not isinstance(error, NOT_SENT))
            except LATE as error:
                raise exchange.late(limit_s) from error
            else:
                if (wait_s := exchange.answered(reply)) is None:
                    return exchange.result()
                pause_s = wait_s
            if time.monotonic() + pause_s >= deadline:
                raise exchange.late(limit_s)
            time.sleep(pause_s)

    def _send(self, exchange: Exchange[Any], deadline: float) -> Reply:
        """Makes one attempt, once a connection is free for it."""
        http, room = self._waiting if exchange.waits else self._http
        if not room.acquire(timeout=_left_s(deadline)):
            raise httpx.PoolTimeout("all connections are in use")
        try:
            return self._send_on(http, exchange, deadline)
        finally:
            room.release()

    def _send_on(self, http: httpx.Client, exchange: Exchange[Any], deadline: float) -> Reply:
        """Makes one attempt; each piece of its answer has to come within the remaining time."""
        left_s = _left_s(deadline)
        timeout = httpx.Timeout(left_s, connect=min(left_s, CONNECT_S))
        request = made(http, self._url, exchange, timeout)
        with closing(http.send(request, stream=True)) as response:
            body, limit = bytearray(), self._settings.max_answer_bytes
            for piece in response.iter_raw():
                body += piece
                if len(body) > limit:
                    raise exchange.too_long(limit)
                if time.monotonic() >= deadline:
                    raise httpx.ReadTimeout("the answer took longer than the timeout")
            return reply_of(response, body)


def _left_s(deadline: float) -> float:
    return min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT_S)


class Client(_Faces[Blocking]):
    """Asks a kvd and blocks until it has answered.

    Threads may share one. Close it, or use it in a `with` block: its connections stay open.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections; calls that still wait, in other threads, raise Unreachable."""
        for asker in self._askers:
            asker.close()

    def _asker(self, face: str) -> BlockingAsker:
        address = self._addresses[face]
        asker = BlockingAsker(address, self._settings, self._attempts, self.stats)
        self._askers.append(asker)
        return asker

    @contextmanager
    def reserve(self, **wish: Unpack[Wish]) -> Iterator[Choice[Blocking]]:
        """Books the prompt on the rank that should serve it, for as long as the block runs.

            with client.reserve(model_name="m", token_ids=tokens) as choice:
                answer = send(choice.endpoint)

        The reservation is freed in any case: at the end of the block, when the block raises, and
        when the answer to the booking is lost. Exceptions of the block pass through unchanged.
        Raises what `SelectionService.select_and_reserve` raises.
        """
        reservation_id = new_reservation_id()
        booking, service = self._booking(reservation_id, wish), self.selection
        try:
            selection = service._asker.ask(booking)
        except BaseException:
            if booking.may_have_effect:
                self._free(reservation_id)
            raise
        choice: Choice[Blocking] = Choice(service._asker, reservation_id, selection)
        try:
            yield choice
        finally:
            choice.freed = self._free(reservation_id)

    def _free(self, reservation_id: str) -> bool:
        """Ends a reservation within FREE_S; returns whether it has ended."""
        try:
            self.selection._asker.ask(self._freeing(reservation_id), FREE_S)
        except ClientError as error:
            return self._note_unfreed(error)
        return True


# ---- on trio


NO_TRIO = "AsyncClient needs trio; on asyncio call Client's methods with asyncio.to_thread"


class TrioPool(NamedTuple):
    """A pool of connections, and a limiter that admits as many calls."""

    http: httpx.AsyncClient
    room: trio.CapacityLimiter


class TrioAsker:
    """Makes calls to one address while other tasks run; tasks may share it."""

    def __init__(
        self, address: Address, settings: ConnectionSettings, attempts: int, stats: ClientStats
    ) -> None:
        self.attempts = attempts
        self.stats = stats
        self._settings = settings
        self._url = address.url
        options, shown = settings.transport_options(address), settings.client_options()
        self._http, self._waiting = (
            TrioPool(
                httpx.AsyncClient(
                    transport=httpx.AsyncHTTPTransport(**options, limits=limits(connections)),
                    **shown,
                ),
                trio.CapacityLimiter(connections),
            )
            for connections in (MAX_CONNECTIONS, MAX_WAITING_CONNECTIONS)
        )

    async def aclose(self) -> None:
        await self._http.http.aclose()
        await self._waiting.http.aclose()

    async def ask(self, exchange: Exchange[T], timeout_s: float | None = None) -> T:
        """Returns the answer; `timeout_s` is the client's unless given."""
        limit_s = self._settings.timeout_s if timeout_s is None else timeout_s
        try:
            trio.lowlevel.current_task()
        except RuntimeError:
            raise RuntimeError(NO_TRIO) from None
        with trio.move_on_after(limit_s):
            while True:
                try:
                    reply = await self._send(exchange)
                except LOST as error:
                    pause_s = exchange.lost(error, not isinstance(error, NOT_SENT))
                else:
                    if (wait_s := exchange.answered(reply)) is None:
                        return exchange.result()
                    pause_s = wait_s
                await trio.sleep(pause_s)
        raise exchange.late(limit_s)

    async def _send(self, exchange: Exchange[Any]) -> Reply:
        """Makes one attempt, once a connection is free for it."""
        http, room = self._waiting if exchange.waits else self._http
        async with room:
            return await self._send_on(http, exchange)

    async def _send_on(self, http: httpx.AsyncClient, exchange: Exchange[Any]) -> Reply:
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        request = made(http, self._url, exchange, timeout)
        async with aclosing(await http.send(request, stream=True)) as response:
            body, limit = bytearray(), self._settings.max_answer_bytes
            with trio.CancelScope() as scope:
                async for piece in response.aiter_raw():
                    body += piece
                    if len(body) > limit:
                        scope.cancel()  # ends httpx's generators, unlike leaving the loop
        if len(body) > limit:
            raise exchange.too_long(limit)
        return reply_of(response, body)


class AsyncClient(_Faces[Trio]):
    """Asks a kvd from tasks of trio.

    Tasks may share one. Close it, or use it in an `async with` block: its connections stay open.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes all connections; calls that still wait, in other tasks, raise Unreachable."""
        for asker in self._askers:
            await asker.aclose()

    def _asker(self, face: str) -> TrioAsker:
        address = self._addresses[face]
        asker = TrioAsker(address, self._settings, self._attempts, self.stats)
        self._askers.append(asker)
        return asker

    @asynccontextmanager
    async def reserve(self, **wish: Unpack[Wish]) -> AsyncIterator[Choice[Trio]]:
        """Books the prompt on the rank that should serve it, for as long as the block runs.

            async with client.reserve(model_name="m", token_ids=tokens) as choice:
                answer = await send(choice.endpoint)

        The reservation is freed in any case: at the end of the block, when the block raises or is
        cancelled, and when the answer to the booking is lost. Exceptions of the block pass through
        unchanged; a cancelled block ends up to 5 s later if the daemon is silent.
        Raises what `SelectionService.select_and_reserve` raises.
        """
        reservation_id = new_reservation_id()
        booking, service = self._booking(reservation_id, wish), self.selection
        try:
            selection = await service._asker.ask(booking)
        except BaseException:
            if booking.may_have_effect:
                await self._free(reservation_id)
            raise
        choice: Choice[Trio] = Choice(service._asker, reservation_id, selection)
        try:
            yield choice
        finally:
            choice.freed = await self._free(reservation_id)

    async def _free(self, reservation_id: str) -> bool:
        """Ends a reservation within FREE_S, even when cancelled; returns whether it has ended."""
        with trio.CancelScope(shield=True):
            try:
                await self.selection._asker.ask(self._freeing(reservation_id), FREE_S)
            except ClientError as error:
                return self._note_unfreed(error)
        return True


# ---- both


def made(
    http: httpx.Client | httpx.AsyncClient,
    url: str,
    exchange: Exchange[Any],
    timeout: httpx.Timeout,
) -> httpx.Request:
    """Returns the request of an exchange's next attempt."""
    if http.is_closed:
        raise exchange.closed()
    method, target, headers, body = exchange.begin()
    return http.build_request(method, url + target, headers=headers, content=body, timeout=timeout)


def reply_of(response: httpx.Response, body: bytearray) -> Reply:
    return Reply(response.status_code, response.headers.get("retry-after", ""), bytes(body))
