"""Plans: the promise, the search, and what is said where nothing holds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from app.config import CacheConfig, SchedulerConfig
from app.errors import InvalidSetup
from deployments.plan.__main__ import main
from deployments.plan.planner import Plan, Planner, ServiceLevel
from deployments.plan.report import plan_in_words
from deployments.plan.traces import Trace
from tests.deployments.plan.measured import measured_replica, step_cost, trace_of

# 120 requests of 50 prompt and 10 output tokens. Alone, one takes 15 + 9 x 10.1 ms.
STEADY = trace_of(*((0.01 * number, 50, 10) for number in range(120)))


LEVEL = ServiceLevel.parse("ttft_p99=100ms,itl_p99=40ms")


def planner_of(trace: Trace, level: ServiceLevel, **settings: object) -> Planner:
    scheduler = SchedulerConfig.model_validate(settings)
    return Planner(trace, level, measured_replica(), scheduler, CacheConfig(), dispatch="least_loaded")


def plan_of(trace: Trace, level: str, **settings: object) -> Plan:
    return planner_of(trace, ServiceLevel.parse(level), **settings).plan()


@pytest.fixture(scope="module")
def steady_plan() -> Plan:
    return planner_of(STEADY, LEVEL).plan()


@pytest.fixture(scope="module")
def busy_planner() -> Planner:
    return planner_of(STEADY.at_rate(500.0), LEVEL)


@pytest.fixture(scope="module")
def busy_plan(busy_planner: Planner) -> Plan:
    return busy_planner.plan()


def test_a_promise_is_read_and_written() -> None:
    level = ServiceLevel.parse("ttft_p99=1s, itl_p999=100ms,latency_p50=2.5s")
    assert str(level) == "ttft_p99=1s,itl_p999=100ms,latency_p50=2.5s"
    assert [each.percent for each in level.targets] == [99, 99.9, 50]
    for wrong in ("ttft=1s", "ttft_p99=0s", "ttft_p99=1", "speed_p99=1s", ""):
        with pytest.raises(InvalidSetup, match=r"--slo: got .*; must be like ttft_p99=1s"):
            ServiceLevel.parse(wrong)


def test_more_requests_need_more_replicas_and_no_fewer(
    steady_plan: Plan, busy_planner: Planner, busy_plan: Plan
) -> None:
    plan = busy_plan
    assert steady_plan.num_replicas == 1
    assert 3 <= plan.num_replicas <= 8
    assert LEVEL.is_met(plan.run)
    assert not LEVEL.is_met(busy_planner.fleet(plan.scheduler, plan.num_replicas - 1))


def test_a_step_budget_is_found_that_keeps_gaps_short() -> None:
    long_prompts = trace_of(*((0.2 * number, 1000, 20) for number in range(20)))
    plan = plan_of(long_prompts, "itl_p99=40ms", max_step_tokens=1000, prefill_chunk_tokens=1000)
    assert min(plan.scheduler.max_step_tokens, plan.scheduler.prefill_chunk_tokens) <= 300
    assert plan.run.percentile_s("itl", 99) <= 0.040


def test_static_batching_is_left_where_it_costs() -> None:
    plan = plan_of(STEADY.first(40), "ttft_p99=200ms", strategy="static")
    assert plan.scheduler.strategy.name in ("continuous", "hybrid")


def test_a_promise_that_nothing_holds_is_answered_with_the_best() -> None:
    with pytest.raises(InvalidSetup, match=r"no settings meet --slo ttft_p99=5ms: .* only reaches ttft_p99=15ms"):
        plan_of(STEADY.first(30), "ttft_p99=5ms")


def test_the_knee_is_below_the_full_load_and_overload_is_past_it(steady_plan: Plan) -> None:
    plan = steady_plan
    assert plan.knee.load <= 1.0
    full = next(point for point in plan.curve if point.load == 1.0)
    assert plan.curve[-1].run.percentile_s("ttft", 99) > full.run.percentile_s("ttft", 99)
    assert plan.cost_per_million_tokens(3.6) == pytest.approx(1000 / plan.output_tokens_per_s)


def test_a_plan_says_whether_roles_pay(busy_plan: Plan) -> None:
    measured = replace(measured_replica(), kv_bytes=1_000_000)
    long_prompts = trace_of(*((0.05 * number, 600, 40) for number in range(50)))
    level = ServiceLevel.parse("ttft_p99=1s")
    scheduler = SchedulerConfig()
    planner = Planner(long_prompts, level, measured, scheduler, CacheConfig(), dispatch="least_loaded")
    plan = planner.plan()
    assert plan.num_replicas > 1
    assert plan.splits
    assert all(0 < each.num_prefill < plan.num_replicas for each in plan.splits)
    words = plan_in_words(plan, long_prompts, level, cost_per_hour=None)
    for split in plan.splits:
        pays = "pays" if split.pays(level, plan.run) else "does not pay"
        assert f"roles {split.num_prefill} + {plan.num_replicas - split.num_prefill}" in words
        assert pays in words
        assert split.run.num_output_tokens == plan.run.num_output_tokens
    assert not busy_plan.splits, "nothing can be fetched"


def test_a_plan_of_step_times_that_do_not_fit_begins_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    command = ["trace", "--trace", "azure-conv", "--requests", "20", "--slo", "ttft_p99=9s", "--costs", str(costs),
               "--lengths", "0.1", "--out", str(tmp_path / "planned.yaml"), "--seconds", "30"]  # fmt: skip
    measured_replica(replace(step_cost(), median_error=0.589, num_steps=1200)).write(costs)
    assert main(command) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("WARNING: this plan is not reliable: half of the steps took at least 58.9% more or less")
    assert "too few steps (1,200 here)" in first
    assert f"on an idle machine: remove {costs}, and run this command with --seconds 60" in first
    measured_replica(replace(step_cost(), median_error=0.15)).write(costs)
    assert main(command) == 0
    assert "WARNING" not in capsys.readouterr().out


def test_the_command_prints_a_plan_and_writes_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured_replica().write(tmp_path / "costs.json")
    rows = [f"{0.05 * number},50,10" for number in range(60)]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    command = ["trace", "--trace", str(tmp_path / "trace.csv"), "--costs", str(tmp_path / "costs.json"),
               "--out", str(tmp_path / "planned.yaml")]  # fmt: skip
    assert main([*command, "--slo", "ttft_p99=1s", "--cost-per-hour", "4"]) == 0
    shown = capsys.readouterr().out
    for line in ("replicas             1", "strategy             continuous", "per million output tokens", "knee"):
        assert line in shown
    [model] = yaml.safe_load((tmp_path / "planned.yaml").read_text())["applications"][0]["args"]["models"]
    assert model["replicas"]["num_replicas"] == 1
    assert model["engine"]["scheduler"]["strategy"]["name"] == "continuous"
    assert main([*command, "--slo", "ttft_p99=1ms"]) == 1
    assert "no settings meet" in capsys.readouterr().err
    assert main([*command, "--slo", "soon"]) == 1
