"""Operators see a wrong setup in /workers, `kvd status`, the log and /metrics."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvd.cli.main import main
from kvd.cli.status import read_samples
from kvd.index.partitions import UNMATCHED_QUESTIONS
from tests.conformance.engine import Engine
from tests.conformance.failure import show, wait_until
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.running import running

WITHIN_S = 20.0  # for conditions that take a second or two
STALE_S = 2.0
CONNECT_S = 0.5

TOKENS = list(range(8))

Json = dict[str, Any]


def stored(block_size: int, tokens: list[int] = TOKENS) -> Json:
    """Returns a batch that stores all blocks of a prompt on the device."""
    hashes = list(range(1, len(tokens) // block_size + 1))
    return {"seq": 0, "batch": [0.0, [["BlockStored", hashes, None, tokens, block_size, None]], 0]}


class Fleet:
    """A running daemon, its engines, and its log and metrics from now on."""

    def __init__(self, server: Server, flags: list[str], engines: ExitStack) -> None:
        self.server = server
        self.flags = flags
        self.client = engines.enter_context(Client(server.base_url))
        self._engines = engines
        self._lines_before = len(server.stderr.splitlines())
        self._samples_before = self._samples()

    def engine(self) -> Engine:
        engine = Engine("e")
        engine.bind()
        self._engines.callback(engine.unbind)
        return engine

    def register(self, model_name: str, endpoint: str, block_size: int = 4) -> None:
        body = {"instance_id": 1, "model_name": model_name, "block_size": block_size}
        self.client.post("/register", json={**body, "endpoint": endpoint}).raise_for_status()

    def row(self, model_name: str) -> Json:
        """Returns the instance of a model as /workers lists it."""
        (row,) = self.client.get("/workers", params={"model_name": model_name}).json()
        found: Json = row
        return found

    def wait_shown(self, model_name: str, **members: Any) -> Json:
        """Waits until /workers shows these members of the model's rank, and returns all of them."""
        found: Json = {}

        def check() -> str | None:
            found.clear()
            found.update(self.row(model_name)["listeners"]["0"])
            shown = {name: found.get(name) for name in members}
            return None if shown == members else f"{show(found)} instead of {show(members)}"

        wait_until(check, WITHIN_S)
        return found

    def wait_logged(self, *texts: str) -> str:
        """Waits for the only line with all these texts, and returns it."""

        def lines() -> list[str]:
            logged = self.server.stderr.splitlines()[self._lines_before :]
            return [line for line in logged if all(text in line for text in texts)]

        self.server.wait_until(lambda: bool(lines()), f"saying {texts}")
        (line,) = lines()
        return line

    def metric(self, name: str) -> float:
        """Returns by how much the sum of a metric's samples has grown."""
        return self._samples()[name] - self._samples_before[name]

    def _samples(self) -> Counter[str]:
        sums: Counter[str] = Counter()
        for (name, _), value in read_samples(self.client.get("/metrics").text).items():
            sums[name] += value  # type: ignore[assignment]
        return sums

    def empty(self) -> None:
        """Unregisters every engine."""
        for row in self.client.get("/workers").json():
            body = {name: row[name] for name in ("instance_id", "model_name")}
            self.client.post("/unregister", json=body).raise_for_status()

    def status(self, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
        code = main(["status", "--interval=0", *self.flags])
        return code, capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[str]]]:
    """An indexer, and the flags by which `kvd status` finds it."""
    port = find_free_port()
    flags = [f"--indexer-bind=127.0.0.1:{port}"]
    flags += [f"--{face}-bind=off" for face in ("slot-tracker", "selection", "conductor")]
    limits = [f"--engine-stale-s={STALE_S}", f"--engine-connect-timeout-s={CONNECT_S}"]
    with running(tmp_path_factory.mktemp("kvd"), port, "serve", *flags, *limits) as server:
        yield server, flags


@pytest.fixture
def fleet(daemon: tuple[Server, list[str]]) -> Iterator[Fleet]:
    """The indexer without engines."""
    with ExitStack() as engines:
        fleet = Fleet(*daemon, engines)
        yield fleet
        fleet.empty()


Capture = pytest.CaptureFixture[str]


def test_blocks_of_another_size_are_said(fleet: Fleet, capsys: Capture) -> None:
    engine = fleet.engine()
    fleet.register("m", engine.endpoint("pub"), block_size=4)
    engine.wait_subscribed(1, WITHIN_S)
    engine.publish(stored(block_size=2))
    loss = "the engine has blocks of 2 tokens, 4 are registered"
    fleet.wait_shown("m", stream="degraded", loss=loss, ignored_events={"block_size": 1})
    line = fleet.wait_logged("event=stream_health", "health=degraded")
    assert "listener=m:default/1:0 " in line and f'loss="{loss}"' in line and "warn" in line
    code, printed = fleet.status(capsys)
    assert code == 1 and f"  worker 1 of m/default: degraded, active; rank 0: {loss}" in printed
    # A batch of the right size does not make the others count.
    engine.publish({**stored(block_size=4), "seq": 1})
    fleet.wait_shown("m", stream="degraded", loss=loss, last_seq=1)
    # Those of another process do, and what was ignored of the last one is no finding any more.
    for seq in range(2):
        engine.publish({**stored(block_size=4, tokens=[seq] * 8), "seq": seq})
    shown = fleet.wait_shown("m", loss="missing 0", last_seq=1)
    assert "ignored_events" not in shown
    assert fleet.metric("kvd_events_ignored_total") == 1


def test_a_stream_that_is_ignored_wholly_is_not_exact(fleet: Fleet, capsys: Capture) -> None:
    engine = fleet.engine()
    fleet.register("m", engine.endpoint("pub"))
    engine.wait_subscribed(1, WITHIN_S)
    elsewhere = ["BlockStored", [1, 2], None, TOKENS, 4, None, "somewhere"]
    engine.publish({"seq": 0, "batch": [0.0, [elsewhere], 0]})
    loss = "all events were ignored: medium 1"
    fleet.wait_shown("m", stream="degraded", loss=loss, ignored_events={"medium": 1})
    fleet.wait_logged("event=stream_health", "health=degraded", f'loss="{loss}"')
    code, printed = fleet.status(capsys)
    assert code == 1 and f"  worker 1 of m/default: degraded, active; rank 0: {loss}" in printed
    assert fleet.metric("kvd_events_ignored_total") == 1
    # Once other events count, ignored ones do not speak against the stream.
    engine.publish({**stored(block_size=4), "seq": 1})
    shown = fleet.wait_shown("m", stream="exact", ignored_events={"medium": 1})
    assert "loss" not in shown
    assert fleet.status(capsys)[0] == 0


def test_a_block_size_of_zero_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    body = {"instance_id": 1, "model_name": "m", "endpoint": "tcp://127.0.0.1:9", "block_size": 0}
    answer = fleet.client.post("/register", json=body)
    assert (answer.status_code, answer.json()) == (
        422,
        {"error": "block_size: expected a number greater than 0"},
    )
    assert fleet.client.get("/workers").json() == []
    static = ["--workers=1=tcp://127.0.0.1:9", "--block-size=0"]
    with pytest.raises(SystemExit):
        main(["indexer", *static])


def refusing(opened: ExitStack, folder: Path) -> tuple[str, str]:
    return f"tcp://127.0.0.1:{find_free_port()}", "Connection refused"


def missing(opened: ExitStack, folder: Path) -> tuple[str, str]:
    return f"ipc://{folder}/nobody", "No such file or directory"


def not_answering(opened: ExitStack, folder: Path) -> tuple[str, str]:
    """Returns an address where connections are dropped, because the listener's queue is full."""
    full = opened.enter_context(socket.socket())
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    for _ in range(4):
        one = opened.enter_context(socket.socket())
        one.setblocking(False)
        one.connect_ex(full.getsockname())
    return f"tcp://127.0.0.1:{full.getsockname()[1]}", f"timed out after {CONNECT_S} s"


def without_route(opened: ExitStack, folder: Path) -> tuple[str, str]:
    """Returns loopback's broadcast address, which the kernel refuses for TCP at once."""
    return "tcp://127.255.255.255:5557", "Network is unreachable"


def test_engines_that_cannot_be_reached_are_said(
    fleet: Fleet, capsys: Capture, tmp_path: Path
) -> None:
    with ExitStack() as opened:
        ways = (refusing, missing, not_answering, without_route)
        found = {at.__name__: at(opened, tmp_path) for at in ways}
        for model, (endpoint, _) in found.items():
            fleet.register(model, endpoint)
        for model, (endpoint, why) in found.items():
            error = f"cannot connect: {why}: {endpoint}"
            shown = fleet.wait_shown(model, last_error=error, quiet="unreachable")
            assert shown["status"] == "pending" and shown["stream"] == "recovering"
            assert shown["quiet_s"] >= STALE_S
            listener = f"listener={model}:default/1:0 "
            line = fleet.wait_logged("event=engine_quiet", "quiet=unreachable", listener)
            assert f'error="{error}"' in line and "warn" in line
            code, printed = fleet.status(capsys)
            row = f"  worker 1 of {model}/default: recovering, pending; rank 0: unreachable, "
            assert code == 1 and row + error in printed
        assert fleet.metric("kvd_listener_unreachable_total") == len(found)
        assert fleet.metric("kvd_quiet_streams") == len(found)


def test_an_engine_that_comes_at_last_is_not_said_any_more(fleet: Fleet, capsys: Capture) -> None:
    engine = Engine("e")
    fleet.register("m", engine.endpoint("pub"))
    fleet.wait_shown("m", quiet="unreachable")
    engine.bind()
    try:
        engine.wait_subscribed(1, WITHIN_S)
        engine.publish(stored(block_size=4))
        shown = fleet.wait_shown("m", stream="exact", quiet=None)
    finally:
        engine.unbind()
    assert "last_error" not in shown
    fleet.wait_shown("m", quiet="unreachable")  # gone, and reported again
    assert fleet.metric("kvd_listener_unreachable_total") == 2


def test_a_stream_that_is_connected_and_silent_is_said(fleet: Fleet, capsys: Capture) -> None:
    engine = fleet.engine()
    fleet.register("m", engine.endpoint("pub"))
    shown = fleet.wait_shown("m", status="active", quiet="silent")
    assert shown["stream"] == "recovering" and shown["quiet_s"] >= STALE_S
    line = fleet.wait_logged("event=engine_quiet", "quiet=silent")
    assert "listener=m:default/1:0 " in line and engine.endpoint("pub") in line and "warn" in line
    code, printed = fleet.status(capsys)
    assert code == 1
    assert "  worker 1 of m/default: recovering, active; rank 0: silent" in printed
    assert fleet.metric("kvd_listener_silent_total") == 1
    engine.publish(stored(block_size=4))
    fleet.wait_shown("m", stream="exact", quiet=None)
    assert fleet.status(capsys)[0] == 0
    assert fleet.metric("kvd_quiet_streams") == 0


def test_questions_that_never_match_are_said(fleet: Fleet, capsys: Capture) -> None:
    engine = fleet.engine()
    fleet.register("m", engine.endpoint("pub"))

    def ask(tokens: list[int]) -> None:
        body = {"model_name": "m", "token_ids": tokens}
        fleet.client.post("/query", json=body).raise_for_status()

    ask([9, 9, 9, 9])  # not counted: nothing is indexed yet
    assert fleet.row("m")["questions"] == 0
    engine.wait_subscribed(1, WITHIN_S)
    engine.publish(stored(block_size=4))
    fleet.wait_shown("m", stream="exact")
    ask([0, 1, 2])  # less than a block
    for number in range(UNMATCHED_QUESTIONS - 1):
        ask([9, 9, 9, number])
    assert fleet.row("m")["questions"] == UNMATCHED_QUESTIONS - 1
    assert "warning" not in fleet.row("m") and fleet.status(capsys)[0] == 0
    hashes = {"model_name": "m", "block_hashes": [5]}
    fleet.client.post("/query_by_hash", json=hashes).raise_for_status()
    row = fleet.row("m")
    warning = f"none of {UNMATCHED_QUESTIONS} questions has matched a block"
    assert (row["matched"], row["warning"]) == (0, warning)
    line = fleet.wait_logged("event=queries_never_match", "model=m")
    assert "tenant=default" in line and f"questions={UNMATCHED_QUESTIONS}" in line
    code, printed = fleet.status(capsys)
    assert code == 1 and f"  m/default: {warning}" in printed
    assert fleet.metric("kvd_unmatched_models") == 1
    ask(TOKENS)
    row = fleet.row("m")
    assert row["matched"] == 1 and "warning" not in row
    assert fleet.status(capsys)[0] == 0
    assert (fleet.metric("kvd_questions_matched_total"), fleet.metric("kvd_unmatched_models")) == (
        1,
        0,
    )


def test_an_answer_shows_its_streams_if_that_is_asked_for(fleet: Fleet) -> None:
    engine = fleet.engine()
    fleet.register("m", engine.endpoint("pub"))
    gone = {"instance_id": 2, "model_name": "m", "dp_rank": 1, "block_size": 4}
    gone["endpoint"] = f"tcp://127.0.0.1:{find_free_port()}"
    fleet.client.post("/register", json=gone).raise_for_status()
    engine.wait_subscribed(1, WITHIN_S)
    engine.publish(stored(block_size=4))

    def is_exact() -> str | None:
        rows = fleet.client.get("/workers").json()
        return None if rows[0]["stream"] == "exact" else show(rows)

    wait_until(is_exact, WITHIN_S)
    query = {"model_name": "m", "token_ids": TOKENS}
    plain = fleet.client.post("/query", json=query)
    shown = fleet.client.post("/query", json={**query, "streams": True}).json()
    assert shown.pop("streams") == {"1": {"0": "exact"}, "2": {"1": "recovering"}}
    assert shown == plain.json() and shown["scores"] == {"1": {"0": 8}}
    for absent in (False, None):
        same = fleet.client.post("/query", json={**query, "streams": absent})
        assert same.content == plain.content
    by_hash = {"model_name": "m", "block_hashes": [1], "streams": True}
    streams = fleet.client.post("/query_by_hash", json=by_hash).json()["streams"]
    assert streams == {"1": {"0": "exact"}, "2": {"1": "recovering"}}
    answer = fleet.client.post("/query", json={**query, "streams": "yes"})
    assert answer.status_code == 422
    assert answer.json() == {"error": "streams: expected true or false"}
    assert json.loads(plain.content) and re.fullmatch(r'\{"scores":.*\}', plain.text)


def test_the_selection_face_shows_why_a_worker_is_not_chosen_and_its_streams(
    tmp_path: Path, capsys: Capture
) -> None:
    port = find_free_port()
    flags = [f"--selection-bind=127.0.0.1:{port}"]
    flags += [f"--{face}-bind=off" for face in ("slot-tracker", "indexer", "conductor")]
    limits = [f"--engine-stale-s={STALE_S}", "--router-unconnected-s=1"]
    with running(tmp_path, port, "serve", *flags, *limits) as server, ExitStack() as engines:
        fleet = Fleet(server, flags, engines)
        engine, away = fleet.engine(), f"tcp://127.0.0.1:{find_free_port()}"
        usual = {"model_name": "m", "endpoint": "http://w", "block_size": 4}

        def put(worker_id: int, **members: Any) -> None:
            body = {**usual, "worker_id": worker_id, **members}
            fleet.client.post("/workers", json=body).raise_for_status()

        def row(worker_id: int) -> Json:
            rows = fleet.client.get("/workers").json()
            found: Json = next(each for each in rows if each["worker_id"] == worker_id)
            return found

        def is_shown() -> str | None:
            rows = {each: row(each) for each in (1, 2)}
            gone = rows[2]["listeners"]["0"]
            matches = rows[1]["listeners"]["0"]["stream"] == "degraded"
            matches = matches and rows[2]["lifecycle"] == "unschedulable"
            matches = matches and gone.get("quiet") == "unreachable" and "last_error" in gone
            return None if matches else show(rows)

        put(1, kv_events_endpoint=engine.endpoint("pub"))
        put(2, kv_events_endpoint=away)
        put(3)
        engine.wait_subscribed(1, WITHIN_S)
        engine.publish(stored(block_size=2))
        wait_until(is_shown, WITHIN_S)
        loss = "the engine has blocks of 2 tokens, 4 are registered"
        assert row(1)["listeners"]["0"]["loss"] == loss
        assert row(1)["listeners"]["0"]["ignored_events"] == {"block_size": 1}
        assert (row(1)["questions"], row(1)["lifecycle"]) == (0, "schedulable")
        error = f"cannot connect: Connection refused: {away}"
        (reason,) = row(2)["not_schedulable_reasons"]
        assert reason.startswith("the event connection of dp_rank 0 has not been connected for ")
        assert reason.endswith(f" s: {error}")
        ready = fleet.client.get("/ready")  # one schedulable worker is enough
        lifecycles = {"schedulable": 1, "unschedulable": 1, "incomplete": 1}
        assert ready.status_code == 200 and ready.json()["lifecycles"] == lifecycles
        assert "listeners" not in row(3) and row(3)["lifecycle"] == "incomplete"
        fleet.wait_logged("event=engine_quiet", "quiet=unreachable", "listener=m:default/2:0 ")
        code, printed = fleet.status(capsys)
        assert code == 1
        assert f"  worker 1 of m/default: degraded, active; rank 0: {loss}" in printed
        assert any(
            line.startswith("  worker 2 of m/default: unschedulable: the ev") for line in printed
        )
        reason = "kv_events endpoint is required for dp_rank 0"
        assert f"  worker 3 of m/default: incomplete: {reason}" in printed
        for worker_id in (1, 2, 3):
            assert fleet.status(capsys)[0] == 1
            fleet.client.delete(f"/workers/{worker_id}").raise_for_status()
        assert fleet.status(capsys)[0] == 0
