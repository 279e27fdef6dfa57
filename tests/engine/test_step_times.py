"""How long steps take, and the pace of late."""

from __future__ import annotations

import random
from math import inf

import pytest

from app.engine.step_times import StepTimes, Throughput


def test_step_times_find_the_largest_step_within_a_time() -> None:
    times = StepTimes()
    for size in (1, 10, 50, 200, 500):
        for _ in range(10):
            times.note(size, 0.010 + 0.0001 * size)
    assert times.largest_within(0.040) == pytest.approx(300, rel=0.01)
    assert times.seconds(300) == pytest.approx(0.040, rel=0.01)


def test_times_of_steps_larger_than_any_before_go_on_as_they_rose() -> None:
    times = StepTimes()
    times.note(100, 0.020)
    assert times.largest_within(0.040) == pytest.approx(200)
    assert times.largest_within(0.010) == pytest.approx(50)
    assert times.largest_within(inf) == inf
    times.note(20, 0.012)  # 10 ms and 0.1 ms for each
    assert times.largest_within(0.040) == pytest.approx(300)


def test_nothing_is_known_of_steps_before_the_first() -> None:
    assert StepTimes().largest_within(0.1) == inf
    assert StepTimes().seconds(10) == 0.0


def test_steps_that_vary_leave_room_for_the_longest() -> None:
    times, rng = StepTimes(), random.Random(1)
    samples = [0.1 * rng.gauss(1.0, 0.1) for _ in range(2000)]
    for seconds in samples:
        times.note(100, seconds)
    assert sorted(samples)[1960] < times.seconds(100) < max(samples)


def test_a_pause_of_the_system_hardly_counts() -> None:
    times = StepTimes()
    for _ in range(100):
        times.note(100, 0.1)
    times.note(100, 5.0)
    assert times.seconds(100) < 0.12


def note(pace: Throughput, seconds: float, *, num_tokens: int, num_ended: int) -> None:
    """A step that begins at the end of the step before."""
    began_at = pace.last_step_at
    pace.note_step(began_at + seconds, began_at=began_at, num_tokens=num_tokens, num_ended=num_ended)


def test_averages_are_those_of_the_steps() -> None:
    pace = Throughput()
    assert (pace.step_s, pace.tokens_per_s, pace.ended_per_s) == (0, 0, 0)
    for _ in range(10):
        note(pace, 0.1, num_tokens=32, num_ended=0)
        note(pace, 0.3, num_tokens=32, num_ended=1)
    assert pace.step_s == pytest.approx(0.2, rel=0.1)
    assert pace.tokens_per_s == pytest.approx(160, rel=0.1)
    assert pace.ended_per_s == pytest.approx(2.5, rel=0.15)


def test_old_steps_fade() -> None:
    pace = Throughput()
    note(pace, 60.0, num_tokens=1, num_ended=0)  # compiled something
    for _ in range(5_000):
        note(pace, 0.01, num_tokens=1, num_ended=0)
    assert pace.step_s == pytest.approx(0.01, rel=0.1)


def pace_of(*steps: tuple[int, float]) -> Throughput:
    pace = Throughput()
    for _ in range(20):
        for num_tokens, seconds in steps:
            note(pace, seconds, num_tokens=num_tokens, num_ended=0)
    return pace


def test_speed_at_a_size_does_not_depend_on_how_full_the_steps_were() -> None:
    def step_s(num_tokens: int) -> float:
        return 0.010 + 0.0001 * num_tokens

    empty = pace_of(*((size, step_s(size)) for size in (1, 2, 20)))
    full = pace_of(*((size, step_s(size)) for size in (100, 200, 500)))
    assert empty.tokens_per_s < 0.2 * full.tokens_per_s
    assert empty.tokens_per_s_at(32) == pytest.approx(32 / step_s(32), rel=0.001)
    assert full.tokens_per_s_at(32) == pytest.approx(32 / step_s(32), rel=0.001)


def test_the_speed_stays_while_a_single_request_decodes_for_minutes() -> None:
    pace = pace_of((1, 0.042), (100, 0.240))
    speed = pace.tokens_per_s_at(64)
    for _ in range(10_000):
        note(pace, 0.042, num_tokens=1, num_ended=0)
    assert pace.tokens_per_s < 25
    assert pace.tokens_per_s_at(64) == pytest.approx(speed, rel=0.01)


def test_one_step_hardly_moves_the_speed_and_a_machine_that_becomes_slower_does() -> None:
    pace = pace_of(*((size, 0.040 + 0.002 * size) for size in (1, 10, 30, 100)))
    speed = pace.tokens_per_s_at(64)
    note(pace, 3 * 0.060, num_tokens=10, num_ended=0)
    assert pace.tokens_per_s_at(64) == pytest.approx(speed, rel=0.02)
    for _ in range(200):
        for size in (1, 10, 30, 100):
            note(pace, 3 * (0.040 + 0.002 * size), num_tokens=size, num_ended=0)
    assert pace.tokens_per_s_at(64) == pytest.approx(speed / 3, rel=0.02)


def test_speed_at_a_size_is_positive_whatever_was_measured() -> None:
    assert Throughput().tokens_per_s_at(32) == 0
    assert pace_of((8, 0.1)).tokens_per_s_at(32) == pytest.approx(80)  # one size: each token costs the same
    assert pace_of((1, 0.3), (100, 0.1)).tokens_per_s_at(32) == pytest.approx(32 / 0.2, rel=0.05)  # falling: flat
    assert pace_of((10, 0.01), (100, 1.0)).tokens_per_s_at(1) > 0
