"""Checks that a face's answers, and the requests it accepts, are as its OpenAPI document says."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import httpx
import msgpack
from jsonschema import Draft202012Validator

from kvd.faces.common.openapi import document
from tests.support.all_routes import DESCRIPTIONS, all_routes

JSON, PACKED = "application/json", "application/msgpack"


class Documented:
    """The document of one face, against which requests and answers are checked."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._components = {"components": document["components"]}
        self._paths = [
            (re.compile(re.sub(r"{\w+}", "[^/]+", path)), operations)
            for path, operations in document["paths"].items()
        ]
        self._validators: dict[int, Draft202012Validator] = {}

    def untrue(self, response: httpx.Response) -> str | None:
        """Returns the first difference from the document, None if there is none."""
        request = response.request
        path = request.url.raw_path.partition(b"?")[0].decode("latin-1")
        method = "get" if request.method == "HEAD" else request.method.lower()
        entry = next((each for pattern, each in self._paths if pattern.fullmatch(path)), {})
        if method not in entry:
            refused = 405 if entry else 404
            return None if response.status_code == refused else f"not {refused}, as undocumented"
        wrong = self._wrong_answer(entry[method]["responses"], response)
        if wrong is None and response.is_success and request.method != "HEAD":
            wrong = self._wrong_request(entry[method].get("requestBody"), request)
        return wrong

    def _wrong_answer(self, responses: dict[str, Any], response: httpx.Response) -> str | None:
        if str(response.status_code) not in responses:
            return f"status {response.status_code} is not documented"
        entry = responses[str(response.status_code)]
        if "$ref" in entry:
            entry = self._components["components"]["responses"][entry["$ref"].rpartition("/")[2]]
        if response.request.method == "HEAD":
            return None
        return self._invalid(entry.get("content", {}), response.headers, response.content)

    def _wrong_request(self, entry: dict[str, Any] | None, request: httpx.Request) -> str | None:
        if entry is None or (not request.content and not entry["required"]):
            return None
        headers = request.headers
        if headers.get("content-type", "").partition(";")[0] not in entry["content"]:
            headers = httpx.Headers({"content-type": JSON})  # some routes ignore it
        wrong = self._invalid(entry["content"], headers, request.content)
        return wrong and f"accepted a body that is not documented: {wrong}"

    def _invalid(self, content: dict[str, Any], headers: httpx.Headers, body: bytes) -> str | None:
        """Returns what is wrong with a body, which must have one of the types of `content`."""
        given = headers.get("content-type")
        if not content:
            return None if not given and not body else f"{given}: no content is documented"
        known = given if given in content else str(given).partition(";")[0]
        if known not in content and known.partition("/")[0] + "/*" in content:
            known = known.partition("/")[0] + "/*"
        if known not in content:
            return f"content type {given} is not documented"
        schema = content[known]["schema"]
        if known == JSON:
            value = json.loads(body)
        elif "msgpack" in known:
            value = _texts(msgpack.unpackb(body))
        else:
            return None
        # The document keeps its schemas alive, so no two of them ever have the same id.
        validator = self._validators.get(id(schema))
        if validator is None:
            validator = Draft202012Validator(schema | self._components)
            self._validators[id(schema)] = validator
        error = next(iter(validator.iter_errors(value)), None)
        return error and f"{error.json_path}: {error.message[:300]}"


def _texts(value: Any) -> Any:
    """Returns a value with texts in place of bins, for which JSON schemas have no type."""
    if isinstance(value, dict):
        return {name: _texts(each) for name, each in value.items()}
    return value.hex() if isinstance(value, bytes) else value


@cache
def documented(face: str) -> Documented:
    """Returns the document of a face, by the name that the daemon uses."""
    return Documented(document(face, all_routes()[face], DESCRIPTIONS[face]))
