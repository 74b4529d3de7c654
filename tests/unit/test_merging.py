"""Metrics of several processes are merged into one text."""

from __future__ import annotations

from kvd.telemetry.merging import Merged
from kvd.telemetry.metrics import Family, counter, render
from tests.support.exposition import parse


def text(*families: Family) -> bytes:
    return b"".join(render(families))


def test_each_sample_says_whose_it_is_and_each_family_is_announced_once() -> None:
    merged = Merged()
    labelled = Family("b_total", "counter", "B", [("", (("path", "/{id} x"),), 2)])
    merged.add("kvd", text(counter("a_total", "A", 1), labelled))
    merged.add("gateway-0", text(labelled, counter("c_total", "C", 3)))
    merged.add("gateway-1", text(labelled))
    assert parse(merged.render().decode()) == {
        'a_total{process="kvd"}': 1,
        'b_total{process="kvd",path="/{id} x"}': 2,
        'b_total{process="gateway-0",path="/{id} x"}': 2,
        'b_total{process="gateway-1",path="/{id} x"}': 2,
        'c_total{process="gateway-0"}': 3,
    }


def test_nothing_is_nothing() -> None:
    merged = Merged()
    merged.add("kvd", b"")
    assert merged.render() == b""
