"""Limits and deadlines as settings: which values are accepted or refused, and that they hold."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest

from kvd.cli.main import main
from kvd.config.errors import StartError
from kvd.config.load import load
from kvd.config.sections.connecting import ENGINE_SETTINGS
from kvd.config.sections.listening import HTTP_SETTINGS
from kvd.config.sections.state import INDEX_SETTINGS
from kvd.config.settings import SETTINGS
from kvd.config.sources import CONFIG
from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.net.link import LinkOptions
from kvd.net.recovery import RecoveryLimits
from kvd.net.replay import ReplayOptions
from kvd.net.replication import REPLICA_LINK
from kvd.selection.service import Selections
from tests.conformance.engine import Engine
from tests.support.dumps import dump_json, event
from tests.support.processes import REPOSITORY
from tests.support.reloading import Daemon, daemon

NUMBERS = [
    each
    for each in SETTINGS
    if isinstance(each.default, int | float) and not isinstance(each.default, bool)
]


@pytest.mark.parametrize("value", ["-1", str(2**70), "nan"])
def test_out_of_range_is_refused_by_file_key_and_range(value: str, tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    for setting in NUMBERS:
        path.write_text(f"{setting.name} = {value}\n")
        with pytest.raises(StartError) as caught:
            load({CONFIG: str(path)}, {})
        complaint = str(caught.value)
        assert complaint.startswith(f"{path}: {setting.name}: expected ")
        assert any(word in complaint for word in (" from ", " greater than "))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("index_max_blocks", 0, 2**40),
        ("max_partitions", 1, 2**31 - 1),
        ("max_dumps", 1, 1024),
        ("max_requests", 1, 2**20),
        ("max_request_blocks", 1, 2**27),
        ("engine_queue_messages", 0, 2**31 - 1),
        ("engine_message_bytes", 64 * 1024, 2**31 - 1),
        ("replay_messages", 1, 2**31 - 1),
        ("replay_bytes", 64 * 1024, 2**40),
        ("replay_at_once", 1, 4096),
        ("recovery_bytes", 2**20, 2**40),
        ("recovery_blocks", 1, 2**31 - 1),
        ("replica_sync_queue_messages", 0, 2**31 - 1),
        ("router_queue_requests", 1, 2**31 - 1),
        ("router_retries", 1, 2**31 - 1),
        ("session_affinity_sessions", 1, 2**31 - 1),
    ],
)
def test_ranges_end_where_they_say(name: str, least: int, most: int) -> None:
    variable = f"KVD_{name.upper()}"
    for value in (least, most):
        assert load({}, {variable: str(value)}).values[name] == value
    for value in (least - 1, most + 1):
        with pytest.raises(StartError, match=f"expected a whole number from {least} to {most}"):
            load({}, {variable: str(value)})


def others(made: Any) -> dict[str, Any]:
    """Returns values for the fields of options, all of them different."""
    return {
        each.name: type(getattr(made, each.name))(90 + number)
        for number, each in enumerate(dataclasses.fields(made))
    }


def test_the_defaults_are_those_of_the_options() -> None:
    config = load({}, {})
    assert config.engine_link == LinkOptions()
    assert config.replica_link == REPLICA_LINK
    assert config.replays == ReplayOptions()
    assert config.recovery == RecoveryLimits()
    state = State()
    assert (config.index_max_blocks, config.max_partitions) == (
        state.budget.max_blocks,
        state.max_partitions,
    )


def test_every_option_of_connections_and_replays_can_be_said() -> None:
    settings: dict[str, Any] = {
        each.name: (200_000 + number if isinstance(each.default, int) else 100.0 + number)
        for number, each in enumerate(ENGINE_SETTINGS)
    }
    settings["engine_heartbeat_timeout_s"] = settings["engine_heartbeat_s"] + 50
    config = load({**settings, "replica_sync_queue_messages": 7}, {})
    fixed = {"give_up_s": LinkOptions().give_up_s}
    link, replays = dataclasses.asdict(config.engine_link), dataclasses.asdict(config.replays)
    assert sorted([*link.values(), *replays.values(), config.engine_stale_s]) == sorted(
        [*settings.values(), *fixed.values()]
    )
    own = {"queue_messages": 7, "max_message_bytes": REPLICA_LINK.max_message_bytes}
    assert config.replica_link == dataclasses.replace(config.engine_link, **own)


def test_pauses_that_do_not_fit_are_refused() -> None:
    with pytest.raises(StartError, match="engine_reconnect_max_s is shorter"):
        load({"engine_reconnect_s": 9.0}, {})
    assert load({"engine_reconnect_s": 9.0, "engine_reconnect_max_s": 9.0}, {})


def test_the_queue_follows_a_reload() -> None:
    settings = {
        "router_queue_requests": 3,
        "router_queue_s": 4.5,
        "max_partitions": 5,
        "session_affinity_sessions": 6,
        "router_retries": 7,
    }
    options = load(settings, {}).router
    assert (options.max_sessions, options.max_retries) == (6, 7)
    state = State()
    selections = Selections(
        state,
        Registry(state, None),  # type: ignore[arg-type]
        load({}, {}).router,
        300.0,
        Random(1),
        lambda: 0.0,
        lambda: 0,
    )
    selections.reload(options, 300.0)
    held = selections.options
    assert (held.max_held, held.max_wait_s, held.max_partitions) == (3, 4.5, 5)


# ---- in a daemon


@contextmanager
def engine(replay: bool = False) -> Iterator[Engine]:
    """An engine that publishes."""
    made = Engine("e")
    made.bind(replay=replay)
    try:
        yield made
    finally:
        made.unbind()


def stored(first: int, count: int, parent: int | None = None) -> list[object]:
    """Returns an event that stores blocks of one token each, whose names equal their tokens."""
    names = list(range(first, first + count))
    return ["BlockStored", names, parent, names, 1, None]


def register(kvd: Daemon, made: Engine, model: str = "m", *, replay: bool = False) -> int:
    body: dict[str, Any] = {"instance_id": 1, "model_name": model, "block_size": 1}
    body["endpoint"] = made.endpoint("pub")
    if replay:
        body["replay_endpoint"] = made.endpoint("replay")
    status: int = kvd.http.post("/register", json=body).status_code
    return status


def listener(kvd: Daemon) -> Any:
    return kvd.http.get("/workers").json()[0]["listeners"]["0"]


def send(made: Engine, number: int, *events: object) -> None:
    made.publish({"seq": number, "batch": [0.0, list(events), 0]})


def test_a_batch_beyond_the_limit_costs_the_connection_and_a_lost_engine_goes_stale(
    tmp_path: Path,
) -> None:
    text = "engine_message_bytes = 65536\nengine_reconnect_max_s = 0.1\nengine_stale_s = 0.05\n"
    with daemon(tmp_path, text=text) as kvd:
        with engine() as made:
            assert register(kvd, made) == 201
            made.wait_subscribed(1, 10.0)
            send(made, 0, stored(1, 5000))
            kvd.server.wait_until(lambda: listener(kvd).get("last_seq") == 0, "a batch below it")
            send(made, 1, stored(2**32 - 40_000, 30_000))
            failures = "kvd_listener_failures_total"
            kvd.server.wait_until(lambda: kvd.samples()[failures] > 0, "cut off")
            assert kvd.samples()["kvd_index_blocks"] == 5000
        kvd.server.wait_until(lambda: listener(kvd)["stream"] == "stale", "stale")


def test_deadlines_of_replays_follow_a_reload(tmp_path: Path) -> None:
    deadlines = "replay_idle_s = {}\nreplay_total_s = {}\nreplay_spare_s = 0\n"
    with daemon(tmp_path, text=deadlines.format(60, 0.05)) as kvd, engine(replay=True) as made:
        made.mode = "silent"
        assert register(kvd, made, replay=True) == 201
        made.wait_subscribed(1, 10.0)

        def ended(how: str) -> bool:
            return kvd.samples()[f'kvd_replays_total{{end="{how}"}}'] == 1

        send(made, 5, stored(1, 1))  # 0 to 4 are missing
        kvd.server.wait_until(lambda: ended("late"), "late")
        kvd.reload(deadlines.format(0.05, 60))
        send(made, 9, stored(2, 1))
        kvd.server.wait_until(lambda: ended("silent"), "silent")


@contextmanager
def dump_server(dump: bytes) -> Iterator[str]:
    """Runs a peer that answers every request with this dump; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(dump)))
            self.end_headers()
            self.wfile.write(dump)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("blocks", "outcome"), [(2, "refused"), (3, "recovered")])
def test_recovery_goes_on_after_its_deadline_and_refuses_what_is_too_large(
    blocks: int, outcome: str, tmp_path: Path
) -> None:
    dump = dump_json(event([(1, 1), (2, 2), (3, 3)], worker=7))
    with socket.create_server(("127.0.0.1", 0)) as silent, dump_server(dump) as url:
        peers = f'["http://127.0.0.1:{silent.getsockname()[1]}", "{url}"]'
        text = f"recovery_delay_s = 0\nrecovery_stall_s = 3\nrecovery_blocks = {blocks}\n"
        with daemon(tmp_path, text=text + f"peers = {peers}\n") as kvd:
            attempts = 'kvd_recovery_attempts_total{{outcome="{}"}}'
            kvd.server.wait_until(lambda: kvd.samples()[attempts.format(outcome)] == 1, outcome)
            assert kvd.samples()[attempts.format("unreachable")] == 1
            assert kvd.samples()["kvd_index_blocks"] == (blocks if blocks == 3 else 0)


def test_more_partitions_are_taken_after_a_reload(tmp_path: Path) -> None:
    with daemon(tmp_path, text="max_partitions = 1\n") as kvd, engine() as made:
        assert [register(kvd, made, model) for model in ("m", "n")] == [201, 503]
        kvd.reload("max_partitions = 2\n")
        assert register(kvd, made, "n") == 201


def test_live_requests_are_bounded_as_said(tmp_path: Path) -> None:
    text = "max_requests = 2\nmax_request_blocks = 3\n"
    with daemon(tmp_path, "slot-tracker", text) as kvd:
        place = {"model_name": "m", "worker_id": 1}
        worker = {**place, "block_size": 1, "dp_start": 0, "dp_size": 1}
        assert kvd.http.post("/register", json=worker).is_success

        def add(name: str, *hashes: int) -> int:
            request = {"request_id": name, "dp_rank": 0, "sequence_hashes": hashes}
            body = {**place, **request, "new_isl_tokens": len(hashes)}
            status: int = kvd.http.post("/add", json=body).status_code
            return status

        assert add("long", 1, 2, 3, 4) == 503
        assert [add("a", 1, 2, 3), add("b", 1, 2), add("c", 1)] == [201, 201, 503]
        assert kvd.samples()['kvd_slots_refused_total{reason="full"}'] == 2


def test_the_index_has_a_ceiling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An index that is sent ten times its ceiling refuses, counts and logs once what is too much.

    All that it has is right, and removals make room again.
    """
    limit = 1000
    text = "index_max_blocks = {}\n"
    with daemon(tmp_path, text=text.format(limit)) as kvd, engine() as made:
        assert register(kvd, made) == 201
        made.wait_subscribed(1, 10.0)
        for number in range(100):
            send(made, number, stored(100 * number + 1, 100))
        kvd.server.wait_until(lambda: listener(kvd).get("last_seq") == 99, "all of it")

        def held() -> list[int]:
            prompts = [list(range(100 * n + 1, 100 * n + 101)) for n in range(100)]
            bodies = [{"model_name": "m", "token_ids": each} for each in prompts]
            answers = [kvd.http.post("/query", json=each).json()["scores"] for each in bodies]
            return [answer.get("1", {}).get("0", 0) for answer in answers]

        samples = kvd.samples()
        assert samples["kvd_index_max_blocks"] == limit
        assert samples["kvd_index_blocks"] == samples["kvd_index_pairs"] == limit
        assert samples["kvd_index_refused_blocks_total"] == 9 * limit
        assert samples['kvd_events_ignored_total{reason="full"}'] == 90
        assert held() == [100] * 10 + [0] * 90
        shown = listener(kvd)
        assert shown["stream"] == "degraded"
        assert shown["loss"] == "the index had no room for batch 99"
        line = "event=index_full max_blocks=1000"
        kvd.server.wait_until(lambda: line in kvd.server.stderr, "said")
        off = [f"--{face}-bind=off" for face in ("slot-tracker", "selection", "conductor")]
        bind = f"--indexer-bind=127.0.0.1:{kvd.server.port}"
        assert main(["status", "--interval=0", bind, *off]) == 1
        limits = "index limit   1,000 blocks; 1,000 (rank, block) pairs; 9,000 blocks refused"
        assert limits in capsys.readouterr().out.splitlines()

        send(made, 100, ["BlockRemoved", list(range(201, 301)), None])
        send(made, 101, stored(50_001, 100))
        send(made, 102, stored(60_001, 100))
        kvd.server.wait_until(lambda: listener(kvd).get("last_seq") == 102, "the rest")
        assert held() == [100, 100, 0] + [100] * 7 + [0] * 90
        taken = {"model_name": "m", "token_ids": list(range(50_001, 50_101))}
        assert kvd.http.post("/query", json=taken).json()["scores"]["1"]["0"] == 100
        assert kvd.samples()["kvd_index_refused_blocks_total"] == 9 * limit + 100

        kvd.reload(text.format(0))
        send(made, 103, stored(70_001, 5000))
        kvd.server.wait_until(lambda: kvd.samples()["kvd_index_blocks"] == 6000, "no bound")
        main(["status", "--interval=0", bind, *off])
        limits = "index limit   none; 6,000 (rank, block) pairs; 9,100 blocks refused"
        assert limits in capsys.readouterr().out.splitlines()
        send(made, 104, ["AllBlocksCleared"])
        kvd.server.wait_until(lambda: listener(kvd)["stream"] == "exact", "exact again")
        assert kvd.server.stderr.count("event=index_full") == 1


# ---- the page

LISTED = {
    each
    for each in NUMBERS
    if each in (*HTTP_SETTINGS, *ENGINE_SETTINGS, *INDEX_SETTINGS)
    or each.name.startswith(("recovery_", "outgoing_lookup_", "max_", "router_queue_"))
    or each.name in ("replica_sync_queue_messages", "router_retries", "session_affinity_sessions")
} - {next(each for each in SETTINGS if each.name == "router_queue_threshold")}


def test_the_page_lists_every_limit_as_it_is() -> None:
    page = (REPOSITORY / "docs/operations.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    for setting in LISTED:
        (row,) = (each for each in rows if f"`{setting.name}`" in each[0])
        names = re.findall("`([a-z_]+)`", row[0])
        shown = re.findall("[0-9.]+", row[1])
        assert len(names) == len(shown), row
        assert float(shown[names.index(setting.name)]) == setting.default, row
        assert (row[2].strip() == "yes") == setting.live, row
