"""Certificates of a running daemon: read again at a reload, all of them or none."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.asking import (
    FACES,
    Faces,
    bearer,
    make_certificate,
    make_client_certificates,
    serving_faces,
)
from tests.support.ports import find_free_port
from tests.support.running import running

OLD, NEW = "old-0123456789abc", "new-0123456789abc"
REQUEST = f"HEAD /metrics HTTP/1.1\r\nhost: kvd\r\nauthorization: Bearer {OLD}\r\n\r\n".encode()


@pytest.fixture
def folder(tmp_path: Path, certificate: Path) -> Path:
    """A directory with a daemon's files, two authorities, and a client of each."""
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((certificate / name).read_bytes())
    make_client_certificates(tmp_path, "client", "stranger")
    (tmp_path / "tokens").write_text(f"old read {OLD}\n")
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[Faces]:
    with serving_faces(folder, folder, f'tokens_file = "{folder}/tokens"', client_ca=True) as faces:
        yield faces


def reload(faces: Faces, line: str) -> None:
    seen = len(faces.server.stderr)
    faces.server.process.send_signal(signal.SIGHUP)
    faces.server.wait_until(lambda: line in faces.server.stderr[seen:], line)


def trust(folder: Path, name: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "cert.pem")
    context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


def secured(faces: Faces, face: str) -> str:
    return next(each for each in faces.addresses[face] if each.startswith("tls:"))


@contextmanager
def connected(faces: Faces, name: str) -> Iterator[list[socket.socket]]:
    """Connects to every face as a client that trusts the certificate now in the folder."""
    context = trust(faces.folder, name)
    with ExitStack() as opened:
        yield [opened.enter_context(faces.connect(secured(faces, f), context)) for f in FACES]


def statuses(socks: list[socket.socket]) -> list[bytes]:
    """Returns the status that each connection is answered, b"" if it is closed."""
    found = []
    for sock in socks:
        try:
            sock.sendall(REQUEST)
            data = b""
            while b"\r\n\r\n" not in data and (piece := sock.recv(65536)):
                data += piece
            found.append(data[9:12])
        except OSError:
            found.append(b"")
    return found


ALL = [b"200"] * len(FACES)
NONE = [b""] * len(FACES)


def test_certificates_change_while_it_runs(served: Faces, folder: Path) -> None:
    with connected(served, "client") as kept:
        assert statuses(kept) == ALL
        make_certificate(folder, subject="another")
        with pytest.raises(ssl.SSLError), connected(served, "client"):
            pass  # the daemon still shows the old certificate
        reload(served, 'event=reloaded changed="tls_certfile tls_keyfile"')
        with connected(served, "client") as after:
            assert statuses(after) == ALL and statuses(kept) == ALL
        reload(served, 'event=reloaded changed=""')


def test_with_flags_alone_files_are_read_again(folder: Path) -> None:
    port, secured = find_free_port(), find_free_port()
    flags = [f"--tls-{kind}file={folder}/{kind}.pem" for kind in ("cert", "key")]
    flags += [f"--{face}-bind=off" for face in FACES[1:]]
    flags.append(f"--indexer-bind=127.0.0.1:{port},tls:127.0.0.1:{secured}")
    with running(folder, port, "serve", *flags) as server:
        make_certificate(folder, subject="another")
        server.process.send_signal(signal.SIGHUP)
        server.wait_logged("event=reloaded")
        context = ssl.create_default_context(cafile=folder / "cert.pem")
        base = f"https://127.0.0.1:{secured}"
        assert httpx.get(f"{base}/health", verify=context, trust_env=False).is_success


def _break_key(folder: Path) -> None:
    (folder / "key.pem").write_bytes((folder / "client.key").read_bytes())


def _break_certificate(folder: Path) -> None:
    (folder / "cert.pem").write_text("no certificate\n")


def _remove_key(folder: Path) -> None:
    (folder / "key.pem").unlink()


def _break_authority(folder: Path) -> None:
    (folder / "ca.pem").write_text("")


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (_break_key, "tls_certfile: cannot use {0}/cert.pem with {0}/key.pem: "),
        (_break_certificate, "tls_certfile: cannot use {0}/cert.pem with {0}/key.pem: "),
        (_remove_key, "tls_keyfile: cannot read {0}/key.pem: "),
        (_break_authority, "tls_client_ca: cannot use {0}/ca.pem: "),
    ],
)
def test_with_a_bad_file_all_stays_as_it_was(
    served: Faces, folder: Path, harm: Callable[[Path], None], complaint: str
) -> None:
    context = trust(folder, "client")
    harm(folder)
    (folder / "tokens").write_text(f"new read {NEW}\n")
    reload(served, f'event=reload_refused reason="{complaint.format(folder)}')
    for face in FACES:
        plain = served.plain(face)
        assert served.ask(plain, "/metrics", bearer(OLD)).status == 200
        assert served.ask(plain, "/metrics", bearer(NEW)).status == 401
        with closing(served.connect(secured(served, face), context)) as sock:
            assert statuses([sock]) == [b"200"]


def test_an_authority_that_is_gone_opens_nothing(served: Faces, folder: Path) -> None:
    ours, others = ((folder / name).read_bytes() for name in ("ca.pem", "otherca.pem"))
    with connected(served, "client") as kept:
        assert statuses(kept) == ALL
        (folder / "ca.pem").write_bytes(ours + others)
        reload(served, "event=reloaded changed=tls_client_ca")
        with connected(served, "stranger") as unlisted:
            assert statuses(unlisted) == ALL and statuses(kept) == ALL
        (folder / "ca.pem").write_bytes(others)
        reload(served, "event=reloaded changed=tls_client_ca")
        assert statuses(kept) == NONE
    with connected(served, "client") as again:
        assert statuses(again) == NONE
    with connected(served, "stranger") as unlisted:
        assert statuses(unlisted) == ALL
