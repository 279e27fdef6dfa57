"""A service with keys tells a person where to enter one, in every view."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.service import ADMIN_KEY, KEY, entry
from tests.page.stage import Stage

ENTER = "Enter an API key in the field at the top right"
ENTER_ADMIN = "Enter an administrator's API key in the field at the top right."


@pytest.fixture(scope="module")
def stage(browser: Any, demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    keys = [entry(), entry(ADMIN_KEY, "root", admin=True)]
    with Stage(demo_path, num_replicas=1, keys=keys, batches=tmp_path_factory.mktemp("batches")) as started:
        yield started


def give(page: Any, key: str) -> None:
    page.fill("#key", key)
    page.keyboard.press("Enter")


@pytest.mark.parametrize("view", ["live", "playground", "batches"])
def test_every_view_without_a_key_says_where_to_enter_one_and_marks_the_field(
    page: Any, stage: Stage, view: str
) -> None:
    page.goto(f"{stage.url}/#{view}")
    page.wait_for_selector(f"#key-wanted:visible:has-text('{ENTER}')")
    field = "document.getElementById('key')"
    assert page.evaluate(f"document.activeElement === {field} && {field}.ariaInvalid") == "true"
    assert page.get_attribute("#key", "aria-describedby") == "key-wanted"
    assert "header" not in page.inner_text("body").lower()
    give(page, "sk-not-a-key")
    page.wait_for_selector("#key-wanted:has-text('does not know this API key')")
    give(page, ADMIN_KEY)
    page.wait_for_selector("#key-wanted", state="hidden")
    assert page.get_attribute("#key", "aria-invalid") == "false"
    page.wait_for_selector("#model option", state="attached")
    if view == "batches":
        page.wait_for_selector("#batches-notice:has-text('no batches yet')")


def test_a_message_and_a_batch_without_a_key_say_the_same(page: Any, stage: Stage, tmp_path: Path) -> None:
    page.goto(f"{stage.url}/#playground")
    page.fill("#prompt", "Hello")
    page.click("#send")
    page.wait_for_selector(f".message.error:has-text('{ENTER}.')")
    page.click("#tab-batches")
    page.wait_for_selector(f"#batches-notice:has-text('{ENTER}.')")
    file = tmp_path / "night.jsonl"
    file.write_text("{}")
    page.set_input_files("#batch-file", file)
    page.click("#batch-form button")
    page.wait_for_selector(f"#batch-error:has-text('{ENTER}.')")


@pytest.mark.parametrize("table", ["usage", "wanted"])
def test_tables_want_the_key_of_an_administrator(page: Any, stage: Stage, table: str) -> None:
    page.goto(stage.url)
    page.wait_for_selector("#key-wanted:visible")
    page.click(f"#{table} summary")
    page.wait_for_selector(f'#{table} td:text("{ENTER_ADMIN}")')
    give(page, KEY)
    page.wait_for_selector(f'#notice:text("This is for administrators. {ENTER_ADMIN}")')
    assert page.is_hidden("#key-wanted"), "the playground may be used"
    page.click(f"#{table} summary")
    page.click(f"#{table} summary")
    page.wait_for_selector(f'#{table} td:text("This is for administrators. {ENTER_ADMIN}")')


def test_the_field_does_not_take_the_focus_from_a_person_who_writes(page: Any, stage: Stage) -> None:
    page.route("**/v1/models", lambda route: route.abort())
    page.goto(f"{stage.url}/#playground")
    page.wait_for_selector("#key-wanted:visible")
    page.focus("#prompt")
    page.click("#tab-batches")
    page.wait_for_selector(f"#batches-notice:has-text('{ENTER}.')")
    assert page.evaluate("document.activeElement.id") == "tab-batches"
