"""A kvd that several tests of one module share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import Server, clean_environment, find_free_port


@contextmanager
def running_kvd(folder: Path, *flags: str) -> Iterator[Server]:
    """Runs `kvd indexer`; it must end with exit code 0 on SIGTERM, and alive until then."""
    port = find_free_port()
    command = [sys.executable, "-m", "kvd", "indexer", "--port", str(port), *flags]
    server = Server(command, folder, port, clean_environment())
    try:
        server.wait_healthy()
        yield server
        assert server.process.poll() is None, server.stderr
    finally:
        code = server.stop()
    assert code == 0, server.stderr
