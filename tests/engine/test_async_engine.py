from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import pytest

from app.engine.async_engine import AsyncEngine
from app.engine.batch import Batch
from app.engine.engine import ModelRunner
from app.engine.request import FinishReason, Request
from app.errors import EngineStopped, InvalidRequest, Overloaded, StepFailed
from tests.fakes import CountingRunner, build_fake_engine, expected_tokens, make_request


@contextmanager
def async_engine(
    runner: ModelRunner | None = None, *, max_requests: int = 100, **settings: int
) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(build_fake_engine(runner=runner, **settings), max_requests=max_requests)
    try:
        yield engine
    finally:
        engine.shutdown()


async def collect(engine: AsyncEngine, request: Request) -> list[int]:
    tokens: list[int] = []
    async with aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
    return tokens


class GatedRunner(CountingRunner):
    """Steps only when let through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)

    def run(self, batch: Batch) -> list[int]:
        self.gate.acquire()
        return super().run(batch)


class FailingRunner(CountingRunner):
    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures

    def run(self, batch: Batch) -> list[int]:
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("a broken device")
        return super().run(batch)


def test_concurrent_requests_each_hear_their_own_tokens() -> None:
    requests = [make_request((5, 6, 7 + n), max_tokens=3 + n) for n in range(20)]

    async def main(engine: AsyncEngine) -> list[list[int]]:
        return await asyncio.gather(*(collect(engine, request) for request in requests))

    with async_engine() as engine:
        heard = asyncio.run(main(engine))
    assert heard == [expected_tokens(r.prompt_token_ids, r.sampling.max_tokens) for r in requests]


def test_a_slow_reader_gets_what_has_accumulated_as_one_delta() -> None:
    runner = GatedRunner()
    request = make_request(max_tokens=4)

    async def main(engine: AsyncEngine) -> tuple[int, ...]:
        deltas = engine.generate(request)
        runner.gate.release()
        await anext(deltas)
        runner.gate.release(3)
        while engine.stats().total_finished == 0:
            await asyncio.to_thread(threading.Event().wait, 0.01)
        await asyncio.sleep(0)
        last = await anext(deltas)
        assert last.finish_reason is FinishReason.LENGTH
        return last.token_ids

    with async_engine(runner) as engine:
        assert list(asyncio.run(main(engine))) == expected_tokens(request.prompt_token_ids, 4)[1:]


def test_closing_the_stream_aborts_the_request_and_frees_its_blocks() -> None:
    runner = GatedRunner()

    async def main(engine: AsyncEngine) -> None:
        deltas = engine.generate(make_request(max_tokens=900))
        runner.gate.release()
        await anext(deltas)
        await deltas.aclose()
        runner.gate.release()  # the step that was under way; no other may follow
        for _ in range(500):
            stats = engine.stats()
            if stats.total_aborted == 1 and stats.num_free_blocks == stats.num_blocks:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"blocks are still owned: {engine.stats()}")

    with async_engine(runner, num_blocks=256) as engine:
        asyncio.run(main(engine))
    assert len(runner.batches) <= 2


def test_what_cannot_be_served_raises_before_anything_is_queued() -> None:
    with async_engine() as engine, pytest.raises(InvalidRequest, match="empty"):
        asyncio.run(collect(engine, make_request(())))


def test_more_than_max_requests_are_refused_and_the_others_finish() -> None:
    runner = GatedRunner()

    async def main(engine: AsyncEngine) -> None:
        requests = [make_request() for _ in range(2)]
        tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests"):
            await collect(engine, make_request())
        runner.gate.release(100)
        for request, task in zip(requests, tasks, strict=True):
            assert await task == expected_tokens(request.prompt_token_ids, 4)
        assert len(await collect(engine, make_request())) == 4

    with async_engine(runner, max_requests=2) as engine:
        asyncio.run(main(engine))


def test_a_request_id_in_use_is_refused() -> None:
    runner = GatedRunner()

    async def main(engine: AsyncEngine) -> None:
        task = asyncio.create_task(collect(engine, make_request(request_id="same")))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="same"):
            await collect(engine, make_request(request_id="same"))
        runner.gate.release(100)
        await task

    with async_engine(runner) as engine:
        asyncio.run(main(engine))


def test_a_failed_step_fails_its_requests_and_the_engine_lives_on() -> None:
    async def main(engine: AsyncEngine) -> None:
        with pytest.raises(StepFailed):
            await collect(engine, make_request())
        request = make_request()
        assert await collect(engine, request) == expected_tokens(request.prompt_token_ids, 4)
        engine.check_health()

    with async_engine(FailingRunner(num_failures=1)) as engine:
        asyncio.run(main(engine))


def test_a_device_that_never_recovers_makes_the_engine_unhealthy() -> None:
    async def main(engine: AsyncEngine) -> None:
        for n in range(8):
            with pytest.raises(StepFailed):
                await collect(engine, make_request((5, 6, 7 + n)))
        with pytest.raises(EngineStopped):
            await collect(engine, make_request())
        with pytest.raises(EngineStopped):
            engine.check_health()

    with async_engine(FailingRunner(num_failures=1000)) as engine:
        asyncio.run(main(engine))


def test_shutdown_fails_open_requests_and_refuses_new_ones() -> None:
    runner = GatedRunner()

    async def main(engine: AsyncEngine) -> None:
        task = asyncio.create_task(collect(engine, make_request(max_tokens=50)))
        await asyncio.sleep(0)
        stop = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        await asyncio.sleep(0.05)
        runner.gate.release(5)
        await stop
        with pytest.raises(EngineStopped):
            await task
        with pytest.raises(EngineStopped):
            await collect(engine, make_request())

    with async_engine(runner) as engine:
        asyncio.run(main(engine))


def test_an_engine_serves_several_event_loops() -> None:
    results: list[list[int]] = []
    request_ids = [f"loop-{n}" for n in range(4)]
    with async_engine() as engine:
        threads = [
            threading.Thread(
                target=lambda name=name: results.append(asyncio.run(collect(engine, make_request(request_id=name))))
            )
            for name in request_ids
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [expected_tokens((5, 6, 7), 4)] * 4
