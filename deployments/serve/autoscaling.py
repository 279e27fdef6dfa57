"""Connects Serve's autoscaling to the policy in `app.fleet.autoscaling`.

Replicas report their outstanding work to Serve's controller, which calls the policy ten times a second, applies delays
and limits, and starts the first replica of a model that was scaled to zero. Serve pickles this module by value into the
controller, so the module cannot share state with other modules in that process.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ray.serve import config as serve_config

from app.config import AutoscalingConfig, ServedModelConfig
from app.engine.stats import EngineMeasurements, EngineStats
from app.fleet.autoscaling import AutoscalingLoad, WantedReplicas, decide

# How long the load must be too high before the controller adds replicas. The delay spans five reports, so that a single
# burst does not start a replica, and is short compared with the time to load a model.
UPSCALE_DELAY_S = 10.0
REPORT_INTERVAL_S = 2.0  # seconds between the reports of a replica or a handle to the controller
# Outstanding tokens are averaged over this time, because prompts arrive at random and take a second or two each.
LOOK_BACK_S = 30.0
# The values that a replica reports, by name.
TOKENS = "num_outstanding_tokens"  # prompt and predicted output tokens still to compute
REQUESTS = "num_requests"  # running and waiting requests
KV_USE = "kv_use"  # share of the replica's blocks that requests own, 0 to 1
SPEED = "tokens_per_s"  # `EngineStats.speed`; 0 until it is measured
MISSES = "misses_targets"  # 1 if the replica is busy and misses its targets even with the best batch limits
_NAMES = frozenset({TOKENS, REQUESTS, KV_USE, SPEED, MISSES})


class TokenPolicy:
    """The policy that Serve calls to decide a deployment's number of replicas."""

    def __init__(self, autoscaling: Mapping[str, Any], num_slots: int) -> None:
        """`autoscaling` has the fields of an `AutoscalingConfig` as plain values, because Serve passes them as JSON."""
        self._config = AutoscalingConfig.model_validate(autoscaling)
        self._num_slots = num_slots
        self._told: WantedReplicas | None = None
        self._fewer = (0, 0)  # (target, highest of the consecutive decisions below it)

    def __call__(self, context: serve_config.AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas and an empty state. Logs each new decision with its reason."""
        uses = _recent_uses(context.raw_metrics)
        decision = decide(
            _load(
                uses,
                self._num_slots,
                target=context.target_num_replicas,
                num_running=context.current_num_replicas,
                num_queued=context.total_queued_requests,
            ),
            self._config,
        )
        if decision.number != context.target_num_replicas and (
            self._told is None or decision[:2] != self._told[:2]  # to log it once, not ten times a second
        ):
            logging.getLogger("ray.serve").info(
                "%s should have %d replicas instead of %d: %s",
                context.deployment_name, decision.number, context.target_num_replicas, decision.reason,
            )  # fmt: skip
        self._told = decision
        return self._held(decision.number, context.target_num_replicas), {}

    def _held(self, number: int, target: int) -> int:
        """Return the highest of consecutive decisions to shrink. After its delay, Serve would use the last one."""
        before, most = self._fewer
        if number >= target:
            self._fewer = (target, 0)
            return number
        self._fewer = (target, max(number, most if before == target else 0))
        return self._fewer[1]


def advice(model: ServedModelConfig, uses: Sequence[Mapping[str, float]], num_in_flight: int) -> WantedReplicas | None:
    """Return the policy's decision, or None if autoscaling is not configured for the model.

    `uses` contains the result of `use_of` for each replica. `num_in_flight` counts the requests that ingresses are
    answering, including those that the replicas report.
    """
    autoscaling = model.replicas.autoscaling
    if autoscaling is None:
        return None
    num_there = len(uses) if model.replicas.is_elastic else model.replicas.num_replicas
    uses = [use for use in uses if use.keys() >= _NAMES]  # replicas of other versions may not report all values
    num_queued = max(0.0, num_in_flight - sum(use[REQUESTS] for use in uses))
    num_slots = model.engine.scheduler.max_running
    return decide(_load(uses, num_slots, target=num_there, num_running=num_there, num_queued=num_queued), autoscaling)


def _load(
    uses: Sequence[Mapping[str, float]], num_slots: int, *, target: int, num_running: int, num_queued: float
) -> AutoscalingLoad:
    return AutoscalingLoad(
        target=target,
        num_running=num_running,
        num_reporting=len(uses),
        num_outstanding_tokens=sum(use[TOKENS] for use in uses),
        speeds=[use[SPEED] for use in uses],
        num_replica_requests=sum(use[REQUESTS] for use in uses),
        kv_use=sum(use[KV_USE] for use in uses),
        num_queued=num_queued,
        num_slots=num_slots,
        num_missing=sum(use[MISSES] > 0 for use in uses),
    )


def number_of_replicas(model: ServedModelConfig) -> dict[str, Any]:
    """Return Serve's options for a deployment's fixed or autoscaled number of replicas."""
    replicas, autoscaling = model.replicas, model.replicas.autoscaling
    if autoscaling is None or not replicas.is_elastic:
        return {"num_replicas": replicas.num_replicas}
    with warnings.catch_warnings():
        # Ray 2.60 warns that an environment variable will replace this field, but does not read the variable yet.
        warnings.filterwarnings("ignore", message="The `metrics_interval_s` field", category=DeprecationWarning)
        return {
            "autoscaling_config": serve_config.AutoscalingConfig(
                min_replicas=autoscaling.min_replicas,
                initial_replicas=replicas.initial_replicas,
                max_replicas=autoscaling.max_replicas,
                upscale_delay_s=UPSCALE_DELAY_S,
                downscale_delay_s=autoscaling.downscale_delay_s,
                downscale_to_zero_delay_s=autoscaling.scale_to_zero_after_s,
                metrics_interval_s=REPORT_INTERVAL_S,
                look_back_period_s=LOOK_BACK_S,
                policy=serve_config.AutoscalingPolicy(
                    policy_function="deployments.serve.autoscaling:TokenPolicy",
                    policy_kwargs={
                        "autoscaling": autoscaling.model_dump(),
                        "num_slots": model.engine.scheduler.max_running,
                    },
                ),
            )
        }


def use_of(stats: EngineStats, measurements: EngineMeasurements) -> dict[str, float]:
    """Return the values that a replica reports to Serve."""
    num_requests, tuning = stats.num_running + stats.num_waiting, measurements.tuning
    return {
        TOKENS: measurements.num_outstanding_tokens,
        REQUESTS: num_requests,
        KV_USE: 1.0 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
        SPEED: stats.speed,
        MISSES: float(num_requests > 0 and tuning is not None and tuning.needs_replicas),
    }


def _recent_uses(metrics: Mapping[str, Mapping[Any, Any]]) -> list[dict[str, float]]:
    """Return each replica's last report, with its outstanding tokens averaged over `LOOK_BACK_S`.

    `metrics` contains time series by name, then by replica. Replicas with missing values are omitted.
    """
    series = {name: metrics.get(name, {}) for name in _NAMES}
    replicas = set.intersection(*(set(by_replica) for by_replica in series.values()))
    return [
        {name: by_replica[replica][-1].value for name, by_replica in series.items()}
        | {TOKENS: fmean(point.value for point in series[TOKENS][replica])}
        for replica in replicas
        if all(by_replica[replica] for by_replica in series.values())
    ]
