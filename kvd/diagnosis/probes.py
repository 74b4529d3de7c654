"""Engines probed from outside: who listens at an address, and what does it speak?

    connect ── greeting of ZMTP 3.0 ──> greeting? ── READY, as a SUB socket ──> its socket type
       └ errno                             └ something else, or nothing

ZMTP (rfc.zeromq.org/spec/23) has both ends send a greeting of 64 bytes at once, and then, without
CURVE or PLAIN, a READY command that names the type of the socket. The connection ends there. What
is dialled has been registered, and is dialled all the time; the rules about addresses hold.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import trio

from kvd.diagnosis.evidence import ProbeResult
from kvd.net.dialing import Unreachable
from kvd.wire.endpoints import host_and_port

if TYPE_CHECKING:
    from kvd.net.dialing import Dialer

PROBE_S = 2.0  # for one address; who speaks ZeroMQ answers within a round trip
PROBES_S = 10.0  # for all of them, below the deadline of handlers
PROBES_AT_ONCE = 64  # a descriptor each
MAX_PROBES = 1024  # addresses; others are not probed
MOST_BYTES = 512  # read of an answer: a greeting and a command have 64 and some 40

# Of a greeting, as the protocol has it: the mechanism, all of it, what comes before the mechanism.
MECHANISM_BYTES = 20
GREETING_BYTES = 64
VERSION_END = 12
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\3\0" + b"NULL".ljust(MECHANISM_BYTES, b"\0") + bytes(32)
SOCKET_TYPE = b"\x0bSocket-Type"
READY_BODY = b"\5READY" + SOCKET_TYPE + struct.pack(">I", 3) + b"SUB"
READY = b"\4" + bytes([len(READY_BODY)]) + READY_BODY
IPC = "ipc://"


class EngineProber:
    """Probes addresses; all who ask together have PROBES_AT_ONCE connections."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._limiter = trio.CapacityLimiter(PROBES_AT_ONCE)
        self.left_out = 0  # addresses, for their number or for want of time

    async def probe(self, endpoints: Iterable[str]) -> dict[str, ProbeResult]:
        """Probes each of them, MAX_PROBES at most, as far as it gets within PROBES_S."""
        probes: dict[str, ProbeResult] = {}
        wanted = list(dict.fromkeys(endpoints))

        async def probe_one(endpoint: str) -> None:
            async with self._limiter:
                probes[endpoint] = await probe_once(endpoint, self._dialer)

        with trio.move_on_after(PROBES_S):
            async with trio.open_nursery() as nursery:
                for endpoint in wanted[:MAX_PROBES]:
                    nursery.start_soon(probe_one, endpoint)
        self.left_out += len(wanted) - len(probes)
        return probes


async def probe_once(endpoint: str, dialer: Dialer) -> ProbeResult:
    """Probes one address: PROBE_S at most to connect, and as long to hear who is there."""
    stream: trio.SocketStream | None = None
    try:
        address = await dialer.endpoint(endpoint)
        with trio.move_on_after(PROBE_S):
            stream = await _connect(address)
    except Unreachable as error:
        return ProbeResult(str(error))
    except OSError as error:
        return ProbeResult(os.strerror(error.errno or errno.EIO))
    if stream is None:
        return ProbeResult(f"no connection within {PROBE_S:g} s")
    said = bytearray()
    async with aclosing(stream):
        # An engine that hangs up has sent what counts before.
        with trio.move_on_after(PROBE_S), suppress(trio.BrokenResourceError):
            await _talk(stream, said)
    return read_probe(bytes(said))


async def _connect(address: str) -> trio.SocketStream:
    host_port = host_and_port(address)
    if host_port is not None:
        family = socket.AF_INET6 if ":" in host_port[0] else socket.AF_INET
        target: str | tuple[str, int] = host_port
    else:
        family, path = socket.AF_UNIX, address.removeprefix(IPC)
        target = "\0" + path[1:] if path.startswith("@") else path
    sock = trio.socket.socket(family)
    try:
        await sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


async def _talk(stream: trio.SocketStream, said: bytearray) -> None:
    """Sends a subscriber's greeting, and collects the answer until it identifies the other end."""
    # An engine with another mechanism hangs up at once when it hears ours.
    await stream.send_all(GREETING[:VERSION_END])
    while len(said) < GREETING_BYTES:
        if not await _hear(stream, said) or not is_greeting(said):
            return
    await stream.send_all(GREETING[VERSION_END:])
    if _mechanism(said) != "NULL":
        return
    await stream.send_all(READY)
    while not read_probe(said).socket_type and len(said) < MOST_BYTES:
        if not await _hear(stream, said):
            return


async def _hear(stream: trio.SocketStream, said: bytearray) -> bool:
    """Takes some more; returns whether there was any."""
    data = await stream.receive_some(MOST_BYTES)
    said += data
    return bool(data)


def is_greeting(said: bytes | bytearray) -> bool:
    """Returns whether an answer begins as ZMTP does; the 8 bytes after its first may be any."""
    return said[:1] == SIGNATURE[:1] and (len(said) < len(SIGNATURE) or said[9] & 1 == 1)


def read_probe(said: bytes | bytearray) -> ProbeResult:
    """Returns what the bytes of an answer show."""
    if not said or not is_greeting(said) or len(said) < len(SIGNATURE):
        return ProbeResult(said=bytes(said))
    _, found, rest = bytes(said[GREETING_BYTES:]).partition(SOCKET_TYPE)
    size = int.from_bytes(rest[:4]) if len(rest) >= 4 else 0
    kind = rest[4 : 4 + size] if found and len(rest) >= 4 + size else b""
    return ProbeResult("", bytes(said), True, _mechanism(said), kind.decode("ascii", "replace"))


def _mechanism(said: bytes | bytearray) -> str:
    """Returns the mechanism that a greeting names, "" while it has not come as far."""
    name = (
        bytes(said[VERSION_END : VERSION_END + MECHANISM_BYTES])
        if len(said) >= GREETING_BYTES
        else b""
    )
    return name.rstrip(b"\0").decode("ascii", "replace")
