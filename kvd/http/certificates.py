"""TLS credentials from PEM files: kvd's certificate and the client authorities."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass

from kvd.http.options import TlsFiles

# Forward secret and authenticated; what TLS 1.3 has is so anyway.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

_PEM = re.compile(rb"-----BEGIN [^-]*CERTIFICATE-----(.*?)-----END", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """The credentials of TLS handshakes; a reload replaces them as a whole."""

    context: ssl.SSLContext
    authorities: frozenset[bytes] | None  # certificates that let clients in; None takes anybody

    def admit_all_of(self, before: TlsCredentials) -> bool:
        """Returns whether everybody may connect who could by `before`."""
        if self.authorities is None:
            return True
        return before.authorities is not None and before.authorities <= self.authorities


def load_credentials(files: TlsFiles) -> TlsCredentials:
    """Reads the files; raises ValueError, which names them, if nobody could be served with them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    # The end of the stream is what it is without TLS: a client may end its side and read on. What
    # would be cut short has a length.
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.certfile, files.keyfile, _ask_nobody)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot use {files.certfile} with {files.keyfile}: {error}") from None
    if files.client_ca is None:
        return TlsCredentials(context, None)
    try:
        said = files.client_ca.read_bytes()  # once: what is compared is what holds
        context.load_verify_locations(cadata=said.decode("ascii", "ignore"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot use {files.client_ca}: {error}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    # The context does not list those that are no authorities but stand for themselves.
    return TlsCredentials(
        context, frozenset(b"".join(block.split()) for block in _PEM.findall(said))
    )


def _ask_nobody() -> str:
    """Stands for the passphrase, for which OpenSSL would ask on the terminal."""
    raise ValueError("the key has a passphrase")
