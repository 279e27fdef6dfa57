"""Figures of the page: none is shown without a unit and an explanation that pointers, keys and screen readers reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.stage import Stage

WORD = "abbr[data-figure]"


@pytest.fixture(scope="module")
def stage(browser: Any, demo_path: Path) -> Iterator[Stage]:
    with Stage(demo_path, scheduler={"max_running": 8}, cache={"num_blocks": 400}) as started:
        yield started


def test_every_figure_has_a_label_a_unit_and_an_explanation(page: Any, stage: Stage) -> None:
    page.goto(stage.url)
    figures = page.evaluate("import('/page/figures.js').then(({ FIGURES }) => FIGURES)")
    for name, (label, unit, explanation) in figures.items():
        assert label, name
        assert isinstance(unit, str), name
        assert explanation.endswith("."), name
        assert len(explanation) > len(label) + 10, name


@pytest.mark.parametrize("way", ["figure('no such', 5)", "heading('no such')", "column('no such')"])
def test_a_figure_that_is_not_explained_cannot_be_shown(page: Any, stage: Stage, way: str) -> None:
    page.goto(stage.url)
    error = page.evaluate(
        f"import('/page/figures.js').then((figures) => figures.{way}).catch((error) => error.message)"
    )
    assert error == "figures.js does not explain the figure no such"


def test_all_that_is_said_of_a_replica_are_figures(page: Any, stage: Stage) -> None:
    page.goto(stage.url)
    page.wait_for_selector(".replica >> nth=1")
    page.wait_for_selector(".head [data-of=running]")
    for place in (".head", ".dispatch"):
        parts = page.eval_on_selector_all(f"{place} > *", "parts => parts.map((part) => part.className.split(' ')[0])")
        assert set(parts) == {"figure"}
    shown = page.locator(".head >> nth=0").locator(".figure").all_inner_texts()
    assert {"running 0 of 8 slots", "waiting 0 requests", "output 0 tokens/s", "bubbles 0 %"} <= set(shown)
    assert page.locator(".labels >> nth=0").locator(WORD).count() == 5, "one for the slots, and one for each strip"


def test_an_explanation_is_seen_under_the_pointer_and_on_focus_and_read_by_screen_readers(
    page: Any, stage: Stage
) -> None:
    page.goto(stage.url)
    page.wait_for_selector(".head [data-of=bubbles]")
    assert page.is_hidden("#tip")
    page.hover(f".head [data-of=bubbles] {WORD} >> nth=0")
    page.wait_for_selector("#tip:has-text('no request used')")
    page.mouse.move(1, 1)
    page.wait_for_selector("#tip", state="hidden")
    page.focus(".switch button")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.figure") == "last_dispatch"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.figure") == "running", "one stop for all figures of a replica"
    assert "slots" in page.inner_text("#tip:visible")
    page.keyboard.press("ArrowRight")
    assert "queue" in page.inner_text("#tip:visible")
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.figure") == "queue", "hidden words are passed over"
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    read = [node["description"]["value"] for node in nodes if node["role"]["value"] == "term" and "description" in node]
    assert any("no request used" in text for text in read)
    assert len(read) >= page.locator(f"{WORD}:visible").count()


def test_the_focus_stays_on_a_figure_while_values_and_figures_change(page: Any, stage: Stage) -> None:
    page.goto(stage.url)
    page.wait_for_selector(".head [data-of=output_rate]")
    page.focus(f".head [data-of=output_rate] {WORD} >> nth=0")
    page.click("#demo", no_wait_after=True)
    page.focus(f".head [data-of=output_rate] {WORD} >> nth=0")
    page.wait_for_selector(".head >> nth=0 >> [data-of=running]:has-text('8 of 8')")
    page.wait_for_selector(".head >> nth=0 >> [data-of=speed]")  # a figure that was not there before
    assert page.evaluate("document.activeElement.dataset.figure") == "output_rate"


def test_a_list_explains_all_figures(page: Any, stage: Stage) -> None:
    page.goto(stage.url)
    number = page.evaluate("import('/page/figures.js').then(({ FIGURES }) => Object.keys(FIGURES).length)")
    page.click("#figures summary")
    assert page.locator("#glossary dt:visible").count() == page.locator("#glossary dd:visible").count() == number
    assert "bubbles (%)" in page.locator("#glossary dt").all_inner_texts()
