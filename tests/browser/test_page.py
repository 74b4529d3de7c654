"""The page in a real browser: it draws, follows changes, fits the window and logs no errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.conftest import WORKERS, OpenWindow, Window
from tests.support.pictured import MODEL, Pictured, pictured
from tests.support.ports import find_free_port

pytestmark = pytest.mark.browser

PHONE = {"width": 360, "height": 740}
TOKEN = "read-by-a-person-in-a-browser"
OPERATOR = "operator-that-registers-workers"
AWAY = r"Failed to load resource: net::ERR_(CONNECTION_\w+|EMPTY_RESPONSE)"
UNAUTHORIZED = r"Failed to load resource: .* status of 401 "
NOT_FOUND = r"Failed to load resource: .* status of 404 "

# Visible texts that have too little contrast with their background (WCAG 2, level AA).
FAINT = """() => {
    const channels = (color) => color.match(/[\\d.]+/g).map(Number);
    const luminance = (color) => {
        const [red, green, blue] = channels(color).slice(0, 3).map((each) => each / 255)
            .map((each) => each <= .04045 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
        return .2126 * red + .7152 * green + .0722 * blue;
    };
    const behind = (element) => {
        const color = element ? getComputedStyle(element).backgroundColor : "rgb(255, 255, 255)";
        return channels(color)[3] === 0 ? behind(element.parentElement) : color;
    };
    const seen = [...document.querySelectorAll("body *")].filter((each) => each.checkVisibility()
        && [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
    return seen.filter((each) => {
        const [low, high] = [getComputedStyle(each).color, behind(each)].map(luminance)
            .sort((one, other) => one - other);
        return (high + .05) / (low + .05) < 4.5;
    }).map((each) => each.outerHTML);
}"""


@pytest.fixture(scope="module")
def guarded(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pictured]:
    """A fleet of two workers whose daemon asks for tokens."""
    folder = tmp_path_factory.mktemp("guarded")
    tokens = folder / "tokens"
    tokens.write_text(f"person read {TOKEN}\noperator read,lifecycle,admin {OPERATOR}\n")
    tokens.chmod(0o600)
    everywhere = f"--conductor-bind=0.0.0.0:{find_free_port()}"
    with pictured(folder, 2, f"--tokens-file={tokens}", everywhere, token=OPERATOR) as found:
        yield found


def give(window: Window, token: str) -> None:
    """Types a token into the dialog that asks for one."""
    window.page.fill("#token", token)
    window.page.get_by_role("button", name="Use it").click()


def test_it_draws_every_worker_and_what_comes(open_window: OpenWindow, fleet: Pictured) -> None:
    window = open_window(fleet)
    window.until("#rank-count", f"{WORKERS} ranks")
    window.until("#streams", f"{WORKERS} exact")
    fleet.ask(5)
    window.until("#decisions", f"request-{fleet.asked:05}")


def test_it_asks_for_a_token_until_one_holds(open_window: OpenWindow, guarded: Pictured) -> None:
    window = open_window(guarded, expected=UNAUTHORIZED)
    page = window.page
    page.get_by_text("a bearer token is needed. One of scope read shows").wait_for()
    give(window, "one-that-kvd-does-not-know")
    page.get_by_text("unknown token. One of scope read shows").wait_for()
    give(window, TOKEN)
    window.until("#rank-count", "2 ranks")
    assert not page.locator("#token-dialog").is_visible()
    page.reload()  # the tab keeps the token
    window.until("#rank-count", "2 ranks")
    page.click("#token-open")
    assert "unknown" not in page.locator("#token-why").inner_text()


def test_a_face_on_every_address_is_linked_by_the_pages_own_host(
    open_window: OpenWindow, guarded: Pictured
) -> None:
    window = open_window(guarded, expected=UNAUTHORIZED)
    give(window, TOKEN)
    window.until("#faces", "conductor 0.0.0.0:")
    links = [each.get_attribute("href") for each in window.page.locator("#faces a").all()]
    assert len(links) == 3 and all(each.startswith("http://127.0.0.1:") for each in links)


def test_it_goes_on_after_a_restart(open_window: OpenWindow, guarded: Pictured) -> None:
    window = open_window(guarded, expected=f"{UNAUTHORIZED}|{AWAY}")
    give(window, TOKEN)
    window.until("#rank-count", "2 ranks")
    assert guarded.stop() == 0
    window.until("#state", "kvd does not answer, trying again")
    guarded.start()
    window.until("#state", "live")
    window.until("#rank-count", "2 ranks")


def test_an_ended_request_is_told_as_it_was_chosen(
    open_window: OpenWindow, fleet: Pictured
) -> None:
    window = open_window(fleet, expected=NOT_FOUND)
    window.until("#streams", f"{WORKERS} exact")
    fleet.ask(1)
    name = f"request-{fleet.asked:05}"
    fleet.end(name)
    window.until("#decisions", name)
    window.page.get_by_role("button", name=name).click()
    window.until("#explained", f"among {WORKERS} candidates")
    window.until("#explained", "The request has ended")


def test_what_is_wrong_is_examined(open_window: OpenWindow, fleet: Pictured) -> None:
    window = open_window(fleet, "#doctor")
    window.until("#doctor-said", "Nothing is wrong.")
    body = {"model_name": "unheard-of", "token_ids": [1]}
    assert fleet.client.post(f"{fleet.url}/query", json=body).status_code == 404
    window.page.check("#doctor-probe")
    window.page.click("#doctor-again")
    window.until("#doctor-said", "1 finding")
    window.until("#findings", "model_name_mismatch")
    window.until("#findings", MODEL)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone(open_window: OpenWindow, fleet: Pictured, scheme: str) -> None:
    window = open_window(fleet, viewport=PHONE, color_scheme=scheme)
    page = window.page
    window.until("#rank-count", f"{WORKERS} ranks")
    for view in ("live", "tree", "doctor", "try"):
        page.click(f"nav a[href='#{view}']")
        page.locator(f"#{view}").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], view
        assert page.evaluate(FAINT) == [], view
    fleet.ask(1)
    name = f"request-{fleet.asked:05}"
    page.click("nav a[href='#live']")
    window.until("#decisions", name)
    page.get_by_role("button", name=name).click()
    window.until("#explained", "by cost")
    box = page.locator("#explained-dialog").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
    assert page.evaluate(FAINT) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [int(each) for each in re.findall(r"\d+", background)]
    assert (sum(channels[:3]) > 3 * 128) == (scheme == "light")


def test_the_tree_opens_branch_by_branch(open_window: OpenWindow, fleet: Pictured) -> None:
    branch = open_window(fleet, "#tree").page.locator("#branches > ul > li.branch").first
    branch.locator("summary").first.click()
    branch.locator("li.branch").first.wait_for()


def test_a_route_can_be_tried(open_window: OpenWindow, fleet: Pictured) -> None:
    window = open_window(fleet, "#try")
    window.page.select_option("#try-route", label="GET /workers")
    window.page.click("#try-form button[type=submit]")
    window.until("#try-status", "200 OK")


def test_a_recent_choice_is_explained(open_window: OpenWindow, fleet: Pictured) -> None:
    window = open_window(fleet)
    page = window.page
    window.until("#streams", f"{WORKERS} exact")
    fleet.ask(1)
    name = f"request-{fleet.asked:05}"
    window.until("#decisions", name)
    page.get_by_role("button", name=name).click()
    window.until("#explained", "by cost, policy kvd; chosen ")
    assert page.locator("#explained table").first.locator("tbody tr").count() == WORKERS
    window.until("#explained", "never stored")
    page.click("#explained-dialog button[type=submit]")
    page.locator("#explained-dialog").wait_for(state="hidden")


def test_a_question_can_be_posted(open_window: OpenWindow, fleet: Pictured) -> None:
    window = open_window(fleet, "#try")
    window.page.select_option("#try-route", label="POST /query")
    body = f'{{"model_name": "{MODEL}", "token_ids": [1, 2, 3]}}'
    window.page.fill("#try-form textarea", body)
    window.page.click("#try-form button[type=submit]")
    window.until("#try-status", "200 OK")


def test_examples_name_a_model_that_is_there(open_window: OpenWindow, fleet: Pictured) -> None:
    url = str(fleet.client.base_url).rstrip("/")  # the selection service, which has these routes
    window = open_window(fleet)
    window.page.goto(f"{url}/ui")
    window.until("#rank-count", f"{WORKERS} ranks")
    window.page.goto(f"{url}/ui#try")
    for route, answered in (
        ("POST /select", "worker_id"),
        ("POST /explain", "choices"),
        ("POST /busy_threshold", "active_decode_blocks_threshold"),
    ):
        window.page.select_option("#try-route", label=route)
        window.page.click("#try-form button[type=submit]")
        window.until("#try-text", answered)


def test_an_explanation_that_is_tried_is_shown_as_tables(
    open_window: OpenWindow, fleet: Pictured
) -> None:
    window = open_window(fleet, "#try")
    fleet.ask(1)
    window.page.select_option("#try-route", label="GET /explain")
    window.page.fill("#try-parameters input", f"request-{fleet.asked:05}")
    window.page.click("#try-form button[type=submit]")
    window.until("#try-status", "200 OK")
    assert window.page.locator("#try-tables tbody tr").count() >= WORKERS
