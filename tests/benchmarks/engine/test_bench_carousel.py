"""The engine as a contender: arrivals, times, an emptied prefix cache, room in KV memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.config import CacheConfig, EngineConfig, SchedulerConfig
from app.engine.engine import Engine
from benchmarks.engine.carousel import Carousel
from benchmarks.engine.engine_setup import check_fit, num_blocks_for, with_room
from benchmarks.engine.run import measured_runs
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.settings import parse_assignments
from benchmarks.harness.workload import TimedRequest, Workload
from tests.fakes import build_fake_engine, expected_tokens, make_request

STEP_S = 0.25  # what one look at the clock costs


class ScriptedClock:
    """Goes on by a quarter of a second whenever it is read; notes what it was asked to wait for."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.waits: list[float] = []

    def now(self) -> float:
        self.at_s += STEP_S
        return self.at_s

    def wait_until(self, at_s: float) -> None:
        self.waits.append(at_s)
        self.at_s = max(self.at_s, at_s)


def workload(*arrivals_s: float, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 4) -> Workload:
    return Workload(
        tuple(
            TimedRequest(
                request=make_request(prompt, request_id=f"r{number}", max_tokens=max_tokens), arrival_s=arrival_s
            )
            for number, arrival_s in enumerate(arrivals_s)
        )
    )


def test_every_request_is_served_with_the_engines_tokens() -> None:
    run = Carousel(build_fake_engine()).serve(workload(0, 0, 0))
    assert {name: timeline.token_ids for name, timeline in run.timelines.items()} == {
        f"r{number}": expected_tokens((5, 6, 7), 4) for number in range(3)
    }
    assert run.num_steps == 4
    assert run.num_output_tokens == 12


def test_nothing_is_added_before_it_arrives_and_an_idle_engine_waits_once_for_the_next() -> None:
    clock = ScriptedClock()
    run = Carousel(build_fake_engine(), start_clock=lambda: clock).serve(workload(0, 0.8, 100, 200))
    assert clock.waits == [100, 200]
    assert all(timeline.time_to_first_token_s > 0 for timeline in run.timelines.values())
    # Four deliveries a request, each a step after the last; the second joined while the first was running.
    assert run.timelines["r1"].delivered_s[0] < run.timelines["r0"].delivered_s[-1]
    assert run.timelines["r2"].delivered_s[0] == pytest.approx(100 + 2 * STEP_S)


def test_an_engine_that_falls_behind_is_not_spared_a_late_arrival() -> None:
    """Open loop: the time a request waits before it is even added is part of its latency."""
    clock = ScriptedClock()
    run = Carousel(build_fake_engine(), start_clock=lambda: clock).serve(workload(0, 0.3))
    assert run.timelines["r1"].time_to_first_token_s == pytest.approx(run.timelines["r1"].delivered_s[0] - 0.3)


def test_a_partial_batch_is_waited_for_and_not_polled() -> None:
    clock = ScriptedClock()
    strategy = {"name": "static", "batch_size": 4, "max_wait_ms": 100}
    run = Carousel(build_fake_engine(strategy=strategy), start_clock=lambda: clock).serve(workload(0, 0))
    assert [len(timeline.token_ids) for timeline in run.timelines.values()] == [4, 4]


def test_a_request_that_misses_its_deadline_has_failed_and_the_others_have_not() -> None:
    whole = workload(0, 0)
    hopeless = replace(whole.requests[0], request=replace(whole.requests[0].request, deadline_s=1e-6))
    run = Carousel(build_fake_engine()).serve(Workload((hopeless, whole.requests[1])))
    assert {name: timeline.has_failed for name, timeline in run.timelines.items()} == {"r0": True, "r1": False}


def test_the_prefix_cache_is_emptied_between_repeats() -> None:
    same = workload(0, prompt=tuple(range(2, 22)))
    carousel = Carousel(build_fake_engine())
    assert carousel.serve(same).num_cached_prompt_tokens == 0
    assert carousel.serve(same).num_cached_prompt_tokens == 16
    assert [run.num_cached_prompt_tokens for run in measured_runs(carousel, same, repeat=2)] == [0, 0]


def test_clearing_the_prefix_cache_of_a_running_engine_changes_no_token() -> None:
    engine = build_fake_engine()
    request = make_request(tuple(range(2, 22)), max_tokens=6)
    engine.add(request)
    token_ids: list[int] = []
    while engine.has_work:
        token_ids += [token for delta in engine.step() for token in delta.token_ids]
        engine.clear_prefix_cache()
    assert token_ids == expected_tokens(request.prompt_token_ids, 6)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def config(*, max_running: int) -> EngineConfig:
    return EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_running=max_running))


def test_default_kv_memory_holds_the_longest_requests_that_may_run_at_once() -> None:
    mixed = Workload((*workload(0, 0, 0).requests, *workload(0, prompt=(5,) * 20).requests))
    assert num_blocks_for(mixed, block_size=4, max_running=2) == 7 + 2
    assert with_room(config(max_running=2), mixed, (), "cpu").cache.num_blocks == 9
    assert with_room(config(max_running=2), mixed, (), "cuda").cache.num_blocks is None
    chosen = parse_assignments(["cache.memory_gib=1"])
    assert with_room(config(max_running=2), mixed, chosen, "cpu").cache.num_blocks is None


def sized(num_blocks: int) -> Engine:
    return build_fake_engine(num_blocks=num_blocks)


def test_the_default_room_suffices_without_preemption() -> None:
    work = workload(0, 0, 0, 0, max_tokens=9)
    num_blocks = num_blocks_for(work, block_size=4, max_running=8)
    run = Carousel(sized(num_blocks)).serve(work)
    assert run.num_preemptions == 0


def test_a_workload_that_does_not_fit_is_told_with_the_numbers() -> None:
    with pytest.raises(
        BenchmarkError, match=r"does not fit: request 'r0' has 20 prompt tokens and asks for 4.* takes 16 "
    ):
        check_fit(sized(4), config(max_running=8), workload(0, prompt=(5,) * 20))


def test_tokens_that_the_model_has_not_are_told_before_anything_runs() -> None:
    with pytest.raises(BenchmarkError, match="request 'r0' cannot be served: prompt has token id 99"):
        check_fit(sized(16), config(max_running=8), workload(0, prompt=(5, 99)))


def test_memory_that_may_lead_to_preemption_is_remarked() -> None:
    remark = check_fit(sized(4), config(max_running=8), workload(0, 0, 0))
    assert remark is not None
    assert "4 blocks" in remark
    assert check_fit(sized(6), config(max_running=8), workload(0, 0, 0)) is None
