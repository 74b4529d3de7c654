"""A daemon killed and started again on its state directory: what it restores and what it trusts."""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import trio

from kvd.cli.main import main
from kvd.persistence.directory import journals
from kvd.persistence.frames import Content, unpacked
from kvd.persistence.journal import RETRY_S
from kvd.persistence.reading import bookings_of, frames_of
from kvd.persistence.registrations import ROWS
from tests.support.budget import scaled
from tests.support.commands import run_command
from tests.support.engines import BLOCK_SIZE
from tests.support.kvds import (
    PATIENCE_S,
    Kvd,
    book,
    engine_of,
    kvd_of,
    paths_of,
    prompt,
    settle,
    wait,
)
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment


def test_what_an_engine_said_meanwhile_is_replayed(tmp_path: Path) -> None:
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        kvd.kill()
        engine.store(prompt(77))
        engine.evict(next(iter(engine.cache)))
        kvd.start()
        wait(lambda: kvd.health() == ("exact", ""))
        assert len(kvd.paths()) == len(engine.cache)
        assert kvd.matched(prompt(77)) == 12
        assert kvd.matched(prompt(0)) == 0  # first block evicted meanwhile
        kvd.stop()


def test_an_engine_that_says_nothing_is_asked(tmp_path: Path) -> None:
    """Without new batches, a replay of the last one proves that the engine is the same."""
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        kvd.stop()
        asked = engine.replays
        kvd.start()
        wait(lambda: kvd.health() == ("exact", ""))
        assert engine.replays > asked
        assert len(kvd.paths()) == len(engine.cache)
        kvd.stop()


def test_the_blocks_of_another_engine_are_dropped(tmp_path: Path) -> None:
    """The engine was restarted, and its new batches have reached the old number."""
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        kvd.kill()
        seq = engine.seq
        engine.restart()
        for number in range(100, 100 + seq):
            engine.store(prompt(number))
        kvd.start()
        wait(lambda: kvd.health() == ("exact", ""))
        assert len(kvd.paths()) == len(engine.cache)
        assert kvd.matched(prompt(0)) == 0
        assert kvd.matched(prompt(100)) == 12
        kvd.stop()


def test_a_replay_that_does_not_reach_back_is_a_loss(tmp_path: Path) -> None:
    with engine_of(buffered=3) as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        kvd.kill()
        for number in range(100, 110):
            engine.store(prompt(number))
        kvd.start()
        # Batches are missing; how many is not known until the engine publishes again.
        wait(lambda: kvd.health()[0] == "degraded")
        wait(lambda: engine.store(prompt(500 + engine.seq)) or "missing" in kvd.health()[1])
        kvd.stop()


def test_without_a_replay_server_nothing_is_exact(tmp_path: Path) -> None:
    """Not even if the next batch has the expected number."""
    with engine_of(replays=False) as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        kvd.kill()
        kvd.start()
        # Even before the engine publishes anything.
        wait(lambda: kvd.health() == ("degraded", "not known to be the same engine"))
        wait(lambda: engine.store(prompt(500 + engine.seq)) or kvd.health()[0] == "degraded")
        kvd.stop()


def test_what_finds_no_room_after_the_restart_is_a_loss(tmp_path: Path) -> None:
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        kvd.stop()
        kvd.flags.append(f"--index-max-blocks={len(engine.cache) - 1}")
        kvd.start()
        wait(lambda: kvd.health() == ("degraded", "the index had no room for its snapshot"))
        kvd.stop()


def test_an_engine_at_another_address_is_another(tmp_path: Path) -> None:
    with engine_of() as engine, engine_of() as other, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        kvd.stop()
        file = tmp_path / "fleet.toml"
        file.write_text(
            f'[[indexer]]\ninstance_id = 1\nmodel_name = "m"\nblock_size = {BLOCK_SIZE}\n'
            f'endpoint = "{other.endpoint}"\nreplay_endpoint = "{other.replay_endpoint}"\n'
        )
        kvd.flags.append(f"--fleet-file={file}")
        kvd.start()
        assert "registration_not_restored" in kvd.server.stderr  # type: ignore[union-attr]
        wait(lambda: other.store(prompt(other.seq)) or kvd.health() == ("exact", ""))
        wait(lambda: len(kvd.paths()) == len(other.cache))
        kvd.stop()


def test_a_peer_is_asked_where_the_snapshot_is_empty(tmp_path: Path) -> None:
    """A process that is stopped before its engines come leaves one."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with engine_of() as engine, kvd_of(there) as full, kvd_of(here) as kvd:
        settle(full, engine)
        kvd.stop()
        assert (kvd.state / "index").exists()
        kvd.flags.append(f"--peers={full.url('indexer', '')}")
        kvd.start()
        wait(lambda: len(kvd.paths()) == len(engine.cache))


def test_registrations_of_all_faces_come_back(tmp_path: Path) -> None:
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        kvd.register(engine)
        slots = {"worker_id": 7, "model_name": "m", "block_size": 4, "dp_start": 2, "dp_size": 2}
        assert kvd.post("slot-tracker", "/register", slots).status_code == 201
        record = {
            "worker_id": 9,
            "model_name": "n",
            "tenant_id": "t",
            "block_size": 16,
            "endpoint": "http://gpu9:8000",
            "kv_events_endpoint": engine.endpoint,
            "role": "both",
            "taints": ["a", "b"],
            "total_kv_blocks": 1000,
            "topology_domains": {"rack": "r1"},
        }
        assert kvd.post("selection", "/workers", record).status_code == 201
        limits = {"model": "n", "active_decode_blocks_threshold": 0.5}
        assert kvd.post("selection", "/busy_threshold", limits).status_code == 200
        policy = {"model": "n", "router_policy": "kvd"}
        assert kvd.post("selection", "/policy", policy).status_code == 200
        store = {
            "endpoint": engine.endpoint,
            "type": "vLLM",
            "modelname": "m2",
            "instance_id": "a",
            "block_size": 16,
            "dp_rank": 0,
            "additional_salt": "s",
        }
        assert kvd.post("conductor", "/register", store).status_code == 200
        paths = {
            "indexer": ["/workers", "/peers"],
            "slot-tracker": ["/workers"],
            "selection": ["/workers", "/busy_threshold", "/policy"],
            "conductor": ["/services"],
        }
        peer = {"url": "http://127.0.0.1:1"}
        assert kvd.post("indexer", "/register_peer", peer).status_code in (200, 201)
        before = {path: _still(kvd.get(face, path)) for face in paths for path in paths[face]}
        wait(lambda: kvd.metric("kvd_state_failures_total") == 0)
        wait(lambda: _kept(kvd.state / "registrations") == 8)  # all, with the peer as the last
        kvd.kill()
        kvd.start()
        assert {
            path: _still(kvd.get(face, path)) for face in paths for path in paths[face]
        } == before
        kvd.stop()


def test_registrations_of_a_face_that_is_off_wait_for_it(tmp_path: Path) -> None:
    with kvd_of(tmp_path) as kvd:
        slots = {"worker_id": 7, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}
        assert kvd.post("slot-tracker", "/register", slots).status_code == 201
        before = kvd.get("slot-tracker", "/workers")
        kvd.stop()
        kvd.flags.append("--slot-tracker-bind=off")
        kvd.start()
        kvd.stop()
        del kvd.flags[-1]
        kvd.start()
        assert kvd.get("slot-tracker", "/workers") == before
        kvd.stop()


def test_a_policy_of_the_file_replaces_no_other_setting(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    record = {"worker_id": 9, "model_name": "n", "block_size": 16, "endpoint": "http://gpu9:8000"}
    with kvd_of(tmp_path, "--no-router-kv-events") as kvd:
        assert kvd.post("selection", "/workers", record).status_code == 201
        limits = {"model": "n", "active_decode_blocks_threshold": 0.5}
        assert kvd.post("selection", "/busy_threshold", limits).status_code == 200
        policy = {"model": "n", "router_policy": "kvd"}
        assert kvd.post("selection", "/policy", policy).status_code == 200
        kvd.stop()
        file.write_text('[[policy]]\nmodel_name = "n"\nrouter_policy = "lmetric"\n')
        kvd.flags.append(f"--fleet-file={file}")
        kvd.start()
        (entry,) = kvd.get("selection", "/policy")["router_policies"]
        assert entry["router_policy"] == "lmetric"
        (entry,) = kvd.get("selection", "/busy_threshold")["thresholds"]
        assert entry["active_decode_blocks_threshold"] == 0.5
        kvd.stop()


def test_engines_that_came_by_calls_stay_behind_the_gateway(tmp_path: Path) -> None:
    port = find_free_port()
    with kvd_of(tmp_path, f"--gateway-bind=127.0.0.1:{port}") as kvd:
        url = f"http://127.0.0.1:{port}/upstreams"
        engine = {"url": "http://127.0.0.1:9"}  # nobody listens there
        added = kvd.client.post(url, json=engine)
        assert added.status_code == 201
        wait(lambda: _kept(kvd.state / "registrations") == 1)
        kvd.kill()
        kvd.start()
        assert kvd.client.post(url, json=engine).status_code == 409
        assert kvd.client.delete(f"{url}/{added.json()['worker_id']}").status_code == 200
        wait(lambda: _kept(kvd.state / "registrations") == 0)
        kvd.stop()


def _kept(path: Path) -> int:
    """Returns about how many registrations a file has; a policy counts as one."""
    frames = frames_of(path, Content.REGISTRATIONS) if path.exists() else []
    return sum(len(unpacked(each.content)) if each.kind == ROWS else 2 for each in frames)


def _live(state: Path) -> list[str]:
    """Returns the ids of the live requests in the journals."""
    bookings = trio.run(bookings_of, [path for _, path in journals(state)], 0.0)
    return [name for _, name in bookings.live]


def _output_blocks(state: Path) -> list[int]:
    """Returns the output blocks of the live requests in the journals."""
    bookings = trio.run(bookings_of, [path for _, path in journals(state)], 0.0)
    return [each.output_blocks for each in bookings.live.values()]


def _still(listing: Any) -> str:
    """Returns a listing as text, without the states that a connection changes."""
    text = json.dumps(listing, sort_keys=True)
    for word in ("active", "pending", "exact", "recovering"):
        text = text.replace(f'"{word}"', '"..."')
    return text


def reserve(kvd: Kvd, name: str) -> httpx.Response:
    body = {"model_name": "m", "reservation_id": name, "token_ids": [1] * 8, "session_id": "s"}
    return kvd.post("selection", "/select_and_reserve", body, **{"idempotency-key": name})


def test_bookings_and_their_answers_come_back(tmp_path: Path) -> None:
    with kvd_of(tmp_path, "--session-affinity-ttl-secs=60", "--no-router-kv-events") as kvd:
        slots = {"worker_id": 7, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}
        kvd.post("slot-tracker", "/register", slots)
        for number in (1, 2):
            record = {
                "worker_id": number,
                "model_name": "m",
                "block_size": 4,
                "endpoint": "http://x",
            }
            assert kvd.post("selection", "/workers", record).status_code == 201
        assert book(kvd, "r1").status_code == 201
        assert book(kvd, "r2").status_code == 201
        done = {"model_name": "m", "request_id": "r2"}
        assert kvd.post("slot-tracker", "/prefill_complete", done).status_code == 200
        answer = reserve(kvd, "one").json()
        loads = kvd.get("slot-tracker", "/loads"), kvd.get("selection", "/loads")
        wait(lambda: _kept(kvd.state / "registrations") == 3)
        wait(lambda: len(_live(kvd.state)) == 3)
        kvd.kill()
        kvd.start()
        assert (kvd.get("slot-tracker", "/loads"), kvd.get("selection", "/loads")) == loads
        assert book(kvd, "r1").status_code == 200  # a retry
        assert reserve(kvd, "one").json() == answer
        assert reserve(kvd, "two").json()["worker_id"] == answer["worker_id"]  # same session
        deleted = kvd.client.delete(kvd.url("selection", "/reservations/one"))
        assert deleted.status_code == 200
        free = {"model_name": "m", "request_id": "r1"}
        assert kvd.post("slot-tracker", "/free", free).status_code == 200
        kvd.stop()
        kvd.start()
        deleted = kvd.client.delete(kvd.url("selection", "/reservations/one"))
        assert deleted.status_code == 404
        assert kvd.client.delete(kvd.url("selection", "/reservations/two")).status_code == 200
        kvd.stop()


def test_blocks_that_a_later_request_shares_do_not_fade(tmp_path: Path) -> None:
    with kvd_of(tmp_path, "--session-affinity-ttl-secs=60", "--no-router-kv-events") as kvd:
        record = {"worker_id": 1, "model_name": "m", "block_size": 4, "endpoint": "http://x"}
        assert kvd.post("selection", "/workers", record).status_code == 201
        for name in ("one", "two"):
            assert reserve(kvd, name).status_code == 200
        faded = kvd.post("selection", "/reservations/one/output_block", {"decay_fraction": 0})
        assert faded.status_code == 200
        loads = kvd.get("selection", "/loads")
        assert loads[0]["loads"][0]["potential_decode_blocks"] == 2
        wait(lambda: _kept(kvd.state / "registrations") == 1)
        wait(lambda: _output_blocks(kvd.state) == [1, 0])
        kvd.kill()
        kvd.start()
        assert kvd.get("selection", "/loads") == loads
        kvd.stop()


@pytest.mark.parametrize("name", ["index", "registrations", "journal"])
def test_a_damaged_file_is_put_aside(tmp_path: Path, name: str) -> None:
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        kvd.stop()
        (path,) = kvd.state.glob(f"{name}*") if name == "journal" else [kvd.state / name]
        data = bytearray(path.read_bytes())
        data[len(b"KVDSTAT1") + 12] ^= 1
        path.write_bytes(data)
        kvd.start()
        kvd.server.wait_logged("state_refused")  # type: ignore[union-attr]
        wait((kvd.state / f"{name}.refused").exists)
        if name == "registrations":
            kvd.register(engine)
        # By a replay from the restored number, or from the start once the engine publishes.
        wait(lambda: engine.store(prompt(500 + engine.seq)) or kvd.health() == ("exact", ""))
        wait(lambda: len(kvd.paths()) == len(engine.cache))
        kvd.stop()


def test_one_damaged_journal_of_two_is_named_and_none_counts(tmp_path: Path) -> None:
    """Requests of the sound journal may have ended in the damaged one."""
    with kvd_of(tmp_path) as kvd:
        slots = {"worker_id": 7, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}
        assert kvd.post("slot-tracker", "/register", slots).status_code == 201
        assert book(kvd, "r1").status_code == 201
        kvd.stop()
        ((number, sound),) = journals(kvd.state)
        damaged = kvd.state / f"journal.{number - 1}"
        damaged.write_bytes(b"not a journal")
        kvd.start()
        log = kvd.server.stderr  # type: ignore[union-attr]
        assert f"event=state_refused file={damaged} " in log
        assert (kvd.state / "journal.refused").read_bytes() == b"not a journal"
        assert not sound.exists()
        assert book(kvd, "r1").status_code == 201  # a new booking
        kvd.stop()


def test_the_command_shows_verifies_and_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        slots = {"worker_id": 7, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}
        assert kvd.post("slot-tracker", "/register", slots).status_code == 201
        assert book(kvd, "r1").status_code == 201
        dump = kvd.get("indexer", "/dump")
        kvd.stop()
    folder = str(kvd.state)
    assert main(["state", "show", folder]) == 0
    shown = capsys.readouterr().out
    assert "registrations: 2 registrations (1 of indexer, 1 of slot_tracker); written" in shown
    assert f"index: {len(engine.cache)} blocks, 1 streams; written" in shown
    assert "1 live requests (1 of slot_tracker), 0 sessions" in shown
    assert main(["state", "verify", folder]) == 0
    assert capsys.readouterr().out.count(": ok\n") == 3
    assert main(["state", "export", folder]) == 0
    exported = json.loads(capsys.readouterr().out)
    assert paths_of(exported["dump"]) == paths_of(dump) != set()
    (request,) = exported["requests"]
    assert (request["request_id"], request["blocks"], request["tokens"]) == ("r1", 3, 12)
    assert {row["table"] for row in exported["registrations"]} == {"indexer", "slot_tracker"}
    (stream,) = exported["streams"]
    assert (stream["endpoint"], stream["next_seq"]) == (engine.endpoint, engine.seq)
    path = kvd.state / "index"
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["state", "verify", folder]) == 1
    assert "index: damaged: cut off at byte" in capsys.readouterr().out
    assert main(["state", "export", folder]) == 1
    assert main(["state", "show", str(tmp_path / "nowhere")]) == 1
    assert "not a folder" in capsys.readouterr().err


def test_two_daemons_do_not_share_a_directory(tmp_path: Path) -> None:
    with kvd_of(tmp_path) as kvd:
        (tmp_path / "second").mkdir()
        other = Kvd(tmp_path / "second", f"--state-dir={kvd.state}")
        binds = [f"--{face}-bind=127.0.0.1:{port}" for face, port in other.ports.items()]
        command = [sys.executable, "-m", "kvd", "serve", *binds, f"--state-dir={kvd.state}"]
        second = Server(command, other.folder, other.ports["indexer"], clean_environment())
        assert second.process.wait(PATIENCE_S) == 78
        assert f"in use by process {kvd.server.process.pid}" in second.stderr  # type: ignore[union-attr]
        other.close()
        kvd.stop()


def test_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("not a folder")
    kvd = Kvd(tmp_path)
    command = [
        sys.executable,
        "-m",
        "kvd",
        "indexer",
        f"--port={kvd.ports['indexer']}",
        *kvd.flags,
    ]
    server = Server(command, tmp_path, kvd.ports["indexer"], clean_environment())
    assert server.process.wait(PATIENCE_S) == 78
    assert "state_dir: cannot use" in server.stderr
    kvd.close()


def test_a_full_disk_costs_nothing_but_what_it_does_not_take(tmp_path: Path) -> None:
    """Files cannot grow beyond a size: meanwhile bookings are served but not recorded."""
    with kvd_of(tmp_path, "--snapshot-s=3600") as kvd:
        assert kvd.server is not None
        pid = kvd.server.process.pid
        slots = {"worker_id": 7, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}
        assert kvd.post("slot-tracker", "/register", slots).status_code == 201
        assert book(kvd, "before").status_code == 201
        wait(lambda: _live(kvd.state) == ["before"])
        wait(lambda: _kept(kvd.state / "registrations") == 1)
        began = time.monotonic()
        _limit_files(pid, 64)  # bytes
        assert kvd.post("slot-tracker", "/register", slots | {"worker_id": 8}).status_code == 201
        assert book(kvd, "lost").status_code == 201
        wait(lambda: kvd.metric("kvd_state_recording") == 0)  # the log cannot grow either
        assert book(kvd, "served").status_code == 201
        binds = [f"--{face}-bind=127.0.0.1:{port}" for face, port in kvd.ports.items()]
        status = run_command("status", "--interval=0", *binds)
        assert "bookings NOT recorded" in status.stdout
        assert _live(kvd.state) == ["before"]
        # Three at once: the journal, its successor and the registrations. A retry after a pause.
        wait(lambda: kvd.metric("kvd_state_failures_total") >= 4)
        assert time.monotonic() - began >= RETRY_S
        _limit_files(pid, resource.RLIM_INFINITY)
        wait(lambda: kvd.metric("kvd_state_recording") == 1)
        wait(lambda: _kept(kvd.state / "registrations") == 2)
        wait(lambda: sorted(_live(kvd.state)) == ["before", "lost", "served"])
        kvd.kill()
        kvd.start()
        assert book(kvd, "lost").status_code == book(kvd, "served").status_code == 200
        kvd.stop()


def _limit_files(pid: int, size: int) -> None:
    """Makes a process's writes fail that would extend a file beyond `size` bytes."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Under events, bookings and queries: exact streams are correct, and old bookings survive."""
    random = Random(7)
    with engine_of() as engine, kvd_of(tmp_path, "--request-expiry-s=1000000") as kvd:
        kvd.register(engine)
        slots = {"worker_id": 7, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}
        assert kvd.post("slot-tracker", "/register", slots).status_code == 201
        assert engine.subscribed.wait(PATIENCE_S)
        wait(lambda: _kept(kvd.state / "registrations") >= 2)
        # By name: the number of writes when the booking was seen. Of the next two writes, the first
        # may have begun before the booking; the second has it.
        booked: dict[str, float] = {}
        number = 0
        for _ in range(scaled(2)):
            writes = 0.0
            until = time.monotonic() + random.uniform(0.0, 0.6)
            while time.monotonic() < until:
                number += 1
                engine.store(prompt(random.randrange(300), blocks=random.randrange(2, 6)))
                if random.randrange(3) == 0 and engine.cache:
                    engine.evict(random.choice(list(engine.cache)))
                name = f"r{number}"
                assert book(kvd, name).status_code == 201
                booked[name] = math.inf
                if number % 8 == 0:
                    writes = kvd.metric("kvd_state_journal_writes_total")
                    booked = {each: min(at, writes) for each, at in booked.items()}
                if random.randrange(2):
                    ended = random.choice(list(booked))
                    body = {"model_name": "m", "request_id": ended}
                    assert kvd.post("slot-tracker", "/free", body).status_code == 200
                    booked.pop(ended)
                kvd.matched(prompt(random.randrange(300)))
            kvd.kill()
            for _ in range(random.randrange(20)):
                engine.store(prompt(random.randrange(300)))
            kvd.start()
            assert "state_refused" not in kvd.server.stderr  # type: ignore[union-attr]
            old = [name for name, at in booked.items() if at + 2 <= writes]
            lost = [name for name in old if not _lives(kvd, name)]
            assert lost == []
            for name in list(booked):
                if _lives(kvd, name):
                    booked[name] = -math.inf  # on the disk, whatever happens next
                else:
                    booked.pop(name)
            if not kvd.snapshots_before_death():  # then only a new batch shows it
                wait(lambda: engine.store(prompt(engine.seq, 9)) or kvd.health()[0] == "exact")
            wait(lambda: kvd.health() == ("exact", ""))
            wait(lambda: len(kvd.paths()) == len(engine.cache))
        kvd.stop()


def _lives(kvd: Kvd, name: str) -> bool:
    """Returns whether a request is booked: booking it again is a retry, or else a new booking."""
    status = book(kvd, name).status_code
    assert status in (200, 201)
    if status == 201:
        kvd.post("slot-tracker", "/free", {"model_name": "m", "request_id": name})
    return status == 200


def test_sigterm_in_the_middle_of_a_start_keeps_what_there_was(tmp_path: Path) -> None:
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        kvd.stop()
        for _ in range(5):
            command = [sys.executable, "-m", "kvd", "serve", *kvd.flags]
            command += [f"--{face}-bind=127.0.0.1:{port}" for face, port in kvd.ports.items()]
            server = Server(command, tmp_path, kvd.ports["indexer"], clean_environment())
            server.stop(signal.SIGTERM)
        kvd.start()
        wait(lambda: kvd.health() == ("exact", ""))
        assert len(kvd.paths()) == len(engine.cache)
        kvd.stop()
