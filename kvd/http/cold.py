"""The application of cold requests, which is there once it is wanted.

Quart and what it brings along take 16 MB and 0.2 s. A process that is asked for hot routes alone,
as a gateway is, does without. The first cold request waits while a thread loads them; all others
are served meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from kvd.http.context import ServerContext
from kvd.http.limits import HttpLimits
from kvd.http.routes import Route, WrongPath, nowhere

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypercorn.typing import HTTPScope

    from kvd.http.asgi import AsgiApp, Receive, Send


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
        app = self._app or await self.load()
        await app(scope, receive, send)

    async def load(self) -> AsgiApp:
        """Makes the application, unless it is there, and returns it."""
        build_app = await trio.to_thread.run_sync(_load)
        if self._app is None:  # another request may have been first
            self._app = build_app(*self._made_of)
        return self._app


def _load() -> Callable[[tuple[Route, ...], HttpLimits, ServerContext, WrongPath], AsgiApp]:
    from kvd.http.app import build_app

    return build_app
