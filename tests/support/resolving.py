"""A resolver of hostnames that answers what a test says."""

from __future__ import annotations

import socket
from typing import Any

import trio


class Names(trio.abc.HostnameResolver):
    """Maps each name to its addresses, or to the seconds after which resolving it fails."""

    def __init__(self) -> None:
        self.known: dict[str, list[str] | float] = {}
        self.asked = 0

    async def getaddrinfo(self, host: Any, *rest: Any) -> Any:
        self.asked += 1
        found = self.known.get(host.decode())
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if isinstance(found, float):
            await trio.sleep(found)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [
            (
                socket.AF_INET6 if ":" in each else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (each, 0),
            )
            for each in found
        ]

    async def getnameinfo(self, *rest: Any) -> Any:
        raise NotImplementedError
