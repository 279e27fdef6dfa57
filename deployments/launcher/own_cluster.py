"""A Ray cluster for one run alone, on this machine. No Serve here: a cluster starts while that is imported."""

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
    """`ray.init` for a new cluster, which disturbs no other cluster on this machine.

    reserved_cpus: what has to find room. A reservation is a number, not a core: a machine with fewer cores does the
        same, only slower.
    options: those of `ray.init`.
    """
    num_cpus = max(os.cpu_count() or 1, math.ceil(reserved_cpus))
    os.environ.pop("RAY_REDIS_ADDRESS", None)  # this cluster would take the state of another for its own
    with _small_cluster(has_dashboard=bool(options.get("include_dashboard"))):
        ray.init(address="local", num_cpus=num_cpus, log_to_driver=False, logging_level="ERROR", **options)


def ray_processes() -> dict[str, subprocess.Popen[bytes]]:
    """The children of this process with which its cluster ends, by what they are; `ray.init` has started them."""
    started = worker._global_node.all_processes
    names = {"gcs_server": "Ray's head (GCS)", "raylet": "Ray's raylet"}
    return {text: started[name][0].process for name, text in names.items()}


@contextmanager
def _small_cluster(*, has_dashboard: bool) -> Iterator[None]:
    """A `ray.init` in this block starts a cluster without what one machine does not need, its agent on a free port.

    The cluster has no monitor (Ray's autoscaler of machines) and no log monitor (which copies the logs of workers to
    the driver, and is told not to). Without a dashboard it has no API server either: Ray starts one all the same, which
    then only reports usage, and waits a second for it. `ray.init` has no options for the three.

    Every cluster's agent, through which jobs begin, listens on port 52365; where that is taken, the cluster runs
    without one and no job ever begins. `ray start` has an option for the port, `ray.init` has none
    (https://github.com/ray-project/ray/pull/34886 asked for one and was closed).
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
