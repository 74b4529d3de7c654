"""What a setting is, and how its text becomes a value; ValueError says what would be good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvd.errors import BadRequest
from kvd.logs import LEVELS
from kvd.peers import MAX_PEERS
from kvd.scheduling.options import RouterMode
from kvd.scheduling.queue import QueuePolicy
from kvd.wire.endpoints import check_replica_endpoint
from kvd.wire.outgoing import Places, parse_places
from kvd_core.selector import MAX_ISL_TOKENS
from kvd_core.selector_settings import MAX_WEIGHT

ENV_PREFIX = "KVD_"

Parse = Callable[[str], Any]

U16_MAX = 2**16 - 1
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
U64_DIGITS = 20  # more digits are refused unread: int() of a long text is slow


@dataclass(frozen=True, slots=True)
class TcpBind:
    """A listening TCP address; port 0 lets the system choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixBind:
    """A listening unix-domain socket."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


Bind = TcpBind | UnixBind

OFF = "off"  # the bind of a face that is not to be served


def parse_bind(text: str) -> Bind:
    """Reads `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`; ValueError says what is wrong."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path or "\0" in path:
            raise ValueError("the path of the unix socket is missing")
        return UnixBind(path)
    return parse_tcp_bind(text)


def parse_face_bind(text: str) -> Bind | str:
    """Reads a bind, or OFF."""
    return OFF if text == OFF else parse_bind(text)


def parse_tcp_bind(text: str) -> TcpBind:
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address needs brackets: [::1]:8090")
    if not colon or not host:
        raise ValueError("expected HOST:PORT or unix:PATH")
    return TcpBind(host, parse_port(port))


def parse_uint(text: str, maximum: int) -> int:
    """Reads plain decimal digits, 0 to `maximum`; no sign, blank or underscore."""
    if not (text.isascii() and text.isdigit() and len(text) <= U64_DIGITS) or int(text) > maximum:
        raise ValueError(f"expected a whole number from 0 to {maximum}")
    return int(text)


def parse_port(text: str) -> int:
    return parse_uint(text, U16_MAX)


def parse_u32(text: str) -> int:
    return parse_uint(text, U32_MAX)


def parse_u64(text: str) -> int:
    return parse_uint(text, U64_MAX)


def parse_positive(text: str) -> int:
    if (number := parse_u32(text)) == 0:
        raise ValueError("expected a number greater than 0")
    return number


def parse_seconds(text: str) -> float:
    """Reads a duration in seconds, from a millisecond to a day."""
    seconds = float(text)
    if not 0.001 <= seconds <= 86400:
        raise ValueError("expected seconds, from 0.001 to 86400")
    return seconds


def parse_pause(text: str) -> float:
    """Reads a duration in seconds, from none to an hour."""
    seconds = float(text)
    if not 0 <= seconds <= 3600:
        raise ValueError("expected seconds, from 0 to 3600")
    return seconds


def parse_affinity_ttl(text: str) -> int:
    """Reads a whole number of seconds, from one to a year."""
    seconds = parse_u32(text)
    if not 1 <= seconds <= 31_536_000:
        raise ValueError("expected seconds, from 1 to 31536000")
    return seconds


def parse_weight(text: str) -> float:
    """Reads a weight or threshold, 0 or more."""
    weight = float(text)
    if not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"expected a number from 0 to {MAX_WEIGHT:g}")
    return weight


def parse_share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError("expected a number from 0 to 1")
    return share


def parse_threshold(text: str) -> float | str:
    """Reads a threshold, or OFF, which the originals write as None."""
    return OFF if text.lower() in (OFF, "none") else parse_weight(text)


def parse_switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected true or false")


def parse_policy(text: str) -> QueuePolicy:
    try:
        return QueuePolicy(text.lower())
    except ValueError:
        raise ValueError(f"expected one of {', '.join(QueuePolicy)}") from None


def parse_mode(text: str) -> RouterMode:
    try:
        return RouterMode(text.lower())
    except ValueError:
        raise ValueError(f"expected one of {', '.join(RouterMode)}") from None


def parse_share_threshold(text: str) -> float | str:
    """Reads a threshold from 0 to 1, or OFF."""
    return OFF if text.lower() in (OFF, "none") else parse_share(text)


def parse_tokens_threshold(text: str) -> int | str:
    """Reads a number of tokens, or OFF."""
    return OFF if text.lower() in (OFF, "none") else parse_uint(text, MAX_ISL_TOKENS)


def parse_level(text: str) -> str:
    if text.lower() not in LEVELS:
        raise ValueError(f"expected one of {', '.join(LEVELS)}")
    return text.lower()


def parse_list(text: str) -> tuple[str, ...]:
    """Splits at commas; blanks around and between do not count."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def parse_urls(text: str) -> tuple[str, ...]:
    """Splits, and counts each but once."""
    urls = tuple(dict.fromkeys(parse_list(text)))
    if len(urls) > MAX_PEERS:
        raise ValueError(f"more than {MAX_PEERS} peers")
    return urls


def parse_replica_port(text: str) -> int:
    if (port := parse_port(text)) == 0:
        raise ValueError("expected a port from 1 to 65535: replicas have to know it")
    return port


def parse_replica_peers(text: str) -> tuple[str, ...]:
    """Splits like parse_urls and checks every endpoint."""
    endpoints = parse_urls(text)
    for endpoint in endpoints:
        try:
            check_replica_endpoint(endpoint)
        except BadRequest as error:
            raise ValueError(str(error)) from None
    return endpoints


def parse_outgoing(text: str) -> Places:
    """Splits, and reads networks and the words for some; none at all is no outgoing connection."""
    return parse_places(parse_list(text))


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of kvd.settings: how a text becomes a value, and what holds when nobody says.

    `borrowed` is the variable of a setting that other programs of the fleet read as well;
    `empty_is_wrong` if those refuse an empty one, which otherwise counts as unset. `also` is
    another name of its flag. `live` if a reload changes it in a running daemon.
    """

    name: str
    parse: Parse
    default: object
    metavar: str
    help: str
    borrowed: str | None = None
    empty_is_wrong: bool = False
    also: str | None = None
    live: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether its flag can stand alone, or as --no-..., as well."""
        return self.parse is parse_switch

    @property
    def many(self) -> bool:
        """Whether it takes several values, which a flag separates by commas."""
        return self.metavar.endswith(",...")

    @property
    def variable(self) -> str:
        return self.borrowed or ENV_PREFIX + self.name.upper()
