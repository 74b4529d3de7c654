"""Addresses that a face listens on: HOST:PORT, tls:HOST:PORT, unix:PATH."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from kvd.config.parsers import OFF, Off, parse_host, parse_list, parse_port
from kvd.wire.hosts import bracketed
from kvd.wire.urls import MAX_UNIX_PATH_BYTES, UNIX_PREFIX

TLS_PREFIX = "tls:"


@dataclass(frozen=True, slots=True)
class TcpBind:
    """A listening TCP address; port 0 lets the system choose one."""

    host: str
    port: int
    tls: bool = False

    @property
    def address(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    def __str__(self) -> str:
        return f"{TLS_PREFIX}{self.address}" if self.tls else self.address


@dataclass(frozen=True, slots=True)
class UnixBind:
    """A listening unix-domain socket."""

    path: str
    tls: Literal[False] = False

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def __str__(self) -> str:
        return self.address


Bind = TcpBind | UnixBind


@dataclass(frozen=True, slots=True)
class Binds:
    """The addresses of one face, at least one."""

    each: tuple[Bind, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.each))


def parse_bind(text: str) -> Bind:
    """Reads `HOST:PORT`, `[IPV6]:PORT`, these behind `tls:`, or `unix:PATH`; raises ValueError."""
    if text.startswith(TLS_PREFIX):
        return replace(parse_tcp_bind(text.removeprefix(TLS_PREFIX)), tls=True)
    if text.startswith(UNIX_PREFIX):
        path = text.removeprefix(UNIX_PREFIX)
        if not path or "\0" in path:
            raise ValueError("the path of the socket is missing")
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise ValueError(f"the path of the socket is longer than {MAX_UNIX_PATH_BYTES} bytes")
        return UnixBind(path)
    return parse_tcp_bind(text)


def parse_face_binds(text: str) -> Binds | Off:
    """Reads binds between commas, or OFF."""
    if text == OFF:
        return OFF
    binds = tuple(map(parse_bind, parse_list(text)))
    if not binds:
        raise ValueError("expected HOST:PORT, tls:HOST:PORT, unix:PATH or off")
    if len(set(binds)) < len(binds):
        raise ValueError("the list contains an address twice")
    return Binds(binds)


def parse_tcp_bind(text: str) -> TcpBind:
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError(f"only an IPv6 address has brackets, and {host} is not one")
    elif ":" in host and "/" not in host:
        raise ValueError("an IPv6 address needs brackets: [::1]:8090")
    if not colon or not host or "/" in host:
        raise ValueError("expected HOST:PORT, tls:HOST:PORT or unix:PATH")
    return TcpBind(parse_host(host), parse_port(port))
