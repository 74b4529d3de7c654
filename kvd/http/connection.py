"""One client connection: requests in, responses out, one after the other.

    parked in the fast path: a hot route's plain request that comes whole
    woken:  head -> body -> handler -> one send, or pieces  hot routes
                         -> ASGI application (asgi.py)      everything else

A request that the server itself refuses (Refusal) is answered and ends the connection, because the
bytes behind it cannot be trusted to be a request. No mistake of a client leaves `run`: it raises
nothing but cancellation.
"""

from __future__ import annotations

import contextlib
from time import perf_counter

import trio

from kvd.http.access import echoed, rendered
from kvd.http.asgi import AsgiApp, AsgiExchange
from kvd.http.body import read_body
from kvd.http.context import ServerContext
from kvd.http.errors import Refusal
from kvd.http.fast_path import FastPath, Handoff, PlainRequest
from kvd.http.head import Head
from kvd.http.head_reader import read_head
from kvd.http.hot import HotHandler
from kvd.http.messages import Headers, Response
from kvd.http.pages import preflight, welcome
from kvd.http.relayed import RelayedRequest
from kvd.http.render import CLOSE_LINE, whole_response
from kvd.http.routes import Route, Scope
from kvd.http.scanning import scanned_ahead
from kvd.http.serving import ListenerContext, Served, Streamed, Undo
from kvd.http.table import Found, RouteTable
from kvd.http.transport import ByteStream, ConnectionPhase, Shared, Transport
from kvd.http.untasked import IN_TASK, Untasked, in_task
from kvd.http.writer import ResponseWriter, connection_lines, persists_after
from kvd.telemetry.logs import get_logger
from kvd_core.json.scan import AHEAD_BYTES, ScanAhead

log = get_logger(__name__)

# Time for a request of a client that may not know of a stop yet: a round trip between continents.
# Without it a restart would lose some requests.
LAST_REQUEST_S = 0.25
_LEFT = "the client left before its answer"
_UNENCODED: Headers = [(b"accept-encoding", b"identity")]  # RFC 9110 §15.5.16
_REFUSAL_COUNTERS = {
    400: "malformed",
    413: "too_large",
    414: "head_too_large",
    415: "encoded",
    417: "expectation_failed",
    431: "head_too_large",
}


class Connection(Transport):
    """Serves one client until it leaves, misbehaves or the listener stops."""

    __slots__ = ("_listener", "_outcome", "_owed", "_rest", "_retired", "_task")

    def __init__(
        self, stream: ByteStream, shared: Shared, listener: ListenerContext, checks_host: bool
    ) -> None:
        super().__init__(stream, shared, checks_host)
        self._listener = listener
        self._task: trio.lowlevel.Task | None = None  # it sleeps while the connection is parked
        self._outcome: Handoff | Exception | None = None  # what it was woken with
        # What is left of a request begun without it: relayed, or with an answer in pieces.
        self._rest: Untasked | Streamed | None = None
        self._owed = False  # the client has yet to send a part of a body that nobody reads
        self._retired = False

    def retire(self) -> None:
        """Ends the connection after the request under way."""
        self._retired = True
        self.close_if_idle()

    async def run(self) -> None:
        """Serves the connection and closes its socket; raises nothing but cancellation."""
        stats = self.shared.stats
        try:
            if await self._open():
                await self._serve()
        except* OSError:  # reset, or a send without progress: nobody is left to answer
            stats.client_gone += 1
        except* Exception:
            stats.bugs += 1
            log.exception("connection_failed")
        finally:
            self.stream.sock.close()

    async def _open(self) -> bool:
        """Gets ready for the first request; returns False if there will be none."""
        if self.stream.parks:
            self._listener.fast_path.add(self.fd)
            return True
        try:
            with self.within(ConnectionPhase.HANDSHAKE, self.shared.limits.head_s):
                await self.stream.open()
        except trio.TooSlowError:
            return False
        except OSError:
            self.shared.stats.handshakes_failed += 1
            with contextlib.suppress(OSError):  # the client is gone
                await self.linger()  # the stream tells the client why
            return False
        return True

    def serve_parked(
        self,
        route: Route,
        captured: bytes,
        query: bytes,
        headers: Headers,
        body: bytes,
        raised: Exception | None,
    ) -> tuple[bytes, bool, Undo] | Handoff:
        """Serves a request that the fast path has received but does not answer itself.

        An answer in pieces is left to the task: it is to be woken with what is returned.
        """
        self.shared.stats.requests += 1
        self.since = self.shared.now
        self.note_granted(route.scope)
        head = self._plain_head(route, query, headers)
        found = Found(route, captured)
        served = self._listener.serve(self.shared, head, found, body, self.checks_host, raised)
        return Handoff(b"", b"", True, None, served) if isinstance(served, Streamed) else served

    def _plain_head(self, route: Route, query: bytes, headers: Headers) -> Head:
        head = Head()
        head.method, head.query, head.headers = route.method, query, headers
        if self._listener.context.for_pages:
            welcome(self._listener.context.authorizer, head)
        return head

    def log_answered(
        self, route: Route, status: int, seconds: float, size: int, headers: Headers
    ) -> bytes:
        """Logs a request that the fast path answers; returns header lines for the answer."""
        access = self._listener.access
        return rendered(access.note(route.method, route.path, status, seconds, size, headers))

    def wake(self, outcome: Handoff | Exception) -> None:
        """Wakes the task of a connection that the fast path no longer parks."""
        assert self._task is not None
        self._outcome = outcome
        trio.lowlevel.reschedule(self._task)

    def relay(self, asked: PlainRequest) -> Handoff | Exception | None:
        """Begins to serve a request whose answer is relayed, without waking the task.

        Returns what to wake the task with, or None while the request waits for a signal.
        """
        self.shared.stats.requests += 1
        self.note_granted(asked.route.scope)
        head = self._plain_head(asked.route, asked.query, asked.headers)
        head.path = asked.path
        self._rest = Untasked(self._relay(asked.route, self._relayed(head, asked.body)))
        return self._advance(self._rest)

    def _advance(self, rest: Untasked) -> Handoff | Exception | None:
        """Runs a relayed request until it waits for a signal, needs its task, or is served."""
        try:
            signal = rest.step()
        except StopIteration as end:
            self._rest = None
            if not end.value:
                return Handoff(b"", b"", False)
            self.enter(ConnectionPhase.IDLE)
            return self._listener.fast_path.park(self, self.fd)
        except Exception as error:
            self._rest = None
            return error
        if signal is IN_TASK:
            self._rest = None
            return Handoff(b"", b"", True, None, rest)
        signal.subscribe(self._on_signal)
        return None

    def _on_signal(self) -> None:
        assert isinstance(self._rest, Untasked)
        outcome = self._advance(self._rest)
        if outcome is not None:
            self.wake(outcome)
        del outcome  # the frames of a failure's traceback lead back to this one: a cycle

    async def _serve(self) -> None:
        self.enter(ConnectionPhase.IDLE)
        fill = self._fill_parked if self.stream.parks else self._fill
        try:
            while await fill() and await self._serve_next() and await self._goes_on():
                self.enter(ConnectionPhase.IDLE)
                await trio.lowlevel.checkpoint()
            if self._owed or self._unread():  # its client did not expect this end
                await self.linger()
        except Refusal as refusal:
            await self._refuse(refusal)
        self.stream.finish()  # not after a failure, so that a broken answer shows as cut

    async def _fill(self) -> bool:
        """Waits until the buffer has data; returns False if none will come."""
        while not self._retired and not self.buffer:
            try:
                self.buffer = await self.receive()
            except OSError:  # a reset, while no request is under way
                return False
            if not self.buffer:
                return False
        return not self._retired

    async def _fill_parked(self) -> bool:
        """Does what `_fill` does, with the connection parked in the fast path meanwhile."""
        while not self.buffer and self._rest is None:
            outcome = self._listener.fast_path.park(self, self.fd)
            if outcome is not None:
                await trio.lowlevel.checkpoint()
            else:
                self._task = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._unpark)
                outcome, self._outcome = self._outcome, None
            if isinstance(outcome, Exception):
                try:
                    raise outcome
                finally:
                    del outcome  # its traceback has this frame: a cycle with the request
            assert outcome is not None
            self.buffer, self._rest = outcome.received, outcome.rest
            persists = outcome.persists
            if outcome.unsent:
                await self._deliver(outcome.unsent, outcome.undo)
                persists = persists and await self._goes_on()
            if not persists:
                return False
            self.enter(ConnectionPhase.IDLE)  # also once the rest of an answer is sent
        return True

    def dispensability(self) -> tuple[bool, int, float] | None:
        return None if self._is_arriving() else super().dispensability()

    def _unread(self) -> bool:
        return self._is_arriving() or super()._unread()

    def _is_arriving(self) -> bool:
        return self._listener.fast_path.is_arriving(self.fd)

    def _unpark(self, _: object) -> trio.lowlevel.Abort:
        self._listener.fast_path.unpark(self.fd)
        if self._rest is not None:
            assert isinstance(self._rest, Untasked)  # the other kind wakes the task at once
            self._rest.close()
            self._rest = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def _serve_next(self) -> bool:
        """Serves the request that has come; returns whether the connection persists."""
        if self._rest is None:
            return await self._serve_request(await self._wanted_head())
        rest, self._rest = self._rest, None
        return await (self._stream(rest) if isinstance(rest, Streamed) else rest.rest())

    async def _wanted_head(self) -> Head | None:
        """Returns the next head, None if the client left in the middle of it."""
        try:
            return await read_head(self)
        except Refusal as refusal:
            self._listener.context.note_no_head(refusal)
            raise

    async def _serve_request(self, head: Head | None) -> bool:
        """Serves one request, if there is one; returns whether the connection persists."""
        if head is None:
            return False
        self.shared.stats.requests += 1
        try:
            return await self._serve_head(head)
        except Refusal as refusal:
            refusal.silent = head.method == "HEAD"
            refusal.path, refusal.asked = head.path, head.headers
            raise

    async def _serve_head(self, head: Head) -> bool:
        context = self._listener.context
        if context.for_pages:
            welcome(context.authorizer, head)
            if (response := preflight(head)) is not None:
                return await self._answer_page(head, response)
        found = self._listener.table.find(head.method, head.path)
        route = None if found is None else found.route
        self._check_permit(head, route)
        if not head.length:
            return await self._answer(head, found, b"")
        if route is not None and route.body_limit:
            return await self._answer(head, found, await self._read_body(head, route))
        return await self._answer_unread(head, found)

    async def _answer_page(self, head: Head, response: Response) -> bool:
        """Answers the preflight request of a page, which has no use for a body."""
        assert isinstance(response.body, bytes)
        persists = not head.length and persists_after(response.status, head, self.shared)
        path = self._listener.table.label(head.path)
        lines = connection_lines(head, self.shared, persists) + self._listener.note(
            head.method, path, response.status, 0.0, 0, head.headers
        )
        await self.send(whole_response(response, response.body, lines, silent=False))
        return persists

    async def _answer(self, head: Head, found: Found | None, body: bytes) -> bool:
        if found is None or not found.route.hot:
            return await self._serve_app(head, found, body)
        if found.route.relays is not None:
            request = self._relayed(head, body)
            del body  # the request alone holds it, and frees it early
            return await self._relay(found.route, request)
        ahead = await self._scanned_ahead(found.route, body)
        if found.route.waits:
            return await self._serve_waiting(head, found, body, ahead)
        served = self._listener.serve(self.shared, head, found, body, self.checks_host, ahead=ahead)
        return await self._send_served(served)

    async def _scanned_ahead(self, route: Route, body: bytes) -> ScanAhead | None:
        """Scans a long body in steps, between which others run, if the handler can use that."""
        if len(body) <= AHEAD_BYTES or not isinstance(route.handler, HotHandler):
            return None
        self.enter(ConnectionPhase.WORKING)  # no connection whose request is still to come
        return await scanned_ahead(route.handler, body)

    async def _send_served(self, served: Served) -> bool:
        """Sends an answer; returns whether the connection persists."""
        if isinstance(served, Streamed):
            return await self._stream(served)
        data, persists, undo = served
        await self._deliver(data, undo)
        return persists

    async def _answer_unread(self, head: Head, found: Found | None) -> bool:
        """Serves a request whose body nobody needs, without waiting for the body.

        If a part of it is missing, the connection ends, because that part would come next on it.
        """
        here = 0 < head.length <= len(self.buffer)
        self.buffer = self.buffer[head.length :] if here else b""
        head.keep_alive = head.keep_alive and here
        self._owed = not here
        return await self._answer(head, found, b"")

    def _relayed(self, head: Head, body: bytes) -> RelayedRequest:
        is_checked = self._listener.context.authorizer.asks_for_tokens
        return RelayedRequest(self, head, body, is_checked=is_checked)

    async def _relay(self, route: Route, request: RelayedRequest) -> bool:
        """Lets another part write the answer; returns whether the connection persists."""
        persists = await self._relay_one(route, request)
        if persists and self.shared.stopping:
            await in_task()
        return persists

    async def _relay_one(self, route: Route, request: RelayedRequest) -> bool:
        assert route.relays is not None
        self.enter(ConnectionPhase.WORKING)
        started = perf_counter()
        self.shared.stats.connections_waiting += 1
        try:
            return await route.relays(request)
        finally:
            self.shared.stats.connections_waiting -= 1
            seconds, status, size = perf_counter() - started, request.status, request.sent_bytes
            self._listener.note(request.method, route.path, status, seconds, size, request.headers)

    async def _goes_on(self) -> bool:
        """Returns whether a further request is to be served, after an answer that announced no end.

        If its head was made before a stop, the client has not been told, and may send a last one.
        """
        if not self.shared.stopping:
            return True
        if not self._unread():
            with trio.move_on_after(LAST_REQUEST_S):
                await trio.lowlevel.wait_readable(self.fd)
        return self._unread()

    async def _serve_waiting(
        self, head: Head, found: Found, body: bytes, ahead: ScanAhead | None
    ) -> bool:
        """Calls an asynchronous handler, and cancels it when its client leaves.

        A request of Scope.ADMIN is not cancelled: it is carried out even if nobody waits for it.
        """
        self.enter(ConnectionPhase.WORKING)
        served: Served | None = None
        started = perf_counter()
        self.shared.stats.connections_waiting += 1
        try:
            async with trio.open_nursery() as nursery:
                if not found.route.scope & Scope.ADMIN:
                    nursery.start_soon(self._watch_client, nursery.cancel_scope)
                served = await self._listener.serve_waiting(
                    self.shared, head, found, body, self.checks_host, ahead
                )
                nursery.cancel_scope.cancel()
        except BaseException:
            if served is not None and not isinstance(served, Streamed) and served[2] is not None:
                served[2]()
            raise
        finally:
            self.shared.stats.connections_waiting -= 1
        if served is None:
            seconds = perf_counter() - started
            self._listener.note(head.method, found.route.path, 0, seconds, 0, head.headers)
            raise ConnectionResetError(_LEFT)
        return await self._send_served(served)

    async def _stream(self, served: Streamed) -> bool:
        """Sends an answer in pieces as they are written; returns whether the connection persists.

        Other tasks run after each piece.
        """
        head, response = served.head, served.response
        access, writer = self._listener.access, ResponseWriter(self, head)
        logs, started, size = access.enabled, perf_counter(), 0
        headers = [*response.headers, *echoed(head.headers)] if logs else response.headers
        self.enter(ConnectionPhase.WORKING)
        try:
            async with contextlib.aclosing(served.body) as pieces:
                writer.start(response.status, response.content_type, headers, None)
                if head.method != "HEAD":
                    async for piece in pieces:
                        await writer.write(piece)
                        size += len(piece)
                        await trio.lowlevel.checkpoint()
                await writer.end()
        except OSError:
            raise
        except Exception:
            self.shared.stats.handler_bugs += 1
            log.exception("handler_failed", method=head.method, path=served.path)
            raise ConnectionAbortedError("the answer broke off") from None
        finally:
            if logs:
                seconds = perf_counter() - started
                access.note(head.method, served.path, response.status, seconds, size, head.headers)
        return writer.persists

    async def _deliver(self, data: bytes, undo: Undo) -> None:
        """Sends an answer; undoes what it reports if the client has left or sending fails.

        A client that has shut down its sending side counts as gone: until something is sent to it,
        the two cannot be distinguished.
        """
        try:
            if undo is not None and self.stream.has_left():
                raise ConnectionResetError(_LEFT)
            await self.send(data)
        except BaseException:
            if undo is not None:
                undo()
            raise

    async def _watch_client(self, serving: trio.CancelScope) -> None:
        """Cancels `serving` when the client ends its stream."""
        await self.stream.wait_for_end()
        serving.cancel()

    def _check_permit(self, head: Head, route: Route | None) -> None:
        """Raises Refusal if the request is not allowed, before any of its body is kept."""
        refusal = self._listener.context.authorizer.refusal(head.headers, route, self.checks_host)
        if refusal is not None:
            self._listener.context.note_refused(head, route, refusal)
            raise refusal
        self.note_granted(Scope.ANY if route is None else route.scope)

    async def _read_body(self, head: Head, route: Route) -> bytes:
        try:
            if head.encoded:
                raise Refusal(415, "the body must not be compressed", _UNENCODED)
            return await read_body(self, head, route.body_limit)
        except Refusal as refusal:
            self._listener.context.note_refused(head, route, refusal)
            raise

    async def _serve_app(self, head: Head, found: Found | None, body: bytes) -> bool:
        self.shared.stats.requests_app += 1
        self.enter(ConnectionPhase.WORKING)
        known = self._listener.context.authorizer.knows(head.headers, self.checks_host)
        exchange = AsgiExchange(self, head, found, body, known=known)
        await exchange.run(self._listener.app)
        self.shared.stats.handler_bugs += exchange.writer.status == 500
        return exchange.writer.persists

    async def _refuse(self, refusal: Refusal) -> None:
        if counter := _REFUSAL_COUNTERS.get(refusal.status):
            self.shared.stats.count(counter)
        response = self._listener.failures.refused(refusal)
        assert isinstance(response.body, bytes)
        lines = self.shared.date_line + CLOSE_LINE
        await self.send(whole_response(response, response.body, lines, silent=refusal.silent))
        await self.linger()


def listener_context(
    table: RouteTable, app: AsgiApp, context: ServerContext, shared: Shared
) -> ListenerContext:
    """Returns what the connections of one listener share, with the fast path that parks them."""
    fast_path = FastPath(
        table.plain(),
        table.plain_patterns(),
        Connection.serve_parked,
        Connection.log_answered,
        Connection.wake,
        Connection.relay,
        context.authorizer.rules,
        shared,
        context.counts,
    )
    return ListenerContext(table, app, context, fast_path)
