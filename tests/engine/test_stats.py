"""An engine's stats, and the times and sizes that it measures beside them, on a clock that only its steps turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from app.engine.observer import EndedStep, StepObserver
from app.engine.stats import EngineMeasurements
from tests.engine.test_steps_in_flight import LateRunner
from tests.kit.engine import FakeClock, TimedEngine, build_fake_engine, make_request, run_to_end


def test_the_stats_are_what_there_is_and_what_has_been() -> None:
    timed = TimedEngine(step_s=0.1, max_running=2, num_blocks=32, policy="sjf", strategy="hybrid")
    timed.finish(make_request((5,) * 9, max_tokens=51, stop_token_ids=tuple(range(2, 50))))  # ends at its first token
    timed.add(*(make_request((5,) * number, max_tokens=20, ignore_eos=True) for number in (12, 5)))
    timed.step(2)
    night = replace(make_request((7,) * 3, max_tokens=30), is_background=True)
    timed.add(make_request((8,) * 6, max_tokens=40, ignore_eos=True), night)
    timed.add(make_request(request_id="gone"), make_request((7,), deadline_s=0.05))
    timed.engine.abort("gone")
    timed.step()
    assert structs.asdict(timed.stats) == {
        "strategy": "hybrid", "policy": "sjf", "settings": timed.engine._scheduler.config.version,
        "batch_size": 0, "num_running": 2, "num_waiting": 2, "num_waiting_tokens": 9,
        "num_waiting_foreground_tokens": 6, "num_background": 1, "num_unpreemptible_background": 0,
        "estimated_wait_s": pytest.approx(79 / 45, rel=0.1), "ended_per_s": pytest.approx(5, rel=0.1),
        "mean_length_error_tokens": 1.0,  # 0.02 * (51 - 1)
        "num_free_blocks": 27, "num_blocks": 32, "block_size": 4, "max_running": 2, "speed": pytest.approx(640),
        "total_steps": 4, "total_prompt_tokens": 26, "total_cached_tokens": 12, "total_generated_tokens": 7,
        "total_preemptions": 0, "total_memory_preemptions": 0, "total_finished": 1, "total_aborted": 1,
        "total_failed": 0, "total_missed": 1, "total_drafted_tokens": 0, "total_accepted_tokens": 0,
        "num_layer_groups": 1, "num_state_slots": 0, "num_free_state_slots": 0, "total_unresumable_tokens": 0,
    }  # fmt: skip


def sizes(measurements: EngineMeasurements) -> list[int]:
    spreads = (measurements.queue_s, measurements.prefill_s, measurements.step_s, measurements.step_tokens)
    return [spread.num_values for spread in spreads]


def test_the_times_of_queue_prefill_and_steps_are_those_of_the_clock() -> None:
    timed = TimedEngine(step_s=0.5, max_running=1)
    # 40 tokens are three chunks; the second request waits for these and for three more tokens.
    timed.finish(make_request(tuple(range(2, 42)), max_tokens=4), make_request((5, 6), max_tokens=1))
    measured = timed.engine.measurements()
    assert sizes(measured) == [2, 2, 7, 7]
    assert measured.queue_s.total == pytest.approx(0.0 + 6 * 0.5)
    assert measured.prefill_s.total == pytest.approx(3 * 0.5 + 0.5)
    assert measured.step_s.total == pytest.approx(7 * 0.5)
    assert measured.step_tokens.total == 40 + 3 + 2
    assert (measured.max_running, measured.block_size) == (1, 4)


def test_a_preempted_request_is_measured_once() -> None:
    engine = build_fake_engine(num_blocks=8)
    run_to_end(engine, *(make_request((first, 6, 7), max_tokens=20) for first in (5, 8, 9)))
    assert engine.stats().total_preemptions > 0
    assert sizes(engine.measurements())[:2] == [3, 3]


def test_an_aborted_request_leaves_nothing_behind() -> None:
    engine = build_fake_engine()
    request = make_request(tuple(range(2, 42)))
    engine.add(request)
    engine.step()
    engine.abort(request.request_id)
    run_to_end(engine, make_request())
    assert sizes(engine.measurements())[:2] == [2, 1]
    assert engine.measurements().num_outstanding_tokens == 0


def test_an_engine_that_runs_ahead_measures_the_same_requests() -> None:
    clock = FakeClock()
    engine = build_fake_engine(runner=LateRunner(clock), clock=clock)
    assert engine.runner.launches
    run_to_end(engine, *(make_request((5, 6, 7), max_tokens=6) for _ in range(3)))
    assert sizes(engine.measurements())[:2] == [3, 3]


def test_the_outstanding_tokens_shrink_with_every_step_to_nothing() -> None:
    engine = build_fake_engine(max_running=1)
    for _ in range(2):
        engine.add(make_request((5, 6, 7), max_tokens=5, ignore_eos=True))
    outstanding = [engine.measurements().num_outstanding_tokens]
    while engine.has_work:
        engine.step()
        outstanding.append(engine.measurements().num_outstanding_tokens)
    # The prompt and the first token by one step, then a token each.
    assert outstanding == [16, 12, 11, 10, 9, 8, 4, 3, 2, 1, 0]


def test_a_first_token_comes_with_the_times_of_queue_and_prefill() -> None:
    timed = TimedEngine(step_s=0.5, max_running=1)
    engine = timed.engine
    requests = [make_request(tuple(range(2, 42)), max_tokens=4), make_request((5, 6), max_tokens=2)]
    timed.add(*requests)
    deltas = [delta for _ in range(8) for delta in engine.step()]
    firsts = [delta for delta in deltas if delta.times is not None]
    assert [delta.request_id for delta in firsts] == [each.request_id for each in requests]
    assert [delta.times and delta.times[:2] for delta in firsts] == [(0.0, 1.5), (3.0, 0.5)]
    assert {delta.times and delta.times.settings for delta in firsts} == {engine.stats().settings}


class Gaps(StepObserver):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step_ended(self, step: EndedStep) -> None:
        self.seconds.append(step.gap_s)


def test_a_gap_between_tokens_has_the_time_between_two_steps_in_it_but_no_idle_time() -> None:
    gaps, request = Gaps(), make_request()
    timed = TimedEngine(step_s=0.5, recorder=gaps)
    timed.add(request)
    for _ in range(2):
        timed.step()
        timed.clock.advance(0.25)
    timed.engine.abort(request.request_id)
    timed.clock.advance(100.0)
    timed.add(make_request())
    timed.step()
    assert gaps.seconds == pytest.approx([0.5, 0.75, 0.5])
