"""A kvd that several tests of one module share."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment


@contextmanager
def running_kvd(
    folder: Path, *flags: str, face: str = "indexer", environ: dict[str, str] | None = None
) -> Iterator[Server]:
    """Runs `kvd indexer`, or another face, on its port."""
    port = find_free_port()
    with running(folder, port, face, "--port", str(port), *flags, environ=environ) as server:
        yield server


@contextmanager
def running_both(folder: Path, *flags: str) -> Iterator[tuple[Server, str]]:
    """Runs `kvd serve`; yields its indexer as a Server, and the slot tracker's URL."""
    ports = find_free_port(), find_free_port()
    faces = ("--indexer-bind", "--slot-tracker-bind")
    binds = [f"{face}=127.0.0.1:{port}" for face, port in zip(faces, ports, strict=True)]
    # Another test run may use the default ports of the other faces.
    binds += ["--selection-bind=off", "--conductor-bind=off"]
    with running(folder, ports[0], "serve", *binds, *flags) as server:
        yield server, f"http://127.0.0.1:{ports[1]}"


@contextmanager
def running(
    folder: Path,
    port: int,
    *arguments: str,
    environ: dict[str, str] | None = None,
    under: Sequence[str] = (),
) -> Iterator[Server]:
    """Runs a kvd that answers on `port`, started by the command `under` if there is one.

    It must run until the block ends, and then end with exit code 0 on SIGTERM.
    """
    command = [*under, sys.executable, "-m", "kvd", *arguments]
    server = Server(command, folder, port, clean_environment(**environ or {}))
    try:
        server.wait_healthy()
        yield server
        assert server.process.poll() is None, server.stderr
    finally:
        code = server.stop()
    assert code == 0, server.stderr
