"""Reads URLs of other processes, and masks passwords in texts that people read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from kvd.wire.hosts import bracketed, in_ascii, literal

PORTS = {"http": 80, "https": 443}
UNIX_PREFIX = "unix:"
DNS_PREFIX = "dns:"
DNS_FORM = "dns:NAME:PORT or dns:https://NAME:PORT"
# Longest path of a Unix socket: Linux allows 108 bytes with the terminating zero.
MAX_UNIX_PATH_BYTES = 107
FORM = "http://HOST[:PORT][/PATH], or https://"
ENGINE_FORM = "http://HOST:PORT, or https://"
KVD_FORM = "http://HOST:PORT or unix:/PATH"

# Matches up to the last @, as a password may contain anything, even commas and slashes. A text
# without a scheme may have been meant as a URL. The @ of ipc://@name, an abstract socket, follows
# the :// directly and does not match.
_USER = re.compile(r"(://)[^@].*@|^[^\s/]+@", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL."""

    host: str  # in ASCII, an IPv6 address without brackets
    port: int
    tls: bool
    authority: str
    path: str


def masked(text: str) -> str:
    """Returns a text without the user and the password of URLs in it."""
    if "@" not in text:  # lists show thousands of addresses
        return text
    return _USER.sub(lambda found: f"{found[1] or ''}***@", text)


def parse_url(url: str, form: str = FORM) -> Target:
    """Reads a URL to fetch from; the text of a ValueError says what is wrong with it.

    That text may say that `form` is expected, and never contains the URL, which may have a
    password in an unexpected part.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"not a URL: expected {form}") from None
    # Check the text itself, before parts of it: urlsplit drops tabs and line ends.
    if not url.isprintable() or not parts.path.isascii() or " " in url:
        raise ValueError("the URL contains blanks, control characters or non-ASCII letters")
    if parts.scheme not in PORTS:
        raise ValueError(f"the URL is not of http: or https:, expected {form}")
    if "@" in parts.netloc:
        raise ValueError(
            "the URL contains a user or a password, which kvd never sends; use a token"
        )
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError("the URL contains a question mark or a #; it must end with the path")
    host, port = _host(parts, form), _port(parts)
    authority = f"{bracketed(host)}:{port}"
    return Target(host, port, parts.scheme == "https", authority, parts.path or "/")


def parse_upstream(url: str) -> Target:
    """Reads the URL of an engine behind the gateway; raises ValueError as `parse_url` does."""
    target = parse_url(url, ENGINE_FORM)
    if target.path != "/":
        raise ValueError(f"the URL of an engine must have no path: expected {ENGINE_FORM}")
    return target


class DnsName(NamedTuple):
    """A name whose addresses are engines, each at this port."""

    host: str
    port: int
    tls: bool  # the engines' certificates are issued for the name


def parse_dns(url: str) -> DnsName | None:
    """Reads dns:NAME:PORT or dns:https://NAME:PORT; None for a text without `dns:`.

    Raises ValueError for an invalid one.
    """
    if not url.startswith(DNS_PREFIX):
        return None
    named = url.removeprefix(DNS_PREFIX)
    try:
        target = parse_url(named if named.startswith("https://") else "http://" + named)
    except ValueError:
        raise ValueError(f"the name is not valid: expected {DNS_FORM}") from None
    is_name = target.path == "/" and not url.endswith("/") and literal(target.host) is None
    if not is_name or f":{target.port}" != url[-len(str(target.port)) - 1 :]:
        raise ValueError(f"expected {DNS_FORM}, with a name and a port")
    return DnsName(target.host, target.port, target.tls)


def parse_kvd(url: str) -> Target:
    """Reads the address of a kvd: an http: URL, or a Unix socket, whose path becomes the host.

    Raises ValueError as `parse_url` does.
    """
    if url.startswith(UNIX_PREFIX):
        path = url.removeprefix(UNIX_PREFIX)
        if not path.startswith("/") or not path.isprintable():
            raise ValueError(
                f"the path of a Unix socket must begin with a slash, expected {KVD_FORM}"
            )
        if len(path.encode()) > MAX_UNIX_PATH_BYTES:
            raise ValueError(f"the path is longer than {MAX_UNIX_PATH_BYTES} bytes")
        return Target(path, 0, False, "localhost", "/")
    target = parse_url(url, KVD_FORM)
    if target.tls or target.path != "/":
        raise ValueError(
            f"the URL of a kvd must begin with http: and have no path, expected {KVD_FORM}"
        )
    return target


def _host(parts: SplitResult, form: str) -> str:
    host = parts.hostname
    if not host:
        hint = "; an IPv6 address has brackets" if parts.netloc.count(":") > 1 else ""
        raise ValueError(f"the URL has no host{hint}, expected {form}")
    return in_ascii(host)


def _port(parts: SplitResult) -> int:
    try:
        port = parts.port
    except ValueError:
        port = 0
    # None, also for `http://host:`, stands for the scheme's usual port.
    if port == 0:
        raise ValueError("the port of the URL is not a number from 1 to 65535")
    return port or PORTS[parts.scheme]
