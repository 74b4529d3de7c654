"""Starts processes of kvd, and simulated engines, without half a second of imports each.

A process that has imported both and done nothing else, the forker, forks for each of them. What
follows is what `python -m kvd` does, or `python -m examples.engine`: `main` with these arguments,
in this environment, in a process of its own. Once that has returned, the process ends: to take the
interpreter down piece by piece would write to every page that the two share, and so copy it, which
took as much CPU time as all of the start. Tests of the start itself, or of kvd under another
command, run the command.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[2]
MESSAGE_BYTES = 1 << 17  # of an environment with room to spare; a socket takes more at once
FORKED = ("kvd", "examples.engine")


class Forker:
    """The process that forks, seen from the one that asks it to."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = Lock()  # a question and its answer are one
        with theirs:
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(command, cwd=REPOSITORY, stdin=theirs.fileno())
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def ask(self, *question: Any, descriptors: tuple[int, ...] = ()) -> int | None:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
            answer = self._socket.recv(MESSAGE_BYTES)
        assert answer, f"the forker has ended with {self._process.wait()}"
        found: int | None = json.loads(answer)
        return found


class Forked:
    """A process of kvd, as subprocess.Popen shows one."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forker = forker

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forker.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Returns the exit code; raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            poller, ended = select.poll(), os.pidfd_open(self.pid)
            poller.register(ended, select.POLLIN)  # once the process has ended
            try:
                if not poller.poll(None if timeout == math.inf else timeout * 1000):
                    raise subprocess.TimeoutExpired(f"kvd, process {self.pid}", timeout)
            finally:
                os.close(ended)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # the process id is no other's before `poll` has returned it
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_process(
    command: list[str], environ: dict[str, str], stdout: IO[bytes], stderr: IO[bytes]
) -> Forked | subprocess.Popen[bytes]:
    """Starts a command, by forking if it is one of FORKED and nothing more."""
    if command[:2] != [sys.executable, "-m"] or command[2] not in FORKED:
        return subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdout=stdout, stderr=stderr)
    forker, descriptors = the_forker(), (stdout.fileno(), stderr.fileno())
    pid = forker.ask("start", command[2:], environ, descriptors=descriptors)
    assert pid is not None
    return Forked(forker, pid)


@functools.cache
def the_forker() -> Forker:
    return Forker()


# ---- in the forker


def serve() -> list[str] | None:
    """Answers questions; returns module and arguments in each child, None in the forker's end."""
    control = socket.socket(fileno=os.dup(0))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not message:
            return None
        question, *details = json.loads(message)
        answer = look_after(*details) if question == "poll" else os.fork()
        if answer == 0 and question == "start":
            control.close()
            return become(*details, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps(answer).encode())


def look_after(pid: int) -> int | None:
    """Returns the exit code of a child that has ended."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def become(command: list[str], environ: dict[str, str], stdout: int, stderr: int) -> list[str]:
    """Takes over arguments, environment and descriptors, and returns module and arguments."""
    stdin = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = command
    return command


if __name__ == "__main__":
    # Which `main`, the daemon and its first cold request import as late as they can.

    import kvd.app.daemon
    import kvd.app.processes
    import kvd.http.app
    import kvd.shared_state.service  # noqa: F401
    from examples.engine.__main__ import main as run_engine
    from kvd.cli.main import main as run_kvd

    # What is here stays as it is: no child's collection of garbage walks it, and so copies it.
    gc.collect()
    gc.freeze()
    told = serve()
    if told is None:
        sys.exit(0)
    module, *arguments = told
    code = {"kvd": run_kvd, "examples.engine": run_engine}[module](arguments)
    gc.collect()  # what the daemon has left in circles is freed, too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
