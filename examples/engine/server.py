"""Serves a simulated engine over HTTP: one task a connection, one request after the other."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import httptools
import trio
import zmq

from examples.engine import api
from examples.engine.answers import Answer, Hangup, refuse, send_json
from examples.engine.caches import BLOCK_SIZE, Engine, Publisher, SglangEngine, VllmEngine
from examples.engine.kept import KeptResponses
from examples.engine.options import EngineOptions, Fault
from examples.engine.tokenizer import prompt_of
from examples.engine.transfers import (
    HAS_PREFILL,
    WANTS_PREFILL,
    EngineDied,
    Leases,
    Room,
    Rooms,
    TransferFailed,
    enter_room,
    fetch_lease,
)

RECEIVE_BYTES = 64 * 1024
KEPT = 16  # requests whose body and headers are remembered
SPEECH = b"RIFF\x04\0\0\0WAVE"  # the same for every text


class Refused(Exception):
    """The engine answers a request with an error."""

    def __init__(self, status: int, answer: Any) -> None:
        super().__init__()
        self.status = status
        self.answer = answer


class Request:
    """One HTTP request as it comes in; `on_` methods are called by httptools."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.whole = False

    def on_url(self, part: bytes) -> None:
        self.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.whole = True

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("latin-1")


class EngineServer:
    """One engine: its cache, its publisher, and what its clients see."""

    def __init__(
        self, options: EngineOptions, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        """Publishes in `context`; without one, or without events, nothing is published."""
        self.options = options
        self.cache = empty_cache(options)
        self.publisher = Publisher(context) if context is not None and options.events else None
        # The endpoint that it reports for its events, which an operator can get wrong.
        self.announced = "" if self.publisher is None else self.publisher.endpoint
        self.requests = 0  # requests that generate, however they ended
        self.aborted = 0  # requests that their clients gave up
        self.computed = 0  # tokens of prompts
        self.prefilled = 0  # requests whose prompt it computed for another engine
        self.taken_over = 0  # requests whose prompt another engine has computed
        self.leases = Leases()  # vllm
        self.rooms = Rooms()  # sglang
        # Where other engines reach it: unless it is set, where the first client has connected.
        self.address = ("", 0)
        self.dead = False  # it answers only that it is dead
        # Bodies and headers of the last requests that generate, newest first.
        self.received: deque[bytes] = deque(maxlen=KEPT)
        self.heads: deque[dict[bytes, bytes]] = deque(maxlen=KEPT)
        self.computing = trio.Lock()  # one prefill at a time
        self._responses = KeptResponses()

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serves one connection until either side ends it."""
        if not self.address[1]:
            self.address = stream.socket.getsockname()[:2]
        async with stream:
            try:
                # A new connection may wait for its first request for as long as it likes.
                more = await self._serve_request(stream, math.inf)
                while more:
                    more = await self._serve_request(stream, self.options.idle_s)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.aborted += 1
            except Hangup:
                pass

    async def _serve_request(self, stream: trio.SocketStream, idle_s: float) -> bool:
        """Serves one request; returns whether there was one within `idle_s`."""
        request = Request()
        parser = httptools.HttpRequestParser(request)
        while not request.whole:
            with trio.move_on_after(idle_s):
                data = await stream.receive_some(RECEIVE_BYTES)
                if not data:
                    return False
                parser.feed_data(bytes(data))
                continue
            return False
        method = parser.get_method().decode()
        form = api.FORMS.get(request.path, api.Chat)
        try:
            if method == "POST" and request.path in api.FORMS:
                await self._generate(stream, request, form)
            elif method == "POST" and request.path == "/room":
                here = await self.rooms.take(json.loads(request.body)["room"])
                await send_json(stream, 200 if here else 404, {})
            else:
                status, answer = self._answer(method, request)
                await send_json(stream, status, answer)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            # Members have wrong types, or are nested too deeply; nothing has been answered yet.
            await send_json(stream, 400, form.error(400, str(error), "BadRequestError"))
        return True

    # ---- requests that generate nothing

    def _answer(self, method: str, request: Request) -> tuple[int, Any]:
        path = request.path
        if path in ("/health", "/ready"):
            return 503 if self.dead else 200, {}
        if path == "/transfer":
            return 200 if self.leases.redeem(json.loads(request.body)) else 404, {}
        if path == "/metrics":
            return 200, api.metrics(self.options.kind, BLOCK_SIZE, self.options.blocks)
        if path == "/v1/models":
            return 200, {"object": "list", "data": self._cards()}
        if method == "POST" and path in POSTED:
            return POSTED[path](self, request)
        if path.startswith("/v1/responses/") and not path.endswith("/render"):
            return self._answer_kept(method, path.split("/")[3])
        if self.options.kind == "vllm":
            return self._answer_as_vllm(path, request)
        if path == "/server_info":
            return 200, self._server_info()
        return 404, {"detail": "Not Found"}

    def _answer_kept(self, method: str, name: str) -> tuple[int, Any]:
        """Shows, cancels or forgets a response that it keeps."""
        forgets = method == "DELETE"
        found = self._responses.forget(name) if forgets else self._responses.show(name)
        if found is None:
            return 404, api.error(404, f"Response with id '{name}' not found.", "NotFoundError")
        return 200, found

    def _answer_as_vllm(self, path: str, request: Request) -> tuple[int, Any]:
        if path == "/version":
            return 200, {"version": "0.33.0"}
        if path == "/kv_event_sources":
            return 200, self._event_sources()
        if path == "/reset_prefix_cache":
            self.reset()
            return 200, {"success": True}
        if path.endswith("/render"):
            return self._render(path, json.loads(request.body))
        return 404, {"detail": "Not Found"}

    def _render(self, path: str, members: dict[str, Any]) -> tuple[int, Any]:
        if not self.options.renders:
            return 403, api.error(403, "start with --enable-scale-out", "PermissionDeniedError")
        prompt = members.get("prompt", "")
        is_texts = isinstance(prompt, list) and prompt and isinstance(prompt[0], str)
        each = [prompt_of(members | {"prompt": one}) for one in (prompt if is_texts else [prompt])]
        rows = [{"request_id": "r", "token_ids": ids, "features": None} for ids in each]
        return 200, rows if path == "/v1/completions/render" else rows[0]

    def _cards(self) -> list[dict[str, Any]]:
        base = self.options.model
        card = {"id": base, "object": "model", "created": 0, "owned_by": self.options.kind}
        root = self.options.root or base
        lengths = {"root": root, "parent": None, "max_model_len": self.options.max_model_len}
        adapters = [
            {**card, "id": name, "root": name, "parent": base, "max_model_len": None}
            for name in self.options.adapters
        ]
        aliases = [card | lengths | {"id": name} for name in self.options.aliases]
        return [card | lengths, *aliases, *adapters]

    def _count(self, request: Request) -> tuple[int, Any]:
        return 200, {"input_tokens": len(prompt_of(json.loads(request.body)))}

    def _embed(self, request: Request) -> tuple[int, Any]:
        texts = json.loads(request.body).get("input")
        each = texts if isinstance(texts, list) else [texts]
        rows = [
            {"object": "embedding", "index": at, "embedding": [float(len(str(text))), 1.0]}
            for at, text in enumerate(each)
        ]
        used = {"prompt_tokens": len(each), "total_tokens": len(each)}
        return 200, {"object": "list", "data": rows, "model": self.options.model, "usage": used}

    def _hear(self, request: Request) -> tuple[int, Any]:
        return 200, {"text": f"{len(request.body)} bytes"}

    def _speak(self, request: Request) -> tuple[int, Any]:
        return 200, SPEECH

    def _tokenize(self, request: Request) -> tuple[int, Any]:
        members = json.loads(request.body)
        ids = prompt_of(members, knows_former=self.options.kind != "vllm")
        length = self.options.max_model_len
        return 200, {"count": len(ids), "max_model_len": length, "tokens": ids}

    def _event_sources(self) -> dict[str, Any]:
        if self.publisher is None:
            return {}
        source = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": ""}
        return {"0": {**source, "endpoint": self.announced, "replay_endpoint": None}}

    def _server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = {
            "version": "0.5.23",
            "page_size": BLOCK_SIZE,
            "dp_size": 1,
            "max_total_num_tokens": self.options.blocks * BLOCK_SIZE,
            "kv_events": None,
            "disaggregation_mode": self.options.mode,
            "disaggregation_bootstrap_port": self.address[1],
        }
        if self.publisher is not None:
            host, _, port = self.announced.removeprefix("tcp://").rpartition(":")
            events = {"publisher": "zmq", "endpoint_host": host, "endpoint_port_base": int(port)}
            info["kv_events"] = {**events, "block_size": BLOCK_SIZE, "dp_size": 1}
        return info

    def reset(self) -> None:
        """Forgets all that is cached."""
        self.cache = empty_cache(self.options)
        if self.publisher is not None:
            self.publisher.publish([{"type": "AllBlocksCleared"}], time.time())

    # ---- requests that generate

    async def _generate(
        self, stream: trio.SocketStream, request: Request, form: type[api.Form]
    ) -> None:
        self.requests += 1
        self.received.appendleft(request.body)
        self.heads.appendleft(request.headers)
        fault = self.options.faults.popleft() if self.options.faults else None
        if fault is not None:
            await refuse(stream, form, fault, self.options.retry_after)
        if self.dead:
            return await send_json(stream, 500, api.error(500, "EngineCore has died"))
        members = json.loads(request.body)
        try:
            model, ids = self._model_and_prompt(members, form)
            longest = max(0, len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token is computed
            cached = min(self.cache.held(ids)[1] * BLOCK_SIZE, longest)
            room, takes_over = await self._meet(members)
        except Refused as refusal:
            return await send_json(stream, refusal.status, refusal.answer)
        if takes_over:
            self.taken_over += 1
            cached = len(ids) - 1  # it computes the last token's logits itself
        await self._compute(stream, ids, cached, room)
        bounds = [members[name] for name in form.limits if members.get(name)]
        wanted = 1 if room else bounds[0] if bounds else api.DEFAULT_TOKENS
        words = api.words(min(wanted, self.options.max_model_len))
        used = api.Usage(len(ids), cached, len(words))
        request_id = request.headers.get(b"x-request-id", b"none").decode("latin-1")
        worded = form(request_id, model)
        if form is api.Responses and members.get("store") is not False:
            self._responses.keep(worded.whole("".join(words), used), members["input"])
        answer = Answer(stream, worded, words, used, fault)
        answer.chunks = self.options.chunks
        if self.options.kind == "vllm":
            answer.more = self._kept(members, request_id, len(ids), fault)
        if members.get("stream"):
            options = members.get("stream_options") or {}
            await answer.stream(self.options.step_s, with_usage=bool(options.get("include_usage")))
        else:
            await trio.sleep(len(words) * self.options.step_s)
            await answer.whole()

    def _model_and_prompt(
        self, members: dict[str, Any], form: type[api.Form]
    ) -> tuple[str, list[int]]:
        """Returns the model and the token ids that a body asks for; raises Refused.

        The input of a response becomes that of its whole conversation.
        """
        names = (self.options.model, *self.options.aliases, *self.options.adapters)
        model = members.get("model") or names[0]
        if self.options.kind == "vllm" and model not in names:
            text = f"The model `{model}` does not exist."
            raise Refused(404, form.error(404, text, "NotFoundError"))
        if form is api.Responses:
            conversation = self._responses.conversation(members)
            if conversation is None:
                text = f"Response with id '{members['previous_response_id']}' not found."
                raise Refused(404, form.error(404, text, "NotFoundError"))
            members["input"] = conversation
        ids = prompt_of(members)
        if len(ids) >= self.options.max_model_len:
            text = f"the prompt is longer than the context of {self.options.max_model_len} tokens"
            raise Refused(400, form.error(400, text, "BadRequestError"))
        return model, ids

    async def _meet(self, members: dict[str, Any]) -> tuple[Room | None, bool]:
        """Meets the other engine of a pair; raises Refused.

        Returns the room in which this engine hands its prompt over, and whether it takes over one.
        """
        try:
            room = self.rooms.open(_room_of(members)) if self.options.mode == "prefill" else None
            return room, await self._takes_over(members)
        except EngineDied as error:
            self.dead = True
            raise Refused(500, api.error(500, str(error))) from None
        except TransferFailed as error:
            raise Refused(500, api.error(500, str(error))) from None
        except KeyError:
            text = "a request to an engine of a pair needs a bootstrap_room"
            raise Refused(400, api.error(400, text, "BadRequestError")) from None

    async def _compute(
        self, stream: trio.SocketStream, ids: list[int], cached: int, room: Room | None
    ) -> None:
        """Computes and caches a prompt, and waits until it is taken from its room, if it has one.

        Raises Hangup if the client leaves meanwhile.
        """
        async with self.computing:
            if self.options.prefill_s:
                seconds = (len(ids) - cached) * self.options.prefill_s
                await self._unless_left(stream, partial(trio.sleep, seconds), room)
            self._publish(self.cache.serve(ids))
        self.computed += len(ids) - cached
        if room is not None:
            room.computed.set()
            await self._unless_left(stream, room.taken.wait, room)
            self.prefilled += 1

    async def _takes_over(self, members: dict[str, Any]) -> bool:
        """Takes a prompt over if another engine has computed it; returns whether it did.

        Raises TransferFailed, EngineDied, or KeyError for a request without a room.
        """
        if self.options.mode == "decode":
            _room_of(members)
            await enter_room(members)
            return True
        params = members.get("kv_transfer_params")
        if self.options.kind != "vllm" or not (params and params.get(HAS_PREFILL)):
            return False
        await fetch_lease(params)
        return True

    async def _unless_left(
        self, stream: trio.SocketStream, wait: Callable[[], Awaitable[None]], room: Room | None
    ) -> None:
        """Waits for something; if the client leaves before, closes its room and raises Hangup."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, stream, nursery.cancel_scope)
            await wait()
            nursery.cancel_scope.cancel()
            return
        self.aborted += 1
        if room is not None:
            room.left = True
            room.computed.set()
        raise Hangup

    def _kept(
        self, members: dict[str, Any], request_id: str, count: int, fault: Fault | None
    ) -> dict[str, Any]:
        """Returns the members of an answer that offer its prompt to another engine."""
        params = members.get("kv_transfer_params") or {}
        if not params.get(WANTS_PREFILL):
            return {}
        self.prefilled += 1
        if fault is Fault.KEEPS_NOTHING:
            return {"kv_transfer_params": None}
        granted = self.leases.grant(request_id, count // BLOCK_SIZE, self.address)
        if fault is Fault.FORGETS:
            self.leases.redeem(granted)
        return {"kv_transfer_params": granted}

    def _publish(self, events: list[dict[str, Any]]) -> None:
        if self.publisher is not None:
            self.publisher.publish(events, time.time())


def _room_of(members: dict[str, Any]) -> int:
    return int(members["bootstrap_room"])


async def _watch(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Ends a wait if the client leaves."""
    with suppress(trio.BrokenResourceError):  # which means that it has left, too
        await stream.receive_some(1)
    scope.cancel()


# Paths that are answered at once, from the body.
POSTED: dict[str, Callable[[EngineServer, Request], tuple[int, Any]]] = {
    "/tokenize": EngineServer._tokenize,
    "/v1/messages/count_tokens": EngineServer._count,
    "/v1/embeddings": EngineServer._embed,
    "/v1/audio/transcriptions": EngineServer._hear,
    "/v1/audio/translations": EngineServer._hear,
    "/v1/audio/speech": EngineServer._speak,
}


def empty_cache(options: EngineOptions) -> Engine:
    if options.kind == "vllm":
        return VllmEngine(options.blocks)
    return SglangEngine(options.blocks, options.host_blocks)
