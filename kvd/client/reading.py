"""Reads answers: JSON into values of annotated types.

Each type has a reader function, made once. Members that a dataclass does not have are ignored, so
that a newer daemon can send more; a member whose field has no default has to be there.

    Mapping[int, X], Mapping[int | str, X]    decimal names of members become numbers
    member("GPU")                             names the member where the field is named otherwise
    OTHERS                                    the field takes all members that no other field has
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

OTHERS: Mapping[str, Any] = {"others": True}  # metadata of a field

Read = Callable[[Any], Any]


class Mismatch(Exception):
    """A value does not have its type; `text` says where and why."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self._why = why
        self._path: list[str] = []  # innermost first

    def within(self, name: object) -> None:
        self._path.append(str(name))

    @property
    def text(self) -> str:
        path = ".".join(reversed(self._path))
        return f"{path}: {self._why}" if path else self._why


def member(name: str) -> Mapping[str, Any]:
    """Returns the metadata of a field whose member has another `name`."""
    return {"name": name}


def body_reader(kind: Any) -> Callable[[bytes], Any]:
    """Returns a function that reads a body into this type; it raises Mismatch.

    For `str` it returns the body as text, and for None it ignores the body.
    """
    if kind is NoneType:
        return lambda body: None
    if kind is str:
        return _as_text
    read = reader_of(kind)

    def read_body(body: bytes) -> Any:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            raise Mismatch("not JSON") from None
        return read(value)

    return read_body


def _as_text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise Mismatch("not UTF-8") from None


@cache
def reader_of(kind: Any) -> Read:
    """Returns a function that reads a JSON value into this type; it raises Mismatch."""
    if kind is Any:
        return lambda value: value
    if kind in _PLAIN:
        return _PLAIN[kind]
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    arguments = get_args(kind)
    match get_origin(kind):
        case origin if origin is Union or origin is UnionType:
            return _union_reader(arguments)
        case origin if origin is tuple:
            if arguments[-1] is ...:
                return _array_reader(reader_of(arguments[0]))
            return _fixed_reader(tuple(map(reader_of, arguments)))
        case origin if origin is Mapping:
            return _mapping_reader(_NAMES[arguments[0]], reader_of(arguments[1]))
    raise TypeError(f"{kind}: not a type of answers")


# ---- numbers, texts, flags


def _expected(what: str) -> NoReturn:
    raise Mismatch(f"expected {what}")


def _whole(value: Any) -> int:
    return value if type(value) is int else _expected("a whole number")


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) else _expected("a number")


def _text(value: Any) -> str:
    return value if type(value) is str else _expected("a text")


def _flag(value: Any) -> bool:
    return value if type(value) is bool else _expected("true or false")


def _nothing(value: Any) -> None:
    return None if value is None else _expected("null")


_PLAIN: dict[Any, Read] = {
    int: _whole,
    float: _number,
    str: _text,
    bool: _flag,
    NoneType: _nothing,
}


# ---- names of members


def _decimal(name: str) -> int:
    return int(name) if _is_decimal(name) else _expected("a member named by a number")


def _is_decimal(name: str) -> bool:
    return name.isascii() and name.isdigit() and (name == "0" or name[0] != "0")


def _named(name: str) -> int | str:
    return int(name) if _is_decimal(name) else name


_NAMES: dict[Any, Callable[[str], Any]] = {str: str, int: _decimal, int | str: _named}


# ---- types that contain others


def _union_reader(kinds: tuple[Any, ...]) -> Read:
    readers = tuple(reader_of(kind) for kind in kinds if kind is not NoneType)
    nullable = len(readers) < len(kinds)

    def read(value: Any) -> Any:
        if value is None and nullable:
            return None
        for each in readers[:-1]:
            try:
                return each(value)
            except Mismatch:  # the next reader may accept it
                continue
        return readers[-1](value)

    return read


def _array_reader(element: Read) -> Read:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            _expected("an array")
        return tuple([_within(at, element, each) for at, each in enumerate(value)])

    return read


def _fixed_reader(elements: tuple[Read, ...]) -> Read:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(elements):
            _expected(f"an array of {len(elements)}")
        pairs = zip(elements, value, strict=True)
        return tuple([_within(at, *pair) for at, pair in enumerate(pairs)])

    return read


def _mapping_reader(name: Callable[[str], Any], element: Read) -> Read:
    def read(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            _expected("an object")
        return {_within(each, name, each): _within(each, element, value[each]) for each in value}

    return read


def _within(name: object, read: Read, value: Any) -> Any:
    try:
        return read(value)
    except Mismatch as wrong:
        wrong.within(name)
        raise


def _dataclass_reader(kind: Any) -> Read:
    hints = get_type_hints(kind)
    named = {
        field.metadata.get("name", field.name): field
        for field in fields(kind)
        if field.metadata != OTHERS
    }
    members = {name: (field.name, hints[field.name]) for name, field in named.items()}
    required = {name for name, field in named.items() if field.default is MISSING}
    others = next((field.name for field in fields(kind) if field.metadata == OTHERS), None)
    # Made at first use, since a type may contain itself.
    readers: dict[str, tuple[str, Read]] = {}

    def read(value: Any) -> Any:
        if type(value) is not dict:
            _expected("an object")
        if not readers:
            readers.update({name: (to, reader_of(hint)) for name, (to, hint) in members.items()})
        if missing := required - value.keys():
            raise Mismatch(f"missing member `{min(missing)}`")
        found = {
            to: _within(name, each, value[name])
            for name, (to, each) in readers.items()
            if name in value
        }
        if others is not None:
            rest = {name: value[name] for name in value if name not in members}
            found[others] = reader_of(hints[others])(rest)
        return kind(**found)

    return read
