"""What an open page costs: the figures, and a viewer of a page, on a stage without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.config import ApplicationConfig
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.http_call import Target
from benchmarks.service import page_cost
from benchmarks.service.fleet import application
from benchmarks.service.page_cost import _parser, figures_of, watching
from tests.benchmarks.servers import serving, told_server
from tests.page.stage import Stage


def test_the_change_is_of_the_means_and_its_error_of_the_differences_in_each_round() -> None:
    without = [{"replicas": 40.0}, {"replicas": 60.0}]
    figures = figures_of({"without": without, "with": [{"replicas": 42.0}, {"replicas": 62.0}]})["replicas"]
    assert figures["without"] == {"median": 50.0, "mean": 50.0, "error": 10.0}
    assert (figures["change"], figures["change_error"], figures["change_of_medians"]) == (0.04, 0.0, 0.04)


def test_viewers_get_events_one_stream_after_the_other(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cost, "_SETTLE_S", 0.5)
    monkeypatch.setattr("app.api.endpoints.live.STREAM_S", 0.2)

    async def main(url: str) -> None:
        async with watching(Target.parse(url), 2) as viewers:
            pass
        assert all(viewer.num_events >= 2 and viewer.num_bytes > 100 for viewer in viewers)

    with Stage(demo_path, num_replicas=1) as stage:
        asyncio.run(main(stage.url))


def test_a_viewer_that_is_refused_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cost, "_SETTLE_S", 0.1)

    async def main(url: str) -> None:
        async with watching(Target.parse(url), 1):
            pass

    server = told_server(lambda _: pytest.fail("no completion is asked for"))
    with serving(server) as url, pytest.raises(BenchmarkError, match="got the status 404"):
        asyncio.run(main(url))


def test_the_application_is_one_that_the_service_takes() -> None:
    assert ApplicationConfig.model_validate(application(_parser().parse_args([])))
