"""Authorization of requests: bearer tokens, hosts, origins.

The fast path and the tasks of connections apply the same rules (kvd/http/permits.hpp), before a
body is read. This module has the texts of refusals, and counts them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address

from kvd.http.errors import Refusal
from kvd.http.messages import Headers
from kvd.http.permits import VERDICTS, PermitRules
from kvd.http.routes import Route, Scope

GRANTED = VERDICTS.index("granted")
MAX_HOST_BYTES = 253 + 6  # kept of the last refused host: a DNS name and a port
API_KEY = b"x-api-key"  # the header in which clients of Anthropic's API send their token
_CHALLENGE: Headers = [(b"www-authenticate", b"Bearer")]
_REFUSALS = {
    "missing": (401, "a bearer token is needed"),
    "malformed": (401, "expected one header `Authorization: Bearer TOKEN`"),
    "unknown": (401, "unknown token"),
    "scope": (403, "the token lacks the scope of this route"),
    "host": (421, "the host of the request is not a name of this server"),
    "origin": (403, "this server does not serve requests of this origin"),
}


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token and the scopes it grants; one scope does not imply another."""

    name: str
    scopes: Scope
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The operator's rules for clients; without tokens no client needs one."""

    tokens: tuple[Token, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()


class Authorizer:
    """The rules of one face, and the number of requests they have refused, by reason."""

    def __init__(self, policy: AccessPolicy) -> None:
        self.rules = PermitRules()
        self.refused = dict.fromkeys(_REFUSALS, 0)
        self.refused_host = ""  # the last one that was refused
        self._names: tuple[str, ...] = ()
        self.set_policy(policy)

    def add_hostnames(self, names: Iterable[str]) -> None:
        """Also accepts the host names under which the face listens."""
        self._names = tuple(names)
        self.set_policy(self._policy)

    def set_policy(self, policy: AccessPolicy) -> None:
        """Applies another policy, from the next request on."""
        self._policy = policy
        self._origins = frozenset(each.lower() for each in policy.allowed_origins)
        self.rules.replace(
            [(token.secret, token.scopes) for token in policy.tokens],
            [name.lower().encode() for name in (*policy.allowed_hosts, *self._names)],
            [origin.lower().encode() for origin in policy.allowed_origins],
        )

    @property
    def asks_for_tokens(self) -> bool:
        return bool(self._policy.tokens)

    def allows(self, origin: bytes) -> bool:
        """Returns whether pages of an origin may send requests."""
        return origin.decode("latin-1").lower() in self._origins

    def knows(self, headers: Headers, checks_host: bool) -> bool:
        """Returns whether a request for an open route would be granted Scope.READ as well."""
        return self.rules.judge(headers, Scope.READ, checks_host) == GRANTED

    def refusal(self, headers: Headers, route: Route | None, checks_host: bool) -> Refusal | None:
        """Returns the refusal of a request and counts it, None if it is granted.

        A path without a route takes any token.
        """
        scope = Scope.ANY if route is None else route.scope
        if scope & Scope.GENERATE and route is not None:
            headers = _with_api_key(headers)
        verdict = self.rules.judge(headers, scope, checks_host)
        if verdict == GRANTED:
            return None
        reason = VERDICTS[verdict]
        self.refused[reason] += 1
        if reason == "host":
            self.refused_host = _host_of(headers)
        status, text = _REFUSALS[reason]
        if reason == "scope":
            text = f"{text}: {scope.name.lower()}" if scope.name else text
        return Refusal(status, text, _CHALLENGE if status == 401 else [])


def _host_of(headers: Headers) -> str:
    """Returns the host that a request names, without its port, cut and in ASCII."""
    named = next((value for name, value in headers if name == b"host"), b"")
    host, _, port = named[:MAX_HOST_BYTES].decode("ascii", "replace").rpartition(":")
    return host if host and port.isdecimal() else f"{host}:{port}" if host else port


def _with_api_key(headers: Headers) -> Headers:
    """Returns the headers, with an `x-api-key` as the bearer token that it stands for."""
    if any(name == b"authorization" for name, _ in headers):
        return headers
    keys = [(b"authorization", b"Bearer " + value) for name, value in headers if name == API_KEY]
    return [*headers, *keys]


def is_local(sock: socket.socket) -> bool:
    """Returns whether only this machine can reach the address that a socket is bound to."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        return is_loopback(sock.getsockname()[0])
    return sock.family == socket.AF_UNIX


def is_loopback(host: str) -> bool:
    """Returns whether an address is the loopback interface's; a wildcard (`0.0.0.0`) is not."""
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
