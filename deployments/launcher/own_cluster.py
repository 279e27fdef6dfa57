"""A Ray cluster for one run alone, on this machine."""

from __future__ import annotations

import math
import os
from typing import Any

import ray

from deployments.ray_internals import small_cluster


def start_own_cluster(*, num_cpus: int, **options: Any) -> None:
    """`ray.init` for a new cluster, which disturbs no other cluster on this machine.

    `options` are those of `ray.init`.
    """
    with small_cluster():
        ray.init(address="local", num_cpus=num_cpus, log_to_driver=False, logging_level="ERROR", **options)


def num_cpus_for(reserved: float) -> int:
    """The CPUs of a cluster that has to have room for so many.

    A reservation is a number, not a core: a machine with fewer cores does the same, only slower.
    """
    return max(os.cpu_count() or 1, math.ceil(reserved))
