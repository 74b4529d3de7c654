"""Two builds of the core beside each other: python bench/beside.py OTHER_TREE [BENCH] [--turns N]

OTHER_TREE is another checkout of kvd, built with its own `make build`. BENCH is the name of a
script here that prints one Markdown table of CPU microseconds (selector, ledger). The scripts of
both trees run in turns, each in a process of its own, so a slow minute of the machine hits both.
Prints the medians of each tree and, below them, the median ratio of this tree's figure to the
other's of the same turn. With --lowest it prints the lowest figures and their ratio instead, which
a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent.parent

Table = dict[str, list[float]]  # a row's first cell to its figures


def run(tree: Path, bench: str, rounds: int) -> tuple[str, Table]:
    """Returns the head of the table that a tree's script prints, and the rows."""
    command = [sys.executable, f"bench/{bench}.py", "--rounds", str(rounds)]
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    head, _, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return head, {first: [float(cell) for cell in rest] for first, *rest in cells}


def summed_up(tables: list[Table], by: Callable[[Iterable[float]], float]) -> Table:
    """Returns the median or the lowest of several tables, figure by figure."""
    return {
        row: [by(each) for each in zip(*(table[row] for table in tables), strict=True)]
        for row in tables[0]
    }


def share(mine: Table, other: Table) -> Table:
    return {
        row: [a / b if b else 1.0 for a, b in zip(mine[row], other[row], strict=True)]
        for row in mine
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("other", type=Path, help="another built checkout")
    parser.add_argument("bench", nargs="?", default="selector", choices=("selector", "ledger"))
    parser.add_argument("--turns", type=int, default=10, help="runs of each tree")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of a run")
    parser.add_argument("--lowest", action="store_true", help="not medians but the lowest figures")
    options = parser.parse_args()
    trees = {"other": options.other.resolve(), "this": HERE}
    tables: dict[str, list[Table]] = {name: [] for name in trees}
    head = ""
    for turn in range(options.turns):
        for name in sorted(trees, reverse=turn % 2 == 1):
            head, table = run(trees[name], options.bench, options.rounds)
            tables[name].append(table)
    by = min if options.lowest else median
    lines = {name: summed_up(tables[name], by) for name in ("other", "this")}
    if options.lowest:
        lines["share"] = share(lines["this"], lines["other"])
    else:
        shares = [share(*pair) for pair in zip(tables["this"], tables["other"], strict=True)]
        lines["share"] = summed_up(shares, median)
    statistic = "lowest" if options.lowest else "medians"
    print(f"CPU us a call, {statistic} of {options.turns} turns\n")
    print(f"| tree {head}\n|{'---|' * head.count('|')}")
    for row in lines["share"]:
        for name, figures in lines.items():
            cells = " | ".join(f"{figure:.2f}" for figure in figures[row])
            print(f"| {name} | {row} | {cells} |")


if __name__ == "__main__":
    main()
