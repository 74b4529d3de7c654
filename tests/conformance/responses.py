"""Compares an HTTP response with a scenario's expectations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx

from tests.conformance.failure import BadScenario, show
from tests.conformance.matcher import ABSENT, Mode, difference

METRIC = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?(?:[ \t]+(\S+))?", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def unmet(expectations: dict[str, Any], response: httpx.Response) -> str | None:
    """Returns the first expectation that does not hold, as a text; None when all do."""
    for name, wanted in expectations.items():
        if name not in EXPECTATIONS:
            raise BadScenario(f"unknown expectation {name}")
        wrong = EXPECTATIONS[name](wanted, response)
        if wrong:
            return f"{wrong} (status {response.status_code}, body {show(response.text)})"
    return None


def _status(wanted: int | list[int], response: httpx.Response) -> str | None:
    if response.status_code in (wanted if isinstance(wanted, list) else [wanted]):
        return None
    return f"expected status {wanted}"


def _json(mode: Mode) -> Callable[[Any, httpx.Response], str | None]:
    def compare(wanted: Any, response: httpx.Response) -> str | None:
        try:
            return difference(wanted, response.json(), mode)
        except ValueError:
            return "the body is no JSON"

    return compare


def _texts(wanted: str | list[str]) -> list[str]:
    return [wanted] if isinstance(wanted, str) else wanted


def _contains(wanted: str | list[str], response: httpx.Response) -> str | None:
    missing = [text for text in _texts(wanted) if text not in response.text]
    return f"the body lacks {show(missing)}" if missing else None


def _lacks(wanted: str | list[str], response: httpx.Response) -> str | None:
    found = [text for text in _texts(wanted) if text in response.text]
    return f"the body contains {show(found)}" if found else None


def _headers(wanted: dict[str, Any], response: httpx.Response) -> str | None:
    actual = {name: response.headers.get(name, ABSENT) for name in wanted}
    return difference(wanted, actual, path="headers")


def _empty(wanted: bool, response: httpx.Response) -> str | None:
    return "expected no body" if wanted and response.content else None


def _error(wanted: bool, response: httpx.Response) -> str | None:
    if response.status_code < 400:
        return "expected an error status"
    return _json("subset")({"error": {"$type": "string"}}, response)


def _metrics(wanted: dict[str, Any], response: httpx.Response) -> str | None:
    samples = {
        _series(sample): float(sample[3])
        for sample in METRIC.finditer(response.text)
        if sample[3] is not None
    }
    for text, value in wanted.items():
        series = METRIC.match(text)
        if series is None:
            raise BadScenario(f"{text!r} names no metric")
        wrong = difference(value, samples.get(_series(series), ABSENT), path=text)
        if wrong:
            return wrong
    return None


def _series(line: re.Match[str]) -> tuple[str, frozenset[tuple[str, str]]]:
    return line[1], frozenset(LABEL.findall(line[2] or ""))


EXPECTATIONS: dict[str, Callable[[Any, httpx.Response], str | None]] = {
    "status": _status,
    "json": _json("exact"),
    "json_subset": _json("subset"),
    "json_unordered": _json("unordered"),
    "body_contains": _contains,
    "body_lacks": _lacks,
    "header": _headers,
    "empty": _empty,
    "error": _error,
    "metrics": _metrics,
}
