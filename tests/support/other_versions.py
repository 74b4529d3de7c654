"""A daemon of another version of kvd, for the commands that ask one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from kvd.cli.status import KNOWN_BY, LISTS


@contextmanager
def other_version(answer: bytes) -> Iterator[list[str]]:
    """Runs an indexer whose answer to everything but /metrics is `answer`.

    Yields the flags by which commands ask it, and no other face.
    """
    known = f"{KNOWN_BY['indexer']} 0\n".encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(known if self.path == "/metrics" else answer)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Writes nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        off = [f"--{face}-bind=off" for face in LISTS if face != "indexer"]
        try:
            yield [f"--indexer-bind=127.0.0.1:{server.server_port}", *off]
        finally:
            server.shutdown()
            thread.join()
