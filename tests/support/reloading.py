"""A kvd whose file of settings is read again while it runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import exposition
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment
from tests.support.running import running_kvd


class Daemon:
    """A running kvd and its file."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server = server
        self.path = path
        self.http = Client(server.base_url)

    def reload(self, text: str, outcome: str = "applied") -> None:
        """Writes the file, has the daemon read it, and waits until it has."""
        before = self.reloads(outcome)
        self.path.write_text(text)
        self.server.process.send_signal(signal.SIGHUP)
        self.server.wait_until(lambda: self.reloads(outcome) == before + 1, "reloaded")

    def reloads(self, outcome: str) -> float:
        return self.samples()[f'kvd_config_reloads_total{{outcome="{outcome}"}}']

    def samples(self) -> dict[str, float]:
        """Returns the samples of /metrics."""
        return exposition.parse(self.http.get("/metrics").text)


@contextmanager
def starting(folder: Path, face: str = "indexer", text: str = "") -> Iterator[Server]:
    """Starts a face with these settings in its file, without waiting; a test may end it."""
    path, port = folder / "kvd.toml", find_free_port()
    path.write_text(text)
    command = [sys.executable, "-m", "kvd", face, "--port", str(port), "--config", os.fspath(path)]
    server = Server(command, folder, port, clean_environment())
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def daemon(folder: Path, face: str = "indexer", text: str = "", *flags: str) -> Iterator[Daemon]:
    """Runs a face with these settings in its file."""
    path = folder / "kvd.toml"
    path.write_text(text)
    with running_kvd(folder, "--config", os.fspath(path), *flags, face=face) as server:
        found = Daemon(server, path)
        with found.http:
            yield found
