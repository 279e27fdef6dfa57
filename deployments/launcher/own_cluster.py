"""A Ray cluster on this machine for one run alone. No Serve here: the cluster starts while Serve is imported."""

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

    reserved_cpus: the sum of all CPU reservations. A reservation is a number, not a core: a machine with fewer cores
        runs everything as well, only slower.
    options: options of `ray.init`.
    """
    num_cpus = max(os.cpu_count() or 1, math.ceil(reserved_cpus))
    os.environ.pop("RAY_REDIS_ADDRESS", None)  # this cluster would take over the state of another cluster
    with _small_cluster(has_dashboard=bool(options.get("include_dashboard"))):
        ray.init(address="local", num_cpus=num_cpus, log_to_driver=False, logging_level="ERROR", **options)


def ray_processes() -> dict[str, subprocess.Popen[bytes]]:
    """Return the child processes without which the cluster cannot run, by their names. `ray.init` has started them."""
    started = worker._global_node.all_processes
    names = {"gcs_server": "Ray's head (GCS)", "raylet": "Ray's raylet"}
    return {text: started[name][0].process for name, text in names.items()}


@contextmanager
def _small_cluster(*, has_dashboard: bool) -> Iterator[None]:
    """Make `ray.init` in this block start only the parts that one machine needs, with the agent on a free port.

    The cluster has no monitor (Ray's autoscaler of machines) and no log monitor (which copies the logs of workers to
    the driver, although `log_to_driver` is off). Without a dashboard the cluster has no API server either: Ray would
    start one that only reports usage, and would wait a second for it. `ray.init` has no options for these three parts.

    The agent of a cluster starts its jobs. Every agent listens on port 52365 by default: if the port is taken, the
    cluster runs without an agent, and no job ever starts. `ray start` has an option for the port, `ray.init` has none
    (https://github.com/ray-project/ray/pull/34886 asked for an option and was closed).
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
