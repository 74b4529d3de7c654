"""Writes docs/limits.md: every named bound, from the code and the comments that stand with it.

    python docs/limits.py > docs/limits.md

A bound is a number with a name of its own: at the top of a module of kvd, or a `constexpr` of a
header. Its meaning is the comment above it or on its line; a bound without one is an error.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

HEAD = """\
# Limits

To find out which bound a queue, buffer, body, slice or retry has, search this page. It lists the
bounds that are constants, each with the meaning that stands beside it in the code. A constant
whose name begins with `DEFAULT`, and one that a setting may replace, holds unless the setting says
otherwise.
[configuration.md](configuration.md) lists the limits that are settings,
[operations.md](operations.md#limits-and-deadlines) explains them, and
[a decision](decisions/2026-11-22-settings-and-constants.md) says which limits are which.

`python docs/limits.py > docs/limits.md` writes this page.
"""

# Numbers that formats, protocols and exit codes prescribe, and marks: they bound nothing.
PRESCRIBED = re.compile(
    r"EXIT_\w+|[UI]\d+_(MAX|MIN)|RANK_MAX|U64_DIGITS|MAX_PORT|MAX_GROUP|END_SEQ|FIRST|FIRST_OF_STORES"
    r"|(ZAP_REQUEST|MONITOR)_FRAMES|(SEQ|PUBLISHER|MECHANISM|GREETING|SUN_PATH)_BYTES|VERSION_END|STDERR|CRITICAL|PIPE_BUF|RUN_\w+"
    r"|NEW_BEGINNING|KEEPALIVE_\w+|CHUNKED|ANYONE"
)
# Compiled code names many numbers; these names say that they bound something.
BOUND = re.compile(
    r"k\w*(Max|AtOnce|Kept|Keep|Spare|Recent|GrowsTo|Slack|Far|Buffer|Streak)\w*|MAX_\w+|SLICE_\w+"
)
CONSTEXPR = re.compile(r"\s*(?:static )?constexpr \w+(?:::\w+)* (\w+) = ([^;]+);(?:\s*// (.*))?")
CYTHON = re.compile(r"(?:    |cdef \w+ )?(k[A-Z]\w+|[A-Z]\w+) = ([0-9(][^#]*)(?:# (.*))?")


class Bound(NamedTuple):
    module: str
    name: str
    value: int | float
    meaning: str


def main() -> int:
    sys.stdout.write(page())
    return 0


def page() -> str:
    """Returns the whole page; raises SystemExit for a bound that nothing explains."""
    tables: dict[str, list[str]] = {}
    for bound in bounds():
        if not bound.meaning:
            raise SystemExit(f"{bound.module}: {bound.name} needs a comment: what does it bound?")
        meaning = bound.meaning[0].upper() + bound.meaning[1:].removesuffix(".")
        meaning = meaning.replace("|", r"\|")
        row = f"| `{bound.name}` | {text(bound)} | {meaning} | `{bound.module}` |"
        tables.setdefault(".".join(bound.module.split(".")[:2]), []).append(row)
    parts = [HEAD]
    for package, rows in tables.items():
        parts.append(f"## {package}\n\n| bound | value | meaning | module |\n|---|---|---|---|\n")
        parts[-1] += "\n".join(rows) + "\n"
    return "\n".join(parts)


def bounds() -> Iterator[Bound]:
    """Yields every bound, file by file."""
    for folder in ("kvd", "kvd_core"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".py":
                yield from of_module(path)
            elif path.suffix == ".hpp":
                yield from of_compiled(path, CONSTEXPR, "//")
            elif path.suffix == ".pyx":
                yield from of_compiled(path, CYTHON, "#")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


# ---- Python


def of_module(path: Path) -> Iterator[Bound]:
    source = path.read_text()
    lines = source.splitlines()
    group, end = "", 0  # what stands above the first of several lines holds for all of them
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, number(node.value)
            if value is not None and name.isupper() and not name.startswith("_"):
                above = alone_above(lines, node.lineno, "#")
                group = above or (group if node.lineno == end + 1 else "")
                end = node.end_lineno or 0
                if not PRESCRIBED.fullmatch(name):
                    remark = lines[node.lineno - 1].partition("#")[2].strip()  # numbers have none
                    remarks = f"{above} {remark}".strip()
                    yield Bound(dotted(path), name, value, remarks or group)


def number(node: ast.expr) -> int | float | None:
    """Returns the value of an expression of plain numbers."""
    if not any(isinstance(each, ast.Constant) for each in ast.walk(node)):
        return None
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})
    except (TypeError, NameError):
        return None
    return value if type(value) in (int, float) else None


def alone_above(lines: list[str], lineno: int, mark: str) -> str:
    """Returns the comment right above a line."""
    found: list[str] = []
    at = lineno - 2
    while at >= 0 and (line := lines[at].strip()).startswith(mark):
        found.insert(0, line.removeprefix(mark).strip())
        at -= 1
    return " ".join(found)


# ---- C++ and Cython


def of_compiled(path: Path, pattern: re.Pattern[str], mark: str) -> Iterator[Bound]:
    lines = path.read_text().splitlines()
    known: dict[str, int | float] = {}
    group, end = "", 0
    for lineno, line in enumerate(lines, 1):
        if (match := pattern.fullmatch(line)) is None:
            continue
        name, expression, remark = match.groups()
        value = evaluated(expression, known)
        if value is None:
            continue
        known[name] = value
        above = alone_above(lines, lineno, mark)
        group = above or (group if lineno == end + 1 else "")
        end = lineno
        if BOUND.fullmatch(name):
            yield Bound(dotted(path), name, value, f"{above} {remark or ''}".strip() or group)


def evaluated(expression: str, known: dict[str, int | float]) -> int | float | None:
    """Returns the value of a constant expression of numbers and of names that came before."""
    plain = re.sub(r"\b\w+\{(\d+)\}", r"\1", expression).replace("'", "")
    plain = re.sub(r"\b(\d[\d.e+]*|0x[0-9a-f]+)(?:u|ull|ul)\b", r"\1", plain)
    try:
        value = eval(plain, {"__builtins__": {}}, dict(known))
    except (NameError, SyntaxError, TypeError):
        return None
    return value if type(value) in (int, float) else None


# ---- how values are written


def text(bound: Bound) -> str:
    """Returns the value as people read it, with the unit that the name says."""
    name, value = bound.name, bound.value
    for unit, suffixes in UNITS.items():
        if name.endswith(suffixes):
            if unit == "bytes" and isinstance(value, int):
                return in_bytes(value)
            return f"{value:,} {unit}"
    if isinstance(value, int) and value >= 2**30 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:,}"


UNITS = {
    "/s": ("_PER_S",),
    "s": ("_S", "SECONDS"),
    "ns": ("_NS",),
    "µs": ("_US",),
    "bytes": ("_BYTES", "Bytes"),
}


def in_bytes(value: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value % size == 0:
            return f"{value // size:,} {unit}"
    return f"{value:,} bytes"


if __name__ == "__main__":
    sys.exit(main())
