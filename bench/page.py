"""Measures the live page: time until it is drawn, and CPU of the daemon while it is open.

    python bench/page.py [--workers 64] [--rounds 5]
    python bench/page.py --workers 16 --pictures docs/pictures    # draws those of the documentation

A daemon has simulated engines that have published blocks; playwright (`pip install .[test]`) opens
the page in Debian's Chromium without a window. The page is drawn once the last rank is in the
document; the first paint is measured separately. Each round has a browser context without a cache.
CPU is that of the daemon's process, for 10 s without the page and 10 s with it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machine import OtherLoad, cpu_s
from playwright import sync_api as playwright

from tests.support.pictured import Pictured, pictured

WATCHED_S = 10.0
PATIENCE_MS = 30_000
PICTURED_S = 60
LOOKS: dict[str, dict[str, Any]] = {
    "wide": {"viewport": {"width": 1280, "height": 800}},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
}
DRAWN = """() => [
    performance.now(),
    performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? NaN,
    performance.getEntriesByType("resource").concat(performance.getEntriesByType("navigation"))
        .reduce((sum, each) => sum + each.transferSize, 0),
]"""


def watched(fleet: Pictured) -> float:
    """Returns the share of a core that the daemon takes in the next WATCHED_S seconds."""
    pid = fleet.server.process.pid
    before = cpu_s(pid)
    time.sleep(WATCHED_S)
    return (cpu_s(pid) - before) / WATCHED_S


def drawn(browser: Any, fleet: Pictured, workers: int) -> tuple[Any, list[float]]:
    """Opens the page; returns it with milliseconds until drawn, until painted, and its bytes."""
    page = browser.new_context().new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{fleet.url}/ui", wait_until="commit")
    page.locator("#rank-count", has_text=f"{workers} ranks").wait_for()
    return page, page.evaluate(DRAWN)


def take_pictures(browser: Any, fleet: Pictured, folder: Path) -> None:
    """Writes pictures of the page after a minute of requests."""
    pages = {name: browser.new_context(**look).new_page() for name, look in LOOKS.items()}
    for page in pages.values():
        page.goto(f"{fleet.url}/ui")
    for second in range(PICTURED_S):
        fleet.ask(20 + 8 * (second % 7))
        time.sleep(1.0)
    for name, page in pages.items():
        page.screenshot(path=folder / f"ui-{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=64, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="measure nothing")
    options = parser.parse_args()
    if (chromium := shutil.which("chromium")) is None:
        sys.exit("page.py: chromium is not installed")
    load = OtherLoad()
    with (
        tempfile.TemporaryDirectory() as folder,
        pictured(Path(folder), options.workers) as fleet,
        playwright.sync_playwright() as driver,
    ):
        fleet.ask(100)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        if options.pictures is not None:
            return take_pictures(browser, fleet, options.pictures)
        unseen = watched(fleet)
        rounds = []
        for _ in range(options.rounds):
            page, figures = drawn(browser, fleet, options.workers)
            rounds.append(figures)
            page.close()
        page, _ = drawn(browser, fleet, options.workers)
        seen = watched(fleet)
        browser.close()
    whole, painted, size = (median(each) for each in zip(*rounds, strict=True))
    print(f"{options.workers} workers; other processes kept {load.cores():.1f} cores busy\n")
    print("| drawn | first painted | transferred | CPU unseen | CPU while seen |")
    print("|---|---|---|---|---|")
    print(f"| {whole:.0f} ms | {painted:.0f} ms | {size / 1024:.0f} KiB ", end="")
    print(f"| {unseen:.1%} of a core | {seen:.1%} |")


if __name__ == "__main__":
    main()
