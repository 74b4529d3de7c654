"""Loads the application of the cold routes when the first cold request comes.

Quart and its dependencies take 16 MB and 0.4 s. A process that serves hot routes alone does without
them: routers, registrations, probes and scrapes use no others. The first cold request waits while a
thread makes the application; all other requests are served meanwhile.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import trio

from kvd.http.context import ServerContext
from kvd.http.limits import HttpLimits
from kvd.http.routes import Route, WrongPath, nowhere

if TYPE_CHECKING:
    from hypercorn.typing import HTTPScope

    from kvd.http.asgi import AsgiApp, Receive, Send

# Faces make their applications one after the other.
MAKING = trio.Lock()


class ColdApp:
    """An ASGI application that is made at its first call."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        limits: HttpLimits,
        context: ServerContext,
        not_found: WrongPath = nowhere,
    ) -> None:
        """Takes the arguments of `build_app`."""
        self._made_of = routes, limits, context, not_found
        self._app: AsgiApp | None = None

    async def __call__(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        """Passes one request on."""
        app = self._app or await self._load()
        await app(scope, receive, send)

    async def _load(self) -> AsgiApp:
        """Returns the application; makes it unless another request has done so."""
        async with MAKING:
            if self._app is None:
                self._app = await trio.to_thread.run_sync(self._make)
                gc.freeze()  # it stays: full collections need not visit it
        return self._app

    def _make(self) -> AsgiApp:
        from kvd.http.app import build_app

        return build_app(*self._made_of)
