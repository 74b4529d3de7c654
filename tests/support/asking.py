"""`kvd serve` with four faces, each on three kinds of address, and raw requests to them."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes import Server, clean_environment

FACES = ("indexer", "slot-tracker", "selection", "conductor")
SECONDS = 10.0  # timeout of connections, whose answers take milliseconds


class _Connection(http.client.HTTPConnection):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__("localhost")
        self.sock = sock


@dataclass
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])


@dataclass
class Faces:
    """One `kvd serve` with every face on TCP, TLS and a Unix socket."""

    server: Server
    folder: Path
    trust: ssl.SSLContext
    addresses: dict[str, list[str]] = field(default_factory=dict)  # by face, in this order

    def note_addresses(self) -> None:
        lines = re.findall(r"event=serving .*face=(\S+) bind=(.*)", self.server.stderr)
        self.addresses = {face: binds.strip('"').split() for face, binds in lines}

    def each(self) -> Iterator[str]:
        for face in FACES:
            yield from self.addresses[face]

    def plain(self, face: str) -> str:
        return self.addresses[face][0]

    def connect(self, address: str, trust: ssl.SSLContext | None = None) -> socket.socket:
        """Connects to an address in the form of a bind."""
        if address.startswith("unix:"):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(SECONDS)
            sock.connect(address.removeprefix("unix:"))
            return sock
        host, _, port = address.removeprefix("tls:").rpartition(":")
        sock = socket.create_connection((host, int(port)), SECONDS)
        if not address.startswith("tls:"):
            return sock
        try:
            return (trust or self.trust).wrap_socket(sock, server_hostname="127.0.0.1")
        except BaseException:
            sock.close()
            raise

    def ask(
        self,
        address: str,
        path: str,
        *headers: tuple[str, str],
        method: str = "GET",
        body: bytes | None = None,
        host: str | None = "localhost",
    ) -> Reply:
        """Makes one request on its own connection; sends no Host header if `host` is None."""
        with closing(self.connect(address)) as sock:
            connection = _Connection(sock)
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            sent = [("Host", host)] if host is not None else []
            if body is not None:
                sent += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            for name, value in (*sent, *headers):
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())

    def exchange(self, address: str, data: bytes) -> bytes:
        """Sends bytes; returns all that the server sends until it closes or resets."""
        with closing(self.connect(address)) as sock:
            received = b""
            try:
                sock.sendall(data)
                socket.socket.shutdown(sock, socket.SHUT_WR)  # SSLSocket's own would end reading
                while piece := sock.recv(65536):
                    received += piece
            except OSError:
                pass
            return received

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.server.process.pid}/fd"))

    def until(self, descriptors: int) -> None:
        self.server.wait_until(lambda: self.descriptors() <= descriptors, "as few descriptors")


@contextmanager
def serving_faces(
    folder: Path, certificates: Path, *lines: str, client_ca: bool = False, **environ: str
) -> Iterator[Faces]:
    """Runs the faces with further `lines` in the configuration; kvd must end with exit code 0."""
    binds = [
        f'{face.replace("-", "_")}_bind = ["127.0.0.1:0", "tls:127.0.0.1:0", '
        f'"unix:{folder}/{face}.sock"]'
        for face in FACES
    ]
    files = [
        f'tls_certfile = "{certificates}/cert.pem"',
        f'tls_keyfile = "{certificates}/key.pem"',
    ]
    if client_ca:
        files.append(f'tls_client_ca = "{certificates}/ca.pem"')
    config = folder / "kvd.toml"
    config.write_text("\n".join([*binds, *files, *lines]) + "\n")
    command = [sys.executable, "-m", "kvd", "serve", "--config", str(config)]
    server = Server(command, folder, 0, clean_environment(**environ))
    trust = ssl.create_default_context(cafile=certificates / "cert.pem")
    faces = Faces(server, folder, trust)
    try:
        server.wait_logged("face=conductor")
        faces.note_addresses()
        yield faces
        assert server.process.poll() is None, server.stderr
    finally:
        code = server.stop()
    assert code == 0, server.stderr


def make_certificate(folder: Path, valid_for: str = "IP:127.0.0.1", subject: str = "kvd") -> None:
    """Writes a self-signed certificate, cert.pem, and its key.pem."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    names = ["-subj", f"/CN={subject}", "-addext", f"subjectAltName={valid_for}"]
    files = ["-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *names, *files], cwd=folder, check=True, capture_output=True)


def make_client_certificates(folder: Path, *names: str) -> None:
    """Writes ca.pem, and NAME.pem with NAME.key for each name; another CA signs `stranger`."""

    def openssl(*arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for ca in ("ca", "otherca"):
        req = ["req", "-x509", *key, "-days", "1", "-subj", f"/CN={ca}"]
        openssl(*req, "-keyout", f"{ca}.key", "-out", f"{ca}.pem")
    for name in names:
        ca = "otherca" if name == "stranger" else "ca"
        openssl("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", "x.csr")
        signing = ["-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "1"]
        openssl("x509", "-req", "-in", "x.csr", *signing, "-out", f"{name}.pem")


def bearer(token: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {token}"


def counted(text: bytes) -> dict[str, int]:
    """Returns the refusals that a text of /metrics counts, by reason."""
    found = re.findall(rb'kvd_http_refusals_total\{reason="(\w+)"\} (\d+)', text)
    return {reason.decode(): int(number) for reason, number in found}
