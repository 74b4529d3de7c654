"""`kvd gateway` with `--processes` or `--kvd`: a killed process costs clients very little."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import trio

from examples.engine.options import EngineOptions, Fault
from tests.support.commands import run_command
from tests.support.exposition import parse
from tests.support.gateways import (
    CHAT,
    Client,
    Running,
    engines,
    tls_of,
    trusting,
    wait_serving,
)
from tests.support.ports import find_free_port
from tests.support.processes import STOP_DEADLINE_S, Server, clean_environment
from tests.support.reloading import starting
from tests.support.zmtp_fakes import NOT_MY_FAULT_S, until

Start = Callable[..., Server]
BODY = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "a b c"}]}
CLIENTS = 4
STARTED = re.compile(r"event=process_started process=(\S+) pid=(\d+) restarts=(\d+)")


@dataclass
class Fleet:
    """Gateway processes, and the engines behind them."""

    server: Server
    running: list[Running]
    failures: list[str] = field(default_factory=list)

    def pid(self, name: str, restarts: int = 0) -> int:
        """Returns the id of a process after this many restarts."""
        started = {(name, int(n)): int(pid) for name, pid, n in STARTED.findall(self.server.stderr)}
        return started[name, restarts]

    def started(self) -> set[tuple[str, str]]:
        return {(name, restarts) for name, _, restarts in STARTED.findall(self.server.stderr)}

    async def ask(self, headers: dict[str, str] | None = None) -> httpx.Response:
        """Sends a request on a connection of its own, which any of the processes may accept."""
        async with self.client() as client:
            return await client.post(CHAT, json=BODY, headers=headers)

    def client(self) -> httpx.AsyncClient:
        url = self.server.base_url
        return httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=60)

    async def until_metric(self, name: str, value: float) -> None:
        with trio.fail_after(NOT_MY_FAULT_S):
            while (await self.metrics()).get(name) != value:  # noqa: ASYNC110 - another process
                await trio.sleep(0.02)

    async def metrics(self, query: str = "") -> dict[str, float]:
        async with self.client() as client:
            answer = await client.get(f"/metrics{query}")
            assert answer.status_code == 200, answer.text
            return parse(answer.text)


@asynccontextmanager
async def fleet(
    start: Start, *flags: str, count: int = 2, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Fleet]:
    """Yields gateway processes with these further flags, in front of `count` engines.

    All of them are ready: a process that ends before they are ends the others as well.
    """
    async with engines(*(EngineOptions() for _ in range(count)), tls=tls) as running:
        named = [part for each in running for part in ("--upstream", each.url)]
        patient = ["--gateway-tokenize-s", str(NOT_MY_FAULT_S)]
        all_flags = [*named, *patient, *flags]
        server = await trio.to_thread.run_sync(lambda: start(*all_flags, face="gateway"))
        if "--processes" in flags:
            await until(lambda: "event=processes_ready" in server.stderr)
        yield Fleet(server, running)


async def test_all_processes_answer_as_one(kvd_process: Start) -> None:
    async with fleet(kvd_process, "--processes", "2") as gateways:
        shown = set()
        for _ in range(40):  # all meet one process with probability 2^-39
            async with gateways.client() as client:
                status = (await client.get("/status")).json()
                shown.add(status["process"])
                assert [each["up"] for each in status["kvds"]] == [True]
                answered = await client.post(CHAT, json=BODY)
                assert answered.headers["x-kvd-decision"] == "overlap"
        assert shown == {"gateway-0", "gateway-1"}
        metrics = await gateways.metrics()
        served = 'kvd_gateway_relayed_requests_total{{process="gateway-{}",outcome="complete"}}'
        assert metrics[served.format(0)] + metrics[served.format(1)] == 40
        assert {name for name in metrics if name.startswith("kvd_process_up")} == {
            f'kvd_process_up{{process="{name}"}}' for name in ("kvd", "gateway-0", "gateway-1")
        }
        alone = await gateways.metrics("?process=gateway-1")
        assert (
            alone['kvd_gateway_relayed_requests_total{outcome="complete"}']
            == metrics[served.format(1)]
        )


async def test_each_process_reaches_engines_behind_tls(
    kvd_process: Start, certificate: Path
) -> None:
    """So does a process that was started again."""
    flags = "--processes", "2", *trusting(certificate)
    async with fleet(kvd_process, *flags, tls=tls_of(certificate)) as gateways:
        for restarts in (0, 1):
            with trio.fail_after(NOT_MY_FAULT_S):
                served: set[str] = set()
                while len(served) < 2:
                    async with gateways.client() as client:
                        served.add((await client.get("/status")).json()["process"])
                        assert (await client.post(CHAT, json=BODY)).status_code == 200
            if not restarts:
                os.kill(gateways.pid("gateway-0"), signal.SIGKILL)
                await until(lambda: ("gateway-0", "1") in gateways.started())


@asynccontextmanager
async def traffic(gateways: Fleet) -> AsyncIterator[list[int]]:
    """Runs clients that send requests all the time, each on a new connection; yields statuses."""
    statuses: list[int] = []
    stop = trio.Event()

    async def ask_always() -> None:
        while not stop.is_set():
            try:
                statuses.append((await gateways.ask()).status_code)
            except httpx.TransportError as error:
                gateways.failures.append(repr(error))

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(ask_always)
        await until(lambda: len(statuses) > 20)
        yield statuses
        seen = len(statuses)
        await until(lambda: len(statuses) > seen + 40)
        stop.set()


async def test_a_killed_process_is_replaced_and_costs_the_others_nothing(
    kvd_process: Start,
) -> None:
    async with fleet(kvd_process, "--processes", "2") as gateways:
        async with traffic(gateways) as statuses:
            os.kill(gateways.pid("gateway-0"), signal.SIGKILL)
            await until(lambda: ("gateway-0", "1") in gateways.started())
        assert set(statuses) == {200}
        # Connections die with the process that has accepted them: at most one per client.
        assert len(gateways.failures) <= CLIENTS
        await gateways.until_metric('kvd_process_restarts_total{process="gateway-0"}', 1)
        assert (await gateways.metrics())['kvd_process_up{process="gateway-0"}'] == 1


async def test_what_killed_processes_had_booked_ends_with_their_successors(
    kvd_process: Start,
) -> None:
    async with fleet(kvd_process, "--processes", "2") as gateways:
        live, count = 'kvd_selection_reservations{process="kvd"}', 8
        for each in gateways.running:
            each.server.options.faults.extend([Fault.SILENCE] * count)

        async def ask_in_vain() -> None:
            with suppress(httpx.TransportError):
                await gateways.ask()

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(ask_in_vain)
            await gateways.until_metric(live, count)
            names = "gateway-0", "gateway-1"
            for name in names:
                os.kill(gateways.pid(name), signal.SIGKILL)
            # Their successors end before they can do anything.
            await until(lambda: {(name, "1") for name in names} <= gateways.started())
            for name in names:
                os.kill(gateways.pid(name, 1), signal.SIGKILL)
            await gateways.until_metric(live, 0)


async def test_a_killed_kvd_is_replaced_and_costs_nobody_a_request(kvd_process: Start) -> None:
    async with fleet(kvd_process, "--processes", "2") as gateways:
        async with traffic(gateways) as statuses:
            os.kill(gateways.pid("kvd"), signal.SIGKILL)
            await until(lambda: ("kvd", "1") in gateways.started())
        assert (set(statuses), gateways.failures) == ({200}, [])
        with trio.fail_after(NOT_MY_FAULT_S):
            while (await gateways.ask()).headers["x-kvd-decision"] != "overlap":
                pass
        await gateways.until_metric('kvd_process_up{process="kvd"}', 1)


async def test_a_stop_drains_all_processes(kvd_process: Start) -> None:
    async with engines(EngineOptions(step_s=0.05)) as [engine]:
        flags = ("--upstream", engine.url, "--processes", "2")
        server = await trio.to_thread.run_sync(lambda: kvd_process(*flags, face="gateway"))
        gateways = Fleet(server, [engine])
        body = BODY | {"stream": True, "max_tokens": 20}
        async with gateways.client() as client, client.stream("POST", CHAT, json=body) as answer:
            pieces = answer.aiter_text()
            text = await anext(pieces)
            server.process.terminate()
            async for piece in pieces:
                text += piece
        assert text.endswith("data: [DONE]\n\n")
        assert await trio.to_thread.run_sync(server.process.wait) == 0
        assert "process_ended" not in server.stderr


async def test_a_second_signal_ends_all_at_once(kvd_process: Start) -> None:
    async with engines(EngineOptions(step_s=3600.0)) as [engine]:
        flags = ("--upstream", engine.url, "--processes", "2", "--http-graceful-s", "3600")
        server = await trio.to_thread.run_sync(lambda: kvd_process(*flags, face="gateway"))
        gateways = Fleet(server, [engine])

        async def ask() -> None:
            with pytest.raises(httpx.RemoteProtocolError):
                await gateways.ask()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: engine.server.requests == 1)
            server.process.terminate()
            await until(lambda: server.stderr.count("event=stopping") == 3)
            server.process.terminate()
            assert await trio.to_thread.run_sync(server.process.wait) == 130
        await until(lambda: not Path(f"/proc/{gateways.pid('kvd')}/fd").exists())


async def test_who_ends_the_parent_ends_all(kvd_process: Start) -> None:
    async with fleet(kvd_process, "--processes", "2") as gateways:
        names = ("kvd", "gateway-0", "gateway-1")
        await until(lambda: {(name, "0") for name in names} <= gateways.started())
        pids = [gateways.pid(name) for name in names]
        await trio.to_thread.run_sync(gateways.server.stop, signal.SIGKILL)
        await until(lambda: not any(Path(f"/proc/{pid}/fd").exists() for pid in pids))
        (folder,) = set(re.findall(r"unix:(\S+)/gateway-\d\.sock", gateways.server.stderr))
        shutil.rmtree(folder)  # the killed parent could not remove it


@pytest.mark.parametrize("face", ["--gateway-bind", "--indexer-bind"])
def test_an_address_in_use_ends_all_with_one_line(face: str) -> None:
    """Also if another program would share the port, as kvd's own processes do."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        binds = {"--gateway-bind": "127.0.0.1:0"} | {face: bind}
        flags = [part for each in binds.items() for part in each]
        ended = run_command("gateway", "--processes", "2", *flags)
    assert ended.code == 1
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith("ts=")]
    assert bind in line and "in use" in line


# Runs kvd where the calls of fork() with these numbers fail, as with too many processes. The limit
# of processes itself does not hold for root.
WITHOUT_ROOM = """
import itertools, os, sys
from kvd.cli.main import main
numbers, fork = itertools.count(1), os.fork
failing = set(map(int, sys.argv[1].split(",")))
def limited():
    if next(numbers) in failing:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = limited
sys.exit(main(sys.argv[2:]))
"""
NOT_STARTED = (
    'event=process_not_started process={} reason="Resource temporarily unavailable" pause_s={}'
)


def without_room(folder: Path, failing: str) -> Server:
    """Starts two gateway processes, and the kvd that chooses for them."""
    port = find_free_port()
    flags = "gateway", "--port", str(port), "--processes", "2", "--upstream", "http://127.0.0.1:9"
    command = [sys.executable, "-c", WITHOUT_ROOM, failing, *flags]
    return Server(command, folder, port, clean_environment())


@pytest.mark.parametrize(("failing", "name"), [("1", "kvd"), ("3", "gateway-1")])
def test_without_room_for_a_process_the_first_start_is_given_up(
    tmp_path: Path, failing: str, name: str
) -> None:
    server = without_room(tmp_path, failing)
    assert server.process.wait(STOP_DEADLINE_S) == 1
    assert NOT_STARTED.format(name, "0.0") in server.stderr
    assert "Traceback" not in server.stderr


def test_without_room_for_a_process_a_later_start_is_tried_again(tmp_path: Path) -> None:
    server = without_room(tmp_path, "4,5")
    try:
        server.wait_logged("event=processes_ready")
        gateways = Fleet(server, [])
        os.kill(gateways.pid("gateway-0"), signal.SIGKILL)
        server.wait_until(lambda: ("gateway-0", "1") in gateways.started(), "started again")
        assert server.stderr.count("event=process_not_started") == 2
    finally:
        assert server.stop() == 0


def test_without_a_place_for_their_sockets_one_line_says_so(tmp_path: Path) -> None:
    """As where all of a container's file system is read-only."""
    flags = "gateway", "--port", "0", "--processes", "2", "--upstream", "http://127.0.0.1:9"
    missing = run_command(*flags, RUNTIME_DIRECTORY=str(tmp_path / "missing"))
    long = tmp_path / ("x" * 100)
    long.mkdir()
    unnamable = run_command(*flags, TMPDIR=str(long))
    assert not any(long.iterdir())
    for ended, why in ((missing, "No such file or directory"), (unnamable, "path too long")):
        assert ended.code == 1
        line = rf"kvd: cannot .*{tmp_path}/.*: .*{why}; RUNTIME_DIRECTORY, else TMPDIR, .*\n"
        assert re.fullmatch(line, ended.stderr), ended.stderr


def test_a_process_killed_at_the_first_start_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # no process serves before it answers
        engine = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = f'upstreams = ["{engine}"]\ngateway_processes = 2\n'
        with starting(tmp_path, "gateway", settings) as server:
            gateways = Fleet(server, [])
            server.wait_until(lambda: ("gateway-1", "0") in gateways.started(), "started")
            os.kill(gateways.pid("gateway-1"), signal.SIGKILL)
            assert server.process.wait(STOP_DEADLINE_S) == 1
            assert "event=process_ended process=gateway-1 code=-9" in server.stderr


def token_file(folder: Path, line: str) -> Path:
    """Returns the path of a tokens file that has this line."""
    path = folder / "tokens"
    path.write_text(line)
    path.chmod(0o600)
    return path


async def test_tokens_hold_between_the_processes(kvd_process: Start, tmp_path: Path) -> None:
    tokens = token_file(tmp_path, "operator read,generate 0123456789abcdef\n")
    async with fleet(kvd_process, "--processes", "2", "--tokens-file", str(tokens)) as gateways:
        shown = shows("0123456789abcdef")
        assert (await gateways.ask()).status_code == 401
        assert (await gateways.ask(shown)).headers["x-kvd-decision"] == "overlap"
        async with gateways.client() as client:
            metrics = parse((await client.get("/metrics", headers=shown)).text)
        assert metrics['kvd_process_up{process="kvd"}'] == 1


async def test_sighup_has_all_processes_reload(kvd_process: Start, tmp_path: Path) -> None:
    """Tokens of the file change; the tokens that the processes use among themselves stay."""
    tokens = token_file(tmp_path, "old read 0123456789abcdef\n")
    async with fleet(kvd_process, "--processes", "2", "--tokens-file", str(tokens)) as gateways:
        tokens.write_text("new read,generate fedcba9876543210\n")
        await reload(gateways, "tokens_file")
        async with gateways.client() as client:
            for secret, status in (("0123456789abcdef", 401), ("fedcba9876543210", 200)):
                answer = await client.get("/metrics", headers=shows(secret))
                assert answer.status_code == status
        assert parse(answer.text)['kvd_process_up{process="kvd"}'] == 1
        assert (await gateways.ask(shows(secret))).headers["x-kvd-decision"] == "overlap"


async def test_a_process_started_again_has_the_settings_of_the_last_reload(
    kvd_process: Start, tmp_path: Path
) -> None:
    tokens = token_file(tmp_path, "old read,generate 0123456789abcdef\n")
    async with fleet(kvd_process, "--processes", "2", "--tokens-file", str(tokens)) as gateways:
        tokens.write_text("new read,generate fedcba9876543210\n")
        await reload(gateways, "tokens_file")
        for name in ("kvd", "gateway-0", "gateway-1"):
            os.kill(gateways.pid(name), signal.SIGKILL)
        again = {(name, "1") for name in ("kvd", "gateway-0", "gateway-1")}
        await until(lambda: again <= gateways.started())
        assert (await gateways.ask(shows("0123456789abcdef"))).status_code == 401
        await until_decided(gateways, "overlap", shows("fedcba9876543210"))


async def test_a_process_that_ends_before_it_reloads_does_so_afterwards(
    kvd_process: Start, tmp_path: Path
) -> None:
    tokens = token_file(tmp_path, "old read,generate 0123456789abcdef\n")
    async with fleet(kvd_process, "--processes", "2", "--tokens-file", str(tokens)) as gateways:
        tokens.write_text("new read,generate fedcba9876543210\n")
        os.kill(gateways.pid("gateway-0"), signal.SIGSTOP)
        gateways.server.process.send_signal(signal.SIGHUP)
        await until(lambda: gateways.server.stderr.count("event=reloaded") == 2)
        os.kill(gateways.pid("gateway-0"), signal.SIGKILL)
        await until(lambda: gateways.server.stderr.count("event=reloaded") == 3)
        assert (await gateways.ask(shows("0123456789abcdef"))).status_code == 401


async def test_a_process_started_again_has_nothing_of_a_reload_that_it_has_refused(
    kvd_process: Start, tmp_path: Path
) -> None:
    """It could not start without tokens, and connections would wait for it."""
    tokens = token_file(tmp_path, "client generate 0123456789abcdef\n")
    settings = tmp_path / "kvd.toml"
    settings.write_text(f'tokens_file = "{tokens}"\n')
    flags = "--processes", "2", "--config", str(settings), "--host", "0.0.0.0"
    async with fleet(kvd_process, *flags) as gateways:
        settings.write_text("")
        gateways.server.process.send_signal(signal.SIGHUP)
        await until(lambda: gateways.server.stderr.count("event=reload_refused") == 2)
        await until(lambda: "event=reloaded" in gateways.server.stderr)  # the kvd is not exposed
        os.kill(gateways.pid("gateway-0"), signal.SIGKILL)
        await until(lambda: gateways.server.stderr.count(" face=gateway bind=") == 3)
        assert (await gateways.ask()).status_code == 401


async def test_tokens_come_and_go_by_reloads(kvd_process: Start, tmp_path: Path) -> None:
    """The processes choose together before and after."""
    tokens = token_file(tmp_path, "client generate 0123456789abcdef\n")
    settings = tmp_path / "kvd.toml"
    settings.write_text("")
    async with fleet(kvd_process, "--processes", "2", "--config", str(settings)) as gateways:
        assert (await gateways.ask()).headers["x-kvd-decision"] == "overlap"
        settings.write_text(f'tokens_file = "{tokens}"\n')
        await reload(gateways, "tokens_file")
        assert (await gateways.ask()).status_code == 401
        answer = await gateways.ask(shows("0123456789abcdef"))
        assert answer.headers["x-kvd-decision"] == "overlap"
        settings.write_text("")
        await reload(gateways, "tokens_file", times=2)
        assert (await gateways.ask()).headers["x-kvd-decision"] == "overlap"


async def reload(gateways: Fleet, changed: str, times: int = 1) -> None:
    """Has all three processes reload, and waits until each has done so this many times."""
    gateways.server.process.send_signal(signal.SIGHUP)
    line = f"event=reloaded changed={changed}"
    await until(lambda: gateways.server.stderr.count(line) == 3 * times)


def shows(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def until_decided(gateways: Fleet, by: str, headers: dict[str, str]) -> None:
    """Waits until requests are decided in this way; each succeeds."""
    with trio.fail_after(NOT_MY_FAULT_S):
        while (answer := await gateways.ask(headers)).headers.get("x-kvd-decision") != by:
            assert answer.status_code == 200


async def test_a_gateway_asks_a_kvd_elsewhere(kvd_process: Start, tmp_path: Path) -> None:
    kvds = [kvd_process(face="select-service") for _ in range(2)]
    urls = ",".join(each.base_url for each in kvds)
    async with fleet(kvd_process, "--kvd", urls) as gateways:
        async with gateways.client() as client:
            await wait_serving(Client(client), 2)
        assert (await gateways.ask()).headers["x-kvd-decision"] == "overlap"
        for each in kvds:
            async with httpx.AsyncClient(
                base_url=each.base_url, trust_env=False, verify=False
            ) as client:
                workers = (await client.get("/workers")).json()
                assert {row["endpoint"] for row in workers} == {
                    engine.url for engine in gateways.running
                }
        await trio.to_thread.run_sync(kvds[0].stop, signal.SIGKILL)
        assert (await gateways.ask()).headers["x-kvd-decision"] == "overlap"
        await trio.to_thread.run_sync(kvds[1].stop, signal.SIGKILL)
        answered = await gateways.ask()
        assert answered.headers["x-kvd-decision"] == "fallback"
        metrics = await gateways.metrics()
        assert metrics['kvd_gateway_decisions_total{by="fallback"}'] == 1
        assert metrics['kvd_gateway_kvds{standing="down"}'] == 2
