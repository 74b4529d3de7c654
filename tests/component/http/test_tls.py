"""The front's TLS: handshakes, their terms, and how a stream ends.

The fixture `layers` runs the front's other tests with TLS as well.
"""

from __future__ import annotations

import ctypes
import socket
import ssl
from contextlib import ExitStack, suppress
from ctypes.util import find_library
from pathlib import Path

import pytest
import trio

from kvd.http.certificates import TlsCredentials, load_credentials
from kvd.http.options import TlsFiles
from kvd.http.tls import TlsServer
from tests.support.asking import make_client_certificates
from tests.support.descriptors import open_descriptors
from tests.support.serving import (
    SOON,
    TEST_SECONDS,
    TLS,
    Client,
    Running,
    eventually,
    serving,
)

HEALTH = b"GET /health HTTP/1.1\r\nhost: kvd\r\n\r\n"


@pytest.fixture(autouse=True)
def tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TLS, "certificates", certificate)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with two authorities, and a client certificate by each."""
    folder = tmp_path_factory.mktemp("clients")
    make_client_certificates(folder, "client", "stranger")
    authorities = [(folder / f"{name}.pem").read_bytes() for name in ("ca", "otherca")]
    (folder / "both.pem").write_bytes(b"".join(authorities))
    return folder


async def _check_alive(running: Running) -> None:
    """Asks until it is answered: on a busy machine a deadline may pass during a handshake."""
    while True:
        with suppress(trio.BrokenResourceError):
            async with running.client() as client:
                assert (await client.request("GET", "/health")).status == 200
                return


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\na: " + b"x" * 70_000 + b"\r\n\r\n",
        b"\0" * 100,
        b"GET /big HTTP/1.1\r\nhost: kvd\r\n\r\n" * 30,
        b"POST /echo HTTP/1.1\r\nhost: kvd\r\ncontent-length: 9\r\n\r\n",
        b"",
    ],
    ids=["http/2", "long head", "zeros", "pipelined", "no body", "nothing"],
)
async def test_bad_clients_leave_nothing_behind(data: bytes) -> None:
    async with serving(head_s=0.5) as running:
        await _check_alive(running)
        await running.until_empty()
        before = open_descriptors()
        for _ in range(3):
            with suppress(trio.BrokenResourceError):  # as in `_check_alive`
                async with running.client() as client:
                    await client.send(data)
        async with await trio.open_tcp_stream(*running.address) as plain:
            await plain.send_all(data or b"x")
            await running.until_empty()
        assert open_descriptors() == before
        await _check_alive(running)


async def test_what_follows_the_last_request_takes_nothing_from_its_answer() -> None:
    last = b"GET /counted HTTP/1.1\r\nhost: kvd\r\nconnection: close\r\n\r\n"
    # A request by a page of another site: it is refused, which ends the connection.
    refused = b"GET /counted HTTP/1.1\r\nhost: a.example\r\norigin: http://a\r\n\r\n"
    async with serving() as running:
        for sent, ends in ((last, b"0\r\n\r\n"), (refused, b"}")):
            for more in (HEALTH, HEALTH * 3000, b"\0" * 100):
                async with running.client() as client:
                    await client.send(HEALTH + sent + more)
                    got = b""
                    while data := await client.stream.receive_some():
                        got += data
                assert got.count(b"HTTP/1.1 ") == 2 and got.endswith(ends), got


@pytest.mark.parametrize("head", [b"origin: http://a", b"host: a.example", b"x: " + b"x" * 20_000])
async def test_who_goes_on_sending_hears_why_he_is_refused(head: bytes) -> None:
    body = b"x" * (20 * 1024 * 1024)
    text = b"POST /query HTTP/1.1\r\n%b\r\ncontent-length: %d\r\n\r\n" % (head, len(body))
    async with serving(linger_s=60) as running, running.client() as client:
        await client.send(text + body)
        assert (await client.read_reply()).status in (403, 421, 431)
        await client.stream.send_eof()
        assert await client.read_to_end() == b""


async def test_a_stream_ends_as_tls_has_it() -> None:
    """Otherwise a client could not tell a complete answer without a length from a cut one."""

    async def read(path: str) -> bytes:
        async with await trio.open_tcp_stream(*running.address) as plain:
            assert running.trust is not None
            strict = trio.SSLStream(plain, running.trust, server_hostname="127.0.0.1")
            await strict.send_all(f"GET {path} HTTP/1.0\r\nhost: kvd\r\n\r\n".encode())
            answer = b""
            while piece := await strict.receive_some():  # raises if TLS's closing alert is missing
                answer += piece
            return answer

    async with serving() as running:
        assert (await read("/counted")).endswith(b"\r\n\r\n012")
        with pytest.raises(trio.BrokenResourceError):
            pytest.fail(f"a whole answer: {await read('/broken')!r}")
        running.front.stats.handler_bugs = 0


async def test_a_handshake_has_a_deadline_however_slowly_it_comes() -> None:
    async with serving(head_s=SOON) as running:
        async with await trio.open_tcp_stream(*running.address) as silent:
            assert await silent.receive_some() == b""
        async with await trio.open_tcp_stream(*running.address) as slow:
            with pytest.raises(trio.BrokenResourceError):
                for byte in b"\x16\x03\x01\x3f\xff\x01" + b"\0" * 16_000:
                    await slow.send_all(bytes([byte]))
                    await trio.sleep(0.01)
        assert running.front.stats.handshakes_failed == 2
        await _check_alive(running)


async def test_one_handshake_waits_for_no_other() -> None:
    async with (
        serving(head_s=60, graceful_s=60) as running,
        await trio.open_tcp_stream(*running.address) as begun,
    ):
        await begun.send_all(b"\x16\x03\x01")
        await eventually(lambda: running.front.stats.connections_open == 1)
        await _check_alive(running)
        running.stop.set()
        await running.ended.wait()  # at once: any wait would exceed the test's time


async def test_who_is_gone_before_the_handshake_is_no_bug() -> None:
    async with serving() as running:
        for half_closed in (True, False):
            with socket.create_connection(running.address) as gone:  # not accepted yet
                if half_closed:
                    gone.shutdown(socket.SHUT_WR)
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await running.until(handshakes_failed=2)
        await _check_alive(running)
        assert running.front.stats.client_gone == 0  # it counts clients that had begun a request


class OpenSsl:
    """A client that can do things after the handshake for which Python has no interface."""

    REQUESTED = 1  # asks the other side to change its keys, too
    _SET_MAX_PROTO_VERSION = 124

    def __init__(self, opened: ExitStack, address: tuple[str, int], newest: int = 0) -> None:
        self._lib = ctypes.CDLL(find_library("ssl"))
        for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        self.sock = opened.enter_context(socket.create_connection(address, TEST_SECONDS))
        self.sock.settimeout(None)  # makes the socket blocking, so that OpenSSL waits
        context = self._pointer("SSL_CTX_new", self._pointer("TLS_client_method"))
        opened.callback(self._lib.SSL_CTX_free, context)
        assert self._lib.SSL_CTX_ctrl(context, self._SET_MAX_PROTO_VERSION, newest, None) == 1
        self._ssl = self._pointer("SSL_new", context)
        opened.callback(self._lib.SSL_free, self._ssl)
        assert self._lib.SSL_set_fd(self._ssl, self.sock.fileno()) == 1
        assert self._lib.SSL_connect(self._ssl) == 1

    def _pointer(self, name: str, *arguments: ctypes.c_void_p) -> ctypes.c_void_p:
        return ctypes.c_void_p(getattr(self._lib, name)(*arguments))

    def update(self, kind: int = 0) -> bool:
        """Changes the keys; returns whether the message could be sent."""
        assert self._lib.SSL_key_update(self._ssl, kind) == 1
        return bool(self._lib.SSL_do_handshake(self._ssl) == 1)

    def renegotiate(self) -> bool:
        """Returns whether the other side takes part in another handshake."""
        assert self._lib.SSL_renegotiate(self._ssl) == 1
        return bool(self._lib.SSL_do_handshake(self._ssl) == 1)

    def ask(self, data: bytes) -> bytes:
        assert self._lib.SSL_write(self._ssl, data, len(data)) == len(data)
        answer = ctypes.create_string_buffer(4096)
        size = self._lib.SSL_read(self._ssl, answer, len(answer))
        assert size > 0, self._lib.SSL_get_error(self._ssl, size)
        return answer.raw[:size]


async def test_keys_may_be_changed_but_not_for_ever() -> None:
    """A single call of OpenSSL reads key changes for as long as nothing else comes.

    The whole process would wait for it.
    """

    def change(stop: int) -> bool:
        with ExitStack() as opened:
            client = OpenSsl(opened, running.address)
            for _ in range(3):
                assert client.update(OpenSsl.REQUESTED)
                assert client.update()
                assert client.ask(HEALTH).startswith(b"HTTP/1.1 200")
            return all(client.update() for _ in range(stop))

    async with serving(idle_s=60) as running:
        assert await trio.to_thread.run_sync(change, 100)
        await running.until_empty()
        # More than any buffer holds.
        assert not await trio.to_thread.run_sync(change, 1_000_000)
        await running.until_empty()
        await _check_alive(running)


async def test_there_is_no_second_handshake() -> None:
    def renegotiate() -> bool:
        with ExitStack() as opened:
            client = OpenSsl(opened, running.address, ssl.TLSVersion.TLSv1_2)
            assert client.ask(HEALTH).startswith(b"HTTP/1.1 200")
            return client.renegotiate()

    async with serving(idle_s=60) as running:
        assert not await trio.to_thread.run_sync(renegotiate)
        await running.until_empty()


# ---- other terms


def _terms(certificate: Path, authority: Path | None) -> TlsCredentials:
    return load_credentials(TlsFiles(certificate / "cert.pem", certificate / "key.pem", authority))


def _renew(running: Running, terms: TlsCredentials) -> None:
    assert isinstance(running.front, TlsServer)
    running.front.set_credentials(terms)


def _trust(running: Running, certificate: Path, client: Path) -> None:
    running.trust = ssl.create_default_context(cafile=certificate / "cert.pem")
    running.trust.load_cert_chain(client, client.with_suffix(".key"))


async def _may(client: Client) -> bool:
    """Returns whether a connection is served."""
    try:
        return (await client.request("GET", "/health")).status == 200
    except (trio.BrokenResourceError, trio.EndOfChannel):
        return False


async def test_who_lacks_an_authority_that_has_gone_is_not_served_any_more(
    certificate: Path, clients: Path
) -> None:
    async with serving() as running:
        _renew(running, _terms(certificate, clients / "both.pem"))
        _trust(running, certificate, clients / "client.pem")
        async with running.client() as kept:
            assert await _may(kept)
            _renew(running, _terms(certificate, clients / "both.pem"))
            assert await _may(kept)
            _renew(running, _terms(certificate, clients / "otherca.pem"))
            assert not await _may(kept)
        async with running.client() as again:
            assert not await _may(again)
        _trust(running, certificate, clients / "stranger.pem")
        async with running.client() as other:
            assert await _may(other)
            _renew(running, _terms(certificate, None))
            assert await _may(other)


async def test_who_needs_no_certificate_is_served_until_one_is_needed(
    certificate: Path, clients: Path
) -> None:
    async with serving() as running, running.client() as uncertified, running.client() as waits:
        assert await _may(uncertified)
        await waits.send(b"GET /waiting?50 HTTP/1.1\r\nhost: kvd\r\n\r\n" + HEALTH)
        await running.until(requests=2)
        _renew(running, _terms(certificate, clients / "ca.pem"))
        assert not await _may(uncertified)
        assert (await waits.read_reply()).body == b"late"  # its request was under way
        assert await waits.read_to_end() == b""


def test_terms_that_nobody_could_be_served_with_name_their_file(
    certificate: Path, clients: Path, tmp_path: Path
) -> None:
    cert, key, ca = certificate / "cert.pem", certificate / "key.pem", clients / "ca.pem"
    (tmp_path / "empty").touch()
    (tmp_path / "locked").write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\n"
        "MIGjMF8GCSqGSIb3DQEFDTBSMDEGCSqGSIb3DQEFDDAkBBCw6DBtRo0LXzEYNqw8\n"
        "-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    for files, why in (
        ((cert, clients / "client.key", None), "the key is not that of the certificate"),
        ((key, key, None), f"{key} contains no certificate"),
        ((cert, cert, None), f"{cert} contains no private key"),
        ((cert, tmp_path / "empty", None), f"{tmp_path}/empty contains no private key"),
        ((cert, tmp_path / "locked", None), ""),
        ((cert, tmp_path / "none", None), "No such file"),
        ((cert, key, tmp_path / "empty"), ""),
        ((cert, key, clients / "ca.key"), "does not contain a certificate"),
    ):
        wrong = files[1] if files[2] is None else files[2]
        with pytest.raises(ValueError, match=f"cannot use .*{wrong.name}: .*{why}"):
            load_credentials(TlsFiles(*files))
    assert load_credentials(TlsFiles(cert, key, ca)).authorities
