"""Finds the route of a request by its raw path.

Paths are compared as they are spelled, before percent-decoding, as the original servers do: clients
put ids of any text into them, and `a%2Fb` is one segment. A connection looks the route up once,
before it reads a body, and passes it on with the request. Quart routes cold requests by the same
rule (app.py).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvd.http.routes import Route


class Found(NamedTuple):
    """A route, and the part of the path in place of its placeholder."""

    route: Route
    captured: bytes  # one segment, still percent-encoded


class RouteTable:
    """The routes of one face by method and raw path."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._routes = routes
        self._methods = sorted({route.method for route in routes})
        self._exact: dict[tuple[str, bytes], Found] = {}
        self._patterns: list[tuple[str, re.Pattern[bytes], Route]] = []
        for route in routes:
            self._add(route, route.method)
            if route.answers_head:
                self._add(route, "HEAD")

    def _add(self, route: Route, method: str) -> None:
        if "{" in route.path:
            before, _, after = map(re.escape, re.split(rb"(\{\w+\})", route.path.encode()))
            inside = b"(.+)" if route.deep else b"([^/]+)"
            self._patterns.append((method, re.compile(before + inside + after), route))
            return
        key = method, route.path.encode()
        if key in self._exact:
            raise ValueError(f"two routes for {method} {route.path}")
        self._exact[key] = Found(route, b"")

    def find(self, method: str, path: bytes) -> Found | None:
        """Returns the route of a raw path without query; exact paths go before placeholders."""
        found = self._exact.get((method, path))
        if found is None and self._patterns:
            return self._match(method, path)
        return found

    def _match(self, method: str, path: bytes) -> Found | None:
        for of_method, pattern, route in self._patterns:
            if of_method == method and (match := pattern.fullmatch(path)):
                return Found(route, match[1])
        return None

    def label(self, path: bytes) -> str | None:
        """Returns the path of the route that a raw path has for any method, or None."""
        each = (self.find(method, path) for method in self._methods)
        return next((found.route.path for found in each if found is not None), None)

    def plain(self) -> dict[bytes, Route]:
        """Returns hot routes without a placeholder by the start of requests, as `POST /query`."""
        return {
            f"{route.method} {route.path}".encode(): route
            for route in self._routes
            if route.hot and "{" not in route.path
        }

    def plain_patterns(self) -> list[tuple[bytes, bytes, Route]]:
        """Returns the hot routes with a placeholder, each with the text before and behind it."""
        found = []
        for route in self._routes:
            if route.hot and "{" in route.path:
                before, after = re.split(r"\{\w+\}", f"{route.method} {route.path}")
                found.append((before.encode(), after.encode(), route))
        return found
