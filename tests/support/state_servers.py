"""Real Redis or Valkey servers as processes: started, stopped, frozen, emptied; and sentinels."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.forking import Forked, start_process
from tests.support.kvds import wait
from tests.support.ports import find_free_port
from tests.support.processes import clean_environment

KINDS = tuple(name for name in ("redis-server", "valkey-server") if shutil.which(name))

needs_server = pytest.mark.skipif(
    not KINDS, reason="neither redis-server nor valkey-server is installed"
)


class StateServer:
    """One server on a port of this machine, which it keeps when it is started again."""

    def __init__(self, folder: Path, *flags: str, kind: str | None = None) -> None:
        self.port = find_free_port()
        self._folder = folder
        self._flags = flags
        self._kind = kind or KINDS[0]
        self._process: Forked | subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [self._kind, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--repl-diskless-sync-delay", "0"]  # usually 5 s, in case more replicas ask
        command += ["--dir", str(self._folder), *self._flags]
        with (self._folder / f"{self.port}.log").open("ab") as output:
            self._process = start_process(command, clean_environment(), output, output)
        wait(lambda: self._answers(b"PING", b"+PONG") or self._answers(b"PING", b"-NOAUTH"))

    def _answers(self, command: bytes, expected: bytes) -> bool:
        return self.ask(command).startswith(expected)

    def ask(self, *commands: bytes) -> bytes:
        """Returns the server's answer to inline commands, b"" if it cannot be reached."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as stream:
            stream.settimeout(5)
            stream.sendall(b"\r\n".join((*commands, b"")))
            return stream.recv(65536)
        return b""

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.thaw()
            self.kill()


def sentinel_of(
    folder: Path, master: StateServer, name: str, kind: str | None = None
) -> StateServer:
    """Starts a lone sentinel, which watches a server and fails over within a second or two."""
    path = folder / "sentinel.conf"
    path.write_text(
        f"sentinel monitor {name} 127.0.0.1 {master.port} 1\n"
        f"sentinel down-after-milliseconds {name} 300\n"
        f"sentinel failover-timeout {name} 2000\n"
    )
    return _Sentinel(folder, path, kind)


class _Sentinel(StateServer):
    def __init__(self, folder: Path, path: Path, kind: str | None) -> None:
        self._path = path
        super().__init__(folder, kind=kind)

    def start(self) -> None:
        command = [self._kind, str(self._path), "--port", str(self.port), "--sentinel"]
        with (self._folder / f"{self.port}.log").open("ab") as output:
            self._process = start_process(command, clean_environment(), output, output)
        wait(lambda: self._answers(b"PING", b"+PONG"))
