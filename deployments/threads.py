"""Divides a machine's cores among the engines that run on it."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from app.config import EngineConfig, ReplicasConfig
from app.cores import allowed_cpus, near_cpus, num_cores, share_of_cpus
from app.disk import cache_folder, take_lock
from app.errors import InvalidSetup

logger = logging.getLogger(__name__)


# `model.num_threads` for each rank of each engine that may run in the cluster; None means an equal share of the cores.
RequestedThreads = Sequence[int | None]


def with_threads(config: EngineConfig, asked: RequestedThreads, *, num_ranks: int = 1) -> EngineConfig:
    """Return an engine's settings with its number of threads on this machine. The engine is one of those in `asked`.

    Assumes that the engines are spread evenly over the machines of the cluster. Logs a warning if there are too many
    threads. `num_ranks` is the number of the engine's ranks, and `asked` must contain an entry for each of them.

    Raises InvalidSetup if this machine has fewer cores than the engine has ranks, because the ranks wait for each other
    in every step.
    """
    if num_ranks > num_cores():
        raise InvalidSetup(
            f"replicas.tensor_parallel: got {num_ranks}, but a replica may use only {num_cores()} CPU cores here, and "
            f"each rank needs one; set it to {num_cores()} or less"
        )
    num_machines = _num_machines()
    too_many = excess(asked, num_machines)
    if too_many:
        logger.warning(too_many)
    num_threads = config.model.num_threads or share_of_cores(asked, num_machines)
    return config.with_setting("model.num_threads", num_threads)


def pin_to_near_cpus(asked: RequestedThreads, replicas: ReplicasConfig) -> None:
    """Pin this thread, and the threads that it will start, to one engine's share of the CPUs.

    A share consists of CPUs near each other, and memory is allocated on their NUMA node. The engines on a machine use
    file locks, which are released when a process ends, to acquire different shares. An engine that finds no free share
    is not pinned. Does nothing on a machine with one group of CPUs, and for engines with GPUs or several ranks.
    """
    if replicas.num_gpus or replicas.tensor_parallel > 1:
        return
    groups = near_cpus(allowed_cpus())
    if len(groups) == 1:
        return
    number, num_nodes = _num_here(asked, _num_machines()), len({each.node for each in groups})
    if number < num_nodes:
        logger.info(
            "this machine has %d NUMA nodes but fewer replicas (%d), which must also read the memory of other nodes. "
            "With one replica per node, each replica would only read its own node's memory", num_nodes, number,
        )  # fmt: skip
    if number == 1:
        return
    folder = cache_folder() / "cores"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = (take_lock(folder / f"{socket.gethostname()}-{index}-of-{number}.lock") for index in range(number))
        index = next((index for index, lock in enumerate(taken) if lock is not None), None)
    except OSError as error:
        logger.warning("this replica uses all cores, because %s cannot be used: %s", folder, error.strerror)
        return
    if index is None:
        logger.info("this replica uses all cores, because %d other replicas have locked all shares", number)
        return
    own = share_of_cpus(index, number, groups)
    os.sched_setaffinity(0, frozenset().union(*(each.cpus for each in own)))
    logger.info(
        "this replica uses %d cores of NUMA nodes %s", sum(len(each.cpus) for each in own), {each.node for each in own}
    )


def shorten_gil_switch_interval() -> None:
    """Make a thread that holds the GIL release it after 0.2 ms if another thread waits for it. The default is 5 ms.

    A step of a small model takes a millisecond, and so does the host's part of a step on a GPU. The thread that runs
    steps must not wait longer than that for threads that decode text, send frames or answer calls.
    """
    switch_interval_s = 0.0002
    sys.setswitchinterval(switch_interval_s)


def share_of_cores(asked: RequestedThreads, num_machines: int = 1) -> int:
    """Return how many of this machine's cores each of its engines may use."""
    return max(1, num_cores() // _num_here(asked, num_machines))


def _num_here(asked: RequestedThreads, num_machines: int) -> int:
    """Return the maximum number of engines on this machine, if they are spread evenly."""
    return -(-max(1, len(asked)) // num_machines)


def excess(asked: RequestedThreads, num_machines: int = 1) -> str | None:
    """Return a warning if the engines use more threads than there are cores, or None."""
    share, cores = share_of_cores(asked, num_machines), num_cores() * num_machines
    num_threads = sum(each or share for each in asked)
    if num_threads <= cores:
        return None
    return (
        f"{len(asked)} engines with {num_threads} threads in total on {cores} cores slow each other down severely; "
        f"lower model.num_threads or the number of replicas (with autoscaling, max_replicas)"
    )


def _num_machines() -> int:
    """Return the number of machines with CPUs in the cluster, or 1 without a cluster."""
    import ray  # not at the top, because the planner uses this module without Ray

    nodes: list[dict[str, Any]] = ray.nodes() if ray.is_initialized() else []
    return max(1, len([node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]))
