"""Quart routes a cold request to the route that the route table finds, or refuses it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from random import Random

import trio
from werkzeug.routing import Rule

from kvd.http.app import ReadRule, build_app
from kvd.http.context import ServerContext
from kvd.http.limits import HttpLimits
from kvd.http.messages import Request, Response
from kvd.http.routes import Route
from kvd.http.table import RouteTable
from tests.support.all_routes import all_routes
from tests.support.budget import scaled

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND")
# Pieces put into paths: slashes, plain and encoded, and texts that decoding would change.
PIECES = ("/", "//", "%2F", "%2f", ".", "..", "%", "%zz", "%68", "é", "\x7f", "1", "-", "|", "<a>")


def shown(route: Route, request: Request) -> Response:
    """Answers with the route, and the part of the path that its placeholder captured."""
    text = f"{route.method} {route.path} {request.captured!r}"
    return Response(200, b"", b"", [(b"x-route", text.encode())])


async def ask(app: object, method: str, path: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Sends a request without a body over ASGI."""
    status, headers, body = 0, dict[bytes, bytes](), b""
    ended = trio.Event()
    requests = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> object:
        if requests:
            return requests.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        nonlocal status, headers, body
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])  # type: ignore
        else:
            body += message["body"]  # type: ignore

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": "/what/else",  # the decoded path must not be read
        "raw_path": path,
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)  # type: ignore
    return status, headers, body


def spelled(random: Random, paths: list[str]) -> bytes:
    """Returns a path that matches a route, or nearly does."""
    path = re.sub(
        r"{\w+}", lambda _: random.choice(("1", "a%2Fb", "é", "%zz")), random.choice(paths)
    )
    for _ in range(random.choice((0, 0, 1, 2))):
        cut = random.randrange(len(path) + 1)
        path = path[:cut] + random.choice(PIECES) + path[cut + random.choice((0, 0, 1)) :]
    return ("/" + path[1:] if path.startswith("/") else "/" + path).encode()


async def test_quart_and_the_table_agree_on_every_path() -> None:
    random = Random(0)
    for routes in all_routes().values():
        routes = tuple(
            replace(route, handler=partial(shown, route), hot=False, admission=None)
            for route in routes
        )
        table, app = RouteTable(routes), build_app(routes, HttpLimits(), ServerContext())
        paths = [route.path for route in routes] + ["/nowhere", "/"]
        for _ in range(scaled(60)):
            method, path = random.choice(METHODS), spelled(random, paths)
            status, headers, body = await ask(app, method, path)
            found = table.find(method, path)
            if found is not None:
                text = f"{found.route.method} {found.route.path} {found.captured!r}"
                assert (status, headers[b"x-route"]) == (200, text.encode()), path
            elif allowed := [each for each in sorted(METHODS) if table.find(each, path)]:
                assert (status, headers[b"allow"].decode()) == (405, ", ".join(allowed)), path
                assert json.loads(body) == {"error": "method not allowed"}
            else:
                assert (status, json.loads(body)) == (404, {"error": "not found"}), path


def test_werkzeug_compiles_what_writes_urls_under_the_name_that_is_overridden() -> None:
    assert hasattr(Rule, "_compile_builder")
    assert "_compile_builder" in vars(ReadRule)
