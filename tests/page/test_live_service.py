"""The page of a real service: Ray Serve, started as `make serve` starts it. One service for all tests of this file."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.service import Service, service
from tests.page.conftest import Picture
from tests.page.sight import seen, stays
from tests.waiting import eventually

pytestmark = [pytest.mark.serve, pytest.mark.browser]

SLOW, CHATTY = "simulated", "demo"
RESTARTED_WITHIN_S = 90.0


def model(name: str, path: Path, num_replicas: int, **of_model: Any) -> dict[str, Any]:
    engine = {
        "model": {"path": str(path), **of_model},
        "cache": {"num_blocks": 400},
        "scheduler": {"max_running": 8, "max_waiting": 256},
    }
    replicas = {"num_replicas": num_replicas, "num_cpus": 0.1, "drain_timeout_s": 1}
    return {"name": name, "engine": engine, "replicas": replicas}


@pytest.fixture(scope="module")
def live(browser: Any, demo_path: Path) -> Iterator[Service]:
    """Two replicas that only sleep: 40 requests take some seconds on every machine. One that computes, for a chat."""
    models = [model(SLOW, demo_path, 2, simulated={"step_ms": 15.0}), model(CHATTY, demo_path, 1)]
    with service({"models": models}) as running:
        yield running


@pytest.fixture
def watched(page: Any, live: Service) -> Any:
    page.goto(f"http://{live.target.host}:{live.target.port}")
    page.wait_for_selector("#connection.on")
    page.wait_for_selector(".replica >> nth=2")
    page.select_option("#window", "15")
    return page


def replica_pids(live: Service) -> list[int]:
    return [process.pid for process in live.processes().values() if f":replica-{SLOW}" in process.title]


def send_forty(page: Any) -> None:
    before = {stay[0] for stay in stays(page)}
    page.click("#demo:enabled")
    eventually(lambda: {stay[0] for stay in stays(page)} - before, lambda ids: len(ids) >= 16)


def switch(page: Any, strategy: str) -> None:
    page.select_option(".switch [name=strategy] >> nth=0", strategy)
    page.click(".switch button >> nth=0")
    page.wait_for_selector(".told:has-text('in force on 2 replicas')")


def ask(page: Any, model: str, prompt: str) -> None:
    page.click("#tab-playground")
    page.select_option("#model", model)
    page.fill("#prompt", prompt)
    page.click("#send")


def test_a_chat_streams(watched: Any) -> None:
    ask(watched, SLOW, "Hello")
    lengths = set()
    answer = ".message.assistant"
    eventually(lambda: lengths.add(len(watched.inner_text(answer))) or watched.query_selector(".cost"))
    assert len(lengths) > 3, "it grows piece by piece"


def test_a_chat_is_answered(watched: Any, picture: Picture) -> None:
    ask(watched, CHATTY, "Count from 3 to 40.")
    watched.wait_for_selector(".cost:has-text('first token after')")
    assert "3 4 5 6" in watched.inner_text(".message.assistant").replace(",", "")
    picture(watched, "chat")


def test_forty_requests_turn_and_under_static_batching_slots_stay_empty(watched: Any) -> None:
    send_forty(watched)
    eventually(lambda: {stay[0] for stay in stays(watched)}, lambda ids: len(ids) >= 40)
    watched.wait_for_selector("#demo:enabled")
    text = watched.inner_text(".head >> nth=0")
    assert "settings mixed-continuous-fcfs-" in text
    assert "bubbles 0 %" in text
    switch(watched, "static")
    send_forty(watched)
    bubbles = lambda: int(watched.inner_text(".head [data-of=bubbles] .value >> nth=0"))  # noqa: E731
    eventually(bubbles, lambda share: share >= 20)
    assert "settings mixed-static-fcfs-" in watched.inner_text(".head >> nth=0")
    switch(watched, "continuous")


def test_a_killed_replica_is_seen_at_once_and_another_comes(watched: Any, live: Service) -> None:
    watched.wait_for_selector("#demo:enabled")
    send_forty(watched)

    def states() -> list[str]:
        return [replica["state"] for replica in seen(watched).values()]

    before = replica_pids(live)
    os.kill(before[0], signal.SIGKILL)
    watched.wait_for_selector(".replica.lost, .replica.gone")
    assert states().count("serving") == 2, "it is seen before another has come"
    eventually(lambda: [stay for stay in stays(watched) if stay[2]], bool)
    moved = {stay[0] for stay in stays(watched) if stay[2]}
    assert moved & {stay[0] for stay in stays(watched) if stay[1] == "lost"}, "the same request, linked"

    eventually(states, lambda found: found.count("serving") == 3, timeout_s=RESTARTED_WITHIN_S)
    assert len(set(replica_pids(live)) - set(before)) == 1
