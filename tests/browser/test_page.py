"""The page as people see it: it draws, follows what changes, fits, and complains of nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pictured import MODEL, Pictured, pictured

CHROMIUM = shutil.which("chromium")
WORKERS = 12
PATIENCE_MS = 20_000

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install .[test]"
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pictured]:
    with pictured(tmp_path_factory.mktemp("fleet"), WORKERS) as found:
        found.ask(20)
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Page:
    """The page in a window of its own, and what its console says."""

    def __init__(self, browser: Any, fleet: Pictured, view: str = "", **look: Any) -> None:
        context = browser.new_context(**look)
        context.set_default_timeout(PATIENCE_MS)
        self.said: list[str] = []
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(f"{fleet.url}/ui{view}")

    def look(self) -> None:
        """Has the page ask for a picture now, as when a person comes back to it."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def until(self, place: str, text: str) -> None:
        """Waits until an element has a text."""
        self.look()
        expect = playwright.expect(self.page.locator(place))
        expect.to_contain_text(text, timeout=PATIENCE_MS)

    def until_not(self, place: str, text: str) -> None:
        self.look()
        expect = playwright.expect(self.page.locator(place))
        expect.not_to_contain_text(text, timeout=PATIENCE_MS)


def test_it_draws_every_worker_and_what_comes(browser: Any, fleet: Pictured) -> None:
    page = Page(browser, fleet)
    page.until("#rank-count", f"{WORKERS} ranks")
    page.until("#streams", f"{WORKERS} exact")
    fleet.ask(5)
    page.until("#decisions", f"request-{fleet.asked:05}")
    assert not page.said


def test_it_goes_on_after_a_restart(browser: Any, tmp_path: Path) -> None:
    with pictured(tmp_path, 2) as fleet:
        page = Page(browser, fleet)
        page.until("#rank-count", "2 ranks")
        assert fleet.stop() == 0
        page.until_not("#state", "live")
        fleet.start()
        page.until("#state", "live")
        page.until("#rank-count", "2 ranks")


def test_an_ended_request_is_told_as_it_was_chosen(browser: Any, fleet: Pictured) -> None:
    page = Page(browser, fleet)
    page.until("#streams", f"{WORKERS} exact")
    fleet.ask(1)
    name = f"request-{fleet.asked:05}"
    fleet.end(name)
    page.page.get_by_role("button", name=name).click()
    page.until("#explained", f"among {WORKERS} candidates")
    page.until("#explained", "The request has ended")


def test_what_is_wrong_is_examined(browser: Any, fleet: Pictured) -> None:
    page = Page(browser, fleet, "#doctor")
    page.until("#doctor-said", "Nothing is wrong.")
    body = {"model_name": "unheard-of", "token_ids": [1]}
    assert fleet.client.post(f"{fleet.url}/query", json=body).status_code == 404
    page.page.check("#doctor-probe")
    page.page.click("#doctor-again")
    page.until("#doctor-said", "1 finding")
    page.until("#findings article", "model_name_mismatch")
    page.until("#findings pre", MODEL)
    assert not page.said


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone(browser: Any, fleet: Pictured, scheme: str) -> None:
    look = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    page = Page(browser, fleet, **look)
    page.until("#rank-count", f"{WORKERS} ranks")
    for view in ("live", "tree", "doctor", "try"):
        page.page.click(f"nav a[href='#{view}']")
        page.page.locator(f"#{view}").wait_for()
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 360, view
    color = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, color[color.index("(") + 1 : -1].split(",")[:3])) > 3 * 128
    assert light == (scheme == "light")
    assert not page.said


def test_the_tree_opens_branch_by_branch(browser: Any, fleet: Pictured) -> None:
    page = Page(browser, fleet, "#tree")
    branch = page.page.locator("#branches > ul > li.branch").first
    branch.locator("summary").first.click()
    branch.locator("li.branch").first.wait_for()
    assert not page.said


def test_a_route_can_be_tried(browser: Any, fleet: Pictured) -> None:
    page = Page(browser, fleet, "#try")
    page.page.select_option("#try-route", label="GET /workers")
    page.page.click("#try-form button[type=submit]")
    page.until("#try", "200 OK")
    assert not page.said


def test_a_recent_choice_is_explained(browser: Any, fleet: Pictured) -> None:
    page = Page(browser, fleet)
    page.until("#streams", f"{WORKERS} exact")
    fleet.ask(1)
    name = f"request-{fleet.asked:05}"
    page.page.get_by_role("button", name=name).click()
    page.until("#explained", "by cost, policy kvd; chosen ")
    rows = page.page.locator("#explained table").first.locator("tbody tr")
    assert rows.count() == WORKERS
    page.until("#explained", "never stored")
    page.page.click("#explained-dialog button[type=submit]")
    page.page.locator("#explained-dialog").wait_for(state="hidden")
    assert not page.said


def test_a_question_can_be_posted(browser: Any, fleet: Pictured) -> None:
    page = Page(browser, fleet, "#try")
    page.page.select_option("#try-route", label="POST /query")
    body = f'{{"model_name": "{MODEL}", "token_ids": [1, 2, 3]}}'
    page.page.fill("#try-form textarea", body)
    page.page.click("#try-form button[type=submit]")
    page.until("#try-status", "200 OK")
    assert not page.said


def test_an_explanation_that_is_tried_is_shown_as_tables(browser: Any, fleet: Pictured) -> None:
    page = Page(browser, fleet, "#try")
    page.page.select_option("#try-route", label="GET /explain")
    page.page.fill("#try-parameters input", f"request-{fleet.asked:05}")
    page.page.click("#try-form button[type=submit]")
    page.until("#try-status", "200 OK")
    assert page.page.locator("#try-tables tbody tr").count() >= WORKERS
    assert not page.said
