"""Row "node": a whole Ray node is lost, with every process on it."""

from __future__ import annotations

import asyncio
import time

from benchmarks.chaos.killing import LENGTHS, STEP_MS, Row, pauses_after
from benchmarks.chaos.mix import MODEL_NAME, mixed
from benchmarks.chaos.nodes import node
from benchmarks.chaos.size import Size
from benchmarks.chaos.stage import Stage, application, stage
from benchmarks.chaos.traffic import Traffic, with_reference
from benchmarks.chaos.verdict import judged, spread
from benchmarks.harness.command import tell
from benchmarks.harness.service import Layout

ON_EACH = 2  # replicas; so those of a lost node have to wait for another
_QUIET_S = (1.0, 2.0)
_WITHOUT_S = 5.0  # that the rest of the service is alone
# The proxy on the first node only: both nodes have one address here, so the other's would listen on the same port.
LAYOUT = Layout(may_be_joined=True, proxy_location="HeadOnly", max_replicas_per_node={f"replica-{MODEL_NAME}": ON_EACH})


async def lose_node(size: Size) -> list[Row]:
    """Two nodes with two replicas each. The one without ingress and controller is killed; later another joins."""
    config = application(num_replicas=2 * ON_EACH, step_ms=STEP_MS)
    with stage(config, step_s=STEP_MS / 1000, layout=LAYOUT) as running:
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))
        return [await _losing(running, traffic, size)]


async def _losing(running: Stage, traffic: Traffic, size: Size) -> Row:
    source = size.source("node")
    struck_s: list[float] = []
    recoveries_s: list[float] = []
    async with traffic.flowing():
        for run in range(size.runs + 1):
            joined_s = time.perf_counter()
            with node(running) as member:
                recoveries_s.append(await running.is_whole() - joined_s)
                tell(f"node: all replicas there {recoveries_s[-1]:.1f} s after a node has joined")
                if run == size.runs:
                    break  # it is whole again after the last loss, too
                await asyncio.sleep(source.uniform(*_QUIET_S))
                struck_s.append(time.perf_counter())
                member.kill()
                await asyncio.sleep(_WITHOUT_S)
    return (
        {"row": "node", "fault": "kill -9 everything of one of 2 nodes, with 2 of 4 replicas", "runs": size.runs}
        | judged(traffic.answers, traffic.reference)
        | pauses_after(running, traffic, struck_s)
        | spread("whole_after_another_joined_s", recoveries_s)
        | {"left_over": await running.left_over()}
    )
