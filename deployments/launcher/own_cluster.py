"""A Ray cluster for one run alone, on this machine.

Ray 2.60 has every cluster's agent, through which jobs begin, listen on port 52365; where that is taken, the cluster
runs without one and no job ever begins. `ray start` has an option for the port, `ray.init` has none.
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import ray
from ray._private import parameter

_ANY_FREE_PORT = 0


def start_own_cluster(*, num_cpus: int, **options: Any) -> None:
    """`ray.init` for a cluster that joins none, and that is in the way of none, that runs here.

    `options` are those of `ray.init`.
    """
    of_all_clusters = parameter.RayParams
    parameter.RayParams = partial(of_all_clusters, dashboard_agent_listen_port=_ANY_FREE_PORT)
    try:
        ray.init(address="local", num_cpus=num_cpus, log_to_driver=False, logging_level="ERROR", **options)
    finally:
        parameter.RayParams = of_all_clusters


def num_cpus_for(reserved: float) -> int:
    """The CPUs of a cluster that has to have room for so many.

    A reservation is a number, not a core: a machine with fewer cores does the same, only slower.
    """
    return max(os.cpu_count() or 1, math.ceil(reserved))
