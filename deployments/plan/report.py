"""Shows a plan as text and as a picture, and writes it to a Serve config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from app.config import SchedulerConfig
from app.errors import InvalidSetup
from deployments.plan.planner import LoadPoint, Plan, ServiceLevel, in_words
from deployments.plan.step_cost import StepCost
from deployments.plan.traces import Trace

_METRICS = ("ttft", "itl")
# A plan's percentiles should be off by at most 10% (p50) and 20% (p99), see docs/results/planning.md. A fit with a
# larger median error cannot achieve this.
_MAX_MEDIAN_ERROR = 0.15


def cost_in_words(cost: StepCost) -> str:
    """Describe the measured step times and the errors of their fit."""
    sizes = [size for size in cost.tokens if size in (1, 8, 32, 128, 512)]
    steps = ", ".join(f"{size:,}: {in_words(_token_s(cost, size))}" for size in sizes)
    return (
        f"step times: {cost.num_steps:,} steps measured; time by tokens in a step: {steps}; error of a step's time: "
        f"median {cost.median_error:.1%}, p90 {cost.p90_error:.1%}; error of the total time: {cost.total_error:+.1%}"
    )


def warning_of_fit(cost: StepCost, *, seconds: float, costs: Path | None) -> str | None:
    """Return a warning with advice on how to repeat the measurement, or None if the step times fit well enough.

    `seconds` and `costs` are the command line options.
    """
    if cost.median_error <= _MAX_MEDIAN_ERROR:
        return None
    first = "" if costs is None else f"remove {costs}, and "
    return (
        f"WARNING: this plan is not reliable: half of the steps took at least {cost.median_error:.1%} more or less "
        f"than their fitted time, but the error should be at most {_MAX_MEDIAN_ERROR:.0%}. Usual reasons are other "
        f"work on this machine during the measurement, or too few steps ({cost.num_steps:,} here). Repeat the "
        f"measurement on an idle machine: {first}run this command with --seconds {2 * seconds:g}"
    )


def _token_s(cost: StepCost, size: int) -> float:
    return cost.token_s[list(cost.tokens).index(size)]


def plan_in_words(plan: Plan, trace: Trace, level: ServiceLevel, *, cost_per_hour: float | None) -> str:
    """Describe the planned settings, their results on the trace, and the fleet's results at other loads."""
    run, knee = plan.run, plan.knee
    lines = [
        f"trace {trace.name}: {len(trace.requests):,} requests, {trace.rate:.3g} per second, "
        f"{trace.mean_prompt_tokens:,.0f} prompt and "
        f"{trace.mean_output_tokens:,.0f} output tokens each",
        f"SLO: {level}",
        "",
        f"replicas             {plan.num_replicas:,}",
        *(f"{name:<21}{value}" for name, value in settings_of(plan.scheduler).items()),
        f"throughput           {plan.output_tokens_per_s:,.0f} output tokens/s, {run.requests_per_s:.3g} requests/s",
        *(f"{metric.upper():<21}{_percentiles(plan, metric)}" for metric in _METRICS),
        f"goodput              {level.good_per_s(run):.3g} requests/s within the SLO "
        f"({level.num_good(run) / run.num_requests:.1%})",
        f"preemptions          {run.num_preemptions:,} in {run.num_steps:,} steps; {run.num_refused:,} refused",
        f"one replica          {plan.rate_per_replica:.3g} requests/s within the SLO, "
        f"{plan.full_rate_per_replica:.3g} if always full",
        f"knee                 at {knee.load:g} of the fleet's capacity, {knee.rate:.3g} requests/s: the load with the "
        "highest ratio of requests/s to mean latency",
    ]
    if run.share < 1:
        lines.append(
            f"simulated            {run.share * plan.num_replicas:.0f} replicas and {run.num_requests:,} requests, "
            "chosen at random"
        )
    for split in plan.splits:
        ttft, itl = (in_words(split.run.percentile_s(metric, 99)) for metric in _METRICS)
        roles = f"roles {split.num_prefill} + {plan.num_replicas - split.num_prefill}"
        lines.append(
            f"{roles:<21}TTFT p99 {ttft}, ITL p99 {itl}, "
            f"{split.run.requests_per_s:.3g} requests/s: {'pays' if split.pays(level, run) else 'does not pay'}"
        )
    if cost_per_hour is not None:
        cost = plan.cost_per_million_tokens(cost_per_hour)
        lines.append(
            f"cost                 {cost:.4g} per million output tokens, at {cost_per_hour:g} per hour and replica"
        )
    return "\n".join([*lines, "", _table(plan, level)])


def settings_of(scheduler: SchedulerConfig) -> dict[str, object]:
    """Return the settings that the search may change, by name in the config."""
    names = ("max_running", "max_step_tokens", "prefill_chunk_tokens")
    return {"strategy": scheduler.strategy.name, "policy": scheduler.policy.name} | {
        name: getattr(scheduler, name) for name in names
    }


def _percentiles(plan: Plan, metric: str) -> str:
    percents = (50, 99, 99.9)
    return ", ".join(f"p{percent:g} {in_words(plan.run.percentile_s(metric, percent))}" for percent in percents)


def _table(plan: Plan, level: ServiceLevel) -> str:
    heads = ["load", "requests/s", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "good", "refused", ""]
    rows = [heads, *(_row(point, plan, level) for point in plan.curve)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(point: LoadPoint, plan: Plan, level: ServiceLevel) -> list[str]:
    run = point.run
    times = [in_words(run.percentile_s(metric, percent)) for metric in _METRICS for percent in (50, 99)]
    notes = [*["knee"] * (point is plan.knee), *["broken"] * (not level.is_met(run))]
    return [
        f"{point.load:g}", f"{point.rate:.3g}", f"{run.output_tokens_per_s:,.0f}", *times,
        f"{level.num_good(run) / run.num_requests:.0%}", f"{run.num_refused:,}", ", ".join(notes),
    ]  # fmt: skip


# ---------------------------------------------------------------------- files


def write_config(source: Path, model_name: str, plan: Plan, path: Path) -> None:
    """Write a copy of the config `source` with the planned settings to `path`. Raises InvalidSetup if this fails."""
    document = yaml.safe_load(source.expanduser().read_text(encoding="utf-8"))
    for entry in document["applications"]:
        for model in (entry.get("args") or {}).get("models") or []:
            if model.get("name", "demo") == model_name:
                _set_plan(model, plan)
    text = "# Written by `python -m deployments.plan trace`, without the original config's comments.\n"
    try:
        path.write_text(text + yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise InvalidSetup(f"--out {path}: {error.strerror}") from error


def _set_plan(model: dict[str, Any], plan: Plan) -> None:
    scheduler = model.setdefault("engine", {}).setdefault("scheduler", {})
    scheduler.update(plan.scheduler.model_dump(mode="json"))
    replicas = model.setdefault("replicas", {})
    replicas["num_replicas"] = plan.num_replicas
    replicas.pop("autoscaling", None)


def draw(path: Path, plan: Plan, trace: Trace, level: ServiceLevel) -> None:
    """Draw latency and goodput over the rate of requests. Raises InvalidSetup if the file cannot be written."""
    from matplotlib.figure import Figure  # an optional dependency

    rates = [point.rate for point in plan.curve]
    figure = Figure(figsize=(11, 3.6), dpi=90, layout="constrained")
    figure.suptitle(f"{trace.name}, {plan.num_replicas} replicas, {plan.scheduler.strategy.name}: predicted")
    for number, metric in enumerate(_METRICS, start=1):
        axes = figure.add_subplot(1, 3, number)
        for percent in (50, 99):
            times = [1000 * point.run.percentile_s(metric, percent) for point in plan.curve]
            axes.plot(rates, times, marker="o", label=f"p{percent}")
        for target in level.targets:
            if target.metric == metric:
                axes.axhline(1000 * target.limit_s, color="grey", linestyle="--", label=str(target))
        axes.axvline(plan.knee.rate, color="grey", linestyle=":", label="knee")
        axes.set(xlabel="requests/s", ylabel=f"{metric.upper()}, ms", yscale="log")
        axes.legend(fontsize=8)
    axes = figure.add_subplot(1, 3, 3)
    axes.plot(rates, [level.good_per_s(point.run) for point in plan.curve], marker="o")
    axes.axvline(plan.knee.rate, color="grey", linestyle=":")
    axes.set(xlabel="requests/s", ylabel="goodput, requests/s")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidSetup(f"--plot {path} cannot be written: {error}") from error
