"""Resolves a name into the address that a connection is made to.

    endpoint or URL ── host ── a number: it itself
                         └──── a name: looked up, within LOOKUP_S ── checked ── a number

Only the checked number is connected to, so that a name cannot mean one address when it is checked
and another one afterwards. A link would connect to that number for ever, so a name whose connection
stays lost is looked up again (`moved`): the pod behind it may be somewhere else by then.
"""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING, Protocol

import trio

from kvd.net.curve import KeyPair, Options
from kvd.wire.egress import EgressPolicy, refusal
from kvd.wire.endpoints import host_and_port, tcp_endpoint
from kvd.wire.hosts import literal

if TYPE_CHECKING:
    from collections.abc import Callable

# Time allowed for the lookup of one name: resolvers give up after 5 s a server.
LOOKUP_S = 5.0
SLICE_LINKS = 64  # connections judged again between two checkpoints: about 1 ms
LOOKUP_EVERY_S = 5.0  # pause between two lookups of a name whose connection stays lost


class Unreachable(Exception):
    """There is no address to connect to; the text says why."""


class Ends(Protocol):
    """A connection that can be given up."""

    def give_up(self, why: str) -> None: ...


class Dialer:
    """Finds the addresses of all connections that kvd makes, and knows those that are named."""

    def __init__(
        self,
        outgoing: EgressPolicy | None = None,
        lookup_s: float = LOOKUP_S,
        lookup_every_s: float = LOOKUP_EVERY_S,
        keys: KeyPair | None = None,
    ) -> None:
        """Without a rule the default one holds; without keys they are made when needed."""
        self.outgoing = outgoing or EgressPolicy()
        self._keys = keys
        self.lookup_s = lookup_s
        self.lookup_every_s = lookup_every_s
        self._links: dict[Ends, str] = {}  # what lasts, and the endpoint it was made to

    def curve(self, server_key: str | None) -> Options:
        """Returns the options for CURVE to the owner of that key, none without a key.

        Raises zmq.ZMQError where libzmq has no CURVE.
        """
        if server_key is None:
            return {}
        self._keys = self._keys or KeyPair()
        return self._keys.client(server_key)

    async def addresses(self, host: str) -> list[str]:
        """Returns a host's addresses that may be connected to, IPv4 first; raises Unreachable."""
        try:
            address = literal(host)
        except ValueError as error:
            raise Unreachable(str(error)) from None
        found = [str(address)] if address else await _lookup(host, self.lookup_s)
        allowed = self.outgoing.allowed_of(found)
        if not allowed:
            self.outgoing.refused_connections += 1
            seen = ", ".join(dict.fromkeys(found))
            raise Unreachable(refusal(host if seen == host else f"{host} ({seen})"))
        return sorted(allowed, key=lambda text: ":" in text)

    async def endpoint(self, named: str, turn: int = 0) -> str:
        """Returns the endpoint to connect to for a named one; raises Unreachable.

        Of several addresses the next one has its turn at every attempt; those of IPv6 have none
        where there are others, as engines bind to IPv4 unless configured otherwise.
        """
        host_port = host_and_port(named)
        if host_port is None:
            if not self.outgoing.ipc:
                self.outgoing.refused_connections += 1
                raise Unreachable(refusal("ipc"))
            return named
        host, port = host_port
        if host == "*" or not port:
            raise Unreachable(os.strerror(errno.EINVAL))
        endpoints = await self._endpoints(host, port)
        return endpoints[turn % len(endpoints)]

    async def _endpoints(self, host: str, port: int) -> list[str]:
        addresses = await self.addresses(host)
        chosen = [each for each in addresses if ":" not in each] or addresses
        return [tcp_endpoint(each, port) for each in chosen]

    async def moved(self, named: str, used: str, connected: Callable[[], bool]) -> str:
        """Returns, with the reason, when a name's lost connection is to be made elsewhere."""
        while True:
            await trio.sleep(self.lookup_every_s)
            if connected():
                continue
            host_port = host_and_port(named)
            assert host_port is not None
            try:
                found = await self._endpoints(*host_port)
            except NameNotFound:
                continue  # a name may be gone while its pod is made anew
            except Unreachable as error:
                return str(error)
            if found != [used]:
                return f"{host_port[0]} has moved to {', '.join(found)}"

    def watch(self, link: Ends, endpoint: str) -> None:
        """Has `recheck` check a connection, too, until it is left."""
        self._links[link] = endpoint

    def leave(self, link: Ends) -> None:
        del self._links[link]

    async def recheck(self) -> None:
        """Gives up what may not be connected to any more."""
        for number, (link, endpoint) in enumerate(list(self._links.items()), 1):
            if number % SLICE_LINKS == 0:
                await trio.lowlevel.checkpoint()
            if link not in self._links:
                continue
            host_port = host_and_port(endpoint)
            if host_port is None:
                allowed = self.outgoing.ipc
            else:
                allowed = self.outgoing.allows(ip_address(host_port[0]))
            if not allowed:
                self.outgoing.refused_connections += 1
                link.give_up(refusal("ipc" if host_port is None else host_port[0]))


class NameNotFound(Unreachable):
    """A name that has no address now."""


def is_named(endpoint: str) -> bool:
    """Returns whether a checked endpoint's host is a name, which may mean another address later."""
    host_port = host_and_port(endpoint)
    return host_port is not None and host_port[0] != "*" and literal(host_port[0]) is None


async def _lookup(name: str, seconds: float) -> list[str]:
    with trio.move_on_after(seconds):
        try:
            found = await trio.socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            raise NameNotFound(f"{name}: {why or error}") from None
        return [str(address[0]) for *_, address in found]
    raise NameNotFound(f"the lookup of {name} took longer than {seconds:g} s")
