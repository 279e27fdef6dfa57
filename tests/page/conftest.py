"""A real Chromium: `apt-get install chromium` and `pip install carousel[browser]`; tests are skipped without them.

`pytest tests/page --pictures docs/pictures` renews the pictures of docs/guide/page.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PATIENCE_MS = 30_000
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

Picture = Callable[[Any, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", metavar="FOLDER", help="write what the page shows into this folder")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    reason = "playwright is not there: pip install carousel[browser]"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=program, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A new tab. An error of a script or of the Content-Security-Policy fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 820})
    errors: list[str] = []
    tab = context.new_page()
    tab.set_default_timeout(PATIENCE_MS)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    yield tab
    context.close()
    assert errors == []


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Picture:
    """Writes a picture of a tab where `--pictures` asks for them."""
    folder = request.config.getoption("--pictures", default=None)

    def take(tab: Any, name: str) -> None:
        if folder is not None:
            tab.screenshot(path=f"{folder}/page-{name}.png")

    return take
