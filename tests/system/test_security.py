"""Every face lets in only permitted requests: on TCP, TLS and a Unix socket."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import ssl
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvd.cli.main import main
from kvd.http.routes import Route, Scope
from tests.support import http_client
from tests.support.all_routes import all_routes
from tests.support.asking import (
    FACES,
    Faces,
    bearer,
    counted,
    make_client_certificates,
    serving_faces,
)
from tests.support.budget import scaled
from tests.support.commands import run_command
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.reloading import daemon
from tests.support.running import running, running_kvd

READ, LIFECYCLE, ADMIN = "reader-0123456789", "booker-0123456789", "keeper-0123456789"
SECRETS = {Scope.READ: READ, Scope.LIFECYCLE: LIFECYCLE, Scope.ADMIN: ADMIN}
TOKENS = f"""
# name   scopes      token
reader   read        {READ}
booker   lifecycle   {LIFECYCLE}   # a gateway
keeper   admin       {ADMIN}
"""
ROUTES = all_routes()
ALL = [(face, route) for face in FACES for route in ROUTES[face]]
MUTATED = scaled(200)  # requests, over all faces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faces")


@pytest.fixture(scope="module")
def faces(folder: Path, certificate: Path) -> Iterator[Faces]:
    """A kvd with every face, which asks for tokens."""
    (folder / "tokens").write_text(TOKENS)
    lines = [f'tokens_file = "{folder}/tokens"', 'allowed_origins = ["https://a.example"]']
    environ = {"DYN_KV_INDEXER_TEST_ENDPOINTS": "1"}
    with serving_faces(folder, certificate, *lines, **environ) as served:
        yield served
        for secret in SECRETS.values():
            assert secret not in served.server.stderr


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Faces]:
    """A kvd with every face and without tokens, for this machine alone."""
    lines = ['allowed_hosts = ["Kvd.example"]', 'allowed_origins = ["https://a.example", "null"]']
    with serving_faces(tmp_path_factory.mktemp("public"), certificate, *lines) as served:
        yield served


def path_of(route: Route) -> str:
    return re.sub(r"\{\w+\}", "1", route.path)


def body_of(route: Route) -> bytes | None:
    return None if route.method == "GET" else b"{}"


def refusals(faces: Faces, face: str) -> dict[str, int]:
    return counted(faces.ask(faces.plain(face), "/metrics", bearer(READ)).body)


# ---- tokens


@pytest.mark.parametrize(
    ("face", "route"), ALL, ids=[f"{face} {route.method} {route.path}" for face, route in ALL]
)
def test_a_route_takes_a_token_of_its_scope(faces: Faces, face: str, route: Route) -> None:
    asked = {"method": route.method, "body": body_of(route)}
    address = faces.plain(face)
    reply = faces.ask(address, path_of(route), **asked)
    if route.scope is Scope.OPEN:
        assert reply.status in (200, 503)
        return
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["connection"] == "close"
    assert reply.error == "a bearer token is needed"
    for scope, secret in SECRETS.items():
        reply = faces.ask(address, path_of(route), bearer(secret), **asked)
        if scope is route.scope:
            assert reply.status not in (401, 403, 421), reply.body
        else:
            assert reply.status == 403
            lacking = route.scope.name.lower()
            assert reply.error == f"the token lacks the scope of this route: {lacking}"
            assert "www-authenticate" not in reply.headers
    reply = faces.ask(address, path_of(route), bearer(READ + "0"), **asked)
    assert (reply.status, reply.error) == (401, "unknown token")


def test_every_face_and_address_asks_for_tokens(faces: Faces) -> None:
    for address in faces.each():
        for path in ("/metrics", "/dump", "/nowhere", "/workers/1/2"):  # with and without routes
            assert faces.ask(address, path).status == 401, (address, path)
        assert faces.ask(address, "/nowhere", bearer(ADMIN)).status == 404
        assert faces.ask(address, "/metrics", bearer(READ)).status == 200
        assert faces.ask(address, "/metrics", bearer(READ), method="HEAD").status == 200
        assert faces.ask(address, "/metrics", method="HEAD").status == 401
        assert faces.ask(address, "/health", method="OPTIONS").status == 401
        assert faces.ask(address, "/health").status == 200
        assert faces.ask(address, "/health", host="evil.example").status == 200
        assert faces.ask(address, "/metrics", bearer(READ), host="any.example").status == 200


def test_a_probe_learns_nothing_of_workers(faces: Faces, public: Faces) -> None:
    for address in faces.addresses["selection"]:
        for headers, listed in (((), False), ((bearer(ADMIN),), False), ((bearer(READ),), True)):
            reply = faces.ask(address, "/ready", *headers)
            assert ("workers" in json.loads(reply.body)) is listed, (address, headers)
    for address in public.addresses["selection"]:
        for host in ("localhost", "evil.example"):
            reply = public.ask(address, "/ready", host=host)
            known = host == "localhost" or address.startswith("unix:")
            assert ("workers" in json.loads(reply.body)) is known, (address, host)


MALFORMED = {
    "no scheme": READ,
    "no token": "Bearer",
    "blanks": "Bearer   ",
    "another scheme": f"Basic {READ}",
    "two tokens": f"Bearer {READ} {READ}",
    "a list": f"Bearer {READ}, Bearer {ADMIN}",
    "a parameter": f'Bearer token="{READ}"',
    "a tab": f"Bearer\t{READ}",
    "no ASCII": f"Bearer {READ}é",
    "glued": f"Bearer{READ}",
}
UNKNOWN = {
    "shorter": READ[:-1],
    "longer": READ + "x",
    "another case": READ.upper(),
    "padded": READ + "=",
    "of the greatest length": "x" * 128,
    "beyond it": READ + "x" * 3000,
}


def test_other_forms_and_unknown_tokens_are_refused(faces: Faces) -> None:
    for face in FACES:
        before = refusals(faces, face)
        tried = faces.addresses[face] if face == "indexer" else [faces.plain(face)]
        for address in tried:
            for name, value in MALFORMED.items():
                reply = faces.ask(address, "/metrics", ("Authorization", value))
                assert (name, reply.status) == (name, 401)
                assert reply.error.startswith("expected one header"), name
            for name, token in UNKNOWN.items():
                reply = faces.ask(address, "/metrics", bearer(token))
                assert (name, reply.status, reply.error) == (name, 401, "unknown token")
            twice = faces.ask(address, "/metrics", bearer(READ), bearer(READ))
            assert (twice.status, twice.headers["www-authenticate"]) == (401, "Bearer")
            for value in (f"bearer {READ}", f"BEARER   {READ}  "):
                reply = faces.ask(address, "/metrics", ("aUTHORIZATION", value))
                assert reply.status == 200, value
        after = refusals(faces, face)
        addresses = len(tried)
        assert after["malformed"] - before["malformed"] == (len(MALFORMED) + 1) * addresses
        assert after["unknown"] - before["unknown"] == len(UNKNOWN) * addresses


BIG = 8 * 1024 * 1024
HEADS = {
    "announced": f"content-length: {BIG}\r\n",
    "expecting": f"content-length: {BIG}\r\nexpect: 100-continue\r\n",
    "chunked": "transfer-encoding: chunked\r\n",
}
PATHS = {"hot": "/query", "waiting": "/select", "cold": "/register", "none": "/nowhere"}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_no_body_is_waited_for_that_nobody_may_send(faces: Faces, head: str) -> None:
    """The refusal comes right after the head, without a `100 Continue` before it."""
    for address in faces.each():
        for path in PATHS.values():
            with closing(faces.connect(address)) as sock:
                text = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{head}\r\n"
                sock.sendall(text.encode())
                answer = sock.recv(65536)
                assert answer.startswith(b"HTTP/1.1 401 "), (address, path)


def test_an_unwanted_body_is_not_kept(faces: Faces) -> None:
    """kvd reads and discards what a refused client goes on sending; it costs no memory."""
    statm = Path(f"/proc/{faces.server.process.pid}/statm")
    before = int(statm.read_text().split()[1])
    head = f"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: {BIG}\r\n\r\n".encode()

    def send(address: str) -> bytes:
        return faces.exchange(address, head + b"x" * BIG)

    with ThreadPoolExecutor(4) as pool:
        network = [each for each in faces.each() if not each.startswith("unix:")]
        replies = list(pool.map(send, network))
    assert all(reply.startswith(b"HTTP/1.1 401 ") for reply in replies)
    pages = BIG // os.sysconf("SC_PAGE_SIZE")
    assert int(statm.read_text().split()[1]) - before < pages  # less than one of eight bodies


def test_a_connection_ends_with_the_first_refusal(faces: Faces) -> None:
    good = f"GET /metrics HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {READ}\r\n\r\n"
    bad = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for address in faces.each():
        with closing(faces.connect(address)) as sock:  # half-closed, /metrics would not be sent
            sock.sendall((good + bad + good).encode())
            answers = b"".join(iter(partial(sock.recv, 65536), b""))
        statuses = re.findall(rb"^HTTP/1.1 (\d+)", answers, re.MULTILINE)
        assert statuses == [b"200", b"401"], address


@pytest.mark.parametrize("hot", [True, False])
def test_each_request_of_a_connection_is_looked_at(faces: Faces, hot: bool) -> None:
    """Also where the fast path has served the connection before."""
    path, secret = ("/free", LIFECYCLE) if hot else ("/register", ADMIN)
    with closing(faces.connect(faces.plain("slot-tracker"))) as sock:
        for _ in range(3):
            text = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n"
            text += "content-type: application/json\r\n"
            sock.sendall(f"{text}authorization: Bearer {secret}\r\n\r\n{{}}".encode())
            assert sock.recv(65536).split()[1] == b"422"
        sock.sendall(f"{text}\r\n{{}}".encode())
        assert sock.recv(65536).split()[1] == b"401"


def test_tokens_change_while_it_runs(
    tmp_path: Path, certificate: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, old, new = tmp_path / "tokens", "old-0123456789abc", "new-0123456789abc"
    tokens.write_text(f"old read {old}\n")
    with serving_faces(tmp_path, certificate, f'tokens_file = "{tokens}"') as served:
        server = served.server

        def statuses() -> set[tuple[int, int]]:
            """Returns all pairs of statuses that the old and the new token get, on any address."""
            return {
                tuple(served.ask(each, "/metrics", bearer(token)).status for token in (old, new))
                for each in served.each()
            }

        def reload(text: str, line: str) -> None:
            tokens.write_text(text)
            seen = len(server.stderr)
            server.process.send_signal(signal.SIGHUP)
            server.wait_until(lambda: line in server.stderr[seen:], line)

        assert statuses() == {(200, 401)}
        kept = served.connect(served.plain("indexer"))
        request = f"GET /peers HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {old}\r\n\r\n"
        with closing(kept):
            kept.sendall(request.encode())
            assert kept.recv(65536).startswith(b"HTTP/1.1 200 ")
            reload(f"old read {old}\nnew read {new}\n", "event=reloaded changed=tokens_file")
            assert statuses() == {(200, 200)}
            for bad in ("", f"old read {old}\nnew raed {new}\n", f"new read {new} {new}\n"):
                reload(bad, "event=reload_refused")
                assert statuses() == {(200, 200)}
            reload(f"new read {new}\n", "event=reloaded changed=tokens_file")
            assert statuses() == {(401, 200)}
            kept.sendall(request.encode())
            assert kept.recv(65536).startswith(b"HTTP/1.1 401 ")
        assert main(["config", "show", "--config", str(tmp_path / "kvd.toml")]) == 0
        for secret in (old, new):
            assert secret not in server.stderr + "".join(capsys.readouterr())


def test_a_reload_leaves_no_address_open(tmp_path: Path) -> None:
    tokens, config = tmp_path / "tokens", tmp_path / "kvd.toml"
    tokens.write_text(TOKENS)
    others = "".join(f'{name}_bind = "off"\n' for name in ("slot_tracker", "selection"))
    port = find_free_port()
    settings = f'indexer_bind = "0.0.0.0:{port}"\nconductor_bind = "off"\n{others}'
    config.write_text(f'{settings}tokens_file = "{tokens}"\n')
    with running(tmp_path, port, "serve", "--config", str(config)) as server:
        config.write_text(settings)
        server.process.send_signal(signal.SIGHUP)
        line = 'event=reload_refused reason="any client could use the '
        server.wait_logged(line)
        assert http_client.get(f"{server.base_url}/metrics").status_code == 401


def test_replicas_beyond_this_machine_hear_nothing_unasked(tmp_path: Path) -> None:
    flags = ["--replica-sync-port", str(find_free_port()), "--replica-sync-host", "0.0.0.0"]
    ended = run_command("slot-tracker", "--port", "0", *flags)
    assert ended.code == os.EX_CONFIG
    assert "any client could subscribe to the requests" in ended.stderr
    assert ended.stderr.count("\n") == 1
    with running_kvd(tmp_path, *flags, "--allow-unauthenticated", face="slot-tracker"):
        pass


def test_a_peer_is_shown_its_token(kvd_process: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKENS)
    peer = kvd_process("--tokens-file", str(tmp_path / "tokens"))
    outcomes = {}
    for name, secret in (("keeper", ADMIN), ("reader", READ), ("nobody", "")):
        environ = {"KVD_RECOVERY_DELAY_S": "0"}
        if secret:
            (tmp_path / name).write_text(f"{secret}\n")
            environ["KVD_PEERS_TOKEN_FILE"] = str(tmp_path / name)
        server = kvd_process("--peers", peer.base_url, environ=environ)
        server.wait_until(lambda server=server: "event=ready" in server.stderr, "ready")
        text = http_client.get(f"{server.base_url}/metrics").text
        (outcomes[name],) = re.findall(r'attempts_total\{outcome="(\w+)"\} 1', text)
        assert not secret or secret not in server.stderr
    assert outcomes == {"keeper": "empty", "reader": "unreachable", "nobody": "unreachable"}


# ---- browsers

LOOPBACK_HOSTS = {
    None: True,
    "localhost": True,
    "LOCALHOST:8090": True,
    "127.0.0.1": True,
    "127.0.0.1:8090": True,
    "10.1.2.3": True,
    "[::1]:8090": True,
    "kvd.example": True,
    "KVD.EXAMPLE:1": True,
    "": False,
    "evil.example": False,
    "evil.example:8090": False,
    "localhost.evil.example": False,
    "evil.localhost": False,
    "127.0.0.1.evil.example": False,
    "kvd.example.evil": False,
    "1.2.3.4a": False,
}
NO_HOSTS = "127.0.0.1, evil.example", "evil.example@127.0.0.1", ":8090", ".", "a..b", "x" * 64


def test_without_tokens_loopback_addresses_know_their_names(public: Faces) -> None:
    for address in public.each():
        for host, good in LOOPBACK_HOSTS.items():
            reply = public.ask(address, "/metrics", host=host)
            wanted = 200 if good or address.startswith("unix:") else 421
            assert (address, host, reply.status) == (address, host, wanted)
        for host in NO_HOSTS:
            assert public.ask(address, "/metrics", host=host).status == 400
            assert public.ask(address, "/health", host=host).status == 400
        hosts = ("Host", "localhost"), ("Host", "localhost")
        assert public.ask(address, "/metrics", *hosts, host=None).status == 400


ORIGINS = {
    "https://a.example": True,
    "null": True,
    "https://b.example": False,
    "http://a.example": False,
    "https://a.example:8443": False,
    "https://a.example.evil": False,
    "http://127.0.0.1:8090": False,
    "": False,
}


def test_only_listed_pages_may_have_browsers_ask(public: Faces, faces: Faces) -> None:
    for address in public.each():
        for origin, good in ORIGINS.items():
            for path, method in (("/metrics", "GET"), ("/query", "POST")):
                body = b"{}" if method == "POST" else None
                asked = public.ask(address, path, ("Origin", origin), method=method, body=body)
                assert (asked.status == 403) is not good, (address, origin, path)
        twice = ("Origin", "https://a.example"), ("Origin", "https://a.example")
        assert public.ask(address, "/metrics", *twice).status == 403
    for address in faces.each():
        for origin, status in (("https://a.example", 200), ("https://b.example", 403)):
            asked = faces.ask(address, "/metrics", bearer(READ), ("Origin", origin))
            assert asked.status == status


def test_what_browsers_may_not_is_counted(public: Faces) -> None:
    for face in FACES:
        address = public.plain(face)
        before = counted(public.ask(address, "/metrics").body)
        public.ask(address, "/metrics", host="evil.example")
        public.ask(address, "/metrics", ("Origin", "https://b.example"))
        after = counted(public.ask(address, "/metrics").body)
        assert (after["host"], after["origin"]) == (before["host"] + 1, before["origin"] + 1)


# ---- certificates of clients


def test_a_client_without_a_good_certificate_gets_no_connection(
    tmp_path: Path, certificate: Path
) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((certificate / name).read_bytes())
    make_client_certificates(tmp_path, "client", "stranger")

    def trust(name: str | None, version: ssl.TLSVersion) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        context.maximum_version = version
        if name is not None:
            context.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        return context

    with serving_faces(tmp_path, tmp_path, client_ca=True) as served:
        before = served.descriptors()
        refused = 0
        for face in FACES:
            (address,) = (each for each in served.addresses[face] if each.startswith("tls:"))
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                for name in (None, "stranger"):
                    with (
                        pytest.raises(OSError),
                        closing(served.connect(address, trust(name, version))) as sock,
                    ):  # with TLS 1.3 the handshake seems to succeed
                        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                        if not sock.recv(100):
                            raise ConnectionError
                    refused += 1
                with closing(served.connect(address, trust("client", version))) as sock:
                    sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: any.example\r\n\r\n")
                    assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
            assert served.ask(served.plain(face), "/health").status == 200
        texts = [served.ask(served.plain(face), "/metrics").body.decode() for face in FACES]
        failed = re.findall(r"^kvd_https_handshakes_failed_total (\d+)", "".join(texts), re.M)
        assert sum(map(int, failed)) == refused
        served.until(before)


# ---- whatever else comes

GARBAGE = {
    "nothing": b"",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 50,
    "h2c": b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABk\r\nconnection: upgrade, http2-settings\r\n\r\n",
    "h2c, broken": b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nupgrade: h2c\r\n"
    b"http2-settings: !!!!\r\nconnection: upgrade\r\n\r\n",
    "websocket": b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n"
    b"connection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: x\r\n\r\n",
    "30 requests": b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 30,
    "a long head": b"GET /metrics HTTP/1.1\r\na: " + b"x" * 20_000,
    "a long token": b"GET /metrics HTTP/1.1\r\nauthorization: Bearer " + b"x" * 20_000,
    "length and coding": b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "half a head": b"GET /metrics HTTP/1.1\r\nauthorization: Bea",
    "half a body": b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n{",
}


def test_garbage_opens_nothing_and_leaves_nothing(faces: Faces) -> None:
    before = faces.descriptors()
    for address in faces.each():
        for name, data in GARBAGE.items():
            answer = faces.exchange(address, data)
            statuses = set(re.findall(rb"^HTTP/1.1 (\d)", answer, re.MULTILINE))
            assert statuses <= {b"4"}, (address, name, answer[:200])
        if address.startswith("tls:"):
            for data in GARBAGE.values():  # bytes without TLS
                assert b"HTTP/1.1 2" not in faces.exchange(address.removeprefix("tls:"), data)
    faces.until(before)
    for address in faces.each():
        assert faces.ask(address, "/metrics", bearer(READ)).status == 200


def seeds(face: str) -> list[bytes]:
    """Returns requests for each route, with a good token and with a bad one."""
    found = []
    for route in ROUTES[face]:
        secret = SECRETS.get(route.scope, READ)
        for token in (secret, secret[:-1] + "x"):
            body = body_of(route) or b""
            head = f"{route.method} {path_of(route)} HTTP/1.1\r\nhost: localhost\r\n"
            head += f"authorization: Bearer {token}\r\norigin: https://a.example\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            found.append(head.encode() + body)
    return found


def mutate(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed))
        piece = chance.choice((b"\r\n", b"\n", b"\0", b":", b" ", b"\xff", b"9", changed[:40]))
        action = chance.randrange(4)
        if action == 0:
            changed[at] = chance.randrange(256)
        elif action == 1:
            del changed[at : at + chance.randint(1, 20)]
        else:
            changed[at:at] = piece * chance.choice((1, 1, 2, 50))
        changed = changed or bytearray(b"\r\n")
    return bytes(changed)


def test_mutated_requests_hurt_nobody_and_open_nothing(faces: Faces) -> None:
    """No request without a whole, known token is served, except for a few public paths."""
    chance = random.Random(21)
    before = faces.descriptors()
    known = [secret.encode() for secret in SECRETS.values()]

    def attack(job: tuple[str, bytes]) -> bytes:
        address, data = job
        answer = faces.exchange(address, data)
        if b"HTTP/1.1 2" in answer:
            public = b"/health", b"/ready", b"/ui"  # the page's files hold no data
            assert any(map(data.__contains__, (*public, *known)))
        return answer

    jobs = []
    for number in range(MUTATED):
        face = FACES[number % len(FACES)]
        address = faces.addresses[face][chance.choice((0, 0, 0, 1))]
        if number % 20 == 0:  # few over TLS, as handshakes take long
            address = faces.addresses[face][2]
        data = b"".join(chance.choices(seeds(face), k=chance.randint(1, 3)))
        jobs.append((address, mutate(chance, data)))
    with ThreadPoolExecutor(8) as pool:
        answered = sum(map(bool, pool.map(attack, jobs)))
    assert answered > MUTATED // 2
    faces.until(before)
    assert "level=error" not in faces.server.stderr
    for address in faces.each():
        assert faces.ask(address, "/health").status == 200


# ---- files of secrets


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o701)
        yield Path(name)


def test_secrets_that_everybody_may_read_are_warned_of(
    open_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, peer = open_folder / "tokens", open_folder / "peer"
    tokens.write_text("operator read,admin 0123456789abcdef\n")
    peer.write_text("0123456789abcdef")
    tokens.chmod(0o604)
    peer.chmod(0o660)
    text = f'tokens_file = "{tokens}"\npeers_token_file = "{peer}"\n'
    with daemon(open_folder, text=text) as kvd:
        warned = f"event=secrets_exposed files={tokens}\n"
        kvd.server.wait_logged(warned)
        check = ["config", "check", "--config", str(kvd.path)]
        assert main(check) == 0
        printed = capsys.readouterr()
        assert printed.out == "ok\n"
        assert printed.err == f"kvd: warning: every user can read the secret file {tokens}\n"
        kvd.server.process.send_signal(signal.SIGHUP)
        kvd.server.wait_until(lambda: kvd.server.stderr.count(warned) == 2, "warned again")
        tokens.chmod(0o600)
        assert main(check) == 0 and not capsys.readouterr().err
        tokens.chmod(0o604)
        open_folder.chmod(0o700)  # no other user can enter
        assert main(check) == 0 and not capsys.readouterr().err
