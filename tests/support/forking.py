"""Starts processes of kvd, simulated engines and the demo, without half a second of imports each.

The forker is a process that has imported them and done nothing else. It forks for each start. The
child does what `python -m kvd`, or another of `FORKED`, does: it calls `main` with these arguments
in this environment. When `main` has returned, the child ends at once: taking the interpreter down
would write to every page that it shares with the forker, and so copy it, which took as much CPU
time as the whole start. Tests of the start itself, or of kvd under another command, run the command
instead.
"""

from __future__ import annotations

import atexit
import fcntl
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
import termios
from pathlib import Path
from threading import Lock
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[2]
MESSAGE_BYTES = 1 << 17  # more than any environment has; a socket takes more at once
FORKED = ("kvd", "examples.engine", "examples.demo")
STANDARD = 3  # standard descriptors
MOST_DESCRIPTORS = 16  # standard ones and passed sockets
ASIDE = 100  # above the number of any descriptor of a new process


class Forker:
    """The forker, as the process that asks it to fork sees it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = Lock()  # held from a question to its answer
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
    """A forked process, with those methods of subprocess.Popen that tests use."""

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
            poller.register(ended, select.POLLIN)  # comes once the process has ended
            try:
                if not poller.poll(None if timeout == math.inf else timeout * 1000):
                    raise subprocess.TimeoutExpired(f"kvd, process {self.pid}", timeout)
            finally:
                os.close(ended)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # until `poll` has seen its end, its id is no other process's
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_process(
    command: list[str],
    environ: dict[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    session: bool = False,
) -> Forked | subprocess.Popen[bytes]:
    """Starts a command without input, by forking if it is `python -m` with one of FORKED."""
    if command[:2] == [sys.executable, "-m"] and command[2] in FORKED:
        with open(os.devnull, "rb") as stdin:
            standard = (stdin.fileno(), stdout.fileno(), stderr.fileno())
            return fork(command[2:], environ, standard, session=session)
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environ,
        stdout=stdout,
        stderr=stderr,
        start_new_session=session,
    )


def fork(
    command: list[str],
    environ: dict[str, str],
    standard: tuple[int, int, int],
    *passed: int,
    session: bool = False,
) -> Forked:
    """Forks a process with these standard descriptors; with `session` it leads a new session.

    It gets the `passed` sockets as a service manager passes them (sd_listen_fds(3)). If its
    standard input is a terminal, this becomes the terminal of the session.
    """
    forker = the_forker()
    pid = forker.ask("start", command, environ, session, descriptors=(*standard, *passed))
    assert pid is not None
    return Forked(forker, pid)


@functools.cache
def the_forker() -> Forker:
    return Forker()


# ---- in the forker


def serve() -> list[str] | None:
    """Answers questions; returns module and arguments in each child, None when the forker ends."""
    control = socket.socket(fileno=os.dup(0))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not message:
            return None
        question, *details = json.loads(message)
        answer = poll(*details) if question == "poll" else os.fork()
        if answer == 0 and question == "start":
            control.close()
            return become(descriptors, *details)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps(answer).encode())


def poll(pid: int) -> int | None:
    """Returns the exit code of a child that has ended, None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def become(
    descriptors: list[int], command: list[str], environ: dict[str, str], session: bool
) -> list[str]:
    """Takes over arguments, environment and descriptors, and returns module and arguments."""
    os.environ.clear()
    os.environ.update(environ)
    passed = len(descriptors) - STANDARD
    if passed:
        os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(passed)}
    # Move all of them out of the way first: one may occupy the number that another needs.
    aside = [fcntl.fcntl(each, fcntl.F_DUPFD, ASIDE) for each in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in enumerate(aside):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if session:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Opened as the interpreter does at its start, when it inspects what the descriptors are.
    encoding = environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = command
    return command


if __name__ == "__main__":
    # Modules that `main`, the daemon and its first cold request import as late as possible.

    import kvd.app.daemon
    import kvd.app.processes
    import kvd.http.app
    import kvd.shared_state.service  # noqa: F401
    from examples.demo.__main__ import main as run_demo
    from examples.engine.__main__ import main as run_engine
    from kvd.cli.main import main as run_kvd

    # Exempts all objects made so far: a child's garbage collection would write to, and so copy,
    # the pages that they are on.
    gc.collect()
    gc.freeze()
    started = serve()
    if started is None:
        sys.exit(0)
    module, *arguments = started
    mains = dict(zip(FORKED, (run_kvd, run_engine, run_demo), strict=True))
    code = mains[module](arguments)
    gc.collect()  # frees the reference cycles that the daemon has left
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
