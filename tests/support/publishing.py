"""A running conductor with publishers around it: real HTTP, real ZMQ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.conformance.engine import Engine
from tests.conformance.failure import show, wait_until
from tests.support.http_client import Client
from tests.support.processes import Server
from tests.support.running import running_kvd

WITHIN_S = 10.0  # for conditions that take milliseconds

Json = dict[str, Any]


class Running:
    """A conductor's client, and the engines of one test."""

    def __init__(self, client: Client, server: Server) -> None:
        self.client = client
        self.server = server
        self._engines = ExitStack()

    def engine(self, replay: bool = False) -> Engine:
        """Returns an engine that publishes, and ends with the test."""
        made = Engine("e")
        self._engines.callback(made.unbind)
        made.bind(replay=replay)
        return made

    def post(self, path: str, body: Json, status: int = 200) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        return answer.json()

    def register(self, endpoint: str, **members: Any) -> None:
        """Registers an engine of instance `a`, model `m`, blocks of 4, unless said otherwise."""
        usual = {"type": "vLLM", "modelname": "m", "instance_id": "a", "block_size": 4}
        self.post("/register", {"endpoint": endpoint, "dp_rank": 0} | usual | members)

    def services(self) -> list[Json]:
        listed: list[Json] = self.client.get("/services").json()["services"]
        return listed

    def until_row(self, path: str, body: Json, row: Json, instance: str = "a") -> None:
        """Asks until the instance's row has these members."""

        def check() -> str | None:
            found = self.post(path, body)[body.get("tenant_id", "default")].get(instance, {})
            return None if found | row == found else f"{show(found)} instead of {show(row)}"

        wait_until(check, WITHIN_S)

    def until_shown(self, endpoint: str, within_s: float = WITHIN_S, **members: Any) -> Json:
        """Asks until `/services` shows these members of a publisher, and returns all of them."""
        found: Json = {}

        def check() -> str | None:
            found.clear()  # some members are left out while they are empty
            found.update(next(each for each in self.services() if each["Endpoint"] == endpoint))
            shown = {name: found.get(name) for name in members}
            return None if shown == members else f"{show(shown)} instead of {show(members)}"

        wait_until(check, within_s)
        return found

    def end(self) -> None:
        """Unregisters all publishers and ends the engines."""
        for each in self.services():
            body = {"instance_id": each["InstanceID"], "tenant_id": each["TenantID"]}
            self.client.post("/unregister", json=body)
        self._engines.close()


@contextmanager
def running_conductor(folder: Path, *arguments: str) -> Iterator[Running]:
    with (
        running_kvd(folder, *arguments, face="conductor") as server,
        Client(server.base_url) as client,
    ):
        yield Running(client, server)
        assert "Traceback" not in server.stderr
