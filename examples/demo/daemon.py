"""`kvd serve` as a child process that ends with this one."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import trio

PR_SET_PDEATHSIG = 1  # of prctl(2)
NOTICE_BYTES = 4096  # systemd's own bound of a message
_libc = ctypes.CDLL(None)


class Daemon:
    """One child process; make it on the main thread, as it ends with the thread that made it.

    It has a process group of its own: Ctrl-C reaches the demo alone, which then ends the engines
    before the daemon. When the demo dies, however it does, the kernel sends the child a SIGTERM.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        # The daemon notifies its service manager once it serves (sd_notify(3)), so that no other
        # process at the same address is mistaken for it.
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._notices.bind("")  # the kernel picks an abstract address
        address: bytes = self._notices.getsockname()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvd", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"NOTIFY_SOCKET": "@" + address[1:].decode()},
            process_group=0,
            preexec_fn=partial(_end_with_parent, os.getpid()),
        )
        self._end = os.pidfd_open(self._process.pid)

    async def ready(self) -> None:
        """Waits until every face serves, for ever if the daemon ends before that."""
        while True:
            await trio.lowlevel.wait_readable(self._notices)
            if b"READY=1" in self._notices.recv(NOTICE_BYTES).split(b"\n"):
                return

    async def ended(self) -> int:
        """Waits for the end; returns the exit code, after a signal the one that a shell reports."""
        await trio.lowlevel.wait_readable(self._end)
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    async def stop(self) -> int:
        """Ends the daemon if it still runs; returns what `ended` does."""
        self._process.terminate()
        return await self.ended()

    def close(self) -> None:
        """Closes the descriptors; the daemon itself is ended by `stop`, or with this process."""
        os.close(self._end)
        self._notices.close()


def _end_with_parent(parent: int) -> None:
    """Runs in the child before it becomes kvd."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before this call
        os.kill(os.getpid(), signal.SIGTERM)
