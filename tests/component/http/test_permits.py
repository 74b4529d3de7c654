"""The rules for which clients may ask, and the file that they come from."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kvd.app.api_server import ApiServer
from kvd.config import tokens
from kvd.config.binds import Binds, parse_face_binds
from kvd.config.errors import StartError
from kvd.config.load import load
from kvd.faces.indexer.schemas import DESCRIPTION
from kvd.http.auth import AccessPolicy, Authorizer, Token, is_loopback
from kvd.http.messages import Request, Response
from kvd.http.permits import MAX_TOKEN_BYTES, VERDICTS, PermitRules
from kvd.http.routes import Route, Scope
from kvd.platform.activation import PassedSockets
from tests.support.serving import HASTY, SOON, Running, serving

SECRET = b"0123456789abcdef"
GATEWAY = Token("gateway", Scope.READ | Scope.LIFECYCLE, SECRET)
HELD = AccessPolicy((GATEWAY,))


def judged(rules: PermitRules, shown: bytes, scope: Scope = Scope.READ) -> str:
    headers = [(b"authorization", b"Bearer " + shown)]
    return VERDICTS[rules.judge(headers, scope, False)]


# ---- rules


def test_a_token_is_good_for_its_scopes_alone() -> None:
    rules = Authorizer(HELD).rules
    verdicts = {scope: judged(rules, SECRET, scope) for scope in Scope}
    assert verdicts == {
        Scope.READ: "granted",
        Scope.LIFECYCLE: "granted",
        Scope.ADMIN: "scope",
        Scope.GENERATE: "scope",
    }
    assert judged(rules, SECRET, Scope.ANY) == "granted"
    assert judged(rules, b"nonsense", Scope.OPEN) == "granted"


@given(
    held=st.lists(st.binary(min_size=1, max_size=MAX_TOKEN_BYTES), min_size=1, unique=True),
    shown=st.from_regex(rb"[A-Za-z0-9._~+/=-]{1,140}", fullmatch=True),
    pick=st.integers(0, 100),
)
def test_what_is_not_held_is_unknown(held: list[bytes], shown: bytes, pick: int) -> None:
    rules = PermitRules()
    rules.replace([(each, 1) for each in held], [], [])
    assert judged(rules, shown) == ("granted" if shown in held else "unknown")
    rules.replace([(shown[:MAX_TOKEN_BYTES], 1), *((each, 2) for each in held)], [], [])
    if shown not in held:
        assert judged(rules, shown[:MAX_TOKEN_BYTES]) == "granted"
    near = bytearray(shown[:MAX_TOKEN_BYTES])
    near[pick % len(near)] ^= 1
    if bytes(near) not in held:
        assert judged(rules, bytes(near)) != "granted"


def test_tokens_beyond_the_bound_are_a_mistake() -> None:
    for size in (0, MAX_TOKEN_BYTES + 1):
        with pytest.raises(ValueError, match="1 to 128"):
            PermitRules().replace([(b"x" * size, 1)], [], [])


def test_a_route_that_changes_something_says_its_scope() -> None:
    def handler(request: Request) -> Response:
        return Response(200, b"")

    assert Route("GET", "/a", handler).scope is Scope.READ
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        with pytest.raises(ValueError, match=f"{method} /a states no scope"):
            Route(method, "/a", handler)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"gateway read {SECRET.decode()}\n")
    config = load({"tokens_file": path}, {})
    assert config.policy.tokens == (Token("gateway", Scope.READ, SECRET),)
    assert SECRET.decode() not in repr(config) + str(config.values)


# ---- the file


def read(folder: Path, text: str | bytes) -> tuple[Token, ...]:
    path = folder / "tokens"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return tokens.read(path)


def test_a_file_has_names_scopes_and_tokens(tmp_path: Path) -> None:
    text = "# name scopes token\n\ngateway  read,lifecycle\t0123456789abcdef # first\n"
    text += "operator admin,read ABC-._~+/0123456789==\n"
    assert read(tmp_path, text) == (
        GATEWAY,
        Token("operator", Scope.ADMIN | Scope.READ, b"ABC-._~+/0123456789=="),
    )
    # Editors of Windows begin a file with a byte order mark.
    assert read(tmp_path, "\ufeff" + text[text.index("gateway") :]) == read(tmp_path, text)


GOOD = "a read 0123456789abcdef\n"
BAD = {
    "nothing": ("", "0 tokens"),
    "a remark": ("# a read 0123456789abcdef", "0 tokens"),
    "no token": ("a read", "line 1: expected"),
    "a fourth word": (GOOD.strip() + " x", "line 1: expected"),
    "a bad name": ("a/b read 0123456789abcdef", "line 1: expected"),
    "a bad scope": (GOOD + "b raed 0123456789abcdef", "line 2, b: a scope must be"),
    "an empty scope": ("b read, 0123456789abcdef", "line 1, b: a scope must be"),
    "a short token": ("a read 0123456789abcde", "line 1, a: a token must"),
    "a long token": (f"a read {'x' * 129}", "line 1, a: a token must"),
    "a bad character": ('a read 0123456789abcde"', "line 1, a: a token must"),
    "= in the midst": ("a read 01234567=89abcdef", "line 1, a: a token must"),
    "a name twice": (GOOD + "a read 0123456789abcdeg", "a name twice"),
    "a token twice": (GOOD + "b admin 0123456789abcdef", "a token twice"),
    "too many": ("".join(f"a{n} read {n:016}\n" for n in range(65)), "65 tokens"),
    "no text": (b"\xff", "not UTF-8"),
    "too long": ("#" * 70_000, "longer than"),
}


@pytest.mark.parametrize(("text", "complaint"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_without_its_tokens(
    tmp_path: Path, text: str | bytes, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        read(tmp_path, text)
    assert "0123" not in str(caught.value)
    with pytest.raises(StartError, match=complaint):
        load({"tokens_file": tmp_path / "tokens"}, {})


def test_systemd_passes_tokens_on(tmp_path: Path) -> None:
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert load({}, environ).policy.tokens == ()
    (tmp_path / "kvd_tokens").write_text(GOOD)
    assert [each.name for each in load({}, environ).policy.tokens] == ["a"]
    (tmp_path / "other").write_text(GOOD.replace("a", "b", 1))
    other = load({"tokens_file": tmp_path / "other"}, environ)
    assert [each.name for each in other.policy.tokens] == ["b"]


def test_tokens_that_systemd_keeps_to_itself_end_the_start(tmp_path: Path) -> None:
    """An unreadable file of tokens must not let everybody in."""
    (tmp_path / "kvd_tokens").symlink_to("kvd_tokens")
    with pytest.raises(StartError, match=r"cannot read .*kvd_tokens"):
        load({}, {"CREDENTIALS_DIRECTORY": str(tmp_path)})


# ---- addresses beyond this machine


async def opened(
    bind: str, folder: Path, passed: PassedSockets | None = None, **values: object
) -> list[str]:
    """Opens a face and closes it again; returns the addresses that it listened on."""
    config = load({"indexer_bind": parse_face_binds(bind), **values}, {})
    assert isinstance(config.indexer_bind, Binds)
    face = ApiServer("indexer", "kvd", config, DESCRIPTION)
    with ExitStack() as stack:
        await face.open(stack, config, config.indexer_bind, passed or PassedSockets())
        return face.addresses()


EXPOSED = ["0.0.0.0:0", "[::]:0", "127.0.0.1:0,0.0.0.0:0", "tls:0.0.0.0:0"]


@pytest.mark.parametrize("bind", EXPOSED)
async def test_an_exposed_address_needs_somebody_to_ask(
    bind: str, tmp_path: Path, certificate: Path
) -> None:
    files: dict[str, object] = {}
    if "tls:" in bind:
        files = {"tls_certfile": certificate / "cert.pem", "tls_keyfile": certificate / "key.pem"}
    with pytest.raises(StartError, match=r"any client could use the indexer at ") as caught:
        await opened(bind, tmp_path, **files)
    assert "\n" not in str(caught.value)
    assert await opened(bind, tmp_path, **files, allow_unauthenticated=True)
    (tmp_path / "tokens").write_text(GOOD)
    assert await opened(bind, tmp_path, **files, tokens_file=tmp_path / "tokens")
    files |= {"tls_certfile": certificate / "cert.pem", "tls_keyfile": certificate / "key.pem"}
    files["tls_client_ca"] = certificate / "cert.pem"
    if bind.startswith("tls:"):
        assert await opened(bind, tmp_path, **files)
    else:  # only the other address demands a client certificate
        with pytest.raises(StartError, match="any client could"):
            await opened(f"{bind},tls:127.0.0.1:0", tmp_path, **files)


async def test_this_machine_alone_needs_nobody(tmp_path: Path) -> None:
    for bind in ("127.0.0.1:0", "127.9.9.9:0", "[::1]:0", "localhost:0", f"unix:{tmp_path}/s"):
        assert await opened(bind, tmp_path)


async def test_a_passed_socket_is_looked_at_as_well(tmp_path: Path) -> None:
    for host, good in (("127.0.0.1", True), ("0.0.0.0", False)):
        sock = socket.create_server((host, 0))
        passed = PassedSockets([("indexer", sock)])
        if good:
            assert await opened("127.0.0.1:0", tmp_path, passed)
            continue
        with pytest.raises(StartError, match=r"any client could use the \S+ at 0\.0\.0\.0:"):
            await opened("127.0.0.1:0", tmp_path, passed)


async def test_named_sockets_stand_for_addresses_of_their_kind(
    tmp_path: Path, certificate: Path
) -> None:
    files: dict[str, object] = {
        "tls_certfile": certificate / "cert.pem",
        "tls_keyfile": certificate / "key.pem",
    }
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    where = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    names = ["indexer", "indexer", "indexer-tls"]
    passed = PassedSockets(zip(names, sockets, strict=True))
    bind = f"127.0.0.1:0,unix:{tmp_path}/s,tls:127.0.0.1:0"
    assert await opened(bind, tmp_path, passed, **files) == [*where[:2], f"tls:{where[2]}"]
    sock = socket.create_server(("127.0.0.1", 0))
    at = f"127.0.0.1:{sock.getsockname()[1]}"
    passed = PassedSockets([("kvd.socket", sock)])
    assert await opened(f"unix:{tmp_path}/s,{at}", tmp_path, passed) == [f"unix:{tmp_path}/s", at]
    assert not passed.left()


def test_loopback() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "::1%lo"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "::ffff:0:0"):
        assert not is_loopback(host), host


# ---- slow and endless requests, with tokens


async def test_a_slow_head_is_refused_as_ever() -> None:
    async with serving(policy=HELD) as running, running.client() as slow:
        await slow.request("GET", "/describe", authorization=f"Bearer {SECRET.decode()}")
        running.front.set_limits(HASTY)
        await slow.send(b"GET /describe HTTP/1.1\r\nauthorization: Bea")
        assert (await slow.read_reply()).status == 408
        assert running.front.stats.head_timeouts == 1


async def test_slow_bodies_are_refused_as_ever() -> None:
    async with serving(policy=HELD, body_s=SOON) as running:
        for path in ("/query", "/app/query"):
            for token, status in ((SECRET, 408), (SECRET + b"x", 401), (b"", 401)):
                async with running.client() as slow:
                    head = b"POST %b HTTP/1.1\r\ncontent-length: 9\r\n" % path.encode()
                    shown = b"authorization: Bearer %b\r\n" % token if token else b""
                    await slow.send(head + shown + b"\r\n{")
                    assert (await slow.read_reply()).status == status
        assert running.front.stats.body_timeouts == 2


async def test_refusals_are_observed(tmp_path: Path) -> None:
    async with serving(policy=HELD) as running, running.client() as client:
        assert (await client.request("GET", "/describe")).status == 401
        assert running.observed == [("GET", "/describe", 401)]


async def test_requests_in_any_pieces_are_judged_alike() -> None:
    """Requests that come whole are judged on the fast path, others by the connection's task."""
    chance = random.Random(3)
    async with serving(policy=HELD) as running:
        for token, status in ((SECRET, 200), (SECRET[:-1], 401)):
            head = b"GET /describe HTTP/1.1\r\nhost: x.example\r\nauthorization: Bearer %b\r\n\r\n"
            await _whole_and_in_pieces(running, head % token, status, chance)


async def _whole_and_in_pieces(
    running: Running, data: bytes, status: int, chance: random.Random
) -> None:
    for cuts in range(8):
        async with running.client() as client:
            points = sorted(chance.sample(range(1, len(data)), cuts))
            for start, end in zip([0, *points], [*points, len(data)], strict=True):
                await client.send(data[start:end])
                await trio.lowlevel.checkpoint()
            assert (await client.read_reply()).status == status
