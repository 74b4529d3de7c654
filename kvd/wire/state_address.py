"""Reads `--state-url`: the server where replicas share their state.

    redis://[USER@]HOST[:PORT][/DATABASE]                            rediss:// for TLS
    redis+sentinel://[USER@]HOST[:PORT],HOST[:PORT]/NAME[/DATABASE]  rediss+sentinel://
    redis+cluster://[USER@]HOST[:PORT],HOST[:PORT]                   rediss+cluster://

`valkey` may replace `redis` everywhere. A password belongs in a file of its own, since addresses
are shown in answers and logs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

# Ports of addresses that name none.
DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379

MAX_SERVERS = 64  # most servers that one address may name


@dataclass(frozen=True, slots=True)
class StateAddress:
    """The address of the shared state."""

    servers: tuple[tuple[str, int], ...]
    tls: bool
    user: str | None
    sentinel_name: str | None  # the name under which sentinels watch the servers
    is_cluster: bool
    database: int

    def __str__(self) -> str:
        where = ",".join(f"{host}:{port}" for host, port in self.servers)
        kind = "+sentinel" if self.sentinel_name else "+cluster" if self.is_cluster else ""
        name = f"/{self.sentinel_name}" if self.sentinel_name else ""
        scheme = "rediss" if self.tls else "redis"
        database = f"/{self.database}" if self.database else ""
        return f"{scheme}{kind}://{where}{name}{database}"


def parse_address(text: str) -> StateAddress:
    """Reads an address; raises ValueError, whose text never contains a password."""
    scheme, found, rest = text.partition("://")
    kind, _, variant = scheme.partition("+")
    if not found or kind not in ("redis", "rediss", "valkey", "valkeys"):
        raise ValueError("the URL must begin with redis:// or valkey://, or with rediss:// for TLS")
    if variant not in ("", "sentinel", "cluster"):
        raise ValueError(f"after {kind}+ only sentinel or cluster may follow, not {variant!r}")
    user, has_user, location = rest.rpartition("@")
    if ":" in user:
        raise ValueError(
            "the URL must not contain a password; put it into the file of state_password_file"
        )
    hosts, _, path = location.partition("/")
    names = path.split("/") if path else []
    name = names.pop(0) if variant == "sentinel" and names else None
    if variant == "sentinel" and not name:
        raise ValueError("a sentinel URL must end with /NAME, the name of the master")
    if variant == "cluster" and names:
        raise ValueError(f"a cluster has no databases: leave out /{path}")
    if len(names) > 1 or (names and not names[0].isdecimal()):
        raise ValueError(f"expected the number of a database, not {path!r}")
    default = DEFAULT_SENTINEL_PORT if variant == "sentinel" else DEFAULT_PORT
    servers = tuple(_server(each, default) for each in hosts.split(","))
    if not variant and len(servers) > 1:
        raise ValueError(f"{scheme}:// takes one server: use {scheme}+sentinel:// or +cluster://")
    if len(servers) > MAX_SERVERS:
        raise ValueError(f"{len(servers)} servers exceed the limit of {MAX_SERVERS}")
    return StateAddress(
        servers,
        kind in ("rediss", "valkeys"),
        unquote(user) if has_user else None,
        name,
        variant == "cluster",
        int(names[0]) if names else 0,
    )


@dataclass(frozen=True, slots=True)
class StateServer:
    """The server where replicas share their state, and how this replica presents itself there."""

    address: StateAddress
    prefix: str
    password: str | None = field(repr=False)
    ca_file: Path | None  # None: the system's authorities
    advertised: str | None  # base URL of the indexer face, as other replicas reach it
    lease_s: float  # time for which a replica counts as alive after its last renewal


def _server(text: str, default: int) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not host:
        host, port = port, ""
    if not host.strip("[]") or (port and not port.isdecimal()) or int(port or default) > 65535:
        raise ValueError(f"expected HOST or HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port or default)
