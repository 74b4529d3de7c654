"""Options of a listener's socket; imports nothing of kvd, as every command loads settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class UnixRights:
    """Access rights of a Unix socket; its group may let a sidecar in."""

    mode: int = 0o660
    group: str | None = None  # a name or number; None: the process's own


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a TLS listener; with `client_ca` clients need a certificate that it signed."""

    certfile: Path
    keyfile: Path
    client_ca: Path | None = None
    # Digests of the files by the names of their settings: they show whether a file has changed.
    digests: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False)
