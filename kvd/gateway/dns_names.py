"""Names whose addresses are engines, such as a headless service's: `dns:vllm:8000`.

looked up ──> addresses ──> each is an upstream at http://ADDRESS:PORT, wanted by the name; of
   ^              │         `dns:https://vllm:8000` with TLS, and a certificate of the name
   │              └── gone from the answer: not wanted by the name any more
   └── every `lookup_every_s`; a lookup that fails changes nothing
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import trio

from kvd.errors import KvdError
from kvd.net.dialing import Dialer, Unreachable
from kvd.telemetry.logs import get_logger
from kvd.wire.endpoints import tcp_endpoint
from kvd.wire.urls import DnsName, parse_dns

MAX_ADDRESSES = 1024  # addresses of a name that are followed: the lowest ones
# Time for new engines of a name to say what they are before those gone from the name are left.
MEET_S = 10.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An engine, or a name that leads to engines, as an operator gives it."""

    url: str  # http://HOST:PORT or https:, or a name as `parse_dns` reads it
    prefills: bool = False  # it computes prompts for others
    server_name: str | None = None  # in an engine's certificate; None: the URL's host

    @property
    def name(self) -> DnsName | None:
        """The name to be followed, None for one engine's URL."""
        return parse_dns(self.url)


class Followed(Protocol):
    """An engine that is followed because it is wanted."""

    @property
    def met(self) -> trio.Event:
        """Is set once it has been asked what it is, with any outcome."""


class Wanting(Protocol):
    """Follows the engines that are wanted."""

    def want(self, wanted: Wanted, owner: str) -> Followed: ...
    def unwant(self, wanted: Wanted, owner: str) -> None: ...


@dataclass(eq=False, slots=True)
class FollowedName:
    """One name and the engines it leads to now."""

    wanted: Wanted
    urls: set[str] = field(default_factory=set)
    problem: str | None = None  # why its last lookup brought nothing new, for operators
    owners: set[str] = field(default_factory=set)  # who wants it
    following: trio.CancelScope = field(default_factory=trio.CancelScope)
    met: trio.Event = field(default_factory=trio.Event)  # it has been looked up once

    async def run(self, upstreams: Wanting, dialer: Dialer) -> None:
        """Follows the engines at the name's addresses until no owner wants the name any more."""
        with self.following:
            await self._keep(upstreams, dialer)

    async def _keep(self, upstreams: Wanting, dialer: Dialer) -> NoReturn:
        name = self.wanted.name
        assert name is not None
        while True:
            try:
                found = await dialer.addresses(name.host)
            except Unreachable as error:  # a name may be gone while its service is recreated
                self._note(str(error))
            else:
                # IPv4 is preferred, as engines bind to it by default: each must count once.
                chosen = [each for each in found if ":" not in each] or found
                chosen = sorted(set(chosen))[:MAX_ADDRESSES]
                scheme = "https:" if name.tls else "http:"
                urls = {tcp_endpoint(each, name.port).replace("tcp:", scheme) for each in chosen}
                await self._change(urls, name, upstreams)
            self.met.set()
            await trio.sleep(dialer.lookup_every_s)

    async def _change(self, urls: set[str], name: DnsName, upstreams: Wanting) -> None:
        """Makes these URLs the engines of the name.

        Engines that are gone serve until the new ones have been asked what they are, as there may
        be no others.
        """
        problem = None
        came: list[Followed] = []
        for url in sorted(urls - self.urls):
            try:
                wanted = Wanted(url, self.wanted.prefills, name.host if name.tls else None)
                came.append(upstreams.want(wanted, self.wanted.url))
                self.urls.add(url)
            except KvdError as error:
                problem = str(error)
        self._note(problem)
        gone = sorted(self.urls - urls)
        if gone:
            with trio.move_on_after(MEET_S):
                for one in came:
                    await one.met.wait()
        for url in gone:
            upstreams.unwant(Wanted(url, self.wanted.prefills), self.wanted.url)
            self.urls.discard(url)

    def _note(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            log.warning("upstream_name_unusable", name=self.wanted.url, reason=problem)
        self.problem = problem
