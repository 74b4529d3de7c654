"""TLS credentials from PEM files: kvd's certificate and the client authorities."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from kvd.http.options import TlsFiles

# Forward secret and authenticated, as all ciphers of TLS 1.3 are.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

_PEM = re.compile(rb"-----BEGIN [^-]*CERTIFICATE-----(.*?)-----END", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """The credentials of TLS handshakes; a reload replaces them as a whole."""

    context: ssl.SSLContext
    authorities: frozenset[bytes] | None  # certificates that admit clients; None: all are admitted

    def admit_all_of(self, before: TlsCredentials) -> bool:
        """Returns whether all clients that `before` admits are admitted."""
        if self.authorities is None:
            return True
        return before.authorities is not None and before.authorities <= self.authorities


def load_credentials(files: TlsFiles) -> TlsCredentials:
    """Reads the files; raises ValueError, which names them and their settings."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    # As without TLS, a client may just end its side and read on. If that cuts a body short, its
    # announced length shows it.
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    try:
        load_pair(context, files.certfile, files.keyfile)
    except ValueError as error:
        raise ValueError(f"tls_certfile: {error}") from None
    if files.client_ca is None:
        return TlsCredentials(context, None)
    try:
        pem = files.client_ca.read_bytes()  # once, so that a reload compares what is in force
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (OSError, ValueError) as error:
        raise ValueError(f"tls_client_ca: cannot use {files.client_ca}: {error}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    # Not asked of the context: it does not list certificates that vouch for themselves alone.
    return TlsCredentials(
        context, frozenset(b"".join(block.split()) for block in _PEM.findall(pem))
    )


def load_pair(context: ssl.SSLContext, certfile: Path, keyfile: Path | None) -> None:
    """Loads a certificate and its key, None if that file has both; raises ValueError."""
    try:
        context.load_cert_chain(certfile, keyfile, _refuse_passphrase)
    except (OSError, ValueError) as error:
        why = _explained(error, certfile, keyfile or certfile)
        raise ValueError(f"cannot use {certfile} with {keyfile}: {why}") from None


def _explained(error: Exception, certfile: Path, keyfile: Path) -> str:
    """Returns the text of an error; OpenSSL's own is "PEM lib" where a file lacks its object."""
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not that of the certificate"
        for path, what in (certfile, "CERTIFICATE"), (keyfile, "PRIVATE KEY"):
            if f"{what}-----".encode() not in path.read_bytes():
                return f"{path} contains no {what.lower()}"
    return str(error)


def _refuse_passphrase() -> str:
    """Keeps OpenSSL from asking for a passphrase on the terminal."""
    raise ValueError("the key has a passphrase")
