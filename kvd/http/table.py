"""Finds the route of a request without the application's router."""

from __future__ import annotations

from inspect import iscoroutinefunction

from kvd.http.answer import is_json
from kvd.http.head import Head
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

    def bind(self, head: Head) -> None:
        """Gives a head the route whose path is spelled exactly like its own, if there is one."""
        head.route = route = self._routes.get((head.method, head.path))
        if route is not None and route.hot and not head.expects_continue:
            head.hot = 0 <= head.length <= route.body_limit
            if head.http11 and head.keep_alive and is_json(head.headers):
                head.answerer = route.answerer
