"""Compares two autoscaling rules over a day of arrivals: `python -m benchmarks.service.scaling_day`.

Simulates a fleet (`deployments/plan/simulation.py`: the service's own engine and dispatch). Step times come from
`carousel plan trace --costs`, or are made up: 40 ms and 2 ms a token. The rules are the code that Serve's controller
runs: ours (`deployments.serve.autoscaling.TokenPolicy`, with the options of its deployment) and Ray's default, which
counts ongoing requests. Serve's own code applies delays and factors of both, on the simulated clock. A replica serves
`--start-s` after it is requested. A stopped replica finishes its requests. The controller decides every two seconds,
not every 0.1 s.

A day repeats the hour of --trace 24 times. Each hour keeps a random share of its requests; the share follows a cosine
from --night at 4:00 to --noon at 16:00. The day begins at --first-hour with one replica. Prints one line of JSON, with
these figures for each rule:

    replica_hours  sum over all replicas, from the request for a replica to the end of its last request
    late           share of requests that were refused, or whose first token came later than --late-s
    ttft_p50_s, ttft_p99_s, most (replicas at once), starts
"""

from __future__ import annotations

import logging
import math
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from app.config import CacheConfig, EngineConfig, ServedModelConfig
from app.engine.request import ModelInfo
from benchmarks.harness.command import above_zero, command_parser, positive, run_command, tell
from benchmarks.harness.figures import rounded
from deployments.plan.simulated_run import SimulatedRun
from deployments.plan.simulation import Control, FleetSimulation
from deployments.plan.step_cost import MeasuredReplica, StepCost
from deployments.plan.traces import Trace, TracedRequest, read_trace

with warnings.catch_warnings():
    # Ray 2.60 declares its pydantic fields in a way that pydantic 2.14 calls deprecated.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field`")
    from ray.serve import autoscaling_policy
    from ray.serve import config as serve_config

    from deployments.serve.autoscaling import REPORT_INTERVAL_S, TokenPolicy, number_of_replicas, use_of

_DAY_HOURS, _HOUR_S, _NIGHT_HOUR = 24, 3600.0, 4
# Our `target_s` and Ray's `target_ongoing_requests` (default 2). Each rule also runs with delays of the other.
_TARGET_S = (0.5, 1.0, 2.0, 4.0)
_TARGET_REQUESTS = (2, 4, 8, 16)


_MADE_UP = MeasuredReplica(
    model="models/demo", num_threads=None, num_blocks=8192, block_size=CacheConfig().block_size,
    model_info=ModelInfo(max_model_len=8192, vocab_size=49_152, eos_token_ids=(1,)), cost=StepCost.linear(0.040, 0.002),
)  # fmt: skip


class Rule(NamedTuple):
    """An autoscaling policy in the form that Serve calls, and its options."""

    name: str
    policy: Callable[[Any], tuple[float, dict[str, Any]]]
    config: Any


class _Report(NamedTuple):
    value: float


class _Scaler:
    """Serve's controller over a simulated fleet."""

    def __init__(self, rule: Rule, fleet: FleetSimulation, *, start_s: float) -> None:
        self._config = rule.config
        self._decide = autoscaling_policy._apply_autoscaling_config(rule.policy)
        self._fleet = fleet
        self._start_s = start_s
        self._state: dict[str, Any] = {}
        self._running = ["replica-0000"]
        self._starting: list[float] = []  # when each replica will serve
        self._leaving: list[str] = []
        # (time, reports by replica id) within `look_back_period_s`.
        self._reports: deque[tuple[float, dict[str, dict[str, _Report]]]] = deque()
        self.replica_s = 0.0
        self.most = 1
        self.num_starts = 0
        self.now = 0.0

    def look(self, now: float) -> None:
        """Read the reports of all replicas and change the number of replicas."""
        self.now, fleet = now, self._fleet
        while self._starting and self._starting[0] <= now:
            self._starting.pop(0)
            self._running.append(fleet.start_replica())
        for each in [each for each in self._leaving if not _num_requests(fleet, each)]:
            self._leaving.remove(each)
            fleet.forget_replica(each)
        target = len(self._running) + len(self._starting)
        wanted, self._state = self._decide(self._context(now, target))
        wanted = min(max(math.ceil(wanted), self._config.min_replicas), self._config.max_replicas)
        for _ in range(wanted - target):
            self._starting.append(now + self._start_s)
            self.num_starts += 1
        for _ in range(target - wanted):  # Serve first stops replicas that are still starting
            if self._starting:
                self._starting.pop()
            else:
                stopped = self._running.pop()
                fleet.stop_replica(stopped)
                self._leaving.append(stopped)
        number = wanted + len(self._leaving)
        self.replica_s += number * REPORT_INTERVAL_S
        self.most = max(self.most, number)

    def _context(self, now: float, target: int) -> Any:
        uses = {each: _use(self._fleet, each) for each in self._running}
        self._reports.append((now, uses))
        while self._reports[0][0] < now - self._config.look_back_period_s:
            self._reports.popleft()
        numbers = [sum(use["num_requests"].value for use in uses.values()) for _, uses in self._reports]
        names = next(iter(uses.values()))
        return serve_config.AutoscalingContext(
            deployment_id=None, deployment_name="replica", app_name=None, current_num_replicas=len(self._running),
            target_num_replicas=target, running_replicas=[],
            total_num_requests=sum(numbers) / len(numbers),
            total_queued_requests=0.0, aggregated_metrics=None,
            raw_metrics={
                name: {each: [before[each][name] for _, before in self._reports if each in before] for each in uses}
                for name in names
            },
            capacity_adjusted_min_replicas=self._config.min_replicas,
            capacity_adjusted_max_replicas=self._config.max_replicas, policy_state=self._state,
            last_scale_up_time=None, last_scale_down_time=None, current_time=now, config=self._config,
        )  # fmt: skip


def _use(fleet: FleetSimulation, replica_id: str) -> dict[str, _Report]:
    engine = fleet.engine(replica_id)
    return {name: _Report(value) for name, value in use_of(engine.stats(), engine.measurements()).items()}


def _num_requests(fleet: FleetSimulation, replica_id: str) -> int:
    stats = fleet.engine(replica_id).stats()
    return stats.num_running + stats.num_waiting


def day_of(hour: Trace, *, night: float, noon: float, hours: Sequence[int], seed: int) -> Trace:
    """Repeat `hour` for each of `hours`, thinned according to the time of the day."""
    source, kept = random.Random(seed), list[TracedRequest]()
    for number in hours:
        for each in hour.requests:
            at_s = (number - hours[0]) * _HOUR_S + each.arrival_s
            phase = 2 * math.pi * (number + each.arrival_s / _HOUR_S - _NIGHT_HOUR) / _DAY_HOURS
            share = night + (noon - night) * (1 - math.cos(phase)) / 2
            if each.arrival_s < _HOUR_S and source.random() < share:
                kept.append(each.at(at_s))
    return Trace(f"a day of {hour.name}", kept)


def rules(engine: EngineConfig, *, max_replicas: int) -> list[Rule]:
    """Return our rule and Ray's rule, each with several targets and delays."""

    def ours(**changed: Any) -> tuple[Any, dict[str, Any]]:
        replicas = {"num_replicas": 1, "autoscaling": {"max_replicas": max_replicas} | changed}
        model = ServedModelConfig.model_validate({"name": "day", "engine": engine, "replicas": replicas})
        config = number_of_replicas(model)["autoscaling_config"]
        return config, config.policy.policy_kwargs

    def by_requests(target: float, **delays: float) -> Any:
        return serve_config.AutoscalingConfig(
            min_replicas=1, max_replicas=max_replicas, target_ongoing_requests=target, **delays
        )

    found = []
    for target_s in _TARGET_S:
        for name, delays in (("our delays", {}), ("down after 600 s", {"downscale_delay_s": 600.0})):  # as Ray
            config, given = ours(target_s=target_s, **delays)
            found.append(Rule(f"ours, target_s {target_s:g}, {name}", TokenPolicy(**given), config))
    same = {"upscale_delay_s": found[0].config.upscale_delay_s, "downscale_delay_s": found[0].config.downscale_delay_s}
    for target in _TARGET_REQUESTS:
        for name, delays in (("its delays", {}), ("our delays", same)):
            policy = autoscaling_policy.replica_queue_length_autoscaling_policy
            found.append(
                Rule(f"Ray's, target_ongoing_requests {target}, {name}", policy, by_requests(target, **delays))
            )
    return found


def play(
    rule: Rule, trace: Trace, measured: MeasuredReplica, engine: EngineConfig, *, start_s: float, late_s: float
) -> dict[str, Any]:
    """Simulate the whole trace under one rule and return its figures."""
    fleet = FleetSimulation([measured], engine.scheduler, engine.cache)
    scaler = _Scaler(rule, fleet, start_s=start_s)
    with patch.object(autoscaling_policy, "time", SimpleNamespace(time=lambda: scaler.now)):
        run = fleet.run(trace, Control(scaler.look, REPORT_INTERVAL_S))
    return {
        "replica_hours": round(scaler.replica_s / _HOUR_S, 1),
        "late": round(_share_late(run, late_s), 5),
        "refused": run.num_refused,
        "ttft_p50_s": rounded(run.percentile_s("ttft", 50), 3),
        "ttft_p99_s": rounded(run.percentile_s("ttft", 99), 3),
        "most": scaler.most,
        "starts": scaler.num_starts,
    }


def _share_late(run: SimulatedRun, late_s: float) -> float:
    num_in_time = int((run.per_request_s("ttft") <= late_s).sum())
    return 1 - num_in_time / run.num_requests


def measure(
    measured: MeasuredReplica, hour: Trace, *, night: float, noon: float, hours: Sequence[int], max_replicas: int,
    start_s: float, late_s: float, seed: int, only: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of all rules with `only` in their names."""
    trace = day_of(hour, night=night, noon=noon, hours=hours, seed=seed)
    engine = EngineConfig.model_validate({"model": {"path": measured.model}})
    figures: dict[str, Any] = {"requests": len(trace.requests), "start_s": start_s, "late_s": late_s, "seed": seed}
    for rule in rules(engine, max_replicas=max_replicas):
        if only in rule.name:
            figures[rule.name] = play(rule, trace, measured, engine, start_s=start_s, late_s=late_s)
            tell(f"{rule.name}: {figures[rule.name]}")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.scaling_day", __doc__)
    parser.add_argument("--costs", metavar="FILE", help="step times from `carousel plan trace --costs`")
    parser.add_argument("--trace", required=True, metavar="FILE", help="an hour, in a format of `carousel plan trace`")
    parser.add_argument("--lengths", type=above_zero, default=1.0, metavar="F", help="factor for prompts and outputs")
    parser.add_argument(
        "--night", type=above_zero, default=0.15, metavar="SHARE", help="of the requests, at 4:00 (0.15)"
    )
    parser.add_argument("--noon", type=above_zero, default=1.0, metavar="SHARE", help="of the requests, at 16:00 (1)")
    parser.add_argument("--first-hour", type=int, default=0, metavar="H", help="first hour of the day (0)")
    parser.add_argument("--hours", type=positive, default=_DAY_HOURS, metavar="N", help="simulated hours (24)")
    parser.add_argument("--max-replicas", type=positive, default=16)
    parser.add_argument(
        "--start-s", type=above_zero, default=60.0, metavar="S", help="time until a new replica serves (60)"
    )
    parser.add_argument(
        "--late-s", type=above_zero, default=2.0, metavar="S", help="a first token after this time is late (2)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="rules with this text in their names")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # our policy logs each decision

    def run(given: Any) -> dict[str, Any]:
        measured = _MADE_UP if given.costs is None else MeasuredReplica.read(Path(given.costs))
        hour = read_trace(given.trace).with_lengths(given.lengths)
        hour.check_lengths(measured.model_info.max_model_len)
        hours = range(given.first_hour, given.first_hour + given.hours)
        return measure(
            measured, hour, night=given.night, noon=given.noon, hours=hours,
            max_replicas=given.max_replicas, start_s=given.start_s, late_s=given.late_s, seed=given.seed,
            only=given.only,
        )  # fmt: skip

    return run_command(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
