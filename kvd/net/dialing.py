"""Resolves names into the addresses that connections are made to.

    endpoint or URL ── host ── a number: it itself
                         └──── a name: looked up, within LOOKUP_S ── checked ── a number

kvd connects only to the number that was checked, so that a name cannot resolve to one address when
it is checked and to another one afterwards. A link would reconnect to that number for ever. So a
name whose connection stays lost is looked up again (`moved`): its pod may have moved meanwhile.
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
    from collections.abc import Callable, Sequence

# Time allowed for the lookup of one name: resolvers give up on a server after 5 s.
LOOKUP_S = 5.0
SLICE_LINKS = 64  # connections rechecked between two checkpoints: about 1 ms
LOOKUP_EVERY_S = 5.0  # pause between two lookups of a name whose connection stays lost


class Unreachable(Exception):
    """There is no address that may be connected to; the text says why."""


def reason_of(error: Exception) -> object:
    """Returns why a connection failed; trio hides it in the group that is the error's cause."""
    cause = error.__cause__ or error
    if isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    return getattr(cause, "strerror", None) or cause


class Ends(Protocol):
    """A connection that can be given up."""

    def give_up(self, why: str) -> None: ...


class Dialer:
    """Resolves and checks the addresses of all connections, and rechecks the lasting ones."""

    def __init__(
        self,
        outgoing: EgressPolicy | None = None,
        lookup_s: float = LOOKUP_S,
        lookup_every_s: float = LOOKUP_EVERY_S,
        keys: KeyPair | None = None,
    ) -> None:
        """Without `outgoing` the default rule holds; without `keys` a pair is made when needed."""
        self.outgoing = outgoing or EgressPolicy()
        self._keys = keys
        self.lookup_s = lookup_s
        self.lookup_every_s = lookup_every_s
        self._links: dict[Ends, str] = {}  # lasting connections and their endpoints

    def curve(self, server_key: str | None) -> Options:
        """Returns the CURVE options for connecting to the owner of `server_key`; none without it.

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
        """Returns the endpoint, as a number, to connect to for a named one; raises Unreachable.

        A name's addresses are used in turn, by the attempt's number `turn`. IPv6 addresses are
        left out where there are others, as engines bind to IPv4 unless configured otherwise.
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
        """Returns, with the reason, once a name's lost connection has to be made to elsewhere."""
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
        """Includes a connection in `recheck`, until `leave`."""
        self._links[link] = endpoint

    def leave(self, link: Ends) -> None:
        del self._links[link]

    async def recheck(self) -> None:
        """Gives up connections to addresses that are no longer allowed."""
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


def next_address(found: Sequence[str], used: str | None, *, failed: bool) -> str:
    """Returns the address of a name to connect to: the used one, or the next if it has `failed`.

    If the used one is not among those that were found, this is the first of them.
    """
    if used not in found:
        return found[0]
    return found[(found.index(used) + failed) % len(found)]


class NameNotFound(Unreachable):
    """The name has no address now."""


def is_named(endpoint: str) -> bool:
    """Returns whether a checked endpoint's host is a name, whose address may change later."""
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
