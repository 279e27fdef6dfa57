"""/metrics of a live service, whatever else its machine has to do."""

from __future__ import annotations

import time

import httpx

from tests.metrics.test_exposition import value

PATIENCE_S = 30.0


def complete_scrape(url: str) -> httpx.Response:
    """A scrape in which nobody is missing: who does not answer within two seconds is, and it is asked again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        response = httpx.get(f"{url}/metrics", timeout=PATIENCE_S)
        if value(response.content, "carousel_scrape_missing") == 0:
            return response
        assert time.monotonic() < deadline, f"somebody was missing for {PATIENCE_S} s"
