"""How the engines of a machine share its cores."""

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


# `model.num_threads` of each engine that there can be at once; None: a share of the cores.
AskedThreads = Sequence[int | None]


def with_threads(config: EngineConfig, asked: AskedThreads, *, num_ranks: int = 1) -> EngineConfig:
    """The settings of one of these engines with its number of threads on this machine.

    The engines are taken to be spread evenly over the machines of the cluster. Warns where they are too many.

    num_ranks: of this engine; `asked` has an entry for each.

    Raises:
        InvalidSetup: this machine has fewer cores than the engine has ranks: each waits in every step for all others.
    """
    if num_ranks > num_cores():
        raise InvalidSetup(
            f"replicas.tensor_parallel: got {num_ranks}, but a replica may use {num_cores()} CPU cores here, and each "
            f"rank needs one; set it to {num_cores()} or less"
        )
    num_machines = _num_machines()
    too_many = excess(asked, num_machines)
    if too_many:
        logger.warning(too_many)
    num_threads = config.model.num_threads or share_of_cores(asked, num_machines)
    return config.with_setting("model.num_threads", num_threads)


def keep_near(asked: AskedThreads, replicas: ReplicasConfig) -> None:
    """Have this thread, and those that it starts, on CPUs that share a cache: one of these engines' share of them.

    So its memory is that of their NUMA node, too. Each engine of a machine takes another share, by a lock that ends
    with its process; one more than there should be has all CPUs. Nothing changes on a machine with one such group,
    for an engine on a GPU, and for one of several ranks.
    """
    if replicas.num_gpus or replicas.tensor_parallel > 1:
        return
    groups = near_cpus(allowed_cpus())
    if len(groups) == 1:
        return
    number, num_nodes = _num_here(asked, _num_machines()), len({each.node for each in groups})
    if number < num_nodes:
        logger.info(
            "this machine has %d NUMA nodes and replicas for fewer (%d): they read memory of several. With as many "
            "replicas as nodes each reads its own", num_nodes, number,
        )  # fmt: skip
    if number == 1:
        return
    folder = cache_folder() / "cores"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = (take_lock(folder / f"{socket.gethostname()}-{index}-of-{number}.lock") for index in range(number))
        index = next((index for index, lock in enumerate(taken) if lock is not None), None)
    except OSError as error:
        logger.warning("this replica is on all cores: %s: %s", folder, error.strerror)
        return
    if index is None:
        logger.info("this replica is on all cores: %d others have their shares", number)
        return
    own = share_of_cpus(index, number, groups)
    os.sched_setaffinity(0, frozenset().union(*(each.cpus for each in own)))
    logger.info(
        "this replica is on %d cores of NUMA nodes %s", sum(len(each.cpus) for each in own), {each.node for each in own}
    )


def keep_waits_for_the_interpreter_short() -> None:
    """Let a thread of this process wait a fifth of a millisecond for Python's interpreter, not five, the default.

    A step of a small model takes a millisecond, and so does the host's part of one on a GPU: its thread must not wait
    for the one that makes texts, sends frames or answers calls.
    """
    switch_interval_s = 0.0002
    sys.setswitchinterval(switch_interval_s)


def share_of_cores(asked: AskedThreads, num_machines: int = 1) -> int:
    """The cores of this machine divided by the engines on it."""
    return max(1, num_cores() // _num_here(asked, num_machines))


def _num_here(asked: AskedThreads, num_machines: int) -> int:
    """Engines on this machine, at most."""
    return -(-max(1, len(asked)) // num_machines)


def excess(asked: AskedThreads, num_machines: int = 1) -> str | None:
    """A warning when the engines have more threads than there are cores."""
    share, cores = share_of_cores(asked, num_machines), num_cores() * num_machines
    num_threads = sum(each or share for each in asked)
    if num_threads <= cores:
        return None
    return (
        f"{len(asked)} engines with {num_threads} threads on {cores} cores: they slow each other by more than that; "
        f"lower model.num_threads or the number of replicas (with autoscaling, max_replicas)"
    )


def _num_machines() -> int:
    """Those of the cluster on which engines can run."""
    import ray  # only here: the planner uses the rest without it

    nodes: list[dict[str, Any]] = ray.nodes() if ray.is_initialized() else []
    return max(1, len([node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]))
