"""Servers run as processes of their own: started, waited for, stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support import http_client
from tests.support.forking import REPOSITORY as REPOSITORY
from tests.support.forking import start_process

START_DEADLINE_S = 60.0  # a machine may be busy
STOP_DEADLINE_S = 30.0
ANSWER_DEADLINE_S = 5.0
POLL_S = 0.01

# Variables that a service manager which runs the tests has set for the tests themselves.
SERVICE_VARIABLES = (
    "NOTIFY_SOCKET",
    "RUNTIME_DIRECTORY",
    "CREDENTIALS_DIRECTORY",
    "STATE_DIRECTORY",
)


class Server:
    """A server process under test, its standard output and error in files."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        port: int,
        environ: dict[str, str],
        session: bool = False,
    ) -> None:
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}"
        self._output = folder / f"{port}.stdout"
        self._errors = folder / f"{port}.stderr"
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = start_process(command, environ, output, errors, session)

    @property
    def stdout(self) -> str:
        return self._output.read_text()

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    def wait_healthy(self) -> None:
        self.wait_until(self._is_healthy, "answering /health")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for `condition`; fails the test when the process ends or the deadline passes."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not condition():
            if self.process.poll() is not None:
                pytest.fail(f"exited with {self.process.returncode} before {what}:\n{self.stderr}")
            if time.monotonic() > deadline:
                pytest.fail(f"not {what} after {START_DEADLINE_S} s:\n{self.stderr}")
            time.sleep(POLL_S)

    def wait_logged(self, text: str) -> None:
        """Waits until the log has `text`."""
        self.wait_until(lambda: text in self.stderr, f"saying {text}")

    def _is_healthy(self) -> bool:
        try:
            answer = http_client.get(f"{self.base_url}/health", timeout=ANSWER_DEADLINE_S)
        except httpx.TransportError:  # it does not listen yet
            return False
        return answer.status_code == 200

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signals the process if it is still there, and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"still there {STOP_DEADLINE_S} s after {number.name}:\n{self.stderr}")


def reads(pid: int, number: signal.Signals) -> bool:
    """Returns whether a process reads a signal by a descriptor, as kvd does once it blocks it.

    A blocked signal alone proves nothing: making a thread blocks all signals for a moment.
    """
    for descriptor in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            mask = re.search(r"^sigmask:\s+([0-9a-f]+)$", descriptor.read_text(), re.MULTILINE)
            if mask is not None and int(mask[1], 16) & 1 << number - 1:
                return True
    return False


def clean_environment(**extra: str) -> dict[str, str]:
    """Returns this environment without what would configure the daemon, and with `extra`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVD_", "DYN_")) and name not in SERVICE_VARIABLES
    }
    return inherited | extra
