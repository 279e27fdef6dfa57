"""Streams that survive the loss of a rank of their replica on a live cluster: a small R10 of `benchmarks.chaos`.

The rank is stopped; how a killed one is noticed, which ends in the same way, is in tests/model/parallel.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from ray import serve

from app.cores import num_cores
from benchmarks.chaos.stage import application
from benchmarks.chaos.traffic import MODEL_NAME, mixed, with_reference
from benchmarks.harness.http_call import Target
from deployments.serve.application import build
from deployments.serve.settings import parse
from tests.deployments.strikes import assert_nothing_is_wrong, has_begun, replica_pids
from tests.waiting import PATIENCE_S, eventually

APPLICATION = "ranks"
NUM_REPLICAS = 2
NUM_STREAMS = 6
STEP_TIMEOUT_S = 4.0

pytestmark = pytest.mark.skipif(num_cores() < 2, reason="two ranks need two cores")


def ranks() -> list[int]:
    """The second rank of each replica."""
    replicas = [psutil.Process(pid) for pid in replica_pids(APPLICATION, f"replica-{MODEL_NAME}")]
    children = [child for each in replicas for child in each.children()]
    return [child.pid for child in children if "app.rank" in child.cmdline()]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_rank_that_hangs_costs_its_streams_a_pause(cluster: str, demo_path: Path) -> None:
    args = application(
        num_replicas=NUM_REPLICAS, weights=True, model=str(demo_path), tensor_parallel=2, step_timeout_s=STEP_TIMEOUT_S
    )
    serve.run(build(parse(args)), name=APPLICATION, route_prefix=f"/{APPLICATION}")
    asked = mixed(NUM_STREAMS, max_tokens=(30, 60))
    traffic = asyncio.run(with_reference(Target.parse(f"{cluster}/{APPLICATION}"), asked))
    traffic.answers, traffic.timeout_s = [], PATIENCE_S
    stopped, untouched = ranks()

    async def main() -> None:
        async with traffic.flowing():
            await has_begun(traffic)
            os.kill(stopped, signal.SIGSTOP)
            await asyncio.to_thread(eventually, lambda: is_gone(stopped))

    asyncio.run(main())
    assert not is_gone(untouched)
    assert_nothing_is_wrong(traffic)
    serve.delete(APPLICATION, _blocking=False)
