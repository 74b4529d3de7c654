"""One chromium and one fleet for all tests of the page, and windows with a silent console."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.pictured import Pictured, pictured

# The headless shell starts and draws with half of the CPU time.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu"]  # an emulated GPU would draw no better
WORKERS = 12
PATIENCE_MS = 20_000
LOOK_EVERY_MS = 100  # the page itself asks every two seconds

# Makes the page ask for a picture, as when its tab is shown again; true once an element has a text.
SHOWS_TEXT = """([place, text]) => {
    document.dispatchEvent(new Event("visibilitychange"));
    return document.querySelector(place).textContent.includes(text);
}"""


class Window:
    """The page in a window of its own, and the lines of its console."""

    def __init__(self, browser: Any, url: str, **look: Any) -> None:
        context = browser.new_context(**look)
        context.set_default_timeout(PATIENCE_MS)
        self.close = context.close
        self.console: list[str] = []
        self.page = context.new_page()
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.goto(url)

    def until(self, place: str, text: str) -> None:
        """Waits until an element has a text."""
        try:
            self.page.wait_for_function(SHOWS_TEXT, arg=[place, text], polling=LOOK_EVERY_MS)
        except Exception:
            pytest.fail(f"{place} says {self.page.text_content(place)!r}, not {text!r}")


OpenWindow = Callable[..., Window]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install .[test]"
    )
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def fleet(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pictured]:
    with pictured(tmp_path_factory.mktemp("fleet"), WORKERS) as found:
        found.ask(20)
        yield found


@pytest.fixture
def open_window(browser: Any) -> Iterator[OpenWindow]:
    """A function that opens a view of a fleet's page; unexpected console lines fail the test.

    The browser writes a line for each request that fails, even if the page handles that. A test
    that lets requests fail passes a pattern of this line as `expected`.
    """
    opened: list[tuple[Window, str]] = []

    def open_one(fleet: Pictured, view: str = "", expected: str = "(?!)", **look: Any) -> Window:
        window = Window(browser, f"{fleet.url}/ui{view}", **look)
        opened.append((window, expected))
        return window

    yield open_one
    for window, _ in opened:
        window.close()
    for window, expected in opened:
        assert not [line for line in window.console if not re.match(expected, line)]
