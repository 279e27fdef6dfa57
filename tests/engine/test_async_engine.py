from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from app.config import SchedulerConfig
from app.engine.async_engine import AsyncEngine
from app.engine.batch import DeviceLost, StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.request import Adapter, Request
from app.errors import (
    DeadlineMissed,
    EngineStopped,
    Failure,
    InvalidRequest,
    InvalidSetup,
    Overloaded,
    Quarantined,
    StepFailed,
)
from tests.engine.test_adapter_store import gated_store
from tests.kit.engine import (
    CountingRunner,
    FakeClock,
    GatedRunner,
    MadeMatchers,
    PoisonedRunner,
    async_engine,
    build_fake_engine,
    expected_tokens,
    make_request,
    tokens_of,
)
from tests.waiting import until


async def collect(engine: AsyncEngine, request: Request) -> list[int]:
    tokens: list[int] = []
    async with aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
    return tokens


def is_stopping(engine: AsyncEngine) -> bool:
    try:
        engine.check_health()
    except EngineStopped:
        return True
    return False


class FailingRunner(CountingRunner):
    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures

    def run(self, batch: StepBatch) -> StepResult:
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("a broken device")
        return super().run(batch)


async def test_concurrent_requests_each_get_their_own_tokens() -> None:
    requests = [make_request((5, 6, 7 + n), max_tokens=3 + n) for n in range(20)]
    with async_engine() as engine:
        heard = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert heard == [tokens_of(request) for request in requests]


async def test_closing_the_stream_aborts_the_request_and_frees_its_blocks() -> None:
    runner = GatedRunner()
    with async_engine(runner, num_blocks=256) as engine:
        deltas = engine.generate(make_request(max_tokens=900))
        runner.gate.release()
        await anext(deltas)
        await deltas.aclose()
        runner.gate.release()  # the step that was under way; no other may follow
        await until(lambda: engine.stats().total_aborted == 1)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert len(runner.batches) <= 2


async def test_what_cannot_be_served_raises_before_anything_is_queued() -> None:
    with async_engine() as engine, pytest.raises(InvalidRequest, match="empty"):
        await collect(engine, make_request(()))


async def test_more_than_max_requests_are_refused_and_the_others_finish() -> None:
    runner = GatedRunner()
    with async_engine(runner, max_requests=2) as engine:
        requests = [make_request() for _ in range(2)]
        tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests"):
            await collect(engine, make_request())
        runner.gate.release(100)
        assert await asyncio.gather(*tasks) == [tokens_of(request) for request in requests]
        assert len(await collect(engine, make_request())) == 4


async def test_a_request_id_in_use_is_refused() -> None:
    runner = GatedRunner()
    with async_engine(runner) as engine:
        task = asyncio.create_task(collect(engine, make_request(request_id="same")))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="same"):
            await collect(engine, make_request(request_id="same"))
        runner.gate.release(100)
        await task


async def test_a_failed_step_fails_its_requests_and_the_engine_lives_on() -> None:
    with async_engine(FailingRunner(num_failures=1)) as engine:
        with pytest.raises(StepFailed):
            await collect(engine, make_request())
        request = make_request()
        assert await collect(engine, request) == tokens_of(request)
        engine.check_health()


async def test_a_device_that_never_recovers_makes_the_engine_unhealthy() -> None:
    with async_engine(FailingRunner(num_failures=1000)) as engine:
        for n in range(8):
            with pytest.raises(StepFailed):
                await collect(engine, make_request((5, 6, 7 + n)))
        with pytest.raises(EngineStopped):
            await collect(engine, make_request())
        with pytest.raises(EngineStopped):
            engine.check_health()


async def test_a_lost_device_ends_the_engine_at_once() -> None:
    class LostRunner(CountingRunner):
        num_runs = 0

        def run(self, batch: StepBatch) -> StepResult:
            self.num_runs += 1
            raise DeviceLost("gone")

    runner = LostRunner()
    with async_engine(runner) as engine:
        requests = [make_request((5, 6, 7 + n)) for n in range(3)]
        outcomes = await asyncio.gather(*(collect(engine, each) for each in requests), return_exceptions=True)
        assert [type(each) for each in outcomes] == [EngineStopped] * 3
        await until(lambda: is_stopping(engine))
    assert runner.num_runs == 1


def test_the_engines_thread_is_prepared_before_there_is_an_engine() -> None:
    class PreparedEngine(Engine):
        prepared_in: threading.Thread | None = None

        def prepare(self) -> None:
            self.prepared_in = threading.current_thread()

    fake = build_fake_engine()
    fake.__class__ = PreparedEngine
    engine = AsyncEngine(fake, max_requests=1)
    assert isinstance(fake, PreparedEngine)
    assert fake.prepared_in is engine._thread
    engine.shutdown()


def test_an_engine_that_cannot_be_prepared_is_not_made() -> None:
    class UnpreparedEngine(Engine):
        def prepare(self) -> None:
            raise InvalidSetup("no memory for graphs")

    fake = build_fake_engine()
    fake.__class__ = UnpreparedEngine
    with pytest.raises(InvalidSetup, match="no memory for graphs"):
        AsyncEngine(fake, max_requests=1)


class ClosedParts:
    """Which parts of an engine were closed; some of them raise."""

    def __init__(self, engine: Engine, *failing: str) -> None:
        self.names: set[str] = set()
        self._failing = failing
        for name, part in (("recorder", engine._observers[0]), ("runner", engine.runner)):
            self._watch(name, part)

    def _watch(self, name: str, part: Any) -> None:
        close = part.close

        def noting() -> None:
            self.names.add(name)
            close()
            if name in self._failing:
                raise OSError(f"the {name} does not close")

        part.close = noting


@pytest.mark.parametrize("failing", [(), ("recorder",), ("recorder", "runner")])
def test_an_engine_that_cannot_be_prepared_is_closed_with_all_its_parts(failing: tuple[str, ...]) -> None:
    class UnpreparedRunner(CountingRunner):
        def prepare(self) -> None:
            raise InvalidSetup("no memory for graphs")

    store, _, _ = gated_store(1)
    fake, matchers = build_fake_engine(runner=UnpreparedRunner(), adapters=store), MadeMatchers()
    closed = ClosedParts(fake, *failing)
    with pytest.raises(InvalidSetup, match="no memory for graphs"):
        AsyncEngine(fake, max_requests=1, matchers=matchers)
    assert closed.names == {"recorder", "runner"}
    assert matchers.is_closed
    with pytest.raises(EngineStopped):
        store.hold_async(Adapter(name="a", path="/a", digest="a"))


async def test_a_request_that_the_engine_cannot_take_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _, gate = gated_store(1)
    gate.release()
    with async_engine(adapters=store) as engine:
        add = engine._engine._scheduler.add

        def fail_once(*given: Any, **named: Any) -> None:
            monkeypatch.setattr(engine._engine._scheduler, "add", add)
            raise RuntimeError("nobody thought of this")

        monkeypatch.setattr(engine._engine._scheduler, "add", fail_once)
        with pytest.raises(Failure, match="could not accept this request"):
            await collect(engine, with_adapter("a"))
        gate.release()
        assert len(await collect(engine, with_adapter("b"))) == 4, "the only place for adapters is free"
        engine.check_health()
        assert engine.stats().num_waiting == engine.num_requests == 0


async def test_a_command_that_fails_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = GatedRunner()
    with async_engine(runner) as engine:

        def fail(*given: Any) -> None:
            raise RuntimeError("nobody thought of this")

        request = make_request()
        answer = asyncio.create_task(collect(engine, request))
        await asyncio.sleep(0)
        monkeypatch.setattr(engine._engine, "on_prefixes", fail)
        engine.on_prefixes(lambda prefix, is_held: None)
        runner.gate.release(100)
        assert await answer == tokens_of(request)
        engine.check_health()


async def test_shutdown_fails_open_requests_and_refuses_new_ones() -> None:
    runner = GatedRunner()
    with async_engine(runner) as engine:
        task = asyncio.create_task(collect(engine, make_request(max_tokens=50)))
        await asyncio.sleep(0)
        stop = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        await until(lambda: is_stopping(engine))
        runner.gate.release()  # the step that was under way; no other may follow
        await stop
        with pytest.raises(EngineStopped):
            await task
        with pytest.raises(EngineStopped):
            await collect(engine, make_request())


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


async def test_one_poisonous_request_fails_alone_and_the_others_go_on() -> None:
    with async_engine(PoisonedRunner("bad")) as engine:
        requests = [make_request((5, 6, n)) for n in range(3)]
        good = [asyncio.create_task(collect(engine, request)) for request in requests]
        bad = asyncio.create_task(collect(engine, make_request((9, 9), request_id="bad")))
        assert await asyncio.gather(*good) == [tokens_of(request) for request in requests]
        with pytest.raises(StepFailed):
            await bad
        engine.check_health()


async def test_poison_that_comes_again_and_again_does_not_make_the_engine_unhealthy() -> None:
    with async_engine(PoisonedRunner("bad")) as engine:
        for number, expected in enumerate((StepFailed, StepFailed, *[Quarantined] * 20)):
            with pytest.raises(expected):
                await collect(engine, make_request((9, 9), request_id=f"bad-{number}"))
        engine.check_health()


async def test_a_partial_batch_starts_by_its_timer_without_polling() -> None:
    looks = 0
    with async_engine(strategy={"name": "static", "max_wait_ms": 300}, max_running=4) as engine:
        inner = engine._engine
        idle_s = type(inner).idle_s

        class Watched(type(inner)):  # type: ignore[misc]
            @property
            def idle_s(self) -> float | None:
                nonlocal looks
                looks += 1
                return idle_s.fget(self)  # type: ignore[attr-defined,no-any-return]

        inner.__class__ = Watched
        assert len(await collect(engine, make_request())) == 4
    assert looks < 40  # a few for each step and each wait; a loop that spins has thousands


async def test_an_expired_request_is_answered_while_the_engine_waits_for_a_batch() -> None:
    strategy = {"name": "static", "max_wait_ms": 600_000}  # no test takes so long
    with async_engine(strategy=strategy) as engine, pytest.raises(DeadlineMissed):
        await collect(engine, make_request(deadline_s=0.1))


async def test_prompts_beyond_the_token_bound_are_refused_unless_no_other_waits() -> None:
    runner = GatedRunner()
    with async_engine(runner, max_waiting_tokens=20) as engine:
        large = asyncio.create_task(collect(engine, make_request((5,) * 30)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="prompts of 30 tokens are waiting") as refused:
            await collect(engine, make_request())
        assert refused.value.retry_after_s == 1.0  # nothing is known of the pace
        runner.gate.release(100)
        assert len(await large) == 4
        assert len(await collect(engine, make_request())) == 4


async def test_a_refused_client_gets_the_time_when_a_place_should_be_free() -> None:
    clock = FakeClock()

    class Timed(GatedRunner):
        def run(self, batch: StepBatch) -> StepResult:
            tokens = super().run(batch)
            clock.advance(0.01)
            return tokens

    runner = Timed()

    with async_engine(runner, max_requests=1, clock=clock) as engine:
        runner.gate.release(8)
        for _ in range(2):
            await collect(engine, make_request())
        rate = engine.stats().ended_per_s
        task = asyncio.create_task(collect(engine, make_request()))
        await asyncio.sleep(0)
        for turn in (1, 2, 3):
            for fields in ({"no_queue": True}, {"is_background": True}, {}):  # only the last would wait for a place
                with pytest.raises(Overloaded) as refused:
                    await collect(engine, replace(make_request(), **fields))
                assert refused.value.retry_after_s == pytest.approx(turn / rate)
        runner.gate.release(100)
        await task


@pytest.mark.parametrize("strategy", ["continuous", "static"])
async def test_a_request_that_is_not_to_wait_is_refused_where_it_would(strategy: str) -> None:
    runner, urgent = GatedRunner(), replace(make_request(), no_queue=True)
    num_slots = 2 if strategy == "continuous" else 1

    with async_engine(runner) as engine:
        await engine.reconfigure(SchedulerConfig.model_validate({"strategy": strategy, "max_running": 2}))
        tasks = [asyncio.create_task(collect(engine, make_request())) for _ in range(num_slots)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="which may not wait"):
            await collect(engine, urgent)
        tasks.append(asyncio.create_task(collect(engine, make_request())))  # this one waits
        runner.gate.release(100)
        await asyncio.gather(*tasks)
        assert len(await collect(engine, urgent)) == 4


async def test_a_request_that_is_not_to_wait_is_refused_where_its_prompt_has_no_memory() -> None:
    runner = GatedRunner()
    with async_engine(runner, num_blocks=4) as engine:
        task = asyncio.create_task(collect(engine, make_request(tuple(range(5, 14)))))
        await asyncio.sleep(0)
        runner.gate.release(1)
        await until(lambda: engine.stats().num_free_blocks == 1)
        with pytest.raises(Overloaded, match="which may not wait"):
            await collect(engine, replace(make_request(tuple(range(5, 12))), no_queue=True))
        runner.gate.release(100)
        await task


async def test_new_settings_hold_when_reconfigure_returns_and_no_request_is_lost() -> None:
    runner = GatedRunner()
    with async_engine(runner) as engine:
        requests = [make_request((5, 6, n), max_tokens=6) for n in range(5)]
        tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
        await asyncio.sleep(0)
        runner.gate.release(1)
        change = asyncio.create_task(
            engine.reconfigure(SchedulerConfig(strategy="static", policy="sjf", max_running=2, max_waiting=2))
        )
        runner.gate.release(100)
        await change
        assert (engine.stats().strategy, engine.stats().policy) == ("static", "sjf")
        assert await asyncio.gather(*tasks) == [tokens_of(request) for request in requests]
        runner.shut()
        tasks = [asyncio.create_task(collect(engine, make_request())) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="4 requests"):
            await collect(engine, make_request())
        runner.gate.release(100)
        await asyncio.gather(*tasks)


async def test_settings_that_a_stopped_engine_cannot_take_are_refused_and_no_caller_waits_for_ever() -> None:
    runner = GatedRunner()
    with async_engine(runner) as engine:
        task = asyncio.create_task(collect(engine, make_request()))
        await until(lambda: runner.is_waiting)
        change = asyncio.create_task(engine.reconfigure(SchedulerConfig()))
        await asyncio.sleep(0)
        stop = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        await until(lambda: is_stopping(engine))
        runner.gate.release()
        await stop
        for waiting in (change, task):
            with pytest.raises(EngineStopped):
                await waiting
        with pytest.raises(EngineStopped):
            await engine.reconfigure(SchedulerConfig())


def with_adapter(name: str, **fields: Any) -> Request:
    return make_request(adapter=Adapter(name=name, path=f"/{name}", digest=name), **fields)


async def test_however_many_adapters_a_tenant_asks_for_another_waits_for_two_of_them() -> None:
    store, read, gate = gated_store(20)
    with async_engine(adapters=store) as engine:
        flood = [asyncio.create_task(collect(engine, with_adapter(f"{n}", tenant="flood"))) for n in range(12)]
        await until(lambda: read)
        other = asyncio.create_task(collect(engine, with_adapter("other", tenant="other")))
        await asyncio.sleep(0)
        gate.release(20)
        await asyncio.gather(other, *flood)
    assert read[:3] == ["0", "1", "other"]


async def test_loads_of_adapters_take_no_thread_of_the_event_loops() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    store, read, gate = gated_store(1)
    with async_engine(adapters=store) as engine:
        waiting = asyncio.create_task(collect(engine, with_adapter("a")))
        await until(lambda: read)
        assert await asyncio.to_thread(lambda: True)
        gate.release()
        await waiting


async def test_a_request_that_goes_while_its_adapter_is_read_leaves_it_free() -> None:
    store, read, gate = gated_store(1)
    with async_engine(adapters=store) as engine:
        gone = asyncio.create_task(collect(engine, with_adapter("a")))
        await until(lambda: read)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        gate.release(2)
        assert len(await collect(engine, with_adapter("b"))) == 4  # in the only place
    assert read == ["a", "b"]
