"""Checks the ZMQ addresses that clients register.

Rules and texts are those of Dynamo's standalone indexer 1.6.1, as seen on a live one:
`tcp://HOST:PORT` with a u16 port (0 passes) and IPv6 hosts in brackets, `ipc://` and `inproc://`
with any address. On top of them kvd refuses texts that libzmq reads differently than they are
written: a NUL byte cuts the rest off, a `;` splits source from destination, blanks and control
characters are never part of an address. An endpoint that passes may still not be connectable
(port 0), which the listener's status shows; for a replica, where Dynamo takes port 0, kvd refuses
it. Error texts replace a user and a password in an address by stars.
"""

from __future__ import annotations

from typing import NamedTuple

from kvd.errors import BadRequest
from kvd.wire.hosts import bracketed, everywhere
from kvd.wire.hosts import is_ipv6 as is_ipv6_address
from kvd.wire.urls import masked

MAX_PORT = 65_535


class Addresses(NamedTuple):
    """The addresses of an engine's rank."""

    endpoint: str
    replay_endpoint: str | None = None
    server_key: str | None = None  # CURVE key of both endpoints; None connects without CURVE

    def unlike(self, others: Addresses) -> str:
        """Returns the first member that differs from `others`; there has to be one."""
        if self.endpoint != others.endpoint:
            return f"endpoint {self.endpoint}"
        if self.replay_endpoint != others.replay_endpoint:
            return f"replay_endpoint {self.replay_endpoint or 'none'}"
        return f"curve_server_key {self.server_key or 'none'}"


def check_endpoint(endpoint: str) -> None:
    """Raises BadRequest, naming the endpoint and its fault, unless a SUB may connect to it."""
    fault = _fault(endpoint)
    if fault:
        raise refused(endpoint, fault)


def refused(endpoint: str, fault: str, what: str = "ZMQ") -> BadRequest:
    """Returns the error for a faulty endpoint."""
    return BadRequest(f"invalid {what} endpoint `{masked(endpoint)}`: {fault}")


def check_replay_endpoint(endpoint: str) -> None:
    """Checks like `check_endpoint`, with a text that names the replay endpoint."""
    try:
        check_endpoint(endpoint)
    except BadRequest as error:
        raise refused(endpoint, str(error), "replay") from None


def check_bound_endpoint(endpoint: str) -> None:
    """Checks like `check_endpoint`; no socket is bound to `*` or port 0, so these are refused."""
    check_endpoint(endpoint)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if endpoint.startswith("tcp://"):
        if host == "*":
            raise refused(endpoint, everywhere(host))
        if not port.strip("0"):
            raise refused(endpoint, "nobody can listen on port 0")


def is_endpoint(endpoint: str) -> bool:
    """Returns whether the text has the form of an endpoint."""
    return _fault(endpoint) is None


def host_and_port(endpoint: str) -> tuple[str, int] | None:
    """Returns host, without brackets, and port of a checked TCP endpoint; None for others."""
    if not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port.lstrip("0") or "0")


def tcp_endpoint(host: str, port: int) -> str:
    """Returns the TCP endpoint for a host, given as an address or a name."""
    return f"tcp://{bracketed(host)}:{port}"


def is_ipv6(endpoint: str) -> bool:
    """Returns whether the host is written as an IPv6 address, that is, in brackets."""
    return endpoint.startswith("tcp://[")


def _fault(endpoint: str) -> str | None:
    scheme, separator, address = endpoint.partition("://")
    if not separator:
        return "missing scheme"
    if not address:
        return "missing address"
    if scheme not in ("tcp", "ipc", "inproc"):
        return f"unsupported scheme `{scheme}`"
    return (_tcp_fault(address) if scheme == "tcp" else None) or _character_fault(address)


def _tcp_fault(address: str) -> str | None:
    if address.startswith("["):
        host, separator, port = address[1:].partition("]:")
        if not separator:
            return "missing closing `]`"
    else:
        host, separator, port = address.partition(":")
        if not separator or ":" in port:
            return "missing TCP port" + _bracket_hint(address)
    if not host:
        return "missing TCP host"
    fault = _port_fault(port)
    return f"invalid TCP port: {fault}" if fault else None


def _bracket_hint(address: str) -> str:
    """Returns a hint how to write an IPv6 address, "" for any other address."""
    host, _, port = address.rpartition(":")
    if is_ipv6_address(host):
        return f"; an IPv6 address has brackets: tcp://[{host}]:{port}"
    return "; an IPv6 address has brackets" if is_ipv6_address(address) else ""


def _port_fault(port: str) -> str | None:
    if not port:
        return "cannot parse integer from empty string"
    if not (port.isascii() and port.isdigit()):
        return "invalid digit found in string"
    # Leading zeros are fine at any length; int() refuses texts of thousands of digits.
    digits = port.lstrip("0")
    if len(digits) > len(str(MAX_PORT)) or int(digits or "0") > MAX_PORT:
        return "number too large to fit in target type"
    return None


def _character_fault(address: str) -> str | None:
    if address.isprintable() and " " not in address and ";" not in address:
        return None
    char = next(each for each in address if each in " ;" or not each.isprintable())
    return f"invalid character {char!a}"
