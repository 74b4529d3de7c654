"""Runs the steps of a scenario, each kind by its own function."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.conformance.engine import Engine
from tests.conformance.failure import BadScenario, Failure, show, wait_until
from tests.conformance.matcher import difference
from tests.conformance.names import Names
from tests.conformance.packed import PackedDialect
from tests.conformance.responses import unmet
from tests.conformance.servers import FakeHttp, Spawned
from tests.support.http_client import Client

Step = dict[str, Any]

DEFAULT_WITHIN_S = 10.0
DEFAULT_HOLDS_S = 0.5
HOLDS_POLL_S = 0.05
SPAWN_WITHIN_S = 20.0
HTTP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Target:
    """The server under test."""

    base_url: str
    spawn_command: list[str] | None = None  # starts another one of its kind
    rename: dict[str, str] = field(default_factory=dict)  # members: scenario's name -> server's
    packed: PackedDialect | None = None  # translates requests where it can
    untrue: Callable[[httpx.Response], str | None] | None = None  # differs from its document
    spawn_environ: dict[str, str] = field(default_factory=dict)  # for others of its kind


class Stage:
    """Plays the steps of one scenario; `close` puts everything back."""

    def __init__(
        self, target: Target, client: Client, log: Callable[[str], None] = lambda line: None
    ) -> None:
        self._target = target
        self._client = client
        self._log = log
        self._names = Names(target.base_url, target.rename)
        self._registered: list[dict[str, Any]] = []

    def play(self, step: Step) -> None:
        """Raises Failure when the server does not behave as the step says."""
        keywords = [keyword for keyword in STEPS if keyword in step]
        if len(keywords) != 1:
            raise BadScenario(f"a step has one of {', '.join(STEPS)}: {show(step)}")
        STEPS[keywords[0]](self, step)

    def close(self) -> None:
        for body in self._registered:
            with contextlib.suppress(httpx.TransportError):  # the scenario has failed already
                self._client.post(self._target.base_url + "/unregister", json=body)
        for engine in self._names.engines.values():
            engine.unbind()
        for server in self._names.servers.values():
            server.close()

    # ---- http

    def _request(self, http: dict[str, Any]) -> httpx.Response:
        http = self._names.fill(http)
        method, path = http["method"], http["path"]
        for old, new in self._target.rename.items():
            path = re.sub(rf"([?&]){re.escape(old)}=", rf"\g<1>{new}=", path)
        headers, content = dict(http.get("headers", {})), _content(http)
        if "json" in http:
            headers.setdefault("content-type", "application/json")
        url = http.get("base", self._target.base_url) + path
        packed = self._target.packed.request(http) if self._target.packed else None
        if packed is not None:
            content, headers["content-type"] = packed, "application/msgpack"
        response = self._client.request(
            method, url, headers=headers, content=content, timeout=HTTP_TIMEOUT_S
        )
        self._log(f"{method} {path} {show(http.get('json'))} -> {response.status_code}")
        if self._target.untrue and (wrong := self._target.untrue(response)):
            raise Failure(f"{method} {path}, by the document: {wrong}")
        if self._target.packed and packed is not None:
            response = self._target.packed.answer(http, response)
        if method == "POST" and path == "/register" and response.is_success and "base" not in http:
            members = ("instance_id", "worker_id", "model_name")
            given = http.get("json", {})
            self._registered.append({name: given[name] for name in members if name in given})
        return response

    def _unmet(self, step: Step) -> str | None:
        """Makes the request of a step and returns the first expectation that does not hold."""
        try:
            response = self._request(step["http"])
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}"
        expected = self._names.fill(step.get("expect", {}))
        if self._target.packed and PackedDialect.was_packed(response):
            expected = self._target.packed.expected(expected)
        wrong = unmet(expected, response)
        return wrong and f"{step['http']['method']} {step['http']['path']}: {wrong}"

    def http(self, step: Step) -> None:
        if wrong := self._unmet(step):
            raise Failure(wrong)

    def until(self, step: Step) -> None:
        wait_until(lambda: self._unmet(step["until"]), step.get("within_s", DEFAULT_WITHIN_S))

    def holds(self, step: Step) -> None:
        deadline = time.monotonic() + step.get("for_s", DEFAULT_HOLDS_S)
        while time.monotonic() < deadline:
            self.http(step["holds"])
            time.sleep(HOLDS_POLL_S)

    def sleep(self, step: Step) -> None:
        time.sleep(step["sleep_s"])

    # ---- engines

    def engine(self, step: Step) -> None:
        name, within_s = step["engine"], step.get("within_s", DEFAULT_WITHIN_S)
        engine = self._names.engines.setdefault(name, Engine(name))  # has nothing yet
        if "reserve" in step:
            engine.reserve()
        if "bind" in step:
            engine.bind(**step["bind"])
        if "wait_unsubscribed" in step:
            engine.wait_unsubscribed(within_s)
        if "wait_subscribed" in step:
            engine.wait_subscribed(step["wait_subscribed"], within_s)
        if "publish" in step:
            self._log(f"engine {name}: {show(step['publish'])}")
            engine.publish(self._names.fill(step["publish"]))
        if "replay_mode" in step:
            engine.mode = step["replay_mode"]
        for expectation, actual in REPLAY_EXPECTATIONS.items():
            if expectation in step:
                self._expect_replay(step[expectation], engine, actual, within_s)
        if "expect_subscriptions" in step:
            topics = engine.subscriptions()
            if wrong := difference(step["expect_subscriptions"], topics, "unordered"):
                raise Failure(wrong)
        if "unbind" in step:
            engine.unbind()

    def _expect_replay(
        self, expected: Any, engine: Engine, actual: Callable[[Engine], Any], within_s: float
    ) -> None:
        path = f"replay requests to {engine.name}"
        wait_until(lambda: difference(expected, actual(engine), path=path), within_s)

    # ---- servers

    def spawn(self, step: Step) -> None:
        if self._target.spawn_command is None:
            raise BadScenario("no command is known that starts another server")
        arguments, environ = self._names.fill([step.get("args", []), step.get("env", {})])
        environ = self._target.spawn_environ | environ
        server = Spawned(self._target.spawn_command, arguments, environ)
        self._names.servers[step["spawn"]] = server
        if step.get("wait_health", True):
            server.wait_healthy(step.get("within_s", SPAWN_WITHIN_S))

    def _spawned(self, name: str) -> Spawned:
        server = self._names.servers[name]
        assert isinstance(server, Spawned)
        return server

    def signal(self, step: Step) -> None:
        server = self._spawned(step["signal"])
        server.send_signal(step["sig"])
        if "exit" in step:
            server.expect_exit(step["exit"], step.get("within_s", DEFAULT_WITHIN_S), None)

    def exited(self, step: Step) -> None:
        server = self._spawned(step["exited"])
        within_s = step.get("within_s", DEFAULT_WITHIN_S)
        server.expect_exit(step["code"], within_s, step.get("stderr_regex"))

    def fake_http(self, step: Step) -> None:
        servers = self._names.servers
        if step["fake_http"] not in servers:
            servers[step["fake_http"]] = FakeHttp()
        fake = servers[step["fake_http"]]
        assert isinstance(fake, FakeHttp)
        if "routes" in step:
            fake.routes = self._names.fill(step["routes"])
        if step.get("release", False):
            fake.released.set()
        if "expect_requests" in step and (
            wrong := difference(step["expect_requests"], fake.requests, path="requests")
        ):
            raise Failure(wrong)


def _content(http: dict[str, Any]) -> bytes | None:
    if "json" in http:
        return json.dumps(http["json"]).encode()
    parts = http.get("body_parts", [http["body"]] if "body" in http else None)
    if parts is None:
        return None
    repeated = [(part, 1) if isinstance(part, str) else part for part in parts]
    return "".join(text * times for text, times in repeated).encode()


REPLAY_EXPECTATIONS: dict[str, Callable[[Engine], Any]] = {
    "expect_replay_requests": lambda engine: list(engine.requests),
    "expect_replay_count": lambda engine: len(engine.requests),
}

STEPS: dict[str, Callable[[Stage, Step], None]] = {
    "http": Stage.http,
    "until": Stage.until,
    "holds": Stage.holds,
    "sleep_s": Stage.sleep,
    "engine": Stage.engine,
    "spawn": Stage.spawn,
    "signal": Stage.signal,
    "exited": Stage.exited,
    "fake_http": Stage.fake_http,
}
