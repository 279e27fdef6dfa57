"""The measured throughput, and when refused clients should come back."""

from __future__ import annotations

import pytest

from app.engine.throughput import HORIZON_S, RetryTimes, Throughput


def test_averages_are_those_of_the_steps() -> None:
    pace = Throughput()
    assert (pace.step_s, pace.tokens_per_s, pace.ended_per_s) == (0, 0, 0)
    for _ in range(10):
        pace.note_step(0.1, num_tokens=32, num_ended=0)
        pace.note_step(0.3, num_tokens=32, num_ended=1)
    assert pace.step_s == pytest.approx(0.2, rel=0.1)
    assert pace.tokens_per_s == pytest.approx(160, rel=0.1)
    assert pace.ended_per_s == pytest.approx(2.5, rel=0.15)


def test_old_steps_fade() -> None:
    pace = Throughput()
    pace.note_step(60.0, num_tokens=1, num_ended=0)  # compiled something
    for _ in range(int(5 * HORIZON_S / 0.01)):
        pace.note_step(0.01, num_tokens=1, num_ended=0)
    assert pace.step_s == pytest.approx(0.01, rel=0.1)


def test_refused_clients_come_back_one_after_the_other_as_places_become_free() -> None:
    retry = RetryTimes()
    waits = [retry.next_after(100.0, ended_per_s=4.0) for _ in range(4)]
    assert waits == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert retry.next_after(100.5, ended_per_s=4.0) == pytest.approx(0.75)
    assert retry.next_after(200.0, ended_per_s=4.0) == pytest.approx(0.25)


def test_a_tenant_that_floods_moves_only_its_own_times() -> None:
    retry = RetryTimes()
    flood = [retry.next_after(100.0, ended_per_s=4.0, tenant="flood") for _ in range(10_000)]
    assert max(flood) == pytest.approx(120.0)
    assert retry.next_after(100.0, ended_per_s=4.0, tenant="other") == pytest.approx(0.5)  # every second place
    assert retry.next_after(221.0, ended_per_s=4.0, tenant="flood") == pytest.approx(0.25)  # the flood is forgotten


def test_a_flood_of_tenants_takes_bounded_memory() -> None:
    retry = RetryTimes()
    for number in range(3_000):
        retry.next_after(100.0, ended_per_s=4.0, tenant=f"tenant-{number}")
    assert len(retry._last_at) <= 1_000


def test_without_a_pace_it_is_a_second() -> None:
    assert RetryTimes().next_after(5.0, ended_per_s=0.0) == 1.0


def pace_of(*steps: tuple[int, float]) -> Throughput:
    pace = Throughput()
    for _ in range(20):
        for num_tokens, seconds in steps:
            pace.note_step(seconds, num_tokens=num_tokens, num_ended=0)
    return pace


def test_speed_at_a_size_does_not_depend_on_how_full_the_steps_were() -> None:
    def step_s(num_tokens: int) -> float:
        return 0.010 + 0.0001 * num_tokens

    empty = pace_of(*((size, step_s(size)) for size in (1, 2, 20)))
    full = pace_of(*((size, step_s(size)) for size in (100, 200, 500)))
    assert empty.tokens_per_s < 0.2 * full.tokens_per_s
    assert empty.tokens_per_s_at(32) == pytest.approx(32 / step_s(32), rel=0.001)
    assert full.tokens_per_s_at(32) == pytest.approx(32 / step_s(32), rel=0.001)


def test_speed_at_a_size_is_positive_whatever_was_measured() -> None:
    assert Throughput().tokens_per_s_at(32) == 0
    assert pace_of((8, 0.1)).tokens_per_s_at(32) == pytest.approx(80)  # one size: each token costs the same
    assert pace_of((1, 0.3), (100, 0.1)).tokens_per_s_at(32) == pytest.approx(32 / 0.2, rel=0.05)  # falling: flat
    assert pace_of((10, 0.01), (100, 1.0)).tokens_per_s_at(1) > 0
