"""`kvd status` against a running daemon: figures, rates, exit codes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgpack
import pytest
import trio
import zmq

from examples.engine.options import EngineOptions
from kvd.cli.face_client import FaceClient, addresses
from kvd.cli.main import main
from kvd.cli.status import FaceStatus, check, of_one_process, read_samples
from kvd.config import settings, sources
from kvd.config.binds import Binds, TcpBind, UnixBind
from kvd.config.sections import listening
from tests.support import http_client
from tests.support.asking import FACES, make_client_certificates
from tests.support.gateways import engines, gateway_of
from tests.support.http_client import Client
from tests.support.other_versions import other_version
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.running import running

PAIR = {"cert": "pem", "key": "key"}
TOKENS = list(range(16))
STORED = msgpack.packb([0.0, [["BlockStored", [11, 12, 13, 14], None, TOKENS, 4, None]], 0])


@pytest.fixture(scope="module")
def binds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The flags of a running daemon; one of its addresses is a Unix socket with an odd path."""
    folder = tmp_path_factory.mktemp("status")
    port = find_free_port()
    flags = [
        f"--indexer-bind=127.0.0.1:{port}",
        f"--slot-tracker-bind=127.0.0.1:{find_free_port()}",
        f"--selection-bind=unix:{folder}/of the selection:1",
        f"--conductor-bind=127.0.0.1:{find_free_port()}",
    ]
    with running(folder, port, "serve", *flags):
        yield flags


def status(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["status", "--json", "--interval", "0", *flags])
    return code, json.loads(capsys.readouterr().out)


def url(flag: str) -> str:
    return f"http://{flag.partition('=')[2]}"


def test_all_is_well(binds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = status(capsys, *binds)
    assert code == 0
    assert list(shown["faces"]) == ["indexer", "slot-tracker", "selection", "conductor"]
    assert not any("error" in face for face in shown["faces"].values())
    assert shown["resident_bytes"] > 2**20 and shown["log_lines_dropped"] == 0
    assert 0 < shown["loop"]["busy"] < 2  # 1 at most, but for what began before
    longest = shown["loop"]["longest"]["requests"]  # at least this request's own
    assert 0 < longest["cpu_s"] <= longest["seconds"]
    assert sum(shown["streams"].values()) == 0
    assert main(["status", "--interval=0", *binds]) == 0
    text = capsys.readouterr().out
    assert "streams       none" in text.splitlines() and " ms of CPU), " in text


def test_streams_that_are_not_exact_are_named_until_they_are(
    binds: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.PUB) as engine,
        Client(url(binds[0])) as client,
    ):
        engine.linger = 0
        endpoint = f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}"
        body: dict[str, Any] = {"instance_id": 7, "model_name": "m"}
        registration = {**body, "endpoint": endpoint, "block_size": 4}
        client.post("/register", json=registration).raise_for_status()
        code, shown = status(capsys, *binds)
        assert code == 1 and shown["streams"]["recovering"] == 1
        assert main(["status", "--interval=0", *binds]) == 1
        assert "worker 7 of m/default: recovering" in capsys.readouterr().out
        for number in count():
            engine.send_multipart([b"", number.to_bytes(8, "big"), STORED])
            code, shown = status(capsys, *binds)
            if shown["index"]["tiers"]["device"]:
                break
        # If batches came before the subscription, their numbers are missing.
        assert code == (0 if shown["streams"]["exact"] else 1)
        assert shown["index"]["blocks"] == 4 and shown["index"]["models"] == 1
        (worker,) = shown["indexer"]["workers"]
        assert worker["instance_id"] == 7
        client.post("/unregister", json=body).raise_for_status()
    assert status(capsys, *binds)[0] == 0


def test_a_certificate_that_an_authority_has_signed_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_client_certificates(tmp_path, "kvd")
    monkeypatch.setenv("KVD_TLS_CERTFILE", f"{tmp_path}/kvd.pem")
    monkeypatch.setenv("KVD_TLS_KEYFILE", f"{tmp_path}/kvd.key")
    port, secured = find_free_port(), find_free_port()
    others = [f"--{face}-bind=off" for face in ("slot-tracker", "selection", "conductor")]
    plain, tls = f"127.0.0.1:{port}", f"tls:127.0.0.1:{secured}"
    files = {name: os.environ[name] for name in ("KVD_TLS_CERTFILE", "KVD_TLS_KEYFILE")}
    with running(tmp_path, port, "serve", f"--indexer-bind={plain},{tls}", *others, environ=files):
        code, shown = status(capsys, f"--indexer-bind={tls}", *others)
        assert (code, shown["faces"]["indexer"]["bind"]) == (0, tls), shown
        make_client_certificates(tmp_path, "kvd")  # of another authority, with the same name
        code, shown = status(capsys, f"--indexer-bind={tls}", *others)
        assert code == 2 and "is not trusted: " in shown["faces"]["indexer"]["error"]
        code, shown = status(capsys, f"--indexer-bind=tls:{plain}", *others)
        assert (code, shown["faces"]["indexer"]["error"]) == (2, "it does not speak TLS")


def test_where_clients_need_certificates_one_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_client_certificates(tmp_path, "kvd", "operator", "stranger")
    one = (tmp_path / "operator.pem").read_bytes() + (tmp_path / "operator.key").read_bytes()
    (tmp_path / "both.pem").write_bytes(one)
    files = {"CERTFILE": "kvd.pem", "KEYFILE": "kvd.key", "CLIENT_CA": "ca.pem"}
    environ = {f"KVD_TLS_{name}": f"{tmp_path}/{file}" for name, file in files.items()}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    flags = [f"--{face}-bind=off" for face in ("slot-tracker", "selection", "conductor")]
    port, secured = find_free_port(), f"tls:127.0.0.1:{find_free_port()}"
    binds = f"--indexer-bind=127.0.0.1:{port},{secured}"
    flags.append(f"--indexer-bind={secured}")

    def shown(*own: str) -> tuple[int, str]:
        code, shown = status(capsys, *flags, *own)
        return code, shown["faces"]["indexer"].get("error", "")

    def pair(name: str) -> list[str]:
        return [f"--client-{kind}file={tmp_path}/{name}.{end}" for kind, end in PAIR.items()]

    with running(tmp_path, port, "serve", *flags[:3], binds, environ=environ):
        assert shown(*pair("operator")) == (0, "")
        assert shown(f"--client-certfile={tmp_path}/both.pem") == (0, "")
        for own in ([], pair("stranger")):
            code, error = shown(*own)
            assert code == 2 and "alert" in error, error
    for own, text in (
        (pair("nobody"), f"cannot use {tmp_path}/nobody.key: No such file"),
        ([f"--client-certfile={tmp_path}/operator.pem"], f"cannot use {tmp_path}/operator.pem: "),
    ):
        assert main(["status", *flags, *own]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["status", *flags, *pair("operator")[1:]])
    assert "--client-keyfile needs --client-certfile" in capsys.readouterr().err


def test_loads_and_publishers_are_shown(
    binds: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    worker = {"model_name": "m", "worker_id": 7, "block_size": 4, "dp_start": 0, "dp_size": 2}
    booked = {"model_name": "m", "request_id": "r", "worker_id": 7, "dp_rank": 1}
    booked |= {"sequence_hashes": [1, 2, 3], "new_isl_tokens": 12}
    publisher = {"instance_id": "store", "type": "vLLM", "endpoint": "tcp://127.0.0.1:9"}
    publisher |= {"model": "k", "block_size": 4, "dp_rank": 0}
    for flag, path, body in (
        (binds[1], "/register", worker),
        (binds[1], "/add", booked),
        (binds[3], "/register", publisher),
    ):
        http_client.post(url(flag) + path, json=body).raise_for_status()
    code, shown = status(capsys, *binds)
    tracker = shown["slot_tracker"]
    assert (tracker["workers"], tracker["ranks"], tracker["requests"]) == (1, 2, 1)
    assert [row["active_decode_blocks"] for row in tracker["loads"]] == [0, 3]
    assert shown["conductor"]["registered"] == 1 and code == 1
    assert main(["status", "--interval=0", *binds]) == 1
    text = capsys.readouterr().out
    assert "12 tokens to prefill, 3 blocks in use; most: worker 7 rank 1, 3\n" in text
    assert "publisher store rank 0 of k: recovering" in text
    left = {"instance_id": "store"}
    http_client.post(url(binds[3]) + "/unregister", json=left)


def test_rates_are_taken_between_two_looks(
    binds: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = Event()

    def ask() -> None:
        with Client(url(binds[0])) as client:
            while not stop.is_set():
                client.post("/query", json={"model_name": "none", "token_ids": TOKENS})

    asking = Thread(target=ask)
    asking.start()
    try:
        assert main(["status", "--json", "--interval=0.2", *binds]) == 0
    finally:
        stop.set()
        asking.join()
    shown = json.loads(capsys.readouterr().out)
    assert shown["faces"]["indexer"]["requests_per_s"] > 5
    assert shown["requests_per_s"] >= shown["faces"]["indexer"]["requests_per_s"]


def test_a_face_that_is_not_there_is_an_exit_code_of_its_own(
    binds: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    unserved = [*binds[:3], f"--conductor-bind=127.0.0.1:{find_free_port()}"]
    code, shown = status(capsys, *unserved)
    assert code == 2 and "refused" in shown["faces"]["conductor"]["error"]
    assert "error" not in shown["faces"]["indexer"] and shown["indexer"]["workers"] == []
    assert main(["status", "--interval=0", "--config", str(tmp_path / "none.toml")]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("face", [*FACES, "gateway"])
def test_a_face_that_answers_in_place_of_another_is_told(
    binds: list[str], capsys: pytest.CaptureFixture[str], face: str
) -> None:
    """Otherwise its lists and sizes would be missing, as if nothing were registered."""
    flag = f"--{face}-bind"
    others = [each for each in binds if not each.startswith(flag)]
    for other in others:
        off = [f"--{name}-bind=off" for name in FACES if name != face]
        code, shown = status(capsys, f"{flag}={other.partition('=')[2]}", *off)
        assert code == 2
        assert shown["faces"][face]["error"] == f"the server at this address is not a kvd {face}"


def test_answers_of_another_version_are_no_crash(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("1 2 3 4")
    commands = (["status", "--interval=0"], ["doctor"], ["explain", str(tmp_path / "prompt")])
    for answer, complaint in (
        (b'{"else": 1}', "has another form"),
        (b'{"findings": [{"else": 1}]}', "has another form"),
        (b'[{"else": 1}]', "has another form"),
        (b"[" * 100_000, "has another form"),
        (b"<html>", "the answer is not JSON: this is no kvd"),
    ):
        with other_version(answer) as flags:
            for command in commands:
                assert main([*command, *flags]) == 2, (command, answer)
                shown = capsys.readouterr()
                assert complaint in shown.out + shown.err


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "it does not speak HTTP: it began with 'SSH-2.0-OpenSSH"),
        (b"", "it closed the connection without an answer; if it serves TLS, write tls:"),
        (b"HTTP/1.1 404 None\r\n\r\n<html>", "the answer is not JSON: this is no kvd"),
        (b'HTTP/1.1 404 None\r\n\r\n{"error": "no page"}', "404, no page; this is no kvd"),
        (b'HTTP/1.1 421 None\r\n\r\n{"error": "no name"}', "421, no name; ask for it by its IP"),
    ],
)
def test_what_answers_in_place_of_kvd_is_told(
    capsys: pytest.CaptureFixture[str], answer: bytes, complaint: str
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = Thread(target=serve)
        thread.start()
        off = [f"--{face}-bind=off" for face in FACES if face != "indexer"]
        for command in (["status", "--interval=0"], ["doctor"]):
            bind = f"--indexer-bind=127.0.0.1:{server.getsockname()[1]}"
            assert main([*command, bind, *off]) == 2
            shown = capsys.readouterr()
            assert complaint in shown.out + shown.err
            assert "start kvd" not in shown.err and "streams" not in shown.out
        thread.join()


def test_where_nobody_listens_the_next_step_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    binds = [f"--{face}-bind=unix:{tmp_path}/{face}" for face in FACES]
    binds[0] = f"--{FACES[0]}-bind=127.0.0.1:{find_free_port()}"
    (tmp_path / "prompt").write_text("1 2 3 4")
    for command in ("status", "doctor", f"explain {tmp_path}/prompt"):
        assert main([*command.split(), *binds]) == 2
        assert "; start kvd (`kvd serve`, " in capsys.readouterr().err


def test_without_a_face_nothing_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    off = [f"--{face}-bind=off" for face in FACES]
    for command in ("status", "doctor"):
        assert main([command, *off]) == 2
        assert capsys.readouterr().err.endswith("every face is off\n")
    monkeypatch.setenv("KVD_GATEWAY_BIND", f"127.0.0.1:{find_free_port()}")
    code, shown = status(capsys, *off)
    assert code == 2 and "refused" in shown["faces"]["gateway"]["error"]


async def test_a_gateway_names_the_engines_that_do_not_serve(
    kvd_process: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    off = [f"--{face}-bind=off" for face in FACES]
    away = f"http://127.0.0.1:{find_free_port()}"
    async with engines(EngineOptions(events=False)) as (engine,):
        for urls, expected in (([engine.url], 0), ([engine.url, away], 1)):
            async with gateway_of(kvd_process, urls, count=1) as client:
                flags = [*off, f"--gateway-bind={client.http.base_url.netloc.decode()}"]
                code, shown = await trio.to_thread.run_sync(partial(status, capsys, *flags))
                assert code == expected and list(shown["faces"]) == ["gateway"]
                found = {each["url"] for each in shown["gateway"]["status"]["upstreams"]}
                assert found == set(urls) and shown["gateway"]["running"] == 0
                asks = ["status", "--interval=0", *flags]
                assert await trio.to_thread.run_sync(main, asks) == expected
                lines = capsys.readouterr().out.splitlines()
                total = f"1 of {len(urls)} serve, 0 requests in progress"
                assert f"engines       {total}" in lines
                assert any(line.startswith(f"  engine {away}: ") for line in lines) == bool(code)


NAMED = "dns:engines.invalid:8000"


@pytest.mark.parametrize(
    ("urls", "line"), [([], "the gateway has no engine"), ([NAMED], f"engines of {NAMED}: ")]
)
async def test_a_gateway_has_no_engine(
    kvd_process: Callable[..., Server],
    capsys: pytest.CaptureFixture[str],
    urls: list[str],
    line: str,
) -> None:
    off = [f"--{face}-bind=off" for face in FACES]
    async with gateway_of(kvd_process, urls, count=0) as client:
        bind = f"--gateway-bind={client.http.base_url.netloc.decode()}"
        asks = ["status", "--interval=0", *off, bind]
        assert await trio.to_thread.run_sync(main, asks) == 1
        assert f"  {line}" in capsys.readouterr().out


def test_beside_a_gateway_faces_that_nobody_has_named_may_be_missing() -> None:
    nowhere = {"indexer": TcpBind("127.0.0.1", find_free_port())}
    asks = FaceClient(b"", None, None, None)
    assert [face.name for face in check(nowhere, 0.0, asks)] == ["indexer"]
    assert check(nowhere, 0.0, asks, {"indexer"}) == []
    gateway = {"gateway": TcpBind("127.0.0.1", find_free_port())}
    unnamed = {"indexer", "gateway"}
    assert [face.name for face in check(nowhere | gateway, 0.0, asks, unnamed)] == ["indexer"]


async def test_a_gateway_alone_is_found_at_its_default_address(
    kvd_process: Callable[..., Server],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Whoever starts `kvd gateway` without an address needs none for `kvd status` either."""
    monkeypatch.setattr(sources, "SERVICE_FILE", tmp_path / "none.toml")
    gone = Binds((TcpBind("127.0.0.1", find_free_port()),))  # others may serve at the defaults here
    moved = {name: gone for name in sources.FACE_BINDS if name != "gateway_bind"}
    changed = [replace(one, default=moved.get(one.name, one.default)) for one in settings.SETTINGS]
    monkeypatch.setattr(sources, "SETTINGS", changed)
    async with (
        engines(EngineOptions(events=False)) as (engine,),
        gateway_of(kvd_process, [engine.url], count=1) as client,
    ):
        url = client.http.base_url
        monkeypatch.setattr(listening, "DEFAULT_GATEWAY_BIND", TcpBind(url.host, url.port or 0))
        code, shown = await trio.to_thread.run_sync(partial(status, capsys))
        assert code == 0 and list(shown["faces"]) == ["gateway"]
        assert await trio.to_thread.run_sync(main, ["doctor"]) == 0
        capsys.readouterr()
        file = tmp_path / "kvd.toml"
        file.touch()  # says that the gateway is off
        code, shown = await trio.to_thread.run_sync(partial(status, capsys, f"--config={file}"))
        assert code == 2 and list(shown["faces"]) == list(FACES)


def test_processes_of_a_gateway_count_as_one() -> None:
    processes = ("kvd", 4), ("gateway-0", 1), ("gateway-1", 2)
    text = "".join(
        f'kvd_gateway_running_requests{{process="{name}"}} {value}\n'
        f'kvd_streams{{process="{name}",state="exact"}} {value}\n'
        for name, value in processes
    )
    merged = {("kvd_gateway_running_requests", ""): 7, ("kvd_streams", 'state="exact"'): 4}
    assert of_one_process(read_samples(text)) == merged
    alone = 'kvd_streams{state="exact"} 3\n'
    assert of_one_process(read_samples(alone)) == read_samples(alone)


def test_names_of_clients_are_no_lines_and_nothing_for_terminals(
    binds: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "m\u2028indexer 127.0.0.1:1\u2029\u202e\ue000"
    publisher = {"instance_id": "a\u2028", "type": "vLLM", "endpoint": "tcp://127.0.0.1:9"}
    publisher |= {"model": name, "block_size": 4, "dp_rank": 0}
    http_client.post(url(binds[3]) + "/register", json=publisher).raise_for_status()
    try:
        assert main(["status", "--interval=0", *binds]) == 1
        printed = capsys.readouterr().out
    finally:
        left = {"instance_id": "a\u2028"}
        http_client.post(url(binds[3]) + "/unregister", json=left)
    assert all(line.isprintable() for line in printed.split("\n"))
    assert r"publisher a\u2028 rank 0 of m\u2028indexer" in printed


def test_the_file_says_where_the_faces_are(
    binds: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "kvd.toml"
    off = '\nslot_tracker_bind = "off"\nselection_bind = "off"\nconductor_bind = "off"\n'
    path.write_text(f'indexer_bind = "{binds[0].partition("=")[2]}"{off}')
    code, shown = status(capsys, "--config", str(path))
    assert code == 0 and list(shown["faces"]) == ["indexer"]


def test_the_file_of_the_service_is_read_where_none_is_named(
    binds: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "kvd.toml"
    monkeypatch.setattr(sources, "SERVICE_FILE", path)
    faces = dict.fromkeys(FACES, "off") | {"indexer": binds[0].partition("=")[2]}
    text = [f'{name.replace("-", "_")}_bind = "{bind}"\n' for name, bind in faces.items()]
    code, shown = status(capsys, *binds)  # the file need not exist
    assert code == 0 and list(shown["faces"]) == list(FACES)
    path.write_text("".join(text))
    code, shown = status(capsys)
    assert code == 0 and list(shown["faces"]) == ["indexer"]
    other = tmp_path / "other.toml"
    other.write_text("".join(text).replace('"off"', f'"{faces["indexer"]}"', 1))
    code, shown = status(capsys, "--config", str(other))
    assert len(shown["faces"]) == 2


def test_who_needs_a_token_is_told_how(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokens, port = tmp_path / "tokens", find_free_port()
    tokens.write_text("a lifecycle 0123456789abcdef\n")
    (tmp_path / "token").write_text("0123456789abcdef")
    bind = f"--indexer-bind=127.0.0.1:{port}"
    off = [f"--{name}-bind=off" for name in FACES if name != "indexer"]
    with running(tmp_path, port, "serve", bind, *off, "--tokens-file", str(tokens)):
        for flags, refusal in (
            ([], "401, a bearer token is needed"),
            ([f"--token-file={tmp_path / 'token'}"], "403, the token lacks the scope"),
        ):
            assert main(["status", "--interval=0", bind, *off, *flags]) == 2
            printed = capsys.readouterr().out
            assert f"/metrics: {refusal}" in printed and "--token-file takes a file" in printed


def test_only_faces_that_are_on_are_asked() -> None:
    plain, secured, local = TcpBind("::1", 1), TcpBind("::1", 2, tls=True), UnixBind("/x")
    values = {"indexer": Binds((secured, plain)), "slot-tracker": "off"}
    values |= {"selection": Binds((local,)), "conductor": Binds((secured,))}
    assert addresses(values) == {"indexer": plain, "selection": local, "conductor": secured}


def test_rates_are_not_negative_after_a_restart() -> None:
    face = FaceStatus("indexer", TcpBind("::1", 1), seconds=2.0)
    face.before, face.after = {("a", ""): 100.0, ("b", ""): 4.0}, {("a", ""): 6.0, ("b", ""): 6.0}
    assert (face.rate("a"), face.rate("b")) == (3.0, 1.0)


def test_samples_are_read() -> None:
    text = '# HELP a b\na 1\nb{x="y z"} 2.5\nb{x="{}"} 3\n\n'
    assert read_samples(text) == {("a", ""): 1, ("b", 'x="y z"'): 2.5, ("b", 'x="{}"'): 3}
