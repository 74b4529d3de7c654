"""Log events are a closed set of names, and docs/operations.md lists them with their fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvd.telemetry.logs import Log
from tests.support.processes import REPOSITORY

METHODS = {name for name in vars(Log) if not name.startswith("_")}
NAME = re.compile("[a-z]+(_[a-z]+)*")
# These pass on their caller's event.
WRAPPERS = {"kvd/telemetry/logs.py", "kvd/net/streamlog.py"}
OWN = {"lines_dropped"}  # written by the log about itself, in kvd/telemetry/logs.py
ROW = re.compile(r"^\| `(\w+)` \| \S.*\. \| (.*)\|$", re.MULTILINE)


def is_log(node: ast.expr) -> bool:
    """Returns whether an expression is named as a logger: `log`, `self._log`."""
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name.removeprefix("_") == "log"


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(Path(REPOSITORY, "kvd").rglob("*.py")):
        name, text = str(path.relative_to(REPOSITORY)), path.read_text()
        if name not in WRAPPERS and "log." in text:
            yield name, ast.parse(text)


@cache
def written() -> dict[str, set[str]]:
    """Returns the events of all log calls, each with the fields that its calls have."""
    found: dict[str, set[str]] = {}
    for source, module in sources():
        calls = {id(node.func): node for node in ast.walk(module) if isinstance(node, ast.Call)}
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and node.attr in METHODS and is_log(node.value):
                place = f"{source}:{node.lineno}"
                call = calls.get(id(node))
                assert call is not None, f"{place}: a log method is passed on, not called"
                (event,) = call.args
                assert isinstance(event, ast.Constant), f"{place}: the event is no literal"
                assert NAME.fullmatch(event.value), f"{place}: {event.value!r} is no snake_case"
                fields = found.setdefault(event.value, set())
                fields.update(each.arg for each in call.keywords if each.arg is not None)
    return found


def documented() -> dict[str, set[str]]:
    text = (REPOSITORY / "docs/operations.md").read_text()
    section = text.partition("\n### Log events\n")[2].partition("\n## ")[0]
    return {event: set(re.findall(r"`(\w+)`", row)) for event, row in ROW.findall(section)}


def test_the_documentation_lists_every_event_and_no_other() -> None:
    listed, logged = documented().keys(), written().keys() | OWN
    assert not logged - listed, "without a row in docs/operations.md, Log events"
    assert not listed - logged, "a row of docs/operations.md that no call logs"


def test_the_documentation_lists_every_field_that_a_call_names() -> None:
    listed = documented()
    missing = {event: fields - listed.get(event, set()) for event, fields in written().items()}
    assert not any(missing.values()), missing


def test_the_documented_events_are_in_order() -> None:
    assert list(documented()) == sorted(documented())
