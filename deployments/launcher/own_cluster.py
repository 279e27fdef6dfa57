"""Starts a Ray cluster on this machine for one run. Does not import Serve, which can be imported while Ray starts."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray._private import node, parameter, worker


def start_own_cluster(*, reserved_cpus: float, **options: Any) -> None:
    """Start a new cluster with `ray.init`, without disturbing other clusters on this machine.

    `reserved_cpus` is the sum of all CPU reservations. Ray only counts them, so a machine with fewer cores is slower
    but also works. `options` are passed to `ray.init`.
    """
    num_cpus = max(os.cpu_count() or 1, math.ceil(reserved_cpus))
    os.environ.pop("RAY_REDIS_ADDRESS", None)  # otherwise, this cluster would use another cluster's state
    with _small_cluster(has_dashboard=bool(options.get("include_dashboard"))):
        ray.init(address="local", num_cpus=num_cpus, log_to_driver=False, logging_level="ERROR", **options)


def ray_processes() -> dict[str, subprocess.Popen[bytes]]:
    """Return the child processes that the cluster requires, by name. Call this after `ray.init`."""
    started = worker._global_node.all_processes
    names = {"gcs_server": "Ray's head (GCS)", "raylet": "Ray's raylet"}
    return {text: started[name][0].process for name, text in names.items()}


@contextmanager
def _small_cluster(*, has_dashboard: bool) -> Iterator[None]:
    """Make `ray.init` in this block start only the parts that one machine needs, with the agent on a free port.

    The cluster runs without a monitor (Ray's autoscaler of machines) and a log monitor (which would copy workers' logs
    to the driver even though `log_to_driver` is off). Without a dashboard, it also runs without an API server, which
    would only report usage and delay startup by a second. `ray.init` has no options for these three parts.

    The agent starts the cluster's jobs. By default, every agent listens on port 52365. If that port is in use, the
    cluster runs without an agent, and jobs never start. `ray start` has an option for the port, but `ray.init` does
    not (https://github.com/ray-project/ray/pull/34886 proposed one and was closed).
    """
    of_all_clusters, start_api_server = parameter.RayParams, node.Node.start_api_server
    any_free_port = 0
    parameter.RayParams = partial(
        of_all_clusters, dashboard_agent_listen_port=any_free_port, no_monitor=True, include_log_monitor=False
    )
    if not has_dashboard:
        node.Node.start_api_server = lambda *_, **__: None
    try:
        yield
    finally:
        parameter.RayParams, node.Node.start_api_server = of_all_clusters, start_api_server
