"""Reads Prometheus' text format 0.0.4 strictly: any other line fails the test."""

from __future__ import annotations

import re

_VALUE = r'"(?:[^"\\\n]|\\[\\"n])*"'
_LABEL = re.compile(rf"([a-zA-Z_][a-zA-Z0-9_]*)=({_VALUE})(?:,|$)")
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{((?:[a-zA-Z_][a-zA-Z0-9_]*={_VALUE},?)+)\}})?"
    r" ([0-9.e+-]+|\+Inf)"
)
_REFERS = re.compile(r" these | that longest ")
_ESCAPED = re.compile(r"\\(.)")
_UNESCAPED = {"n": "\n"}


def parse(text: str) -> dict[str, float]:
    """Returns samples by name and labels, as written.

    Samples must stand below the HELP and TYPE of their family, each family must be announced once,
    no sample may come twice, and no HELP may refer to another one: tools show it alone.
    """
    assert text == "" or text.endswith("\n")
    samples: dict[str, float] = {}
    announced: set[str] = set()
    family = ""
    for line in text.split("\n")[:-1]:
        if line.startswith("# "):
            kind, name = line[2:].split(" ")[:2]
            assert kind == ("TYPE" if name in announced else "HELP"), line
            assert not _REFERS.search(line), line
            if kind == "HELP":
                announced.add(name)
                family = name
            continue
        found = _SAMPLE.fullmatch(line)
        assert found, line
        name = found[1]
        assert family == name or family == re.sub("_(bucket|sum|count)$", "", name), line
        key = line.rpartition(" ")[0]
        assert key not in samples, line
        samples[key] = float(found[3])
    return samples


def labels(key: str) -> dict[str, str]:
    """Returns the labels of a sample, unescaped."""
    _, _, inside = key.partition("{")
    return {
        name: _ESCAPED.sub(lambda m: _UNESCAPED.get(m[1], m[1]), value[1:-1])
        for name, value in _LABEL.findall(inside.removesuffix("}"))
    }
