"""The tuner: what it learns of steps, and the limits that it moves, in simulated time around the real engine."""

from __future__ import annotations

import logging
import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.config import CacheConfig, SchedulerConfig, TargetsConfig
from app.engine.batch import StepLimits
from app.engine.observer import EndedStep, StepObserver
from app.engine.tuner import MIN_PREFILL_TOKENS, RecentTimes, Tuner, Tuning, TuningReason
from deployments.plan.simulated_run import SimulatedRun
from deployments.plan.simulation import FleetSimulation, simulate
from deployments.plan.step_cost import StepCost
from deployments.plan.traces import Trace
from tests.deployments.plan.measured import measured_replica, step_cost, trace_of

HIGHEST = {"max_running": 64, "max_step_tokens": 2048, "prefill_chunk_tokens": 2048}


def test_recent_times_are_of_the_last_half_minute() -> None:
    times = RecentTimes()
    times.note(0.0, 9.0, 50)
    for second in range(60):
        times.note(float(second), 0.1, 100)
    assert times.p99(59.0) == pytest.approx(0.1, rel=0.03)
    assert times.p99(1000.0) == 0.0


def test_a_target_is_missed_by_more_than_a_hundredth_and_by_more_than_a_few() -> None:
    times = RecentTimes()
    times.note(0.0, 0.1, 1000)
    times.note(0.0, 0.5, 10)
    assert not times.has_missed(0.2, 0.0)
    times.note(0.0, 0.5, 2)
    assert times.has_missed(0.2, 0.0)
    few = RecentTimes()
    few.note(0.0, 0.5, 3)
    assert not few.has_missed(0.2, 0.0)


# ---------------------------------------------------------------------- limits, in simulated time


class Tuned(StepObserver):
    """The limits of one simulated engine, with the times of their changes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.moves: list[tuple[float, StepLimits]] = []
        self.most_tokens = 0  # of a step, since the last move

    def limited(self, limits: StepLimits) -> None:
        self.moves.append((self.now, limits))

    def step_ended(self, step: EndedStep) -> None:
        self.now = step.at

    @property
    def last(self) -> StepLimits:
        return self.moves[-1][1]


def run_tuned(
    trace: Trace, cost: StepCost | None = None, *, num_blocks: int = 4000, seed: int | None = None, **given: object
) -> tuple[Tuned, SimulatedRun, Tuning]:
    config = SchedulerConfig.model_validate(HIGHEST | given)
    seen = Tuned()
    fleet = FleetSimulation(
        [measured_replica(cost, num_blocks=num_blocks)], config, CacheConfig(), recorders={0: seen}, seed=seed
    )  # fmt: skip
    run = fleet.run(trace)
    (replica,) = fleet._replicas.values()
    assert replica.engine.tuning is not None
    return seen, run, replica.engine.tuning


def steady(
    seconds: float, rate: float, *, prompt: int, output: int, start: float = 0.0
) -> list[tuple[float, int, int]]:
    rng = random.Random(f"{rate} {prompt} {output}")
    at, made = start, []
    while at < start + seconds:
        made.append((at, max(1, round(rng.uniform(0.5, 1.5) * prompt)), max(1, round(rng.uniform(0.5, 1.5) * output))))
        at += rng.expovariate(rate)
    return made


def gaps_ms_after(run: SimulatedRun, share: float) -> list[float]:
    return sorted(1000 * gap for gap in run.gaps_s[int(share * len(run.gaps_s)) :])


def test_the_budget_becomes_the_largest_step_within_the_target() -> None:
    seen, run, tuning = run_tuned(trace_of(*steady(20, 8, prompt=800, output=20)), targets={"itl_p99_ms": 50})
    assert tuning.limits == seen.last
    assert seen.last.max_step_tokens == pytest.approx(0.95 * (0.95 * 50 - 10) / 0.1, rel=0.1)
    assert seen.last.prefill_chunk_tokens == seen.last.max_step_tokens
    assert (tuning.reason, seen.last.max_running) == (TuningReason.ITL, 64)
    gaps = gaps_ms_after(run, 0.3)
    assert gaps[int(0.99 * len(gaps))] <= 50


def test_without_need_the_limits_stay_as_configured() -> None:
    seen, _, tuning = run_tuned(trace_of(*steady(10, 8, prompt=800, output=20)), targets={"itl_p99_ms": 5000})
    assert seen.moves == []
    assert (tuning.reason, tuning.limits) == (TuningReason.CONFIGURED, StepLimits(2048, 2048, 64))


def test_a_target_for_first_tokens_bounds_the_step_that_a_request_finds() -> None:
    seen, _, tuning = run_tuned(trace_of(*steady(20, 8, prompt=800, output=20)), targets={"ttft_p99_s": 0.1})
    assert tuning.reason is TuningReason.TTFT
    assert tuning.step_s == pytest.approx(0.0475)
    assert seen.last.max_step_tokens < 450


def test_fewer_run_where_their_decoding_alone_takes_too_long() -> None:
    cost = step_cost(0.005, 0.002)
    seen, run, _ = run_tuned(trace_of(*steady(30, 8, prompt=4, output=100)), cost, targets={"itl_p99_ms": 60})
    assert 16 <= seen.last.max_running <= 26  # 26 take 57 ms
    gaps = gaps_ms_after(run, 0.5)
    assert gaps[int(0.99 * len(gaps))] <= 61


def test_after_a_change_of_traffic_the_limits_follow_within_seconds() -> None:
    """Long contexts make every token dearer, so the same budget takes longer."""
    cost = StepCost(**{name: getattr(step_cost(), name) for name in StepCost.__slots__} | {"prefill_pair_s": 1e-6})
    chat = steady(20, 20, prompt=100, output=20)
    documents = steady(20, 3, prompt=1500, output=20, start=20)
    seen, _, _ = run_tuned(trace_of(*chat, *documents), cost, targets={"itl_p99_ms": 60})
    before = [limits for at, limits in seen.moves if at < 20][-1]
    after = [limits for at, limits in seen.moves if at < 26][-1]
    assert after.max_step_tokens < 0.7 * before.max_step_tokens


@pytest.mark.parametrize("itl_ms", [1, 5])
def test_a_target_that_nothing_can_meet_stops_no_request(itl_ms: float) -> None:
    trace = trace_of(*steady(20, 8, prompt=200, output=20))
    _, run, tuning = run_tuned(trace, targets={"itl_p99_ms": itl_ms})
    assert tuning.reason is TuningReason.UNREACHABLE
    assert tuning.is_missed
    assert 0.010 < tuning.step_s < 0.025  # the smallest steps take 11 ms
    assert tuning.itl_p99_s == pytest.approx(tuning.step_s, rel=0.3)
    assert all(run.num_tokens)
    assert run.seconds < 25


def test_nothing_changes_without_traffic_and_nothing_is_missed_after_it() -> None:
    trace = trace_of((0.0, 500, 50), (200.0, 500, 1), (900.0, 10, 2))
    seen, _, tuning = run_tuned(trace, targets={"ttft_p99_s": 0.01, "itl_p99_ms": 100})
    assert len(seen.moves) <= 2
    assert not tuning.is_missed


def test_as_many_run_as_fit_into_memory() -> None:
    trace = trace_of(*steady(20, 20, prompt=100, output=150))
    seen, run, tuning = run_tuned(trace, num_blocks=300, targets={"itl_p99_ms": 5000})
    fixed = simulate(
        trace, measured_replica(num_blocks=300), SchedulerConfig.model_validate(HIGHEST), CacheConfig(), seed=None
    )
    assert tuning.reason is TuningReason.MEMORY
    assert 15 <= seen.last.max_running <= 40  # 300 blocks of 16 tokens hold 19 requests at their ends
    assert run.num_preemptions < fixed.num_preemptions / 4


def directions(values: list[int]) -> int:
    """How often a series turns."""
    signs = [after > before for before, after in pairwise(values) if after != before]
    return sum(before != after for before, after in pairwise(signs))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_under_a_constant_load_the_limits_do_not_oscillate(seed: int) -> None:
    cost = StepCost(
        **{name: getattr(step_cost(), name) for name in StepCost.__slots__}
        | {"ratios": [[0.8 + 0.002 * number for number in range(200)]] * 4}
    )  # each step between 0.8 and 1.2 times its time
    trace = trace_of(*steady(40, 10, prompt=500, output=30))
    seen, _, tuning = run_tuned(trace, cost, seed=seed, targets={"itl_p99_ms": 50})
    late = [limits for at, limits in seen.moves if at > 10]
    assert len(late) <= 5
    assert directions([limits.max_step_tokens for limits in late]) <= 1
    assert tuning.num_changes == len(seen.moves)


@settings(max_examples=10, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    itl_ms=st.one_of(st.none(), st.floats(0.5, 500)),
    ttft_s=st.floats(0.01, 5),
    max_running=st.integers(1, 64),
    spare=st.integers(0, 600),
    chunk=st.integers(1, 512),
)
@example(rng=random.Random(1), itl_ms=1.0, ttft_s=2.9, max_running=6, spare=0, chunk=320)  # steps below the least chunk
def test_limits_stay_within_their_bounds(
    rng: random.Random, itl_ms: float | None, ttft_s: float, max_running: int, spare: int, chunk: int
) -> None:
    highest = {"max_running": max_running, "max_step_tokens": max_running + spare, "prefill_chunk_tokens": chunk}
    requests = [(rng.uniform(0, 8), rng.randrange(1, 500), rng.randrange(1, 40)) for _ in range(40)]
    cost = step_cost(rng.uniform(0.001, 0.05), rng.uniform(1e-5, 2e-3))
    seen, run, _ = run_tuned(
        trace_of(*sorted(requests)), cost, num_blocks=rng.randrange(60, 400), **highest,
        targets={"itl_p99_ms": itl_ms, "ttft_p99_s": ttft_s},
    )  # fmt: skip
    for _, limits in seen.moves:
        assert min(max_running, max(1, max_running // 8)) <= limits.max_running <= max_running
        assert min(MIN_PREFILL_TOKENS, max_running + spare) <= limits.max_step_tokens <= max_running + spare
        assert min(MIN_PREFILL_TOKENS, chunk, limits.max_step_tokens) <= limits.prefill_chunk_tokens <= chunk
        assert limits.max_running <= limits.max_step_tokens
    assert all(run.num_tokens)


# ---------------------------------------------------------------------- settings


def test_the_version_of_settings_names_the_targets_and_not_what_the_tuner_does() -> None:
    plain = SchedulerConfig()
    tuned = SchedulerConfig(targets=TargetsConfig(itl_p99_ms=80))
    assert plain.version != tuned.version
    assert Tuner(tuned, running=[], limit=print).tuning.limits == StepLimits.of(plain)


def test_changes_are_logged_from_time_to_time_and_an_unreachable_target_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "app.engine.tuner")
    seen, _, _ = run_tuned(trace_of(*steady(20, 8, prompt=200, output=20)), targets={"itl_p99_ms": 5})
    assert seen.moves
    assert 1 <= sum(record.message.startswith("limits are now") for record in caplog.records) <= 3
    [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "itl_p99_ms=5.0 cannot be met: even the smallest steps take longer" in warning
