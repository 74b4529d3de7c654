"""Reads which series a PromQL expression asks for: names, label matchers and grouping labels.

It understands the part of PromQL that kvd's dashboard and alerts use, and refuses anything else,
which would go unchecked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FUNCTIONS = {"avg", "histogram_quantile", "increase", "label_values", "max", "rate", "sum"}
SET_OPERATORS = {"or"}

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>"[^"\\]*") | (?P<range>\[(?:\d+[smh]|\$__rate_interval)\])
        | (?P<number>\d+(?:\.\d+)?(?![\w.])) | (?P<word>[a-zA-Z_:][a-zA-Z0-9_:]*)
        | (?P<sign>=~|!~|!=|==|>|<|=|[-+*/(){},])
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Selector:
    """Series of one name; matchers are (label, operator, text)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()


@dataclass
class Query:
    """The series and labels that an expression names."""

    selectors: list[Selector] = field(default_factory=list)
    grouped: list[set[str]] = field(default_factory=list)  # labels of each `by`


def read(expression: str) -> Query:
    """Returns what an expression names; raises ValueError if it cannot read a part of it."""
    tokens = _tokens(expression)
    query = Query()
    while tokens:
        kind, token = tokens.pop(0)
        if kind != "word" or token in SET_OPERATORS:
            continue
        following = tokens[0][1] if tokens else ""
        if token in FUNCTIONS and following in ("(", "by"):
            if token == "label_values":  # Grafana's own; its last argument is a label
                query.grouped.append({_last_label(tokens)})
        elif token == "by" and following == "(":
            query.grouped.append(_labels(tokens))
        elif following == "(":
            raise ValueError(f"unknown function {token}")
        else:
            query.selectors.append(Selector(token, _matchers(tokens)))
    return query


def _tokens(expression: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    text = expression.rstrip()
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"not understood: {text[at:]}")
        found.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found


def _matchers(tokens: list[tuple[str, str]]) -> tuple[tuple[str, str, str], ...]:
    """Takes `{label="text", ...}` from the front of the tokens, if it is there."""
    if not tokens or tokens[0][1] != "{":
        return ()
    found: list[tuple[str, str, str]] = []
    while tokens.pop(0)[1] != "}":
        (_, label), (_, operator), (kind, text) = tokens[:3]
        if kind != "text" or tokens[3][1] not in (",", "}"):
            raise ValueError(f"not a matcher: {label}{operator}{text}")
        found.append((label, operator, text[1:-1]))
        del tokens[:3]
    return tuple(found)


def _labels(tokens: list[tuple[str, str]]) -> set[str]:
    """Takes `(label, ...)` from the front of the tokens."""
    end = [token for _, token in tokens].index(")")
    found = {token for kind, token in tokens[1:end] if kind == "word"}
    del tokens[: end + 1]
    return found


def _last_label(tokens: list[tuple[str, str]]) -> str:
    """Takes `, label)` from the end of the tokens."""
    label = tokens[-2][1]
    if (tokens[-3][1], tokens[-1][1]) != (",", ")"):
        raise ValueError(f"not a label: {label}")
    del tokens[-3:]
    return label
