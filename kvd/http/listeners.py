"""Opens the listening sockets that a bind address names."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import trio

from kvd.http.options import UnixRights
from kvd.platform.sockets import distinct, listening_tcp

# Connections that wait to be accepted: a fleet reconnects at once. The kernel caps it at
# net.core.somaxconn.
BACKLOG = 1024

OWN_RIGHTS = UnixRights()

_UNIX_PREFIX = "unix:"

_Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]  # as getaddrinfo's


async def open_listeners(bind: str, rights: UnixRights = OWN_RIGHTS) -> list[socket.socket]:
    """Returns non-blocking listening sockets for `host:port`, `[v6]:port` or `unix:/path`.

    Port 0 takes any free port. A host name opens every address it resolves to. `rights` are those
    of a Unix socket.

    Raises:
        ValueError: `bind` has none of these forms.
        OSError: the address cannot be listened on; the text names it and the reason.
    """
    if bind.startswith(_UNIX_PREFIX):
        return [_open_unix(bind.removeprefix(_UNIX_PREFIX), rights)]
    host, port = split_host_port(bind)
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _explained(error, bind) from None
    with contextlib.ExitStack() as opened:
        listeners = [
            opened.enter_context(_open_tcp(family, address, bind))
            for family, address in distinct(found)
        ]
        opened.pop_all()
    return listeners


def open_shared(
    bind: str, count: int, rights: UnixRights = OWN_RIGHTS
) -> list[list[socket.socket]]:
    """Returns listening sockets for `count` processes that share an address: a list for each.

    The kernel spreads the connections of a TCP address over its sockets. A Unix socket is one and
    the same in all lists. A name is looked up while the caller waits. Raises what `open_listeners`
    does.
    """
    if bind.startswith(_UNIX_PREFIX):
        sock = _open_unix(bind.removeprefix(_UNIX_PREFIX), rights)
        return [[sock] for _ in range(count)]
    host, port = split_host_port(bind)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _explained(error, bind) from None
    opened: list[list[socket.socket]] = [[] for _ in range(count)]
    with contextlib.ExitStack() as undone:
        for family, address in distinct(found):
            # Unshared at first: this fails if a stranger shares the address, who would otherwise
            # get some of the connections.
            with _open_tcp(family, address, bind) as alone:
                taken = alone.getsockname()  # with the port that the kernel has chosen for 0
            for each in opened:
                each.append(undone.enter_context(_open_tcp(family, taken, bind, shared=True)))
        undone.pop_all()
    return opened


def split_host_port(bind: str) -> tuple[str, int]:
    """Returns host and port of `host:port` or `[v6]:port`; raises ValueError."""
    host, separator, port = bind.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not separator or not host or (":" in host and not bracketed):
        raise ValueError(f"bind address {bind!r}: expected host:port, [v6]:port or unix:/path")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"bind address {bind!r}: the port must be a number up to 65535")
    return host[1:-1] if bracketed else host, int(port)


def _open_tcp(family: int, address: _Address, bind: str, *, shared: bool = False) -> socket.socket:
    try:
        return listening_tcp(family, address, BACKLOG, shared=shared)
    except OSError as error:
        raise _explained(error, bind) from None


def _open_unix(path: str, rights: UnixRights) -> socket.socket:
    with contextlib.ExitStack() as undone:
        sock = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            group = None if rights.group is None else _group_number(rights.group)
            _remove_stale(path)
            sock.bind(path)
            undone.callback(os.unlink, path)
            # Nobody can connect before listen(), whatever the file's mode is until then. The group
            # is set first, because that may clear bits of the mode.
            if group is not None:
                _set_group(path, group)
            os.chmod(path, rights.mode)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            raise _explained(error, _UNIX_PREFIX + path) from None
        undone.pop_all()
        return sock


def file_remover(sock: socket.socket) -> Callable[[], None]:
    """Returns a function that removes a listening Unix socket's file, if it is still its own."""
    path = sock.getsockname()
    own = _identity(path)

    def remove() -> None:
        with contextlib.suppress(OSError):  # gone already, or its folder is closed to us now
            if _identity(path) == own:
                os.unlink(path)

    return remove


def _identity(path: str) -> tuple[int, ...]:
    """Returns what distinguishes a file from others of its name; inode numbers are used again."""
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _group_number(group: str) -> int:
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise OSError(errno.EINVAL, f"the group {group} does not exist") from None


def _set_group(path: str, group: int) -> None:
    """Gives a file to a group, if it has another: sandboxes forbid even setting the same one."""
    if os.lstat(path).st_gid == group:
        return
    try:
        os.chown(path, -1, group)
    except OSError as error:
        why = f"the socket cannot be given to group {group}: {error.strerror or error}"
        raise OSError(error.errno, why) from None


def _remove_stale(path: str) -> None:
    """Removes the socket file that a dead process left behind, and nothing else."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EADDRINUSE, "a file that is not a socket has this name")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return  # a process listens, and is busy
        except ConnectionRefusedError:
            Path(path).unlink()


def _explained(error: OSError, bind: str) -> OSError:
    return OSError(
        error.errno or errno.EINVAL, f"cannot listen on {bind}: {error.strerror or error}"
    )
