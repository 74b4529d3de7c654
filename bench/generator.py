"""Builds kvbench and runs it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from errors import BenchError
from servers import Server, die_with_parent, end

HERE = Path(__file__).resolve().parent
BUILD_TIMEOUT = 300.0  # seconds
RUN_TIMEOUT = 300.0  # seconds; the longest run takes about 15 on a quiet machine

Option = str | int | float
Result = dict[str, float]


def build(directory: Path, program: str = "kvbench") -> Path:
    """Brings a program up to date in `directory` and returns its path."""
    path = directory / program
    command = ["make", "--silent", "-C", str(HERE), f"BUILD={directory}", str(path)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    except OSError as error:
        raise BenchError(f"cannot run make: {error}") from error
    if made.returncode:
        raise BenchError(f"{program} does not build (README.md has what it needs):\n{made.stderr}")
    return path


def _figures(line: bytes | str) -> Result:
    """Returns the numbers of a result line."""
    fields: dict[str, object] = json.loads(line)
    return {name: float(x) for name, x in fields.items() if isinstance(x, int | float)}


class Hold:
    """A `kvbench hold` process: engines that stay up and answer commands."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.filled = self._answer()

    def ask(self, command: str) -> Result:
        """Sends one command line and returns its result."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchError("kvbench hold has died; its error is above") from None
        return self._answer()

    def _answer(self) -> Result:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        line = b""
        deadline = time.monotonic() + RUN_TIMEOUT
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BenchError(f"kvbench hold gave no answer in {RUN_TIMEOUT:.0f} s")
            piece = os.read(pipe, 4096)
            if not piece:
                raise BenchError("kvbench hold has died; its error is above")
            line += piece
        return _figures(line)


class Generator:
    """Runs one kvbench binary against servers."""

    def __init__(self, binary: Path) -> None:
        self._binary = binary

    def run(self, mode: str, server: Server, **options: Option) -> Result:
        """Does one bounded run; raises BenchError unless every request and event succeeded."""
        (line,) = self._lines(self._command(mode, server, options))
        return _figures(line)

    def alone(self, mode: str, **options: Option) -> Result:
        """Does one bounded run that has a server of its own."""
        (line,) = self._lines([str(self._binary), mode, *_flags(options)])
        return _figures(line)

    def bodies(self, **options: Option) -> list[str]:
        """Returns request bodies as the http mode would send them."""
        return self._lines([str(self._binary), "bodies", *_flags(options)])

    @contextmanager
    def hold(self, server: Server, **options: Option) -> Iterator[Hold]:
        """Yields engines that have filled `server` and stay registered."""
        process = subprocess.Popen(
            self._command("hold", server, options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        try:
            yield Hold(process)
        finally:
            end(process)

    def _command(self, mode: str, server: Server, options: dict[str, Option]) -> list[str]:
        target: dict[str, Option] = {"url": server.address, "pid": server.pid}
        return [str(self._binary), mode, *_flags({**target, **options})]

    def _lines(self, command: list[str]) -> list[str]:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=RUN_TIMEOUT,
                preexec_fn=die_with_parent,
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"no end after {RUN_TIMEOUT:.0f} s: {' '.join(command)}") from None
        if done.returncode:
            raise BenchError(f"{done.stderr.strip()}\nin: {' '.join(command)}")
        return done.stdout.splitlines()


def _flags(options: dict[str, Option]) -> list[str]:
    flags = []
    for name, value in options.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags
