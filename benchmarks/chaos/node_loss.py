"""Row "node": a whole Ray node is lost, with every process on it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.stage import Size, Stage, under_traffic
from benchmarks.chaos.traffic import MODEL_NAME
from benchmarks.chaos.verdict import judged_row, spread
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.processes import family, kill_family
from benchmarks.harness.service import Layout

ON_EACH = 2  # replicas; so those of a lost node have to wait for another
_QUIET_S = (1.0, 2.0)
_WITHOUT_S = 5.0  # that the rest of the service is alone
# The proxy on the first node only: both nodes have one address here, so the other's would listen on the same port.
LAYOUT = Layout(may_be_joined=True, proxy_location="HeadOnly", max_replicas_per_node={f"replica-{MODEL_NAME}": ON_EACH})


async def lose_node(size: Size) -> list[dict[str, Any]]:
    """Two nodes with two replicas each. The one without ingress and controller is killed; later another joins."""
    source = size.source("node")
    struck_s: list[float] = []
    recoveries_s: list[float] = []
    async with under_traffic(size, num_replicas=2 * ON_EACH, layout=LAYOUT) as (running, traffic):
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
        fault = "kill -9 everything of one of 2 nodes, with 2 of 4 replicas"
        found = {"row": "node", "fault": fault, "runs": size.runs}
        return [
            await judged_row(found, running, traffic, struck_s, spread("whole_after_another_joined_s", recoveries_s))
        ]


_STOP_TIMEOUT_S = 10.0
OBJECT_STORE_BYTES = 150 * 1024 * 1024  # as Ray's own tests have it; nothing here is stored


@dataclass(frozen=True, slots=True)
class Node:
    """A node that has joined, with its raylet, its agents and its workers."""

    stage: Stage
    pid: int

    def replicas(self) -> list[int]:
        return sorted(set(self.stage.replicas()) & family(self.pid).keys())

    def kill(self) -> None:
        """All of it at once; connections to it break."""
        kill_family(self.pid)


@contextmanager
def node(stage: Stage, *, within: Sequence[str] = (), address: str = "") -> Iterator[Node]:
    """Another node joins the service, which must be one that `may_be_joined`, and leaves it with the block.

    `within`: the beginning of a command that runs the rest of it elsewhere, such as in another network, where its
    address is `address`.
    """
    raylet = stage.named("raylet")[0]
    command = [
        *within, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-style", "record",
        "--address", _argument(raylet, "--gcs-address"),
        "--node-ip-address", address or _argument(raylet, "--node_ip_address"),
        "--num-cpus", "4", "--num-gpus", "0", "--object-store-memory", str(OBJECT_STORE_BYTES),
    ]  # fmt: skip
    # It leaves at once: by default it waits for other nodes to take over what runs on it, which none can.
    variables = _environment(raylet) | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    joined = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
    stage.nodes.append(joined.pid)
    member = Node(stage, joined.pid)
    try:
        yield member
    finally:
        joined.terminate()
        with suppress(subprocess.TimeoutExpired):
            joined.wait(_STOP_TIMEOUT_S)
        member.kill()  # without a head its HAProxy is left
        joined.wait()
        stage.nodes.remove(joined.pid)


def _argument(raylet: int, name: str) -> str:
    for argument in Path(f"/proc/{raylet}/cmdline").read_text().split("\0"):
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    raise BenchmarkError(f"the service's raylet was started without {name}: is this another version of Ray?")


def _environment(raylet: int) -> dict[str, str]:
    """That of the first node: Serve reads it on each node, and the token that allows a node to join is in it."""
    entries = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
    pairs = (entry.partition(b"=") for entry in entries if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
