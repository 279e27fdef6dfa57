"""A fleet in simulated time: what its requests see, and that it decides what a real engine decides."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from app.build import assemble, build_sync_engine
from app.config import CacheConfig, EngineConfig, SchedulerConfig
from app.engine.batch import StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.request import Request, SamplingParams
from app.engine.trace.entries import Arrival, Entry, StepRecord, to_line
from app.engine.trace.recorder import StepRecorder
from app.engine.trace.step_log import log_header
from deployments.plan.simulated_replica import SimulatedClock, SimulatedReplica
from deployments.plan.simulated_run import SimulatedRun
from deployments.plan.simulation import Control, FleetSimulation, simulate
from deployments.plan.step_cost import MeasuredReplica, StepCost, StepShape
from deployments.plan.traces import Trace, TracedRequest, read_trace
from tests.deployments.plan.measured import measured_replica, step_cost, trace_of
from tests.kit.engine import make_request

CACHE = CacheConfig()


def simulated(trace: Trace, *, num_replicas: int = 1, **settings: object) -> SimulatedRun:
    scheduler = SchedulerConfig.model_validate(settings)
    return simulate(trace, measured_replica(), scheduler, CACHE, num_replicas=num_replicas, seed=None)


def test_one_request_takes_the_time_of_its_steps() -> None:
    run = simulated(trace_of((0, 100, 5)))
    assert run.per_request_s("ttft") == pytest.approx([0.010 + 100 * 0.0001])
    assert list(run.gaps_s) == pytest.approx([0.0101] * 4)
    assert (list(run.num_tokens), run.num_steps) == ([5], 5)
    assert run.seconds == pytest.approx(0.020 + 4 * 0.0101)


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    run = simulated(trace_of((0, 100, 2), (0.001, 100, 1)))
    assert run.first_tokens_s[1] == pytest.approx(0.020 + 0.010 + 101 * 0.0001)


def test_a_static_batch_waits_for_its_timer() -> None:
    run = simulated(trace_of((0, 10, 1)), strategy={"name": "static", "max_wait_ms": 50})
    assert run.per_request_s("ttft")[0] == pytest.approx(0.050 + 0.011, abs=1e-4)


def test_a_replica_that_starts_takes_requests_and_one_that_stops_ends_what_it_has() -> None:
    trace = trace_of(*((0.1 * number, 100, 40) for number in range(20)))
    fleet = FleetSimulation([measured_replica()], SchedulerConfig(), CACHE, seed=None)
    seen: dict[float, tuple[int, ...]] = {}

    def look(now: float) -> None:
        if now == 0.5:
            fleet.start_replica()
        if now == 1.0:
            fleet.stop_replica("replica-0000")
        names = ["replica-0000"] if now < 0.5 else ["replica-0000", "replica-0001"]
        if now <= 2.0:
            seen[now] = tuple(fleet.engine(name).stats().num_running for name in names)
        if now == 2.0:
            fleet.forget_replica("replica-0000")

    run = fleet.run(trace, Control(look, 0.5))
    assert (int(run.is_served.sum()), run.num_output_tokens) == (20, 20 * 40)
    assert seen[0.5][1] == 0
    assert min(seen[1.0]) > 0, "both have requests"
    assert seen[2.0][0] == 0 < seen[2.0][1]
    assert run.num_steps > fleet.engine("replica-0001").stats().total_steps, "what has gone counts"


def test_requests_are_spread_over_replicas_by_the_real_dispatch() -> None:
    trace = trace_of(*((0.0, 200, 10) for _ in range(4)))
    alone, spread = simulated(trace), simulated(trace, num_replicas=4)
    assert spread.per_request_s("ttft")[-1] == pytest.approx(0.030)
    assert spread.seconds < alone.seconds
    assert spread.num_output_tokens == alone.num_output_tokens == 40


@pytest.mark.parametrize("seed", range(8))
def test_an_ingress_sends_a_prompt_past_a_long_one_that_another_has_just_sent(seed: int) -> None:
    trace = trace_of((0.0, 1000, 2), (0.001, 1000, 2))  # the second comes during the step of the first
    fleet = FleetSimulation([measured_replica()] * 2, SchedulerConfig(), CACHE, num_ingresses=8, seed=seed)
    fleet.run(trace)
    assert [each.stats().total_prompt_tokens for each in fleet.engines] == [1000, 1000]


def test_with_roles_streams_wait_for_no_long_prompt_and_prompts_for_their_kv_memory() -> None:
    streams = [(0.0, 20, 300) for _ in range(8)]
    trace = trace_of(*streams, *((0.1 + 0.3 * number, 1000, 3) for number in range(8)))
    measured = replace(measured_replica(), kv_bytes=int(0.0007e9))  # 1 ms for a block
    together, split = (
        simulate(trace, measured, SchedulerConfig(), CACHE, num_replicas=2, seed=None, num_prefill=number)
        for number in (None, 1)
    )
    assert list(split.num_tokens) == list(together.num_tokens) == [300] * 8 + [3] * 8
    assert not split.num_refused + split.num_failed
    assert split.percentile_s("itl", 99) < 0.5 * together.percentile_s("itl", 99)
    # The second token of the first long prompt comes after 62 blocks: 63 are full, one token at least is computed.
    second = split.last_tokens_s[8] - split.first_tokens_s[8]
    assert 0.062 < second < 0.062 + 0.06


def test_a_part_of_a_large_fleet_stands_for_all_of_it() -> None:
    trace = trace_of(*((0.002 * number, 50, 10) for number in range(1500)))  # 500 a second for 16 replicas
    scheduler = SchedulerConfig()
    whole, part = (
        simulate(trace, measured_replica(), scheduler, CACHE, num_replicas=16, max_replicas=number, seed=None)
        for number in (16, 4)
    )
    assert (whole.share, part.share) == (1.0, 0.25)
    assert part.num_requests < len(trace.requests) / 3
    assert part.output_tokens_per_s == pytest.approx(whole.output_tokens_per_s, rel=0.1)
    assert part.percentile_s("itl", 50) == pytest.approx(whole.percentile_s("itl", 50), rel=0.1)


def test_the_next_turn_of_a_conversation_comes_after_the_end_of_the_one_before() -> None:
    [second] = trace_of((0.5, 100, 2)).requests
    [first] = trace_of((0.0, 100, 5)).requests
    run = simulated(Trace("turns", (replace(first, next_turn=second), first.at(3.0))))
    assert list(run.arrivals_s) == pytest.approx([0.0, 0.020 + 4 * 0.0101 + 0.5, 3.0])
    assert list(run.num_tokens) == [5, 2, 5]


def test_what_finds_no_room_is_refused_and_counts_above_the_percentile() -> None:
    run = simulated(trace_of(*((0.0, 10, 3) for _ in range(10))), max_running=2, max_waiting=3)
    assert run.num_refused == 5
    assert run.percentile_s("ttft", 99) == float("inf")
    assert run.percentile_s("ttft", 50) < 1


def test_a_seed_gives_the_same_run_again() -> None:
    cost = step_cost()
    noisy = StepCost(**{name: getattr(cost, name) for name in StepCost.__slots__} | {"ratios": ((0.5, 1.0, 1.5),) * 4})
    trace = trace_of(*((0.01 * number, 50, 10) for number in range(20)))
    runs = [
        simulate(trace, measured_replica(noisy), SchedulerConfig(), CACHE, num_replicas=2, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert list(runs[0].gaps_s) == list(runs[1].gaps_s) != list(runs[2].gaps_s)


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("dispatch", ["least_loaded", "round_robin"])
@pytest.mark.parametrize("settings", [{}, {"strategy": "static"}, {"strategy": "hybrid"}])
def test_many_decode_steps_at_once_are_the_same_as_one_after_the_other(
    num_replicas: int, dispatch: str, settings: dict[str, object]
) -> None:
    """A recorder makes every step a step of its own."""
    rng = random.Random(str(settings))
    at, requests = 0.0, []
    for _ in range(60):
        at += rng.expovariate(10.0 * num_replicas)
        num_output = rng.randrange(1, 80)
        limit = num_output + rng.choice((0, 0, 30))  # some end at the end token
        num_prompt = rng.randrange(1, 90)
        requests.append(
            TracedRequest(
                arrival_s=at, num_prompt_tokens=num_prompt, num_output_tokens=num_output, max_tokens=limit
            )
        )  # fmt: skip
    trace = Trace("mixed", tuple(requests))
    noisy = replace(step_cost(), ratios=((0.5, 0.9, 1.0, 1.6),) * 4, decode_context_s=1e-6, sequence_s=1e-5)
    scheduler = SchedulerConfig.model_validate({"max_running": 6, **settings})
    fleets, entries = [], []
    for recorder in (None, StepRecorder(lambda entry: entries.append(entry) is None, stopwatch_ns=lambda: 0)):
        fleet = FleetSimulation(
            [measured_replica(noisy, num_blocks=24)] * num_replicas, scheduler, CACHE, dispatch=dispatch,
            recorders={} if recorder is None else dict.fromkeys(range(num_replicas), recorder),
        )  # fmt: skip
        fleets.append((fleet, fleet.run(trace)))
    (fast_fleet, fast), (slow_fleet, slow) = fleets
    assert (fast.first_tokens_s, fast.last_tokens_s, fast.num_tokens) == (
        slow.first_tokens_s, slow.last_tokens_s, slow.num_tokens
    )  # fmt: skip
    assert sorted(fast.gaps_s) == pytest.approx(sorted(slow.gaps_s), rel=1e-6)
    assert fast.computing_s == pytest.approx(slow.computing_s)
    for fast_engine, slow_engine in zip(fast_fleet.engines, slow_fleet.engines, strict=True):
        assert fast_engine.stats() == slow_engine.stats()
        assert fast_engine.measurements() == slow_engine.measurements()
    assert slow.num_preemptions > 0


def replica_of(**settings: object) -> SimulatedReplica:
    scheduler = SchedulerConfig.model_validate(settings)
    return SimulatedReplica("", scheduler, CACHE, measured_replica(), noise=None, recorder=None, tells_prefixes=True)


def enter(replica: SimulatedReplica, *sizes: tuple[int, int]) -> None:
    """Requests by prompt and output tokens."""
    for length, max_tokens in sizes:
        replica.engine.add(make_request(tuple(range(2, 2 + length)), max_tokens=max_tokens))


def test_decode_steps_at_once_leave_what_single_steps_leave() -> None:
    replicas = [replica_of() for _ in range(2)]
    for replica in replicas:
        enter(replica, (3, 30), (9, 25), (16, 40))
        replica.step()
    at_once, one_by_one = (replica.engine for replica in replicas)
    number = at_once.num_decode_steps()
    assert number == 25 - 2  # the next one ends a request
    for _ in range(number):
        replicas[1].step()
    steps = replicas[0].runner.decode_steps(at_once.running, number)
    at_once.decode(steps.ends_at)
    for fast, slow in zip(at_once.running, one_by_one.running, strict=True):
        assert fast.block_ids == slow.block_ids
        assert [each.token_ids for each in fast.prefixes] == [each.token_ids for each in slow.prefixes]
        assert (fast.generated_token_ids, fast.num_computed_tokens) == (
            slow.generated_token_ids, slow.num_computed_tokens
        )  # fmt: skip
    assert at_once.stats() == one_by_one.stats()
    assert at_once.measurements() == one_by_one.measurements()


def test_no_step_is_left_out_that_may_decide_something() -> None:
    replica = replica_of(max_running=1, max_step_tokens=16)
    enter(replica, (20, 9))
    assert replica.engine.num_decode_steps() == 0  # nothing runs
    replica.step()
    replica.step()
    assert replica.engine.num_decode_steps() == 7
    enter(replica, (3, 1))
    assert replica.engine.num_decode_steps() == 0  # a request waits
    fair = replica_of(policy="fair")
    enter(fair, (3, 9))
    fair.step()
    assert fair.engine.num_decode_steps() == 0  # the policy counts tokens


# ---------------------------------------------------------------------- the same as a real engine


class ClockedModel(ModelRunner):
    """A real model; its steps take the time of a cost model, so that what is decided does not depend on the machine."""

    def __init__(self, model: ModelRunner, cost: StepCost, clock: SimulatedClock) -> None:
        self._model = model
        self._cost = cost
        self._clock = clock

    def run(self, batch: StepBatch) -> StepResult:
        self._clock.now += self._cost.seconds(StepShape.of(batch))
        return self._model.run(batch)


def serve(engine: Engine, clock: SimulatedClock, arrivals: list[tuple[float, Request]]) -> None:
    """Requests come when their time has come, between two steps."""
    waiting = list(arrivals)
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= clock.now:
            at, request = waiting.pop(0)
            engine.add(request, arrived_at=at)
        idle_s = engine.idle_s
        if idle_s == 0:
            engine.step()
            continue
        times = [clock.now + idle_s] if idle_s is not None else []
        clock.now = min([*times, *(at for at, _ in waiting[:1])])


def requests_of(rng: random.Random, number: int) -> list[tuple[float, Request]]:
    """With shared prefixes, ends at the model's own end token, and classes."""
    shared = tuple(rng.choices(range(10, 700), k=64))
    at, made = 0.0, []
    for index in range(number):
        at += rng.expovariate(20.0)
        prefix = shared if rng.random() < 0.4 else ()
        prompt = (*prefix, *rng.choices(range(10, 700), k=rng.randrange(1, 200)))
        sampling = SamplingParams(max_tokens=rng.randrange(1, 60), temperature=1.0, seed=index)
        made.append(
            (at, Request(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling, tenant=str(index % 3)))
        )
    return made


def real_config(strategy: str) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model": {"path": "models/demo", "num_threads": 1}, "cache": {"num_blocks": 60},
            "scheduler": {
                "strategy": strategy, "policy": "fair" if strategy == "hybrid" else "sjf", "max_running": 8,
                "max_step_tokens": 96, "prefill_chunk_tokens": 48,
            },
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> Engine:
    """The demo model, for engines with any of the strategies."""
    return build_sync_engine(real_config("continuous"))


@pytest.mark.parametrize("strategy", ["continuous", "hybrid", "static", "dynamic", "bucketed", "sorted", "adaptive"])
def test_the_same_is_decided_as_by_a_real_engine(
    strategy: str, loaded: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model draws its own tokens; its step log is the trace of the simulation, which makes the same steps."""
    monkeypatch.setattr("app.engine.strategies.PREFILL_STEPS", 40)  # a dynamic batch is larger than the memory
    config = real_config(strategy)
    real, simulation = [], []
    clock, cost = SimulatedClock(), step_cost()
    runner = ClockedModel(loaded.runner, cost, clock)
    recorder = StepRecorder(lambda entry: real.append(entry) is None, stopwatch_ns=lambda: 0)
    engine = assemble(
        config.scheduler,
        config.cache,
        num_blocks=60,
        runner=runner,
        model_info=loaded.model_info,
        clock=clock,
        recorder=recorder,
    )
    serve(engine, clock, requests_of(random.Random(strategy), 40))
    header = log_header(config, runner=runner, model_info=loaded.model_info, num_blocks=60)
    (tmp_path / "log.jsonl").write_text("\n".join([header.to_line(), *map(to_line, real)]) + "\n")

    trace = read_trace(str(tmp_path / "log.jsonl"))
    measured = MeasuredReplica(
        model="models/demo", num_threads=1, num_blocks=60, block_size=16, model_info=loaded.model_info, cost=cost
    )
    fleet = FleetSimulation(
        [measured], config.scheduler, config.cache, seed=None,
        recorders={0: StepRecorder(lambda entry: simulation.append(entry) is None, stopwatch_ns=lambda: 0)},
    )  # fmt: skip
    fleet.run(trace)
    first_at = next(entry.at for entry in real if isinstance(entry, Arrival))
    assert decisions(simulation, start=0.0) == decisions(real, start=first_at)
    assert sum(bool(entry.preempted) for entry in real if isinstance(entry, StepRecord)) > 0
    assert any(reason == "stop" for entry in real if isinstance(entry, StepRecord) for _, reason in entry.ended)


def decisions(entries: list[Entry], *, start: float) -> list[object]:
    """What each step holds and what is decided beside it, and when; drawn tokens are the model's."""
    steps = [entry for entry in entries if isinstance(entry, StepRecord)]
    return [
        (
            step.scheduled,
            list(step.joined),
            list(map(list, step.blocks)),
            list(step.preempted),
            [number for number, _ in step.ended],
            (step.num_waiting, step.wait_reason, step.num_free_blocks),
            round((step.ended_at or 0.0) - start, 6),
        )
        for step in steps
    ]
