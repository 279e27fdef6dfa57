from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.config import SchedulerConfig
from app.engine.async_engine import AsyncEngine
from app.engine.batch import StepBatch, StepResult
from app.engine.device_lease import SHORTEST_TURN_S, DeviceLease
from app.engine.engine import Engine
from app.engine.request import Request
from app.engine.sleep_controller import SleepController
from app.engine.stats import SleepState
from app.errors import DeadlineMissed, EngineStopped, InvalidSetup, Overloaded
from tests.engine.test_device_lease import asking_process
from tests.engine.test_steps_in_flight import LateRunner
from tests.kit.engine import CountingRunner, FakeClock, Outcome, build_fake_engine, make_request, run_to_end, tokens_of
from tests.waiting import PATIENCE_S, until

AFTER_S = 10.0
WAKE_S = 0.2


class DozingRunner(CountingRunner):
    """Has no KV memory while it sleeps; waking takes time, and until it may."""

    def __init__(self, clock: FakeClock | None = None, *, wake_s: float = WAKE_S) -> None:
        super().__init__()
        self.clock = clock or FakeClock()
        self.wake_s = wake_s
        self.has_memory = True
        self.may_wake = threading.Event()
        self.may_wake.set()
        self.wake_error: Exception | None = None

    @property
    def computed(self) -> set[str]:
        """The ids of all requests that were computed."""
        return {item.request_id for batch in self.batches for item in batch.scheduled}

    def run(self, batch: StepBatch) -> StepResult:
        assert self.has_memory, "nothing is computed in sleep"
        self.clock.advance(0.01)
        return super().run(batch)

    def sleep(self) -> None:
        self.has_memory = False
        self._slots.clear()

    def wake(self) -> None:
        assert not self._slots
        assert self.may_wake.wait(PATIENCE_S)
        if self.wake_error is not None:
            raise self.wake_error
        self.clock.advance(self.wake_s)
        self.has_memory = True


def turns_on(path: Path, *, num_bytes: int = 6, clock: Any) -> DeviceLease:
    turns = DeviceLease(path, name="fake", num_bytes=num_bytes, total_bytes=10, clock=clock)
    turns.wait()
    return turns


class Dozing:
    """An engine that sleeps, and what is heard of it; time passes only when it is told to."""

    def __init__(self, path: Path, clock: FakeClock, **settings: Any) -> None:
        self.clock = clock
        self.runner = DozingRunner(clock)
        self.engine: Engine = build_fake_engine(runner=self.runner, clock=clock, **settings)
        self.turns = turns_on(path, clock=clock)
        self.sleeper = SleepController(self.engine, self.turns, after_s=AFTER_S, startup_s=WAKE_S)
        self.outcome = Outcome()

    def go(self) -> None:
        """What the engine's thread does between two waits."""
        self.sleeper.note_change()
        self.sleeper.advance()
        if self.engine.idle_s == 0.0:
            self.outcome.book(self.engine.step())
        self.sleeper.advance()

    def go_on(self, max_times: int = 1000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_times):
            if not self.engine.has_work:
                return
            self.go()
        raise AssertionError("it still has work")

    def doze(self) -> None:
        """Sleep and wake once, so that the time of a switch is known."""
        self.go()
        self.clock.advance(AFTER_S)
        self.go()
        self.engine.add(make_request())
        self.go_on()
        self.go()

    @property
    def state(self) -> SleepState:
        return self.sleeper.stats.state


@pytest.fixture
def dozing(tmp_path: Path) -> Iterator[Dozing]:
    made = Dozing(tmp_path / "device.json", FakeClock())
    yield made
    made.sleeper.close()


# ---------------------------------------------------------------------- the engine


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_requests_that_ran_go_on_with_the_same_tokens_after_sleep(num_steps: int) -> None:
    engine = build_fake_engine(runner=DozingRunner())
    requests = [make_request((5, 6, 7 + n), max_tokens=9) for n in range(4)]
    outcome = Outcome()
    for request in requests:
        engine.add(request)
    for _ in range(num_steps):
        outcome.book(engine.step())
    engine.sleep()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.idle_s is None
    engine.wake()
    run_to_end(engine, outcome=outcome).check(*requests)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_an_engine_a_step_ahead_sleeps_without_a_lost_token(num_steps: int) -> None:
    engine = build_fake_engine(runner=LateRunner())
    request, outcome = make_request((5, 6, 7), max_tokens=6, frequency_penalty=0.0), Outcome()
    engine.add(request)
    for _ in range(num_steps):
        outcome.book(engine.step())
    engine.sleep()
    engine.wake()
    run_to_end(engine, outcome=outcome).check(request)


def test_nothing_is_cached_after_sleep() -> None:
    engine = build_fake_engine(runner=DozingRunner())
    prompt = tuple(range(2, 22))
    run_to_end(engine, make_request(prompt))
    engine.sleep()
    engine.wake()
    run_to_end(engine, make_request(prompt))
    assert engine.stats().total_cached_tokens == 0


# ---------------------------------------------------------------------- when it sleeps


def test_an_engine_without_requests_sleeps_after_its_time_and_wakes_for_the_next(dozing: Dozing) -> None:
    dozing.go()
    assert dozing.sleeper.due_in_s == AFTER_S
    dozing.clock.advance(AFTER_S)
    dozing.go()
    assert (dozing.state, dozing.runner.has_memory) == (SleepState.ASLEEP, False)
    assert dozing.sleeper.due_in_s is None
    request = make_request()
    dozing.engine.add(request)
    dozing.go_on()
    dozing.outcome.check(request)
    stats = dozing.sleeper.stats
    assert (stats.state, stats.num_wakes, stats.last_wake_s) == (SleepState.AWAKE, 1, pytest.approx(WAKE_S))


def test_the_time_without_a_request_begins_with_the_end_of_the_last(dozing: Dozing) -> None:
    dozing.clock.advance(AFTER_S - 1)
    dozing.go()
    dozing.engine.add(make_request())
    dozing.go_on()
    dozing.go()
    assert dozing.state is SleepState.AWAKE
    assert dozing.sleeper.due_in_s == pytest.approx(AFTER_S, abs=0.1)


def test_a_deadline_passes_in_sleep(dozing: Dozing, tmp_path: Path) -> None:
    dozing.engine.sleep()
    request = make_request(deadline_s=3.0)
    dozing.engine.add(request)
    assert dozing.engine.idle_s == pytest.approx(3.0)
    dozing.clock.advance(3.0)
    dozing.outcome.book(dozing.engine.step())
    assert isinstance(dozing.outcome.errors[request.request_id], DeadlineMissed)
    assert not dozing.engine.has_work


def test_other_settings_hold_after_sleep(dozing: Dozing) -> None:
    dozing.engine.sleep()
    dozing.engine.add(make_request())
    dozing.engine.reconfigure(SchedulerConfig(max_running=3, policy={"name": "sjf"}))  # type: ignore[arg-type]
    dozing.engine.wake()
    dozing.go_on()
    assert (dozing.engine.stats().policy, dozing.engine.stats().total_finished) == ("sjf", 1)


# ---------------------------------------------------------------------- two on one device


@contextmanager
def two_on_one_device(
    folder: Path, clock: FakeClock | None = None, *, has_dozed: bool = True, **settings: Any
) -> Iterator[tuple[Dozing, Dozing]]:
    """The second waits for the first; neither has a request. Both need 6 of 10 bytes.

    has_dozed: the first knows how long its switch takes, and has done something in this turn.
    """
    clock = clock or FakeClock()
    path = folder / "device.json"
    first = Dozing(path, clock, **settings)
    first.engine.sleep()  # as long as the second starts
    first.turns.leave()
    first.sleeper.stats = first.sleeper.stats._replace(state=SleepState.ASLEEP)
    second = Dozing(path, clock, **settings)
    if has_dozed:
        second.doze()
        second.outcome = Outcome()
    try:
        yield second, first
    finally:
        first.sleeper.close()
        second.sleeper.close()


def test_an_idle_engine_gives_way_when_it_was_idle_for_as_long_as_a_switch_takes(tmp_path: Path) -> None:
    with two_on_one_device(tmp_path) as (awake, asleep):
        asleep.engine.add(make_request())
        awake.go()
        asleep.go()
        assert asleep.state is SleepState.QUEUED
        awake.go()
        assert awake.state is SleepState.AWAKE
        awake.clock.advance(WAKE_S)
        awake.go()
        assert awake.state is SleepState.ASLEEP
        asleep.go()
        assert asleep.state is SleepState.AWAKE
        assert asleep.sleeper.stats.queued_s == pytest.approx(WAKE_S)


def test_a_busy_engine_gives_way_after_its_turn_and_both_end_with_their_tokens(tmp_path: Path) -> None:
    with two_on_one_device(tmp_path, num_blocks=256) as (awake, asleep):
        requests = [make_request((3, 4 + n), max_tokens=450) for n in range(2)]
        awake.engine.add(requests[0])
        asleep.engine.add(requests[1])
        while awake.engine.has_work or asleep.engine.has_work:
            for each in (awake, asleep):
                each.go()
                assert awake.runner.has_memory + asleep.runner.has_memory <= 1
            awake.clock.advance(0.001)
        for each, request in zip((awake, asleep), requests, strict=True):
            each.outcome.check(request)
            assert each.sleeper.stats.num_turns_ended >= 1


def test_the_first_turn_is_short_as_no_switch_was_measured(dozing: Dozing, tmp_path: Path) -> None:
    other = DeviceLease(tmp_path / "device.json", name="other", num_bytes=6, total_bytes=10, clock=dozing.clock)
    dozing.engine.add(make_request(max_tokens=100))
    dozing.go()
    assert not other.ask()
    assert dozing.turns.ends_at() == pytest.approx(dozing.clock() + SHORTEST_TURN_S, abs=0.1)
    other.close()


def test_an_engine_whose_requests_are_gone_waits_for_the_memory_no_longer(tmp_path: Path) -> None:
    with two_on_one_device(tmp_path) as (awake, asleep):
        request = make_request()
        asleep.engine.add(request)
        asleep.go()
        assert awake.turns.ends_at() is not None
        asleep.engine.abort(request.request_id)
        asleep.go()
        assert asleep.state is SleepState.ASLEEP
        assert awake.turns.ends_at() is None


def test_a_turn_in_which_nothing_was_done_goes_on(tmp_path: Path) -> None:
    with two_on_one_device(tmp_path, has_dozed=False, prefill_chunk_tokens=4, max_step_tokens=8) as (awake, asleep):
        awake.engine.add(make_request(tuple(range(2, 42)), max_tokens=3))
        asleep.engine.add(make_request())
        asleep.go()
        awake.clock.advance(100.0)  # its turn is long over, and 10 steps are missing to the first token
        while not awake.outcome.token_ids:
            awake.go()
            assert awake.state is SleepState.AWAKE or awake.outcome.token_ids
        awake.go()
        assert awake.state is not SleepState.AWAKE


arrivals = st.lists(
    st.tuples(
        st.integers(0, 1),  # which engine
        st.floats(0, 4),  # seconds after the one before
        st.integers(1, 40),  # tokens of its prompt
        st.integers(1, 60),  # and of its output
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=arrivals, strategy=st.sampled_from(["continuous", "static", "dynamic", "sorted"]))
def test_nothing_is_lost_and_none_waits_for_ever(tmp_path: Path, arrivals: list[Any], strategy: str) -> None:
    """Random requests to two engines that do not fit together: all end with the tokens that each has alone."""
    clock = FakeClock()
    (tmp_path / "device.json").unlink(missing_ok=True)
    with two_on_one_device(tmp_path, clock, num_blocks=40, strategy={"name": strategy}) as both:
        due, at = [], clock()
        for number, (which, after_s, num_prompt, num_output) in enumerate(arrivals):
            at += after_s
            prompt = tuple(2 + (number + n) % 40 for n in range(num_prompt))
            due.append((at, which, make_request(prompt, max_tokens=num_output)))
        sent: dict[str, tuple[float, Dozing, Request]] = {}
        while due or any(each.engine.has_work for each in both):
            while due and due[0][0] <= clock():
                _, which, request = due.pop(0)
                both[which].engine.add(request)
                sent[request.request_id] = clock(), both[which], request
            before = clock()
            for each in both:
                each.go()
                assert sum(engine.runner.has_memory for engine in both) <= 1
            if clock() == before:
                clock.advance(0.05)
            for began_at, engine, request in sent.values():
                if request.request_id not in engine.outcome.reasons:
                    # All work there may be, and a few turns and switches.
                    assert clock() - began_at < 14 * 2 + 8 * (SHORTEST_TURN_S + 2 * WAKE_S * 11) + 20
        for _, engine, request in sent.values():
            engine.outcome.check(request)


# ---------------------------------------------------------------------- in its thread


@contextmanager
def dozing_service(path: Path, *, after_s: float = 0.02, **settings: Any) -> Iterator[tuple[AsyncEngine, DozingRunner]]:
    runner = DozingRunner()
    engine = build_fake_engine(runner=runner, **settings)
    sleeper = SleepController(engine, turns_on(path, clock=engine.now), after_s=after_s, startup_s=0.0)
    service = AsyncEngine(engine, max_requests=4, sleeper=sleeper)
    try:
        yield service, runner
    finally:
        service.shutdown()


async def heard(engine: AsyncEngine, request: Request) -> list[int]:
    return [token_id async for delta in engine.generate(request) for token_id in delta.token_ids]


async def test_a_service_sleeps_and_answers(tmp_path: Path) -> None:
    with dozing_service(tmp_path / "device.json") as (engine, runner):
        await until(lambda: engine.sleep.state is SleepState.ASLEEP)
        assert not runner.has_memory
        request = make_request()
        assert await heard(engine, request) == tokens_of(request)
        measured = engine.measurements().sleep
        assert measured is not None
        assert measured.num_wakes == 1
        await until(lambda: engine.sleep.state is SleepState.ASLEEP)
        await engine.reconfigure(SchedulerConfig(max_running=2, max_waiting=2))


async def test_a_request_that_is_not_to_wait_is_refused_in_sleep(tmp_path: Path) -> None:
    with dozing_service(tmp_path / "device.json") as (engine, _):
        await until(lambda: engine.sleep.state is SleepState.ASLEEP)
        with pytest.raises(Overloaded):
            await heard(engine, replace(make_request(), no_queue=True))


async def test_requests_wait_for_the_memory_within_the_bounds_and_end_with_shutdown(tmp_path: Path) -> None:
    with dozing_service(tmp_path / "device.json") as (engine, _):
        await until(lambda: engine.sleep.state is SleepState.ASLEEP)
        with_memory = turns_on(tmp_path / "device.json", clock=lambda: 1e9)  # its turn has no end
        waiting = [asyncio.ensure_future(heard(engine, make_request())) for _ in range(4)]
        await until(lambda: engine.sleep.state is SleepState.QUEUED)
        with pytest.raises(Overloaded, match="4 requests"):
            await heard(engine, make_request())
        waiting[0].cancel()
        await until(lambda: engine.num_requests == 3)
        with pytest.raises(DeadlineMissed):
            await heard(engine, make_request(deadline_s=0.05))
        with_memory.close()
        for each in waiting[1:]:
            assert len(await each) == 4
        with suppress(asyncio.CancelledError):
            await waiting[0]


@contextmanager
def waking(path: Path) -> Iterator[tuple[AsyncEngine, DozingRunner]]:
    """A service whose next wake lasts until its runner may."""
    with dozing_service(path) as (engine, runner):
        runner.may_wake.clear()
        try:
            yield engine, runner
        finally:
            runner.may_wake.set()


async def asked_in_sleep(engine: AsyncEngine, request: Request) -> asyncio.Future[list[int]]:
    """A request that has begun to wake the engine."""
    await until(lambda: engine.sleep.state is SleepState.ASLEEP)
    asked = asyncio.ensure_future(heard(engine, request))
    await until(lambda: engine.sleep.state is SleepState.WAKING)
    return asked


async def test_a_request_cancelled_during_the_wake_is_never_computed_and_others_are(tmp_path: Path) -> None:
    with waking(tmp_path / "device.json") as (engine, runner):
        cancelled = await asked_in_sleep(engine, make_request((5, 6, 7)))
        request = make_request((8, 9))
        kept = asyncio.ensure_future(heard(engine, request))
        await until(lambda: engine.num_requests == 2)
        cancelled.cancel()
        await until(lambda: engine.num_requests == 1)  # its client need not wait for the wake
        runner.may_wake.set()
        assert await kept == tokens_of(request)
        assert runner.computed == {request.request_id}


async def test_an_engine_whose_only_request_is_cancelled_during_the_wake_sleeps_again(tmp_path: Path) -> None:
    with waking(tmp_path / "device.json") as (engine, runner):
        (await asked_in_sleep(engine, make_request())).cancel()
        await until(lambda: engine.num_requests == 0)
        runner.may_wake.set()
        await until(lambda: engine.sleep.num_wakes == 1 and engine.sleep.state is SleepState.ASLEEP)
        assert runner.computed == set()


async def test_a_deadline_that_passes_during_the_wake_is_missed_and_nothing_computed(tmp_path: Path) -> None:
    with waking(tmp_path / "device.json") as (engine, runner):
        request = make_request((8, 9))
        late = await asked_in_sleep(engine, make_request((5, 6, 7), deadline_s=0.03))
        kept = asyncio.ensure_future(heard(engine, request))
        await until(lambda: engine.num_requests == 2)
        await asyncio.sleep(0.04)
        runner.may_wake.set()
        with pytest.raises(DeadlineMissed):
            await late
        assert await kept == tokens_of(request)
        assert runner.computed == {request.request_id}


async def test_shutdown_during_the_wake_ends_its_requests_and_gives_the_memory_back(tmp_path: Path) -> None:
    with waking(tmp_path / "device.json") as (engine, runner):
        asked = await asked_in_sleep(engine, make_request())
        stopping = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        with suppress(EngineStopped):
            await until(lambda: engine.check_health() is not None)
        runner.may_wake.set()
        await stopping
        with pytest.raises(EngineStopped):
            await asked
        assert runner.computed == set()
        turns_on(tmp_path / "device.json", clock=lambda: 0.0).close()


async def test_a_wake_that_fails_ends_the_engine_and_gives_the_memory_back(tmp_path: Path) -> None:
    with dozing_service(tmp_path / "device.json") as (engine, runner):
        await until(lambda: engine.sleep.state is SleepState.ASLEEP)
        runner.wake_error = InvalidSetup("the file of the weights is gone")
        with pytest.raises(EngineStopped):
            await heard(engine, make_request())
        with pytest.raises(EngineStopped):
            engine.check_health()
        turns_on(tmp_path / "device.json", clock=lambda: 0.0).close()


async def test_shutdown_in_sleep_ends_what_waits_for_memory_and_its_place_in_the_order(tmp_path: Path) -> None:
    with dozing_service(tmp_path / "device.json") as (engine, _):
        await until(lambda: engine.sleep.state is SleepState.ASLEEP)
        with_memory = turns_on(tmp_path / "device.json", clock=lambda: 1e9)  # its turn has no end
        asked = asyncio.ensure_future(heard(engine, make_request()))
        await until(lambda: engine.sleep.state is SleepState.QUEUED)
        assert with_memory.ends_at() is not None
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineStopped):
            await asked
        assert with_memory.ends_at() is None
        with_memory.close()


async def test_requests_go_on_when_the_process_that_has_the_memory_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.sleep_controller.RECHECK_S", 0.05)
    with dozing_service(tmp_path / "device.json") as (engine, _):
        await until(lambda: engine.sleep.state is SleepState.ASLEEP)
        with asking_process(tmp_path / "device.json") as (process, answer):
            assert answer == "has it"
            requests = [make_request((5, 6 + n)) for n in range(3)]
            asked = [asyncio.ensure_future(heard(engine, each)) for each in requests]
            await until(lambda: engine.sleep.state is SleepState.QUEUED)
            os.kill(process.pid, signal.SIGKILL)
            answers = await asyncio.gather(*asked)
        assert answers == [tokens_of(each) for each in requests]
