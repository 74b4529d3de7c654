"""Answers are read into typed values; an error names the member that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvd.client.reading import OTHERS, Mismatch, body_reader, member, reader_of


@dataclass(frozen=True, slots=True)
class Leaf:
    count: int
    share: float = field(metadata=member("SHARE"))
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Node:
    leaves: tuple[Leaf, ...]
    pair: tuple[str, int]
    by_rank: Mapping[int, bool]
    by_instance: Mapping[int | str, int]
    below: Node | None = None


@dataclass(frozen=True, slots=True)
class Open:
    known: int
    others: Mapping[str, int] = field(metadata=OTHERS)


MEMBERS: dict[str, Any] = {
    "leaves": [{"count": 1, "SHARE": 2, "note": None}, {"count": 3, "SHARE": 0.5, "new": {}}],
    "pair": ["a", 1],
    "by_rank": {"0": True},
    "by_instance": {"7": 1, "node1": 2, "007": 3},
    "newer": "ignored",
}
READ = Node((Leaf(1, 2.0), Leaf(3, 0.5)), ("a", 1), {0: True}, {7: 1, "node1": 2, "007": 3}, None)


def test_an_answer_becomes_a_value() -> None:
    read = reader_of(Node)
    assert read(MEMBERS) == READ
    assert read(MEMBERS | {"below": MEMBERS}).below == READ
    assert isinstance(read(MEMBERS).leaves[0].share, float)
    assert reader_of(Open)({"known": 1, "a": 2}) == Open(1, {"a": 2})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"leaves": [{"SHARE": 1}]}, "leaves.0: missing member `count`"),
        ({"leaves": [{"count": True, "SHARE": 1}]}, "leaves.0.count: expected a whole number"),
        ({"leaves": [{"count": 1.0, "SHARE": 1}]}, "leaves.0.count: expected a whole number"),
        ({"leaves": [{"count": 1, "SHARE": "1"}]}, "leaves.0.SHARE: expected a number"),
        ({"leaves": [{"count": 1, "SHARE": 1, "note": 1}]}, "leaves.0.note: expected a text"),
        ({"leaves": {}}, "leaves: expected an array"),
        ({"leaves": None}, "leaves: expected an array"),
        ({"pair": ["a"]}, "pair: expected an array of 2"),
        ({"pair": [1, 1]}, "pair.0: expected a text"),
        ({"by_rank": {"x": True}}, "by_rank.x: expected a member named by a number"),
        ({"by_rank": {"0": 1}}, "by_rank.0: expected true or false"),
        ({"by_instance": []}, "by_instance: expected an object"),
        ({"below": 1}, "below: expected an object"),
    ],
)
def test_what_does_not_fit_says_where(change: dict[str, Any], text: str) -> None:
    with pytest.raises(Mismatch) as caught:
        reader_of(Node)(MEMBERS | change)
    assert caught.value.text == text


def test_bodies() -> None:
    assert body_reader(str)(b"# HELP") == "# HELP"
    assert body_reader(type(None))(b'{"status":"ok"}') is None
    assert body_reader(Mapping[str, Any])(b'{"a":[null]}') == {"a": [None]}
    assert body_reader(int | str)(b'"x"') == "x"
    for kind, body in ((str, b"\xff"), (int, b"{"), (int, b""), (int, b"[" * 100_000)):
        with pytest.raises(Mismatch):
            body_reader(kind)(body)


def test_a_type_that_no_answer_has_is_a_bug() -> None:
    with pytest.raises(TypeError):
        reader_of(set[int])
