"""Requests a reload of a running kvd and reports its outcome: both sides of `kvd reload`.

    kvd reload ── connects to the control socket ──> kvd serve: reads all files again
               <── one line of JSON: a Verdict ──────

The socket is in the folder that the service manager makes for the service, and for nobody but the
service's user, and root, to connect to: so the daemon reads with its own rights and credentials,
and the command ends with what came of it, which a signal could not say.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

import trio

from kvd.config.load import AddressError, StartError
from kvd.http.listeners import open_listeners
from kvd.http.options import UnixRights

FOLDER_VARIABLE = "RUNTIME_DIRECTORY"  # systemd.exec(5): folders between colons
NAME = "control"
RIGHTS = UnixRights(0o600)
RECEIVE_BYTES = 64 * 1024  # bytes of a verdict read at once; a verdict is shorter


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The outcome of a reload."""

    changed: tuple[str, ...] = ()  # settings that hold now
    waiting: tuple[str, ...] = ()  # those that wait for a restart
    refused: str | None = None  # why nothing has changed


def path(environ: Mapping[str, str]) -> str | None:
    """Returns where the control socket is; None without a service manager that says so."""
    folder = environ.get(FOLDER_VARIABLE, "").partition(":")[0]
    return f"{folder}/{NAME}" if folder else None


async def listen(path: str) -> socket.socket:
    """Returns the control socket; raises AddressError."""
    try:
        (sock,) = await open_listeners(f"unix:{path}", RIGHTS)
    except OSError as error:
        raise AddressError(str(error.strerror)) from None
    return sock


async def answer(sock: socket.socket, reload: Callable[[], Awaitable[ReloadResult]]) -> None:
    """Reloads for each who connects, and says what came of it, until cancelled."""

    async def one(stream: trio.SocketStream) -> None:
        async with stream:
            verdict = await reload()
            with suppress(trio.BrokenResourceError):  # who asked has not waited
                await stream.send_all(json.dumps(asdict(verdict)).encode())

    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    await trio.serve_listeners(one, [listener])


def reload(environ: Mapping[str, str]) -> ReloadResult:
    """Has the service reload that this command is run for, and waits for what comes of it.

    Raises StartError where there is none, or it ends meanwhile.
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
    said = json.loads(text)
    return ReloadResult(tuple(said["changed"]), tuple(said["waiting"]), said["refused"])
