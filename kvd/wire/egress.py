"""Decides which addresses kvd may connect to, whether a client, a file or a setting named them.

Clients and files name engines, replay servers, replicas and peers, and kvd connects to them from
inside a network that the client may not reach itself. So every address is checked twice: as it is
written, when it is registered; and as it is resolved, just before a connection to that number.

    private     loopback, RFC 1918, RFC 6598 (pods of some clouds), RFC 4193
    ipc         sockets of this machine, ipc:// and inproc://
    a network   its addresses; those of a SPECIAL network only if the setting's network is that
                one or lies inside of it

An IPv4 address embedded in an IPv6 address is checked as well as the whole. Unusual spellings
(`127.1`, `0x7f000001`, `0177.0.0.1`, zone ids) are refused, as parsers differ about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import IPv4Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import urlsplit

from kvd.errors import BadRequest
from kvd.wire import endpoints
from kvd.wire.hosts import Address, everywhere, literal, normal
from kvd.wire.urls import masked


class Network(NamedTuple):
    """A network as a range of numbers, for fast comparison at every registration."""

    version: int
    first: int
    last: int

    @classmethod
    def of(cls, text: str) -> Network:
        network = ip_network(text)
        return cls(network.version, int(network[0]), int(network[-1]))

    def within(self, other: Network) -> bool:
        return other.first <= self.first and self.last <= other.last


PRIVATE = "private"
IPC = "ipc"


class AllowedNetworks(tuple[str, ...]):
    """The words and networks of the setting, normalised; as a text, the setting's value."""

    __slots__ = ()

    def __str__(self) -> str:
        return ",".join(self)


DEFAULT = AllowedNetworks((PRIVATE, IPC))

PRIVATE_NETWORKS = tuple(
    Network.of(text)
    for text in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "::1/128",
        "fc00::/7",
    )
)

RESERVED = "inproc://zeromq."  # where libzmq sends authentication requests (RFC 27)

# An operator who allows a larger network does not mean these parts of it. Metadata services hand
# out a cloud machine's credentials.
SPECIAL = tuple(
    Network.of(text)
    for text in (
        "0.0.0.0/8",  # this host; Linux connects to loopback
        "169.254.0.0/16",  # link-local
        "169.254.169.254/32",  # metadata of AWS, Google, Azure, OpenStack, Oracle and others
        "169.254.170.2/32",  # of AWS containers
        "169.254.170.23/32",
        "100.100.100.200/32",  # of Alibaba
        "168.63.129.16/32",  # of Azure's agent
        "192.0.0.192/32",  # of Oracle, formerly
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "::/128",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
        "fd00:ec2::/32",  # services of AWS, metadata among them
        "fd20:ce::254/128",  # metadata of Google
    )
)

# Hosts whose check is remembered: a host may have hundreds of ranks, each with an endpoint.
KEPT_HOSTS = 256

# Networks whose last 32 bits are an IPv4 address: NAT64, its local form, translated, compatible.
EMBEDDING = tuple(
    Network.of(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0:0/96", "::/96")
)


class EgressPolicy:
    """The addresses that kvd may connect to, and counts of refused ones.

    `allowed` is the setting's value, which a reload may change.
    """

    __slots__ = (
        "_host_fault",
        "_networks",
        "allowed",
        "ipc",
        "refused_connections",
        "refused_names",
    )

    def __init__(self, allowed: AllowedNetworks = DEFAULT) -> None:
        self.refused_names = 0  # as they were written
        self.refused_connections = 0  # as they were resolved
        self._host_fault = lru_cache(KEPT_HOSTS)(self._find_host_fault)
        self.allow(allowed)

    def allow(self, allowed: AllowedNetworks) -> None:
        """Replaces the allowed addresses from now on."""
        self.allowed = allowed
        self._host_fault.cache_clear()
        self.ipc = IPC in self.allowed
        self._networks = tuple(
            network
            for text in self.allowed
            if text != IPC
            for network in (PRIVATE_NETWORKS if text == PRIVATE else (Network.of(text),))
        )

    # ---- addresses as they are written

    def check_endpoint(self, endpoint: str) -> None:
        """Raises BadRequest unless a SUB may connect there; names are checked once resolved."""
        endpoints.check_endpoint(endpoint)
        if fault := self._fault(endpoint):
            self.refused_names += 1
            raise endpoints.refused(endpoint, fault)

    def check_replay_endpoint(self, endpoint: str) -> None:
        """Checks like `check_endpoint`, with a text that names the replay endpoint."""
        endpoints.check_replay_endpoint(endpoint)
        if fault := self._fault(endpoint):
            self.refused_names += 1
            raise endpoints.refused(endpoint, fault, "replay")

    def check_bound_endpoint(self, endpoint: str) -> None:
        """Checks like `check_endpoint`; no socket is bound to `*` or port 0: these are refused."""
        endpoints.check_bound_endpoint(endpoint)
        self.check_endpoint(endpoint)

    def check_url(self, url: str) -> None:
        """Raises BadRequest if a URL has a password or a host that may not be connected to.

        A text that is no URL passes: fetching it fails before any connection is made. The error's
        text contains only the host.
        """
        if masked(url) != url:  # lists of URLs would show the password to every client
            raise BadRequest("invalid URL: the URL contains a user or a password")
        try:
            host = urlsplit(url).hostname
        except ValueError:
            return
        if host is not None and (fault := self._host_fault(host)):
            self.refused_names += 1
            raise BadRequest(f"invalid URL: {fault}")

    def _fault(self, endpoint: str) -> str | None:
        host_port = endpoints.host_and_port(endpoint)
        if host_port is None:
            if endpoint.startswith(RESERVED):
                return "libzmq's own"
            return None if self.ipc else f"{IPC} is not in outgoing_allow"
        return self._host_fault(host_port[0], bracketed=endpoints.is_ipv6(endpoint))

    def _find_host_fault(self, host: str, *, bracketed: bool = False) -> str | None:
        try:
            address = literal(host)
        except ValueError as error:
            return masked(str(error))
        if bracketed and ":" not in host:
            return f"{host} is not an IPv6 address"
        if address is None or self.allows(address):
            return None
        return everywhere(address) if address.is_unspecified else refusal(address)

    # ---- addresses as they are

    def allows(self, address: Address) -> bool:
        """Returns whether a connection may be made to this very address."""
        if not self._names(address):
            return False
        inner = (each for each in _embedded(address) if _special(each) or _private(each))
        return all(map(self._names, inner))

    def _names(self, address: Address) -> bool:
        inside = _around(self._networks, address)
        for special in _special(address):
            inside = [network for network in inside if network.within(special)]
        return bool(inside)

    def allowed_of(self, found: Iterable[str]) -> list[str]:
        """Returns the allowed ones of the addresses that a name was resolved to."""
        addresses = dict.fromkeys(normal(ip_address(text.partition("%")[0])) for text in found)
        return [str(address) for address in addresses if self.allows(address)]


def refusal(host: object) -> str:
    return f"{host} is not in outgoing_allow"


def parse_networks(texts: Iterable[str]) -> AllowedNetworks:
    """Returns the setting that these texts make up; the text of a ValueError says what is valid."""
    return AllowedNetworks(dict.fromkeys(map(_parse_network, texts)))


def _parse_network(text: str) -> str:
    if text in DEFAULT:
        return text
    try:
        return str(ip_network(text))
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a network such as 10.0.0.0/8 nor one of {', '.join(DEFAULT)}"
        ) from None


def _special(address: Address) -> list[Network]:
    return _around(SPECIAL, address)


def _private(address: Address) -> list[Network]:
    return _around(PRIVATE_NETWORKS, address)


def _around(networks: Iterable[Network], address: Address) -> list[Network]:
    version, number = address.version, int(address)
    return [one for one in networks if version == one.version and one.first <= number <= one.last]


def _embedded(address: Address) -> Iterator[IPv4Address]:
    """Yields the IPv4 addresses that packets to an IPv6 address may be delivered to."""
    if isinstance(address, IPv4Address) or address.is_loopback or address.is_unspecified:
        return
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if _around(EMBEDDING, address):
        yield IPv4Address(int(address) & 0xFFFF_FFFF)
