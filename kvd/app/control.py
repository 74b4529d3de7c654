"""Requests a reload of a running kvd and reports its outcome: both sides of `kvd reload`.

    kvd reload ── connects to the control socket ──> kvd serve: reads all files again
               <── one line of JSON: a ReloadResult ─

The socket is in the folder that the service manager makes for the service. Only the service's user
and root may connect to it. So the daemon reads the files with its own rights and credentials, and
the command reports the outcome, which it could not learn after sending a signal.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

import trio

from kvd.config.errors import AddressError, StartError
from kvd.http.listeners import open_listeners
from kvd.http.options import UnixRights

FOLDER_VARIABLE = "RUNTIME_DIRECTORY"  # systemd.exec(5): folders between colons
NAME = "control"
RIGHTS = UnixRights(0o600)
RECEIVE_BYTES = 64 * 1024  # bytes of a result read at once; a result is shorter


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The outcome of a reload."""

    changed: tuple[str, ...] = ()  # settings that have changed and are in force
    waiting: tuple[str, ...] = ()  # settings that have changed but need a restart
    refused: str | None = None  # why nothing has changed


def folder(environ: Mapping[str, str]) -> str | None:
    """Returns the folder that a service manager has made for the service, None without one."""
    return environ.get(FOLDER_VARIABLE, "").partition(":")[0] or None


def path(environ: Mapping[str, str]) -> str | None:
    """Returns the path of the control socket; None unless a service manager names its folder."""
    named = folder(environ)
    return None if named is None else f"{named}/{NAME}"


async def listen(path: str) -> socket.socket:
    """Returns the control socket; raises AddressError."""
    try:
        (sock,) = await open_listeners(f"unix:{path}", RIGHTS)
    except OSError as error:
        raise AddressError(str(error.strerror)) from None
    return sock


async def answer(sock: socket.socket, reload: Callable[[], Awaitable[ReloadResult]]) -> None:
    """Reloads for each client that connects, and reports the outcome to it, until cancelled."""

    async def one(stream: trio.SocketStream) -> None:
        async with stream:
            result = await reload()
            with suppress(trio.BrokenResourceError):  # the client has not waited
                await stream.send_all(json.dumps(asdict(result)).encode())

    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    await trio.serve_listeners(one, [listener])


def reload(environ: Mapping[str, str]) -> ReloadResult:
    """Makes the service that this command belongs to reload, and waits for the outcome.

    Raises StartError if there is no such service, or it ends meanwhile.
    """
    socket_path = path(environ)
    if socket_path is None:
        raise StartError(
            f"{FOLDER_VARIABLE} is not set: `kvd reload` works for the systemd service only; "
            "elsewhere send SIGHUP"
        )
    text = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(socket_path)
            while piece := sock.recv(RECEIVE_BYTES):
                text += piece
        except OSError as error:
            raise StartError(f"no kvd answers at {socket_path}: {error.strerror}") from None
    if not text:
        raise StartError("kvd ended before it reloaded")
    members = json.loads(text)
    return ReloadResult(tuple(members["changed"]), tuple(members["waiting"]), members["refused"])
