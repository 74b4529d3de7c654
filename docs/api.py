"""Writes docs/api.md: every route of every face, from the OpenAPI documents.

python docs/api.py > docs/api.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvd.faces.common.openapi import document
from tests.support.all_routes import DESCRIPTIONS, all_routes

Schema = Mapping[str, Any]

HEAD = """\
# Every route

To look up what a route takes, answers and refuses, search this page. The pages of the faces
explain the meaning ([gateway](gateway.md), [indexer](faces/indexer.md),
[slot tracker](faces/slot_tracker.md), [selection](faces/selection.md),
[conductor](faces/conductor.md)). Each face also serves this as an OpenAPI 3.1 document at
`GET /openapi.json`, with schemas of the answers, and `/ui` lets you try each route.

Bodies are JSON unless stated otherwise. Members in **bold** are required. `u32`, `u64` and `i64`
are whole numbers that fit these types. The [scope](security.md#scopes) in parentheses is the one
that a token needs; routes without one are open. [Refusals of every
route](faces/indexer.md#failures-on-every-route) are left out, as are 401 and 403 for want of a
token and 421 for another host or owner.

`python docs/api.py > docs/api.md` writes this page.
"""
OF_ALL = {"400", "401", "403", "408", "413", "414", "415", "417", "421", "431", "500", "503"}
# Ranges that have a name of their own.
NAMED = {
    (0, 2**32 - 1): "u32",
    (0, 2**64 - 1): "u64",
    (-(2**63), 2**63 - 1): "i64",
    (-(2**63), 2**64 - 1): "i64 or u64",
}
PLAIN = {"string": "text", "boolean": "true or false", "number": "number", "null": "null"}
SHOWN_MEMBERS = 3  # of an object in an object; more are "..."


def kind(schema: Schema, depth: int = 0) -> str:
    """Says in a few words what a schema allows."""
    if "$ref" in schema:
        return "a refusal"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(kind(each, depth) for each in schema[union]))
    wanted = schema.get("type")
    if isinstance(wanted, list):
        each_alone = ({**schema, "type": one} for one in wanted)
        return " or ".join(dict.fromkeys(kind(each, depth) for each in each_alone))
    if wanted == "array":
        return f"array of {kind(schema.get('items', {}), depth + 1)}"
    if wanted == "integer":
        return whole(schema)
    if wanted == "object":
        names = list(schema.get("properties", {}))
        if depth and names:
            return "{" + ", ".join(names[:SHOWN_MEMBERS]) + (", ...}" if names[3:] else "}")
        return "object"
    return PLAIN.get(str(wanted), "anything")


def whole(schema: Schema) -> str:
    """Says which whole numbers a schema allows."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return NAMED.get((low, high)) or f"{low:,} to {high:,}"
    return "whole number" if low is None else f"whole number from {low:,}"


def described(name: str, schema: Schema, *, needed: bool) -> str:
    """Returns one member or parameter with what it may be."""
    description, shown = schema.get("description"), f"**`{name}`**" if needed else f"`{name}`"
    return f"{shown} {kind(schema)}" + (f" ({description})" if description else "")


def members_of(content: Schema) -> Iterator[str]:
    """Yields what a body of a request has."""
    for media, body in content.items():
        schema = body.get("schema", {})
        if media != "application/json":
            yield f"{media}"
            continue
        unions = [schema] if "properties" in schema else schema.get("anyOf", schema.get("oneOf"))
        for each in unions or [schema]:
            if each.get("properties"):
                needed = set(each.get("required", ()))
                rows = each["properties"].items()
                listed = ", ".join(described(name, of, needed=name in needed) for name, of in rows)
                yield one_of(each.get("anyOf", ())) + listed
            else:
                yield kind(each)


def one_of(alternatives: Iterable[Schema]) -> str:
    """Says of which members a body needs one, before its list of members."""
    needed = [f"**`{name}`**" for each in alternatives for name in each["required"]]
    return f"{' or '.join(needed)}; " if needed else ""


def answers_of(responses: Schema) -> Iterator[str]:
    """Yields statuses that this route has beside those of all, with what their bodies are."""
    for status, response in responses.items():
        if "$ref" in response:
            if status not in OF_ALL:
                yield status
            continue
        bodies = []
        for media, body in response.get("content", {}).items():
            schema = body.get("schema", {})
            if media != "application/json":
                bodies.append(media)
            elif schema.get("properties"):
                bodies.append(", ".join(f"`{name}`" for name in schema["properties"]))
            else:
                bodies.append(kind(schema, 1))
        yield f"{status}{': ' if bodies else ''}{' or '.join(dict.fromkeys(bodies))}"


def route_of(operation: Schema) -> str:
    """Returns what is said of one route, below its name."""
    parameters = [
        described(each["name"], each["schema"], needed=each.get("required", False))
        + (" (header)" if each["in"] == "header" else "")
        for each in operation.get("parameters", ())
    ]
    lines = [f"with {', '.join(parameters)}"] if parameters else []
    content = operation.get("requestBody", {}).get("content", {})
    lines += [f"takes {body}" for body in members_of(content)]
    lines.append(f"answers {'; '.join(answers_of(operation['responses']))}")
    summary = re.sub(r"\s+", " ", operation["summary"]).rstrip(".")
    return f"{summary}.\n\n" + "".join(f"- {line}\n" for line in lines)


def routes_of(paths: Schema) -> Iterator[str]:
    """Yields the routes of one document; those of which the same is said stand together."""
    together: dict[str, list[str]] = {}
    for path, operations in paths.items():
        for method, operation in operations.items():
            scope = next(
                (each["bearer"][0] for each in operation.get("security", ()) if each), None
            )
            needs = f" ({scope.replace('|', ' or ')})" if scope else ""
            text = f"{needs}: {route_of(operation)}"
            together.setdefault(text, []).append(f"**`{method.upper()} {path}`**")
    for text, names in together.items():
        yield f"\n{', '.join(names)}{text}"


def page() -> Iterator[str]:
    """Yields the page, piece by piece; routes that every face has come last."""
    yield HEAD
    documents = {
        face: document(face, routes, DESCRIPTIONS[face]) for face, routes in all_routes().items()
    }
    paths = [set(shown["paths"]) for shown in documents.values()]
    of_every = set.intersection(*paths)
    for face, shown in documents.items():
        yield f"\n## {face.replace('-', ' ').capitalize()}\n"
        own = {
            path: operations for path, operations in shown["paths"].items() if path not in of_every
        }
        yield from routes_of(own)
    yield "\n## Every face\n"
    any_face = next(iter(documents.values()))["paths"]
    yield from routes_of({path: any_face[path] for path in sorted(of_every)})


if __name__ == "__main__":
    sys.stdout.writelines(page())
