"""The width of every view on a phone, and the contrast of every text, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.page.conftest import PATIENCE_MS, Picture
from tests.page.sight import colours, contrasts, seen, stays
from tests.page.stage import Stage
from tests.page.test_batches_view import begin_batch, lines
from tests.waiting import eventually

SCHEMES = ("light", "dark")
LEAST_CONTRAST = 4.5  # of texts of the usual size, by WCAG 2 (AA)
LONG = "organisation/a-model-with-a-very-long-name-Instruct-2507-Q4_K_M-of-some-team"
STATUSES = (
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
)  # fmt: skip
WEBHOOKS = ("waiting", "pending", "delivered", "given_up")


@pytest.fixture(scope="module")
def stage(browser: Any, demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    engine: dict[str, Any] = {"scheduler": {"max_running": 8, "max_waiting": 256}, "cache": {"num_blocks": 400}}
    with Stage(demo_path, batches=tmp_path_factory.mktemp("batches"), **engine) as started:
        begin_batch(started, [*lines(2), *["no JSON"] * 5])
        begin_batch(started, lines(3))
        yield started


@pytest.fixture(params=SCHEMES)
def tab(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """A tab as wide as a phone."""
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=request.param)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.scheme = request.param
    yield page
    context.close()


def fits(tab: Any) -> bool:
    return bool(tab.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def show_live(tab: Any, stage: Stage) -> None:
    """Two replicas with requests in their queues."""
    tab.goto(stage.url)
    tab.wait_for_selector(".replica >> nth=1")
    num_colours = colours(tab)
    tab.click("#demo")
    tab.wait_for_selector(".queue li >> nth=3")
    eventually(lambda: colours(tab), lambda found: found > num_colours + 8)


def show_request(tab: Any) -> None:
    eventually(lambda: stays(tab), bool)
    number = next(n for n, each in enumerate(seen(tab).values()) if each["stays"])
    tab.focus(f".replica canvas >> nth={number}")
    eventually(lambda: tab.keyboard.press("ArrowDown") or tab.is_visible("#request-rows td"))
    eventually(lambda: "gaps between tokens" in tab.inner_text("#request"))


def show_tables(tab: Any) -> None:
    """With names as long as names may be, and large numbers."""
    row = {"key": "a-tenant-with-a-long-name-" * 2, "model": LONG, "cost": 123456.789, "requests": 123_456_789}
    row |= dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens"), 123_456_789_012)
    why = f"the queue of {LONG} takes 12.5 s, and target_s is 2"
    wanted = {"model": LONG, "replicas": 12, "wanted": 34, "why": why}
    tab.route("**/admin/usage*", lambda route: route.fulfill(json={"data": [row]}))
    tab.route("**/admin/fleet", lambda route: route.fulfill(json={"autoscaling": [wanted]}))
    tab.click("#usage summary")
    tab.click("#wanted summary")
    tab.wait_for_selector(f"#usage td:has-text('{LONG}')")
    tab.wait_for_selector(f"#wanted td:has-text('{LONG}')")


def show_chat(tab: Any, stage: Stage) -> None:
    """A long word in an answer, and every form open. The demo's requests end, and the chat does not wait for them."""
    tab.goto("about:blank")
    tab.goto(f"{stage.url}/#playground")
    tab.wait_for_selector("#model option", state="attached")
    tab.click("#forms summary")
    tab.click("#tools-example")
    tab.select_option("#tool_choice", "none")  # the simulated model has no form of calls
    tab.fill("#prompt", "supercalifragilistic" * 12)
    tab.click("#send")
    tab.wait_for_selector(".cost, .message.error")
    assert tab.locator(".message.error").all_inner_texts() == []


def every_batch(route: Any) -> None:
    """Batches in all states, in the form of the API's answer."""
    answer = httpx.get(route.request.url).json()
    batch = answer["data"][0]
    number = len(STATUSES)
    data = [
        batch | {"id": f"batch_{status}", "status": status, "model": LONG, "webhook": None} for status in STATUSES
    ] + [
        batch | {"id": f"batch_{number + n}", "webhook": {"status": status, "attempts": 3, "last_error": LONG}}
        for n, status in enumerate(WEBHOOKS)
    ]
    data[2] |= {"paused": {"code": "storage_full", "message": f"{LONG} is full"}}
    data[4] |= {"request_counts": {"total": 50_000, "completed": 30_000, "failed": 20_000}}
    route.fulfill(json=answer | {"data": [*data, *answer["data"]]})


def show_batches(tab: Any, stage: Stage) -> None:
    tab.route("**/v1/batches?limit=20", every_batch)
    tab.goto(f"{stage.url}/#batches")
    tab.wait_for_selector("#batch-list .why summary")
    tab.click("#batch-list .why summary >> nth=0")


def test_no_view_of_a_phone_scrolls_to_the_side(tab: Any, stage: Stage, picture: Picture) -> None:
    show_live(tab, stage)
    assert fits(tab), "two replicas with queues"
    picture(tab, f"phone-{tab.scheme}-live")
    show_request(tab)
    assert fits(tab), "the timeline of a request"
    tab.keyboard.press("Escape")
    show_tables(tab)
    assert fits(tab), "tables with long names"
    tab.click("#figures summary")
    assert fits(tab), "the list of figures"
    for word in tab.locator("abbr[data-figure]:visible").all()[::7]:
        word.focus()
        assert fits(tab), "an explanation"
    show_chat(tab, stage)
    assert fits(tab), "a chat, and its request as curl"
    tab.click("#as-python")
    assert fits(tab), "the request as Python"
    picture(tab, f"phone-{tab.scheme}-playground")
    show_batches(tab, stage)
    assert fits(tab), "batches with errors"
    picture(tab, f"phone-{tab.scheme}-batches")


def test_a_table_of_a_phone_names_each_value(tab: Any, stage: Stage) -> None:
    show_live(tab, stage)
    show_tables(tab)
    assert tab.locator("#usage").get_by_role("row").count() == 1, "the heads of the columns are in the cells"
    shown = tab.locator("#usage").get_by_role("cell").evaluate_all(
        "cells => cells.map((cell) => getComputedStyle(cell, '::before').content)"
    )  # fmt: skip
    assert {'"output tokens"', '"model"'} <= set(shown)


def unreadable(tab: Any) -> dict[str, float]:
    found = contrasts(tab)
    assert len(found) > 10
    return {text: round(each, 2) for text, each in found.items() if each < LEAST_CONTRAST}


def check_contrasts(tab: Any, stage: Stage) -> None:
    show_live(tab, stage)
    show_request(tab)
    assert unreadable(tab) == {}
    tab.keyboard.press("Escape")
    tab.click("#figures summary")
    show_tables(tab)
    tab.focus(".head abbr >> nth=0")
    tab.wait_for_selector("#tip:visible")
    assert unreadable(tab) == {}
    for state in ("lost", "leaving", "gone"):
        tab.evaluate(_SHOW_STATE, state)
        assert unreadable(tab) == {}, state
    show_chat(tab, stage)
    assert unreadable(tab) == {}
    tab.route("**/v1/chat/completions", lambda route: None)
    tab.fill("#prompt", "Hello")
    tab.click("#send")
    tab.wait_for_selector(".pending")
    assert unreadable(tab) == {}, "while a message waits"
    tab.unroute("**/v1/chat/completions")
    tab.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "no"}}))
    tab.click("#stop")
    tab.fill("#prompt", "Hello")
    tab.click("#send")
    tab.wait_for_selector(".message.error")
    assert unreadable(tab) == {}, "an error"
    show_batches(tab, stage)
    shown = contrasts(tab)
    assert {"in progress", "cancelling", "given up", "delivered", "and 4 more errors"} <= shown.keys()
    assert unreadable(tab) == {}


# A panel as it is in this state: the page is told of another state only when a replica comes to it.
_SHOW_STATE = """(state) => {
    document.querySelector(".replica").className = `replica ${state}`;
    document.querySelector(".replica .state").textContent = state;
    document.querySelector(".head .figure").classList.add(state === "lost" ? "bad" : "warn");
}"""


def test_every_text_is_read_easily(tab: Any, stage: Stage) -> None:
    check_contrasts(tab, stage)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_text_is_read_easily_in_the_scheme_that_a_person_chose(page: Any, stage: Stage, scheme: str) -> None:
    page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    page.goto(stage.url)
    page.click("#theme")
    assert page.evaluate("document.documentElement.classList.contains('dark')") == (scheme == "dark")
    check_contrasts(page, stage)


def test_words_on_pictures_are_read_easily(tab: Any, stage: Stage) -> None:
    tab.goto(stage.url)
    tab.evaluate("""() => import("/page/elements.js").then(({ palette }) => {
        const { soft, faint, panel, text } = palette();
        for (const [colour, back] of [[soft, faint], [soft, panel], [panel, text]]) {
            const word = document.createElement("p");
            Object.assign(word.style, { color: colour, background: back });
            word.textContent = `word of ${colour} on ${back}`;
            document.body.append(word);
        }
    })""")
    assert sum(text.startswith("word of ") for text in contrasts(tab)) == 3
    assert unreadable(tab) == {}
