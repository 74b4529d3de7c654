"""Reads hosts, in their usual spelling only: parsers differ about unusual spellings."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address

Address = IPv4Address | IPv6Address

MAX_NAME_CHARS = 253  # longest name of a host, as in DNS
LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")


def everywhere(host: object) -> str:
    """Returns why kvd does not connect to `*`, 0.0.0.0 or ::, which only a server can bind to."""
    return f"{host} stands for every address of a listening machine; name one of them"


def bracketed(host: str) -> str:
    """Returns a host as it stands before `:PORT`: an IPv6 address has brackets there."""
    return f"[{host}]" if ":" in host else host


def is_ipv6(text: str) -> bool:
    """Returns whether a text is an IPv6 address."""
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def literal(host: str) -> Address | None:
    """Returns the address if the host is one, None if it is a name; ValueError for neither."""
    if host == "*":
        raise ValueError(everywhere(host))
    if ":" in host:
        if "%" in host:
            raise ValueError("zone ids are not supported")
        try:
            return normal(IPv6Address(host))
        except ValueError:
            raise ValueError(f"{host} is not an IPv6 address") from None
    labels = host.removesuffix(".").split(".")
    if NUMBER.fullmatch(labels[-1]):
        try:
            return IPv4Address(host)
        except ValueError:
            raise ValueError(f"{host} is not an address of the form 192.0.2.1") from None
    if len(host) > MAX_NAME_CHARS + 1 or not all(map(LABEL.fullmatch, labels)):
        raise ValueError(f"{host[:64]} is not a host name")
    return None


def in_ascii(host: str) -> str:
    """Returns a host as DNS and certificates spell it; ValueError if it is none."""
    try:
        host = host if host.isascii() else host.encode("idna").decode()
    except UnicodeError:
        raise ValueError(f"{host[:64]!r} is not a host name") from None
    literal(host)
    return host


def normal(address: Address) -> Address:
    """Returns the IPv4 address inside an IPv4-mapped one, any other address unchanged."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped
