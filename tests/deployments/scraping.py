"""/metrics of a live service, also on a busy machine."""

from __future__ import annotations

import httpx

from tests.metrics.test_exposition import value
from tests.waiting import PATIENCE_S, eventually


def complete_scrape(url: str) -> httpx.Response:
    """A scrape in which no process is missing. One that does not answer within two seconds is; then scrape again."""
    return eventually(
        lambda: httpx.get(f"{url}/metrics", timeout=PATIENCE_S),
        lambda response: value(response.content, "carousel_scrape_missing") == 0,
    )
