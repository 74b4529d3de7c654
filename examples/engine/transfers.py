"""How simulated engines hand a computed prompt over to each other, as vLLM and SGLang do.

    vLLM, its NIXL connector   the prefill engine keeps the blocks and answers with
                               kv_transfer_params; the engine that takes over sends these back by
                               POST /transfer, once, within the lease, and has the prompt
    SGLang                     both engines get the number of a room; the decode engine asks for it
                               by POST /room, which the prefill engine answers once the prompt is
                               computed

The blocks themselves stay where they are: each engine knows by the prompt what they would hold.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import httptools
import trio

LEASE_S = 30.0  # vLLM's kv_lease_duration
ROOM_S = 10.0  # time for a room to open and its prompt to be computed
MAX_ROOMS = 4096  # rooms that are remembered: none is used twice
WANTS_PREFILL = "do_remote_decode"
HAS_PREFILL = "do_remote_prefill"


class TransferFailed(Exception):
    """A prompt has not been handed over."""


class EngineDied(Exception):
    """A request that a real engine does not survive."""


class Leases:
    """The prompts that a vLLM engine keeps for others."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[dict[str, Any], float]] = {}

    def __len__(self) -> int:
        """Returns how many prompts have not been fetched, or not in time."""
        return len(self._kept)

    def grant(self, request_id: str, blocks: int, address: tuple[str, int]) -> dict[str, Any]:
        """Keeps a prompt; returns the kv_transfer_params for the engine that takes it over."""
        host, port = address
        params: dict[str, Any] = {
            HAS_PREFILL: True,
            WANTS_PREFILL: False,
            "remote_block_ids": [list(range(1, blocks + 2))],
            "remote_engine_id": f"engine-{port}",
            "remote_request_id": f"{request_id}-{len(self._kept)}",
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "remote_blocks_expiry_time": 1764000000.1234567,
            "remote_registration_generation": 2**63 - 25,
            "not of this version": {"é": [None, 1e-07]},
        }
        self._kept[params["remote_request_id"]] = params, trio.current_time() + LEASE_S
        return params

    def redeem(self, params: dict[str, Any]) -> bool:
        """Hands a prompt over; returns False unless the params are exactly those granted."""
        request_id = str(params.get("remote_request_id"))
        if request_id not in self._kept:
            return False
        granted, until = self._kept[request_id]
        if granted != params or trio.current_time() > until:
            return False
        del self._kept[request_id]
        return True


async def fetch_lease(params: dict[str, Any]) -> None:
    """Takes a prompt over by kv_transfer_params; raises TransferFailed or EngineDied."""
    if not any(params.get("remote_block_ids") or ()):
        raise EngineDied("do_remote_prefill without remote_block_ids")
    await ask(params["remote_host"], params["remote_port"], "/transfer", params)


@dataclass(eq=False, slots=True)
class Room:
    """Where two SGLang engines meet for one request."""

    computed: trio.Event = field(default_factory=trio.Event)
    taken: trio.Event = field(default_factory=trio.Event)
    left: bool = False  # the prefill engine's client has gone: there is nothing to take over


class Rooms:
    """The rooms of an SGLang engine that prefills."""

    def __init__(self) -> None:
        self._rooms: OrderedDict[int, Room] = OrderedDict()
        self._opened = trio.Event()

    def open(self, number: int) -> Room:
        """Opens a room; raises TransferFailed if it was opened before."""
        if number in self._rooms:
            raise TransferFailed(f"bootstrap room {number} is in use")
        self._rooms[number] = room = Room()
        if len(self._rooms) > MAX_ROOMS:
            self._rooms.popitem(last=False)
        self._opened.set()
        self._opened = trio.Event()
        return room

    async def take(self, number: int) -> bool:
        """Waits until the prompt of a room is computed; False if it never will be."""
        with trio.move_on_after(ROOM_S):
            while number not in self._rooms:
                await self._opened.wait()
            room = self._rooms[number]
            await room.computed.wait()
            room.taken.set()
            return not room.left
        return False


async def enter_room(members: dict[str, Any]) -> None:
    """Takes a prompt over in the room that a request names; raises TransferFailed."""
    place = members["bootstrap_host"], members["bootstrap_port"]
    await ask(*place, "/room", {"room": members["bootstrap_room"]})


class _Response:
    def __init__(self) -> None:
        self.whole = False

    def on_message_complete(self) -> None:
        self.whole = True


async def ask(host: str, port: int, path: str, members: dict[str, Any]) -> None:
    """Posts something to another engine; raises TransferFailed unless it answers 200."""
    body = json.dumps(members).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    response = _Response()
    parser = httptools.HttpResponseParser(response)
    try:
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(head.encode() + body)
            while not response.whole:
                data = await stream.receive_some()
                if not data:
                    raise TransferFailed("the other engine has gone")
                parser.feed_data(bytes(data))
    except (OSError, trio.BrokenResourceError) as error:
        raise TransferFailed(f"the other engine is not there: {error}") from None
    if parser.get_status_code() != 200:
        raise TransferFailed("the other engine has nothing for this")
