"""Signals that a task reads, instead of handlers that interrupt whatever runs.

The signals are blocked until the process ends, and a signalfd reports them. A Python handler could
run between any two steps, even of itself: signals that come faster than it returns would nest it
until a RecursionError ends the daemon. A blocked signal is pending once, however often it is sent.
It waits for a reader that does not exist yet; after the last reader has closed it does nothing.

Threads inherit the blocked signals, so they have to be blocked before any thread is started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import trio

# <signal.h> and <sys/signalfd.h>, on every Linux.
_SET_BYTES = 128  # sizeof(sigset_t)
_INFO_BYTES = 128  # sizeof(struct signalfd_siginfo), whose first member is the number
_NUMBER_BYTES = 4

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class Signals:
    """Some signals, for one task that waits for them; without any, it waits for ever.

    The kernel reports the lowest number first. If a signal may come without end and must not hide
    another one, give each a `Signals` of its own.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        """Blocks the signals; raises OSError if there is no descriptor for them."""
        libc = ctypes.CDLL(None, use_errno=True)
        wanted = ctypes.create_string_buffer(_SET_BYTES)
        libc.sigemptyset(wanted)
        for number in numbers:
            libc.sigaddset(wanted, number)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        self._fd: int = libc.signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "signalfd")

    def fileno(self) -> int:
        """Returns the descriptor, which is readable when a signal has come."""
        return self._fd

    async def wait(self) -> signal.Signals:
        """Waits for the next signal and returns it; one sent often meanwhile is returned once."""
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            if (number := self.read()) is not None:  # else another reader has taken it
                return number

    def read(self) -> signal.Signals | None:
        """Returns the next signal as `wait` does, None if there is none now."""
        try:
            info = os.read(self._fd, _INFO_BYTES)
        except BlockingIOError:
            return None
        return signal.Signals(int.from_bytes(info[:_NUMBER_BYTES], sys.byteorder))

    def close(self) -> None:
        """Closes the descriptor; the signals stay blocked."""
        os.close(self._fd)


def end_with_parent(parent: int, name: str) -> None:
    """Makes the kernel send this process SIGTERM when its parent ends; names it for `ps`.

    Only the first 15 bytes of the name are kept. If `parent` has ended already, the process ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(_PR_SET_NAME, name.encode())
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGTERM)
