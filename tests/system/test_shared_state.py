"""Three replicas on a real Redis or Valkey server: whatever happens to it, they end up equal."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest

from kvd.wire.state_address import parse_address
from tests.support.budget import scaled
from tests.support.engines import BLOCK_SIZE, Engine
from tests.support.kvds import Kvd, wait
from tests.support.ports import find_free_port
from tests.support.state_servers import KINDS, StateServer, needs_server, sentinel_of

pytestmark = needs_server

REPLICAS = 3
WORKERS = 4
# Sharing's other times are fractions of the lease; a fifth of the default suits a busy machine.
SHARED = "--state-dir=off", "--state-lease-s=2"


def worker(number: int) -> dict[str, Any]:
    return {
        "worker_id": number,
        "model_name": "m",
        "block_size": 4,
        "endpoint": f"http://gpu{number}:8000",
        "total_kv_blocks": 10_000,
    }


SLOTS = {"worker_id": 1, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 2}


class Fleet:
    """Replicas that share what they book, and a record of all live bookings."""

    def __init__(self, folder: Path, url: str, replicas: int = REPLICAS, *flags: str) -> None:
        self.random = Random(7)
        self.live: dict[str, bool] = {}  # by name: is it a reservation
        self.booked = 0
        self.kvds: list[Kvd] = []
        self._added = 0
        self._folder = folder
        self._flags = (f"--state-url={url}", *SHARED, "--no-router-kv-events", *flags)
        for _ in range(replicas):
            self.add()

    def add(self, *flags: str) -> Kvd:
        self._added += 1
        folder = self._folder / str(self._added)
        folder.mkdir()
        kvd = Kvd(folder, *self._flags, *flags)
        self.kvds.append(kvd)
        kvd.start()
        return kvd

    @contextmanager
    def with_another(self, *flags: str) -> Iterator[Kvd]:
        """Adds a replica for the block."""
        another = self.add(*flags)
        try:
            yield another
        finally:
            self.kvds.remove(another)
            another.close()

    def close(self) -> None:
        for kvd in self.kvds:
            kvd.close()

    def register(self) -> None:
        """Registers workers through different replicas, and waits until all know them."""
        for number in range(WORKERS):
            kvd = self.kvds[number % len(self.kvds)]
            assert kvd.post("selection", "/workers", worker(number)).status_code == 201
        assert self.kvds[0].post("slot-tracker", "/register", SLOTS).status_code == 201
        wait(lambda: all(self.workers(kvd) == (WORKERS, 1) for kvd in self.kvds))

    def rest(self) -> None:
        """Ends all live requests, and registers the original workers again."""
        one = self.kvds[0]
        for name in list(self.live):
            self.end(one, name)
        rows = {"model_name": "m", "workers": [worker(number) for number in range(WORKERS)]}
        assert one.client.put(one.url("selection", "/workers"), json=rows).status_code == 200
        wait(lambda: all(_worker_ids(kvd) == set(range(WORKERS)) for kvd in self.kvds))
        self.settle()

    def end(self, kvd: Kvd, name: str) -> None:
        if self.live[name]:
            answer = kvd.client.delete(kvd.url("selection", f"/reservations/{name}"))
        else:
            answer = kvd.post("slot-tracker", "/free", {"model_name": "m", "request_id": name})
        assert answer.status_code == 200, answer.text
        del self.live[name]

    def workers(self, kvd: Kvd) -> tuple[int, int]:
        return len(kvd.get("selection", "/workers")), len(kvd.get("slot-tracker", "/workers"))

    def step(self, kvd: Kvd) -> None:
        """Books a request through a replica, or has a live one progress or end there."""
        chosen = self.random.choice([*self.live, None, None])
        if chosen is None:
            self.book(kvd)
        elif self.live[chosen]:
            path = f"/reservations/{chosen}"
            what = self.random.choice(["/prefill_complete", "/output_block", None])
            if what is None:
                answer = kvd.client.delete(kvd.url("selection", path))
                del self.live[chosen]
            else:
                answer = kvd.post("selection", path + what, {})
            assert answer.status_code in (200, 404)  # 404: not known there yet
            if answer.status_code == 404 and what is None:
                self.live[chosen] = True  # it stays live
        else:
            body = {"model_name": "m", "request_id": chosen}
            what = self.random.choice(["/prefill_complete", "/free"])
            found = kvd.client.get(kvd.url("slot-tracker", f"/requests/{chosen}?model_name=m"))
            if found.status_code == 200:
                assert kvd.post("slot-tracker", what, body).status_code in (200, 404)
                if what == "/free":
                    del self.live[chosen]

    def book(self, kvd: Kvd) -> None:
        self.booked += 1
        name = f"r{self.booked}"
        tokens = [self.random.randrange(3) for _ in range(self.random.randrange(4, 40))]
        if self.random.random() < 0.6:
            body = {"model_name": "m", "reservation_id": name, "token_ids": tokens}
            body |= {"session_id": f"s{self.random.randrange(9)}"}
            answer = kvd.post("selection", "/select_and_reserve", body)
            assert answer.status_code == 200, answer.text
            self.live[name] = True
        else:
            asked = {
                "model_name": "m",
                "request_id": name,
                "worker_id": 1,
                "dp_rank": self.random.randrange(2),
                "sequence_hashes": tokens,
                "new_isl_tokens": 4 * len(tokens),
            }
            answer = kvd.post("slot-tracker", "/add", asked)
            assert answer.status_code == 201, answer.text
            self.live[name] = False

    def steps(self, count: int, *of: Kvd) -> None:
        for _ in range(count):
            self.step(self.random.choice(of or self.kvds))

    def loads(self, kvd: Kvd) -> tuple[Any, ...]:
        return kvd.get("slot-tracker", "/loads"), kvd.get("selection", "/loads")

    def known(self, kvd: Kvd) -> set[tuple[str, int, int]]:
        """Returns the live requests that a replica knows, and where they are booked."""
        found = set()
        for name, is_reservation in self.live.items():
            path = f"/reservations/{name}" if is_reservation else f"/requests/{name}?model_name=m"
            face = "selection" if is_reservation else "slot-tracker"
            answer = kvd.client.get(kvd.url(face, path))
            if answer.status_code == 200:
                members = answer.json()
                found.add((name, members["worker_id"], members["dp_rank"]))
        return found

    def agree(self) -> bool:
        """Returns whether every replica has exactly the live requests."""
        first, *others = map(self.loads, self.kvds)
        if any(each != first for each in others):
            return False
        there, *elsewhere = map(self.known, self.kvds)
        return len(there) == len(self.live) and all(each == there for each in elsewhere)

    def settle(self) -> None:
        """Waits until all replicas agree."""
        try:
            wait(self.agree)
        except AssertionError:
            seen = "\n\n".join(f"{self.loads(kvd)} {self.known(kvd)}" for kvd in self.kvds)
            pytest.fail(f"live: {sorted(self.live)}\n\n{seen}")


@contextmanager
def fleet_of(folder: Path, url: str, *flags: str, replicas: int = REPLICAS) -> Iterator[Fleet]:
    fleet = Fleet(folder, url, replicas, "--session-affinity-ttl-secs=60", *flags)
    try:
        fleet.register()
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(params=KINDS, scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StateServer]:
    """One server for all tests; a test with its own fleet uses its own prefix."""
    started = StateServer(tmp_path_factory.mktemp("server"), kind=request.param)
    yield started
    started.close()


class Standing:
    """A fleet that tests share, as long as each leaves it as it was."""

    def __init__(self, folders: pytest.TempPathFactory, server: StateServer) -> None:
        self._folders = folders
        self._server = server
        self._fleet: Fleet | None = None

    def fleet(self) -> Fleet:
        if self._fleet is None:
            folder, flag = self._folders.mktemp("fleet"), "--session-affinity-ttl-secs=60"
            self._fleet = Fleet(folder, self._server.url, REPLICAS, flag)
            self._fleet.register()
        return self._fleet

    def close(self) -> None:
        """Ends the fleet, and starts its server anew."""
        if self._fleet is not None:
            self._fleet.close()
            self._server.close()
            self._server.start()
        self._fleet = None


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory, server: StateServer) -> Iterator[Standing]:
    found = Standing(tmp_path_factory, server)
    yield found
    found.close()


@pytest.fixture
def fleet(standing: Standing) -> Iterator[Fleet]:
    """Three replicas on a server, without bookings."""
    found = standing.fleet()
    yield found
    try:
        found.rest()
    except BaseException:  # the next test gets a new fleet
        standing.close()
        raise


def test_replicas_agree_on_what_any_of_them_books(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.steps(scaled(24))
        fleet.settle()


def test_a_replica_that_was_away_hears_what_it_missed(fleet: Fleet) -> None:
    one, two, three = fleet.kvds
    fleet.steps(60)
    fleet.settle()
    three.kill()
    fleet.steps(60, one, two)
    three.start()
    fleet.settle()
    fleet.steps(60)
    fleet.settle()


def test_a_replica_that_stood_still_hears_what_it_missed(fleet: Fleet) -> None:
    one, two, three = fleet.kvds
    fleet.steps(30)
    fleet.settle()
    with three.suspended():
        fleet.steps(60, one, two)
        wait(lambda: one.metric("kvd_shared_state_replicas") == 1)  # the other's lease has ended
    fleet.settle()
    wait(lambda: one.metric("kvd_shared_state_replicas") == 2)


def test_answers_name_who_serves_a_model(tmp_path: Path, server: StateServer) -> None:
    shared = f"--state-url={server.url}", "--state-prefix=served", *SHARED
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = Kvd(tmp_path / "a", *shared), Kvd(tmp_path / "b", *shared)
    address = two.url("indexer", "")
    one.flags.append("--serve=llama")
    two.flags += ["--serve=qwen@acme", f"--state-advertise={address}"]
    question = {"model_name": "qwen", "tenant_id": "acme", "token_ids": [1]}
    try:
        one.start()
        two.start()
        wait(lambda: one.metric("kvd_shared_state_replicas") == 1)
        answer = one.post("indexer", "/query", question)
        assert (answer.status_code, answer.json()["owner"]) == (421, address)
    finally:
        one.close()
        two.close()


def test_a_frozen_server_holds_nobody_up(fleet: Fleet, server: StateServer) -> None:
    def found() -> list[str]:
        findings = fleet.kvds[0].get("selection", "/diagnose")["findings"]
        return [each["name"] for each in findings if server.url in each["subject"]]

    fleet.steps(40)
    fleet.settle()
    assert found() == []
    server.freeze()
    fleet.steps(60)
    wait(lambda: fleet.kvds[0].metric("kvd_shared_state_connected") == 0)
    assert found() == ["replica_behind"]
    fleet.steps(20)
    server.thaw()
    fleet.settle()


def test_a_server_that_is_emptied_is_filled_again(fleet: Fleet, server: StateServer) -> None:
    fleet.steps(60)
    fleet.settle()
    assert server.ask(b"FLUSHALL").startswith(b"+OK")
    fleet.steps(60)
    fleet.settle()
    with fleet.with_another() as late:  # finds all of it on the server
        wait(lambda: fleet.workers(late) == (WORKERS, 1))
        fleet.settle()


def test_a_server_that_comes_back_empty_is_filled_again(fleet: Fleet, server: StateServer) -> None:
    fleet.steps(60)
    server.kill()
    fleet.steps(60)
    server.start()
    fleet.settle()
    fleet.steps(60)
    fleet.settle()


@pytest.mark.parametrize("kind", KINDS)
def test_another_master_takes_over(tmp_path: Path, kind: str) -> None:
    server = StateServer(tmp_path, kind=kind)
    copy = StateServer(tmp_path, "--replicaof", "127.0.0.1", str(server.port), kind=kind)
    sentinel = None
    try:
        wait(lambda: b"master_link_status:up" in copy.ask(b"INFO replication"))
        sentinel = sentinel_of(tmp_path, server, "kvd", kind)
        wait(lambda: f":{copy.port}".encode() in sentinel.ask(b"SENTINEL REPLICAS kvd"))
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/kvd"
        with fleet_of(tmp_path, url) as fleet:
            fleet.steps(60)
            fleet.settle()
            server.kill()
            fleet.steps(60)
            fleet.settle()
            fleet.steps(60)
            fleet.settle()
    finally:
        for each in (server, copy, sentinel):
            if each is not None:
                each.close()


def test_a_full_server_is_said_and_heals(fleet: Fleet, server: StateServer) -> None:
    one = fleet.kvds[0]
    fleet.steps(30)
    fleet.settle()
    refused = one.metric("kvd_shared_state_refused_total")
    assert server.ask(b"CONFIG SET maxmemory 1").startswith(b"+OK")
    fleet.steps(60)
    wait(lambda: one.metric("kvd_shared_state_refused_total") > refused)
    assert server.ask(b"CONFIG SET maxmemory 0").startswith(b"+OK")
    fleet.settle()


def test_a_view_that_a_full_server_refused_is_written_later(
    fleet: Fleet, server: StateServer
) -> None:
    """Nothing changes meanwhile, and the last view is still there."""
    one = fleet.kvds[0]
    fleet.steps(20)
    fleet.settle()
    written = "kvd_shared_state_views_written_total"
    wait(lambda: one.metric(written) > 0)
    before = one.metric(written)
    server.ask(b"CONFIG SET maxmemory 1")
    server.ask(b"CLIENT KILL TYPE normal")  # each session begins with a view
    wait(lambda: "OOM" in str(one.get("selection", "/ready")["shared_state"]["fault"]))
    server.ask(b"CONFIG SET maxmemory 0")
    wait(lambda: one.get("selection", "/ready")["shared_state"]["fault"] is None)
    assert one.metric(written) > before


def test_what_a_full_server_did_not_take_is_said_later(fleet: Fleet, server: StateServer) -> None:
    one, two, _ = fleet.kvds
    refused = "kvd_shared_state_refused_total"
    before = {kvd: kvd.metric(refused) for kvd in (one, two)}
    assert server.ask(b"CONFIG SET maxmemory 1").startswith(b"+OK")
    assert one.post("selection", "/workers", worker(50)).status_code == 201
    url = two.url("selection", "/workers/2")
    assert two.client.delete(url).status_code == 200
    wait(lambda: all(kvd.metric(refused) > count + 1 for kvd, count in before.items()))
    assert server.ask(b"CONFIG SET maxmemory 0").startswith(b"+OK")
    wait(lambda: all(_worker_ids(kvd) == {0, 1, 3, 50} for kvd in fleet.kvds))


def test_what_an_emptied_server_has_lost_is_said_again(fleet: Fleet, server: StateServer) -> None:
    """Even if a new replica, which knows nothing, is the first to write."""
    with ExitStack() as away:
        for kvd in fleet.kvds:
            away.enter_context(kvd.suspended())
        assert server.ask(b"FLUSHALL").startswith(b"+OK")
        with fleet.with_another() as late:
            assert late.post("selection", "/workers", worker(60)).status_code == 201
            wait(lambda: b"$" in server.ask(b"GET {kvd}:catalog:changes"))
            away.close()
            wait(lambda: all(_worker_ids(kvd) == {*range(WORKERS), 60} for kvd in fleet.kvds))


def _worker_ids(kvd: Kvd) -> set[int]:
    return {row["worker_id"] for row in kvd.get("selection", "/workers")}


def test_what_anybody_writes_ends_no_replica(fleet: Fleet, server: StateServer) -> None:
    unreadable = "kvd_shared_state_unreadable_total"
    before = fleet.kvds[0].metric(unreadable)
    fleet.steps(20)
    fleet.settle()
    names = server.ask(b"SMEMBERS {kvd}:members").split(b"\r\n")
    writers = [name for name in names if len(name) == 16]
    for bad in (b"\\x81\\x90\\xc0", b"\\x01", b"\\xff", b"text"):
        for writer in (*writers, b"ghost"):
            for kind in (b"view", b"member"):
                assert server.ask(b'SET {kvd}:%b:%b "%b"' % (kind, writer, bad)) == b"+OK\r\n"
        server.ask(b'SADD {kvd}:members "%b" ghost' % bad)
        server.ask(b'HSET {kvd}:catalog "%b" "%b"' % (bad, bad))
        server.ask(b"SET {kvd}:catalog:changes %b" % bad.hex().encode())
        fields = b'v 1 w zz n 1 m 2 t 1 l "%b" d "%b" r "%b"' % (bad, bad, bad)
        assert server.ask(b"XADD {kvd}:ops * " + fields).startswith(b"$")
    wait(lambda: fleet.kvds[0].metric(unreadable) >= before + 4)
    fleet.steps(20)
    fleet.settle()
    assert server.ask(b"FLUSHALL").startswith(b"+OK")


@pytest.mark.parametrize("name", ["ops", "members", "catalog:changes"])
def test_a_key_of_another_type_is_named(fleet: Fleet, server: StateServer, name: str) -> None:
    """It costs one session, and the key stays as it is until it is deleted."""
    one = fleet.kvds[0]
    fleet.steps(20)
    fleet.settle()
    tries, losses = "kvd_shared_state_wrong_keys_total", "kvd_shared_state_losses_total"
    before, lost = one.metric(tries), one.metric(losses)
    script = b"\"redis.call('DEL', KEYS[1]) return redis.call('HSET', KEYS[1], 'of', 'others')\""
    key = b"{kvd}:" + name.encode()
    assert server.ask(b"EVAL %b 1 %b" % (script, key)) == b":1\r\n"
    wait(lambda: one.metric(tries) >= before + 3)
    fault = one.get("selection", "/ready")["shared_state"]["fault"]
    assert f"the key {{kvd}}:{name} is a hash instead of a s" in fault
    assert one.metric(losses) == lost + 1
    fleet.steps(20)
    assert b"others" in server.ask(b"HGET %b of" % key)
    assert server.ask(b"DEL %b" % key) == b":1\r\n"
    fleet.settle()


def test_a_view_of_another_type_is_replaced(fleet: Fleet, server: StateServer) -> None:
    fleet.steps(20)
    fleet.settle()
    losses = "kvd_shared_state_losses_total"
    names = server.ask(b"SMEMBERS {kvd}:members").split(b"\r\n")
    for writer in (name for name in names if len(name) == 16):
        for key in (b"{kvd}:view:%b" % writer, b"{kvd}:member:%b" % writer):
            server.ask(b"DEL %b" % key)
            server.ask(b"LPUSH %b x" % key)
    with fleet.with_another():
        fleet.steps(20, *fleet.kvds[:REPLICAS])
        fleet.settle()
        assert fleet.kvds[REPLICAS].metric(losses) == 0


def test_keys_of_another_type_are_said_and_heal(fleet: Fleet, server: StateServer) -> None:
    one = fleet.kvds[0]
    fleet.steps(20)
    fleet.settle()
    # One script, so that no replica writes a key between the flush and the command for it.
    sets = b"".join(
        b"redis.call('SET', '{kvd}:%b', 'x') " % name for name in (b"ops", b"members", b"catalog")
    )
    push = b"return redis.call('LPUSH', '{kvd}:catalog:changes', 'x')"
    assert server.ask(b"EVAL \"redis.call('FLUSHALL') %b%b\" 0" % (sets, push)) == b":1\r\n"
    fleet.steps(20)
    wait(lambda: "instead of" in str(one.get("selection", "/ready")["shared_state"]["fault"]))
    assert server.ask(b"FLUSHALL").startswith(b"+OK")
    fleet.settle()


def test_what_is_no_server_ends_no_replica(tmp_path: Path) -> None:
    """Each connection gets another answer that no Redis server would give."""
    answers = (
        b"$99x\r\nx",
        b"%1\r\n+a\r\n:1\r\n" * 9,
        b"HTTP/1.1 400 Bad\r\n\r\n",
        b":1\r\n" * 9,
    )
    served = [0]

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):  # the test is over
            while True:
                peer, _ = listener.accept()
                with peer, suppress(OSError):
                    peer.recv(4096)
                    peer.sendall(answers[served[0] % len(answers)])
                served[0] += 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        kvd = Kvd(tmp_path, f"--state-url=redis://127.0.0.1:{port}", *SHARED)
        try:
            kvd.start()
            wait(lambda: served[0] >= len(answers))
            assert kvd.metric("kvd_shared_state_connected") == 0
        finally:
            kvd.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_user_who_may_not_write_the_stream_is_said(tmp_path: Path, server: StateServer) -> None:
    rights = b"ACL SETUSER kvd on nopass ~{limited}* +@all -xadd"
    assert server.ask(rights).startswith(b"+OK")
    url = f"--state-url=redis://kvd@127.0.0.1:{server.port}"
    kvd = Kvd(tmp_path, url, "--state-prefix=limited", *SHARED)
    password = tmp_path / "password"
    password.write_text("any")
    kvd.flags.append(f"--state-password-file={password}")
    try:
        kvd.start()
        assert kvd.post("slot-tracker", "/register", SLOTS).status_code == 201
        wait(lambda: kvd.metric("kvd_shared_state_refused_total") > 3)
        assert kvd.server is not None
        assert kvd.server.stderr.count("event=shared_state_refused") == 1
        assert "xadd" in kvd.get("selection", "/ready")["shared_state"]["fault"]
    finally:
        kvd.close()


def test_registrations_are_said_once(fleet: Fleet) -> None:
    one, two, three = fleet.kvds
    url = two.url("selection", "/workers/2")
    assert two.client.delete(url).status_code == 200
    wait(lambda: all(fleet.workers(kvd) == (WORKERS - 1, 1) for kvd in fleet.kvds))
    three.kill()
    assert one.client.delete(one.url("selection", "/workers/3")).status_code == 200
    changed = worker(1) | {"total_kv_blocks": 7}
    assert one.post("selection", "/workers", changed).status_code == 201
    three.start()
    wait(lambda: fleet.workers(three) == (WORKERS - 2, 1))

    def blocks_of_one() -> int:
        rows = {row["worker_id"]: row for row in three.get("selection", "/workers")}
        return int(rows[1]["total_kv_blocks"])

    wait(lambda: blocks_of_one() == 7)  # its change came after the lost worker's


def test_a_removal_right_after_the_server_was_emptied_stays(
    fleet: Fleet, server: StateServer
) -> None:
    """No replica that restores the lost data writes a removed worker again."""
    _, two, _ = fleet.kvds
    assert server.ask(b"FLUSHALL") == b"+OK\r\n"
    assert two.client.delete(two.url("selection", "/workers/2")).status_code == 200
    wait(lambda: all(fleet.workers(kvd) == (WORKERS - 1, 1) for kvd in fleet.kvds))


def test_an_old_copy_of_the_data_brings_no_removed_worker_back(tmp_path: Path) -> None:
    server = StateServer(tmp_path, "--save", "900 1")
    try:
        with fleet_of(tmp_path, server.url, replicas=2) as fleet:
            one, two = fleet.kvds
            assert server.ask(b"SAVE").startswith(b"+OK")
            assert one.client.delete(one.url("selection", "/workers/3")).status_code == 200
            wait(lambda: _worker_ids(two) == {0, 1, 2})
            server.kill()
            server.start()
            assert one.post("selection", "/workers", worker(9)).status_code == 201
            wait(lambda: 9 in _worker_ids(two))
            assert _worker_ids(one) == _worker_ids(two) == {0, 1, 2, 9}
    finally:
        server.close()


def test_what_is_said_of_a_model_holds_on_all(fleet: Fleet, server: StateServer) -> None:
    one, two, three = fleet.kvds
    paths = "/busy_threshold", "/policy", "/router_mode"

    def settings_of(kvd: Kvd) -> list[Any]:
        return [kvd.get("selection", path) for path in paths]

    before = settings_of(one)
    limits = {"model": "m", "active_decode_blocks_threshold": 0.5}
    assert one.post("selection", "/busy_threshold", limits).status_code == 200
    assert (
        two.post("selection", "/policy", {"model": "m", "router_policy": "kvd"}).status_code == 200
    )
    wait(
        lambda: (
            settings_of(one) == settings_of(two) == settings_of(three)
            and "kvd" in str(settings_of(one)[1])
        )
    )
    assert "0.5" in str(settings_of(three)[0])
    assert server.ask(b"FLUSHALL").startswith(b"+OK")
    with fleet.with_another() as late:
        wait(lambda: settings_of(late) == settings_of(one))
    for path in paths[:2]:
        url = three.url("selection", f"{path}?model_name=m")
        assert three.client.delete(url).status_code == 200
    wait(lambda: all(settings_of(kvd) == before for kvd in fleet.kvds))


def test_what_ended_while_a_replica_was_down_is_not_booked_again(
    fleet: Fleet, tmp_path: Path
) -> None:
    with fleet.with_another(f"--state-dir={tmp_path / 'kept'}") as two:
        wait(lambda: fleet.workers(two) == (WORKERS, 1))
        fleet.steps(60, two)
        fleet.settle()
        two.kill()
        for name in list(fleet.live)[::2]:
            fleet.end(fleet.kvds[0], name)
        two.start()
        fleet.settle()


def test_an_end_that_no_other_was_told_of_is_not_undone(
    fleet: Fleet, server: StateServer, tmp_path: Path
) -> None:
    """It ends while the server is away; its replica is killed, and again before it can tell."""
    with fleet.with_another(f"--state-dir={tmp_path / 'kept'}") as two:
        wait(lambda: fleet.workers(two) == (WORKERS, 1))
        fleet.steps(60, two)
        fleet.settle()
        server.kill()
        for name in list(fleet.live)[::2]:
            fleet.end(two, name)
        written = two.metric("kvd_state_journal_writes_total")
        reserved = next(name for name, is_reservation in fleet.live.items() if is_reservation)
        path = f"/reservations/{reserved}/prefill_complete"
        assert two.post("selection", path, {}).status_code == 200
        wait(lambda: two.metric("kvd_state_journal_writes_total") > written)  # the ends, too
        for _ in range(2):
            two.kill()
            two.start()
        server.start()
        fleet.settle()


def test_both_ways_of_telling_count_once(tmp_path: Path, server: StateServer) -> None:
    ports = [find_free_port() for _ in range(2)]
    flags = [
        (f"--replica-sync-port={mine}", f"--replica-sync-peers=tcp://127.0.0.1:{other}")
        for mine, other in (ports, ports[::-1])
    ]
    fleet = Fleet(tmp_path, server.url, 0, "--state-prefix=both")
    try:
        for each in flags:
            fleet.add(*each)
        fleet.register()
        fleet.steps(80)
        fleet.settle()
    finally:
        fleet.close()


def test_a_new_replica_takes_the_index_of_one_that_is_there(
    tmp_path: Path, server: StateServer
) -> None:
    engine, prompt = Engine(), [1] * BLOCK_SIZE * 3
    shared = f"--state-url={server.url}", "--state-prefix=index", *SHARED
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, late = Kvd(tmp_path / "a", *shared), Kvd(tmp_path / "b", *shared)
    try:
        first.flags.append(f"--state-advertise={first.url('indexer', '')}")
        first.start()
        first.register(engine)
        assert engine.subscribed.wait(60)
        engine.store(prompt)
        wait(lambda: first.matched(prompt) == len(prompt))
        late.start()
        assert late.server is not None
        late.server.wait_logged("event=recovered")
        wait(lambda: late.matched(prompt) == len(prompt))
    finally:
        first.close()
        late.close()
        engine.close()


def test_users_passwords_tls_and_prefixes(tmp_path: Path, certificate: Path) -> None:
    tls_port = find_free_port()
    tls = ("--tls-port", str(tls_port), "--tls-auth-clients", "no")
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    files = ("--tls-cert-file", str(cert), "--tls-key-file", str(key))
    users = tmp_path / "users.acl"
    users.write_text("user default off\nuser kvd on >secret ~{fleet-1}* &* +@all\n")
    server = StateServer(tmp_path, *tls, *files, "--aclfile", str(users))
    password = tmp_path / "password"
    password.write_text("secret\n")
    flags = f"--state-password-file={password}", f"--state-ca-file={cert}"
    try:
        url = f"rediss://kvd@127.0.0.1:{tls_port}"
        with fleet_of(tmp_path, url, *flags, "--state-prefix=fleet-1", replicas=2) as fleet:
            fleet.steps(30)
            fleet.settle()
            secrets = [kvd.server.stderr for kvd in fleet.kvds if kvd.server is not None]
            assert not any("secret\n" in text for text in secrets)
    finally:
        server.close()


def test_a_cluster(tmp_path: Path) -> None:
    server = StateServer(tmp_path, "--cluster-enabled", "yes")
    try:
        assert server.ask(b"CLUSTER ADDSLOTSRANGE 0 16383").startswith(b"+OK")
        with fleet_of(tmp_path, f"redis+cluster://127.0.0.1:{server.port}", replicas=2) as fleet:
            fleet.steps(30)
            fleet.settle()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://h", "the URL must begin with redis://"),
        ("redis://:pw@h", "put it into the file of state_password_file"),
        ("redis+sentinel://h:1", "must end with /NAME"),
        ("redis://h:99999", "expected HOST or HOST:PORT"),
        ("redis://a,b", "takes one server"),
        ("redis+cluster://" + ",".join("h" * 65), "65 servers exceed the limit of 64"),
        ("redis+ring://h", "only sentinel or cluster may follow"),
        ("redis+cluster://h/1", "a cluster has no databases"),
    ],
)
def test_addresses_are_checked_at_the_start(url: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_address(url)


def test_a_wrong_password_is_said_and_nothing_waits(tmp_path: Path) -> None:
    server = StateServer(tmp_path, "--requirepass", "right")
    kvd = Kvd(tmp_path, f"--state-url={server.url}", *SHARED)
    try:
        kvd.start()
        assert kvd.server is not None
        kvd.server.wait_logged("event=shared_state_lost")
        assert kvd.metric("kvd_shared_state_connected") == 0
    finally:
        kvd.close()
        server.close()
