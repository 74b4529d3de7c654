"""The application of cold requests, which is there once it is wanted.

Quart and what it brings along take 16 MB and 0.4 s. A process that is asked for hot routes alone
does without: those are what routers, registrations, probes and scrapes ask for. The first cold
request waits while a thread makes the application; all others are served meanwhile.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import trio

from kvd.http.context import ServerContext
from kvd.http.limits import HttpLimits
from kvd.http.routes import Route, WrongPath, nowhere

if TYPE_CHECKING:
    from hypercorn.typing import HTTPScope

    from kvd.http.asgi import AsgiApp, Receive, Send

# Of one face after the other, as they share the interval.
MAKING = trio.Lock()

# For which the thread that makes an application may keep the loop waiting, each time that this has
# let it run. Python's own 5 ms are all that a stretch of the loop should have.
SWITCH_S = 0.0005


class ColdApp:
    """An ASGI application that is made when it is called."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        limits: HttpLimits,
        context: ServerContext,
        not_found: WrongPath = nowhere,
    ) -> None:
        """Takes what `build_app` does."""
        self._made_of = routes, limits, context, not_found
        self._app: AsgiApp | None = None

    async def __call__(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        """Passes one request on."""
        app = self._app or await self._load()
        await app(scope, receive, send)

    async def _load(self) -> AsgiApp:
        """Makes the application, unless another request has come first, and returns it."""
        async with MAKING:
            if self._app is None:
                self._app = await trio.to_thread.run_sync(self._make)
        return self._app

    def _make(self) -> AsgiApp:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            from kvd.http.app import build_app

            return build_app(*self._made_of)
        finally:
            sys.setswitchinterval(usual)
