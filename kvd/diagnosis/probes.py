"""Probes engines from outside: does anything listen at an address, and what does it speak?

    connect ── greeting of ZMTP 3.0 ──> greeting? ── READY, as a SUB socket ──> its socket type
       └ errno                             └ something else, or nothing

ZMTP (rfc.zeromq.org/spec/23) has both ends send a greeting of 64 bytes at once, and then, without
CURVE or PLAIN, a READY command that names the type of the socket. The connection ends there. Only
registered addresses are probed, which kvd dials anyway, and by the same rules for addresses.
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

PROBE_S = 2.0  # for one address; a peer that speaks ZeroMQ answers within a round trip
PROBES_S = 10.0  # for all addresses of a diagnosis, below the deadline of handlers
PROBES_AT_ONCE = 64  # addresses probed at a time; each needs a descriptor
MAX_PROBES = 1024  # addresses of a diagnosis; others are not probed
MOST_BYTES = 512  # read of an answer: a greeting has 64, the command some 40

# Sizes in a greeting: the mechanism's, the whole greeting's, that of the part before the mechanism.
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
    """Probes addresses; all diagnoses together have PROBES_AT_ONCE connections."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._limiter = trio.CapacityLimiter(PROBES_AT_ONCE)
        self.left_out = 0  # addresses that were not probed: too many, or out of time

    async def probe(self, endpoints: Iterable[str]) -> dict[str, ProbeResult]:
        """Probes the first MAX_PROBES addresses, as many as it can within PROBES_S."""
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
    """Probes one address: it has PROBE_S to connect, and PROBE_S more to read the answer."""
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
    received = bytearray()
    async with aclosing(stream):
        # If the engine hangs up, what it sent before is enough.
        with trio.move_on_after(PROBE_S), suppress(trio.BrokenResourceError):
            await _talk(stream, received)
    return read_probe(bytes(received))


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


async def _talk(stream: trio.SocketStream, received: bytearray) -> None:
    """Sends a subscriber's greeting, and collects the answer until it identifies the other end."""
    # The rest of the greeting waits: an engine with another mechanism hangs up when it reads ours.
    await stream.send_all(GREETING[:VERSION_END])
    while len(received) < GREETING_BYTES:
        if not await _hear(stream, received) or not is_greeting(received):
            return
    await stream.send_all(GREETING[VERSION_END:])
    if _mechanism(received) != "NULL":
        return
    await stream.send_all(READY)
    while not read_probe(received).socket_type and len(received) < MOST_BYTES:
        if not await _hear(stream, received):
            return


async def _hear(stream: trio.SocketStream, received: bytearray) -> bool:
    """Reads more of the answer; returns False at its end."""
    data = await stream.receive_some(MOST_BYTES)
    received += data
    return bool(data)


def is_greeting(received: bytes | bytearray) -> bool:
    """Returns whether an answer begins as ZMTP does; any 8 bytes may follow the first one."""
    return received[:1] == SIGNATURE[:1] and (
        len(received) < len(SIGNATURE) or received[9] & 1 == 1
    )


def read_probe(received: bytes | bytearray) -> ProbeResult:
    """Returns what the bytes of an answer show."""
    if not received or not is_greeting(received) or len(received) < len(SIGNATURE):
        return ProbeResult(received=bytes(received))
    _, found, rest = bytes(received[GREETING_BYTES:]).partition(SOCKET_TYPE)
    size = int.from_bytes(rest[:4]) if len(rest) >= 4 else 0
    kind = rest[4 : 4 + size] if found and len(rest) >= 4 + size else b""
    return ProbeResult(
        "", bytes(received), True, _mechanism(received), kind.decode("ascii", "replace")
    )


def _mechanism(received: bytes | bytearray) -> str:
    """Returns the mechanism that a greeting names, "" while the greeting is incomplete."""
    name = (
        bytes(received[VERSION_END : VERSION_END + MECHANISM_BYTES])
        if len(received) >= GREETING_BYTES
        else b""
    )
    return name.rstrip(b"\0").decode("ascii", "replace")
