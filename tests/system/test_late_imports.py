"""A daemon loads some modules only when they are needed, not at its start."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support import http_client
from tests.support.all_routes import all_routes
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment

# The application of cold requests, OpenSSL, and modules that would load them.
LATE = ("quart", "hypercorn", "werkzeug", "jinja2", "asyncio", "_ssl", "_hashlib")
SERVES = f"""
import sys
from kvd.cli.main import main
code = main(sys.argv[1:])
print([name for name in {LATE} if name in sys.modules])
sys.exit(code)
"""
FACES = ("indexer", "slot-tracker", "selection", "conductor")


def served(folder: Path) -> tuple[Server, dict[str, str]]:
    """Starts a daemon that prints at its end what it has loaded; returns it and its faces' URLs."""
    ports = {face: find_free_port() for face in FACES}
    binds = (f"--{face}-bind=127.0.0.1:{port}" for face, port in ports.items())
    command = [sys.executable, "-c", SERVES, "serve", *binds]
    server = Server(command, folder, ports["indexer"], clean_environment())
    server.wait_healthy()
    return server, {face: f"http://127.0.0.1:{port}" for face, port in ports.items()}


def test_a_daemon_that_is_asked_for_hot_routes_alone_does_not_load_the_application(
    tmp_path: Path,
) -> None:
    server, urls = served(tmp_path)
    for face, url in urls.items():
        with Client(url) as client:
            for route in all_routes()[face]:
                if route.hot and not route.path.startswith("/test/"):
                    path = route.path.replace("{", "").replace("}", "")
                    body = {} if route.method == "GET" else {"json": {}}
                    answered = client.request(route.method, path, **body)
                    assert answered.status_code not in (405, 500), (route.method, path)
    assert server.stop() == 0, server.stderr
    assert server.stdout == "[]\n"


def test_the_first_cold_request_loads_the_application(tmp_path: Path) -> None:
    server, _ = served(tmp_path)
    dump = http_client.get(f"{server.base_url}/dump")
    assert dump.json() == {}
    assert server.stop() == 0, server.stderr
    assert "'quart'" in server.stdout
