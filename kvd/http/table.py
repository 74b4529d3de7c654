"""Finds the route of a request without the application's router."""

from __future__ import annotations

from inspect import iscoroutinefunction

from kvd.http.types import Route


class RouteTable:
    """The routes of one face by method and raw path."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._routes: dict[tuple[str, bytes], Route] = {}
        self.paths = frozenset(route.path for route in routes)
        for route in routes:
            self._add(route, route.method)
            if route.method == "GET":
                self._add(route, "HEAD")

    def _add(self, route: Route, method: str) -> None:
        if route.hot and iscoroutinefunction(route.handler):
            raise ValueError(f"the hot route {method} {route.path} has an asynchronous handler")
        key = method, route.path.encode()
        if key in self._routes:
            raise ValueError(f"two routes for {method} {route.path}")
        self._routes[key] = route

    def find(self, method: str, path: bytes) -> Route | None:
        """Returns the route whose path is spelled exactly like this."""
        return self._routes.get((method, path))

    def plain(self) -> dict[bytes, Route]:
        """Returns the hot routes by the beginning of their requests, as `POST /query`."""
        return {
            f"{route.method} {route.path}".encode(): route
            for route in self._routes.values()
            if route.hot
        }
