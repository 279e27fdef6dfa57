"""A real Chromium: `apt-get install chromium` and `pip install carousel[browser]`; tests are skipped without them.

`pytest tests/page --pictures docs/pictures` renews the pictures of docs/operate/monitoring.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

PATIENCE_MS = 30_000
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


class Picture(Protocol):
    """Writes a picture of a tab, `after_s` later, where `--pictures` asks for them."""

    def __call__(self, tab: Any, name: str, *, after_s: float = 0.0) -> None: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", metavar="FOLDER", help="write what the page shows into this folder")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one file: while playwright runs, no test of its process can start an event loop."""
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
    folder = request.config.getoption("--pictures", default=None)

    def take(tab: Any, name: str, *, after_s: float = 0.0) -> None:
        if folder is not None:
            tab.wait_for_timeout(1000 * after_s)
            tab.screenshot(path=f"{folder}/page-{name}.png")

    return take
