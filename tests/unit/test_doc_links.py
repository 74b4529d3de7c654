"""Links in the documentation, and paths of sources, lead to files and headings that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.support.processes import REPOSITORY

FOLDERS = ("docs", "bench", "tests")
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *(page for folder in FOLDERS for page in sorted((REPOSITORY / folder).rglob("*.md"))),
]
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
MAPS = [REPOSITORY / "docs" / name for name in ("architecture.md", "core.md")]
FILE = re.compile(r"`([a-z_][\w/]*\.(?:py|pyx|pxd|hpp|md))`")
SOURCE = re.compile(r"`((?:kvd|kvd_core|tests|bench|packaging|systemd|examples)/[\w./-]+\.\w+)`")


def text_of(page: Path) -> str:
    return FENCED.sub("", page.read_text())


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the names of a page's headings, as GitHub makes them."""
    counts: dict[str, int] = {}
    names = set()
    for heading in HEADING.findall(text_of(page)):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        names.add(f"{name}-{counts[name]}" if name in counts else name)
        counts[name] = counts.get(name, 0) + 1
    return frozenset(names)


def lost_files(row: str) -> list[str]:
    """Returns the files in a table's row that are in none of the folders named in the row."""
    folders, lost = [REPOSITORY, REPOSITORY / "kvd_core"], []
    for name in FILE.findall(row):
        place = next((each for each in folders if (each / name).exists()), None)
        if place is None:
            lost.append(name)
        else:
            folders.append((place / name).parent)
    return lost


def broken(page: Path) -> list[str]:
    """Returns the links and paths of a page that lead nowhere."""
    text = text_of(page)
    wrong = [path for path in SOURCE.findall(text) if not (REPOSITORY / path).exists()]
    if page in MAPS:
        wrong += [name for row in text.splitlines() if row[:1] == "|" for name in lost_files(row)]
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match("[a-z]+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


def test_what_a_page_leads_to_exists() -> None:
    for page in PAGES:
        assert broken(page) == [], page


def test_a_file_is_in_a_folder_that_its_row_has_named() -> None:
    assert lost_files("| a gap | `kvd/wire/cursor.py`, `losses.py`; `base/hash.hpp` |") == []
    assert lost_files("| a gap | `losses.py`, `kvd/wire/cursor.py`, `zmq.py` |") == [
        "losses.py",
        "zmq.py",
    ]


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What you see when ...\n```\n# no heading\n```\n## `GET /a_b`\n## [A](page.md)\n## A\n"
        "[1](#a-1) [2](page.md#get-a_b) [3](https://example.org/#no) `kvd/errors.py`\n"
        "[4](#no-heading) [5](none.md) [6](page.md#a-2) `kvd/none.py`\n"
    )
    assert anchors(page) == {"what-you-see-when-", "get-a_b", "a", "a-1"}
    assert broken(page) == ["kvd/none.py", "#no-heading", "none.md", "page.md#a-2"]
