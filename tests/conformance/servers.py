"""Further servers that a scenario starts: more processes of the one under test, and fake ones."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from typing import Any

import httpx

from tests.conformance.failure import Failure, wait_until
from tests.conformance.matcher import difference
from tests.support import http_client
from tests.support.forking import start_process
from tests.support.ports import find_free_port

STOP_WITHIN_S = 5.0
HEALTH_TIMEOUT_S = 2.0
HELD_AT_MOST_S = 60.0  # for an answer that no step releases
SHOWN_OUTPUT = 400  # characters at the end


class Spawned:
    """A process of the server under test on a port of its own."""

    def __init__(self, command: list[str], arguments: list[str], environ: dict[str, str]) -> None:
        port = find_free_port()
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVD_", "DYN_"))
        }
        self.base_url = f"http://127.0.0.1:{port}"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        whole = [*command, "--port", str(port), *arguments]
        self._process = start_process(whole, inherited | environ, self._output, self._output)

    def _text(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def wait_healthy(self, within_s: float) -> None:
        def check() -> str | None:
            code = self._process.poll()
            if code is not None:
                raise Failure(f"exited with {code}: {self._text()[-SHOWN_OUTPUT:]}")
            try:
                url = self.base_url + "/health"
                healthy = http_client.get(url, timeout=HEALTH_TIMEOUT_S).is_success
            except httpx.TransportError:
                healthy = False
            return None if healthy else f"not healthy: {self._text()[-SHOWN_OUTPUT:]}"

        wait_until(check, within_s)

    def send_signal(self, name: str) -> None:
        self._process.send_signal(signal.Signals[f"SIG{name}"])

    def expect_exit(self, code: Any, within_s: float, output_regex: str | None) -> None:
        try:
            actual = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"still running after {within_s} s") from None
        wrong = difference(code, actual, path="exit code")
        if wrong is None and output_regex and not re.search(output_regex, self._text(), re.DOTALL):
            wrong = f"the output does not match {output_regex!r}"
        if wrong:
            raise Failure(f"{wrong}: {self._text()[-SHOWN_OUTPUT:]}")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()


class FakeHttp:
    """An HTTP server that answers each path as `routes` says, and notes requests."""

    def __init__(self) -> None:
        self.routes: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.released = threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.requests.append(f"{self.command} {self.path}")
                route = fake.routes.get(self.path, {"status": 404})
                if route.get("held", False):
                    fake.released.wait(HELD_AT_MOST_S)
                text = json.dumps(route["json"]) if "json" in route else route.get("body", "")
                self.send_response(route.get("status", 200))
                self.send_header("content-type", "application/json")
                self.end_headers()
                with contextlib.suppress(OSError):  # the client has not waited
                    self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
