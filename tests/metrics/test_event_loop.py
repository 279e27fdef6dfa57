"""The monitor of an event loop: what it measures of stalls, and what its warning names."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.metrics import LoopMonitor, LoopSnapshot
from tests.waiting import until


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So often that no stall of these tests is missed."""
    monkeypatch.setattr("app.metrics.event_loop.HEARTBEAT_S", 0.02)
    monkeypatch.setattr("app.metrics.event_loop._LOOK_S", 0.02)


@asynccontextmanager
async def monitored() -> AsyncIterator[LoopMonitor]:
    monitor = LoopMonitor()
    monitor.start()
    try:
        await until(monitor.snapshot, lambda snapshot: snapshot.delay_s.num_values > 0)
        yield monitor
    finally:
        monitor.stop()


def compute(seconds: float, prompt: str = "") -> None:
    """Hold the event loop that this is called on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        prompt.upper()


async def after_stall(monitor: LoopMonitor, seconds: float) -> LoopSnapshot:
    """What the monitor has measured when the loop was held that long."""
    num_stalls = monitor.snapshot().num_stalls
    compute(seconds)
    return await until(monitor.snapshot, lambda snapshot: snapshot.num_stalls > num_stalls)


async def test_a_stall_is_counted_with_its_length() -> None:
    async with monitored() as monitor:
        before, after = monitor.snapshot(), await after_stall(monitor, 0.3)
    assert after.num_stalls > before.num_stalls
    assert after.stalled_s - before.stalled_s >= 0.27  # all but one interval of the timer
    assert sum(after.delay_s.counts[bisect_right(after.delay_s.bounds, 0.2) :]) >= 1


def test_the_warning_names_the_route_and_the_function_and_no_value(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(monitor: LoopMonitor) -> None:
        compute(0.3, "a secret prompt")

    async def stalled() -> None:
        async with monitored() as monitor:
            await asyncio.create_task(answer(monitor), name="POST /v1/completions\nforged line")
            await until(monitor.snapshot, lambda snapshot: snapshot.num_stalls > 0)

    monkeypatch.setattr("app.metrics.event_loop._OUR_PACKAGES", (__name__,))
    with caplog.at_level(logging.WARNING, "app.metrics"):
        asyncio.run(stalled())
    text = caplog.records[0].getMessage()
    assert f"by 'POST /v1/completions\\nforged line' in {__name__}.compute, line " in text
    assert "secret" not in text


def test_many_stalls_make_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def stalled() -> LoopSnapshot:
        async with monitored() as monitor:
            for _ in range(5):
                after = await after_stall(monitor, 0.1)
            return after

    with caplog.at_level(logging.WARNING, "app.metrics"):
        assert asyncio.run(stalled()).num_stalls >= 5
    assert len(caplog.records) == 1


async def test_calls_that_wait_for_a_thread_are_counted() -> None:
    free = threading.Event()
    async with monitored() as monitor:
        executor = asyncio.get_running_loop()._default_executor  # type: ignore[attr-defined]
        tasks = [asyncio.create_task(asyncio.to_thread(free.wait)) for _ in range(executor._max_workers + 3)]
        monitor.add_queue("bodies", lambda: 5)
        await until(lambda: monitor.snapshot().queued == {"default": 3, "bodies": 5})
        free.set()
        await asyncio.wait(tasks)
        assert monitor.snapshot().queued == {"default": 0, "bodies": 5}
