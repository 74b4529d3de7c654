"""Compares a JSON value with an expected one, in which matchers may stand for values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from tests.conformance.failure import BadScenario, show

Mode = Literal["exact", "subset", "unordered"]

ABSENT = object()  # the actual value of an object member that is not there


def difference(expected: Any, actual: Any, mode: Mode = "exact", path: str = "$") -> str | None:
    """Returns the first difference as a text, None when there is none."""
    if isinstance(expected, dict) and len(expected) == 1:
        ((name, argument),) = expected.items()
        if name.startswith("$"):
            return _match(name, argument, actual, mode, path)
    if actual is ABSENT:
        return f"{path}: missing, expected {show(expected)}"
    if isinstance(expected, dict) and isinstance(actual, dict):
        return _objects(expected, actual, mode, path)
    if isinstance(expected, list) and isinstance(actual, list):
        return _arrays(expected, actual, mode, path)
    # True equals 1 in Python, but not in JSON.
    if isinstance(expected, bool) is isinstance(actual, bool) and expected == actual:
        return None
    return f"{path}: expected {show(expected)}, got {show(actual)}"


def _objects(expected: dict[str, Any], actual: dict[str, Any], mode: Mode, path: str) -> str | None:
    for name, value in expected.items():
        wrong = difference(value, actual.get(name, ABSENT), mode, f"{path}.{name}")
        if wrong:
            return wrong
    surplus = [] if mode == "subset" else [name for name in actual if name not in expected]
    return f"{path}: unexpected members {show(surplus)}" if surplus else None


def _arrays(expected: list[Any], actual: list[Any], mode: Mode, path: str) -> str | None:
    if len(expected) != len(actual):
        return f"{path}: expected {len(expected)} items {show(expected)}, got {show(actual)}"
    if mode == "unordered":
        return _multisets(expected, actual, mode, path)
    wrongs = (
        difference(one, other, mode, f"{path}[{i}]")
        for i, (one, other) in enumerate(zip(expected, actual, strict=True))
    )
    return next(filter(None, wrongs), None)


def _multisets(expected: list[Any], actual: list[Any], mode: Mode, path: str) -> str | None:
    """Pairs the items off by augmenting paths, because one item may suit several matchers."""
    partner: dict[int, int] = {}  # actual -> expected

    def place(i: int, tried: set[int]) -> bool:
        for j, item in enumerate(actual):
            if j in tried or difference(expected[i], item, mode, path) is not None:
                continue
            tried.add(j)
            if j not in partner or place(partner[j], tried):
                partner[j] = i
                return True
        return False

    for i, item in enumerate(expected):
        if not place(i, set()):
            return f"{path}: no item is like {show(item)} in {show(actual)}"
    return None


def _match(name: str, argument: Any, actual: Any, mode: Mode, path: str) -> str | None:
    if actual is ABSENT and name in ("$absent", "$optional"):
        return None
    if actual is ABSENT:
        return f"{path}: missing, expected {name} {show(argument)}"
    if name in NESTED:
        return NESTED[name](argument, actual, mode, path)
    if name not in PREDICATES:
        raise BadScenario(f"unknown matcher {name}")
    if PREDICATES[name](argument, actual, lambda one, other: not difference(one, other, mode)):
        return None
    return f"{path}: expected {name} {show(argument)}, got {show(actual)}"


def _unordered(argument: list[Any], actual: Any, mode: Mode, path: str) -> str | None:
    if not isinstance(actual, list) or len(actual) != len(argument):
        return f"{path}: expected {show(argument)} in any order, got {show(actual)}"
    return _multisets(argument, actual, mode, path)


def _all(argument: list[Any], actual: Any, mode: Mode, path: str) -> str | None:
    return next(filter(None, (difference(one, actual, mode, path) for one in argument)), None)


# Matchers that describe the difference themselves.
NESTED: dict[str, Callable[[Any, Any, Mode, str], str | None]] = {
    "$optional": difference,
    "$subset": lambda argument, actual, _, path: difference(argument, actual, "subset", path),
    "$unordered": _unordered,
    "$all": _all,
}

Equal = Callable[[Any, Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has(argument: Any, actual: Any, equal: Equal) -> bool:
    """Whether one item, or one piece of a text, is in `actual`."""
    if isinstance(actual, str):
        return argument in actual
    return isinstance(actual, list) and any(equal(argument, item) for item in actual)


# Matchers that hold or do not: (argument, actual, comparison in the current mode) -> bool.
PREDICATES: dict[str, Callable[[Any, Any, Equal], bool]] = {
    "$absent": lambda argument, actual, equal: False,
    "$any": lambda argument, actual, equal: True,
    "$type": lambda argument, actual, equal: TYPES[argument](actual),
    "$regex": lambda argument, actual, equal: (
        isinstance(actual, str) and re.search(argument, actual, re.DOTALL) is not None
    ),
    "$in": lambda argument, actual, equal: any(equal(one, actual) for one in argument),
    "$gte": lambda argument, actual, equal: _is_number(actual) and actual >= argument,
    "$lte": lambda argument, actual, equal: _is_number(actual) and actual <= argument,
    "$len": lambda argument, actual, equal: (
        isinstance(actual, str | list | dict) and len(actual) == argument
    ),
    "$contains": lambda argument, actual, equal: all(_has(one, actual, equal) for one in argument),
    "$lacks": lambda argument, actual, equal: (
        isinstance(actual, str | list) and not any(_has(one, actual, equal) for one in argument)
    ),
}

TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
