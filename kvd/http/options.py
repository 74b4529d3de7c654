"""What operators say of a listener's socket; imports nothing, as every command reads settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class UnixRights:
    """Who may connect to a Unix socket; a group is how a sidecar is let in."""

    mode: int = 0o660
    group: str | None = None  # a name or number; None: the process's own


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a TLS listener; with `client_ca` clients need a certificate of that."""

    certfile: Path
    keyfile: Path
    client_ca: Path | None = None
