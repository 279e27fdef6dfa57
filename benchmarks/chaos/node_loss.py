"""Row "node": a whole Ray node is lost, with every process on it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.chaos.networks import HERE, Host, own_network, why_no_networks
from benchmarks.chaos.stage import LENGTHS, RECOVERY_TIMEOUT_S, Size, Stage, application, stage
from benchmarks.chaos.traffic import MODEL_NAME, Asked, Traffic, mixed, with_reference
from benchmarks.chaos.verdict import judged_row, spread
from benchmarks.harness.answer import TIMEOUT, Answer, follow
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.http_call import Target
from benchmarks.harness.processes import family, kill_family
from benchmarks.harness.service import Layout, got

ON_EACH = 2  # maximum replicas on a node; the replicas of a lost node must wait for another node
_NUM_INGRESSES = 2
_STEP_MS = 100.0
_QUIET_S = (3.0, 5.0)  # range of the pause between the recovery and the next loss
_AFTER_S = 3.0
_LOOK_S = 0.1
_ANSWERS_WITHIN_S = 1.0  # timeout of the question whether a proxy serves
_MAX_AGAIN = 4  # immediate retries of a client before it pauses
# For nodes with one address: only the first node has a proxy, because a second proxy would listen on the same port.
LAYOUT = Layout(may_be_joined=True, proxy_location="HeadOnly", max_replicas_per_node={f"replica-{MODEL_NAME}": ON_EACH})
# For nodes on several hosts: each node with a replica or an ingress has a proxy.
_PROXIES = Layout(
    host="0.0.0.0", may_be_joined=True, max_replicas_per_node={f"replica-{MODEL_NAME}": ON_EACH, "ingress": 1}
)  # fmt: skip


async def lose_nodes(size: Size) -> list[dict[str, Any]]:
    """Kill a node of three. The head and a second node have a proxy, an ingress and two replicas each; one is a spare.

    Each run kills the node with replicas that is not the head. The spare node takes over, and a new node joins at the
    address of the lost node.
    """
    reason = why_no_networks()
    if reason is not None:
        return [{"row": "node", "fault": "a node of three is lost", "skipped": reason}]
    source = size.source("node")
    config = application(num_replicas=2 * ON_EACH, step_ms=_STEP_MS) | {
        "ingress": {"num_replicas": _NUM_INGRESSES}, "api": {"allow_unauthenticated": True},
    }  # fmt: skip
    with ExitStack() as block:
        hosts = {host.address: host for host in block.enter_context(own_network(2))}
        running = block.enter_context(stage(config, layout=_PROXIES))
        members = []
        for host in hosts.values():
            members.append(block.enter_context(node(running, on=host)))
            await asyncio.gather(running.is_whole(), _has_ingresses(running))  # so the second node stays the spare
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS), RovingTraffic)
        assert isinstance(traffic, RovingTraffic), "the class that was passed"
        losses = []
        async with traffic.flowing():
            for run in range(size.runs):
                [victim] = [member for member in members if member.replicas()]
                members.remove(victim)
                [spare] = members
                for address in (HERE, victim.address):
                    await traffic.is_served_at(address)
                await asyncio.sleep(source.uniform(*_QUIET_S))
                losses.append(await _Loss.made(running, victim, spare))
                tell(f"node: run {run + 1} of {size.runs}: {losses[-1]}")
                members.append(block.enter_context(node(running, on=hosts[victim.address])))
            await asyncio.sleep(_AFTER_S)
        found = {"row": "node", "fault": "kill -9 everything of one of 3 nodes", "runs": size.runs}
        return [
            await judged_row(found, running, traffic, [loss.struck_s for loss in losses], _figures(losses, traffic))
        ]


@dataclass(frozen=True, slots=True)
class _Loss:
    """A killed node, and the seconds until replicas, ingresses and a proxy had been replaced."""

    address: str  # of the node
    struck_s: float
    replicas_s: float
    ingress_s: float
    proxy_s: float  # of the spare node

    @classmethod
    async def made(cls, running: Stage, lost: Node, spare: Node) -> _Loss:
        """Kill a node and wait for the recovery. Raises BenchmarkError if the service does not recover."""
        struck_s = time.perf_counter()
        lost.kill()
        at_s = await asyncio.gather(
            running.is_whole(), _has_ingresses(running), _serves(replace(running.target, host=spare.address))
        )
        return cls(lost.address, struck_s, *(each - struck_s for each in at_s))


async def _has_ingresses(running: Stage) -> float:
    """Wait until all ingresses answer; return the time at which they did."""
    return await _since(lambda: running.holdings().num_ingresses == _NUM_INGRESSES, "all ingresses")


async def _serves(target: Target) -> float:
    """Wait until a proxy answers for the service; return the time at which it did."""
    return await _since(lambda: bool(got(target, "/ready", timeout_s=_ANSWERS_WITHIN_S)), f"a proxy at {target.host}")


async def _since(holds: Callable[[], bool], text: str) -> float:
    deadline_s = time.perf_counter() + RECOVERY_TIMEOUT_S
    while time.perf_counter() < deadline_s:
        with suppress(OSError, HTTPException):  # no answer, or a broken answer
            if await asyncio.to_thread(holds):
                return time.perf_counter()
        await asyncio.sleep(_LOOK_S)
    raise BenchmarkError(f"there was not {text} within {RECOVERY_TIMEOUT_S:.0f} s")


@dataclass(slots=True)
class RovingTraffic(Traffic):
    """Clients of several nodes, as behind a load balancer: each attempt goes to the next node.

    A request whose connection breaks is sent again at once. A node that does not answer is left out until the node
    serves again.
    """

    targets: list[Target] = field(default_factory=list)  # default: `target`
    tried: list[str] = field(default_factory=list)  # the node's address for each answer
    again_s: list[float] = field(default_factory=list)  # seconds from a broken connection to the next attempt's token
    num_requests: int = 0

    async def is_served_at(self, address: str) -> None:
        """Wait until a node serves, and add it to the nodes that clients use."""
        target = replace(self.target, host=address)
        await _serves(target)
        if target not in self.targets:
            self.targets.append(target)

    async def ask(self, asked: Asked) -> Answer:
        """Send one request, again after each broken connection; return the answer of the last attempt."""
        self.num_requests += 1
        answer = await self._try(asked)
        broken_s = answer.ended_s
        for _ in range(_MAX_AGAIN):
            if answer.failure in (None, TIMEOUT):
                break
            answer = await self._try(asked)
            if answer.events_s:
                self.again_s.append(answer.events_s[0] - broken_s)
                broken_s = answer.ended_s
        return answer

    async def _try(self, asked: Asked) -> Answer:
        targets = self.targets or [self.target]
        target = targets[len(self.answers) % len(targets)]
        answer = Answer(time.perf_counter(), name=asked.name)
        self.answers.append(answer)
        self.tried.append(target.host)
        await follow(answer, target, target.request("completions", asked.body), timeout_s=self.timeout_s)
        if answer.status is None and answer.failure != TIMEOUT and target in self.targets:
            self.targets.remove(target)
        return answer


def _figures(losses: Sequence[_Loss], traffic: RovingTraffic) -> dict[str, Any]:
    """Return the seconds until each part had recovered, and the outcomes of attempts at lost and at other nodes."""
    at_lost, at_others, later = Counter[str](), Counter[str](), Counter[str]()
    for answer, address in zip(traffic.answers, traffic.tried, strict=True):
        hit = [loss for loss in losses if answer.begun_s <= loss.struck_s <= answer.ended_s]
        counts = later if not hit else at_lost if hit[0].address == address else at_others
        counts[answer.outcome] += 1
    return {
        "requests": traffic.num_requests,
        "tries_under_way": {"at_the_lost_node": dict(at_lost), "at_other_nodes": dict(at_others)},
        "other_tries": dict(later),
        **spread("first_token_after_break_s", traffic.again_s, 2),
        **spread("replicas_back_s", [loss.replicas_s for loss in losses]),
        **spread("ingress_back_s", [loss.ingress_s for loss in losses]),
        **spread("proxy_back_s", [loss.proxy_s for loss in losses]),
    }


@dataclass(frozen=True, slots=True)
class Node:
    """A node that has joined the service: a raylet with its agents and workers."""

    stage: Stage
    pid: int
    address: str

    def replicas(self) -> list[int]:
        return sorted(set(self.stage.replicas()) & family(self.pid).keys())

    def kill(self) -> None:
        """Kill all processes of the node at once. Connections to the node break."""
        kill_family(self.pid)


_STOP_TIMEOUT_S = 10.0
OBJECT_STORE_BYTES = 150 * 1024 * 1024  # the size in Ray's own tests; the service stores no objects


@contextmanager
def node(stage: Stage, *, on: Host | None = None) -> Iterator[Node]:
    """Let another node join the service until the end of the block. The service's layout must have `may_be_joined`.

    on: the host of the node; None: this host.
    """
    raylet = stage.named("raylet")[0]
    within, address = ([], _argument(raylet, "--node_ip_address")) if on is None else (on.command, on.address)
    command = [
        *within, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-style", "record",
        "--address", _argument(raylet, "--gcs-address"), "--node-ip-address", address,
        "--num-cpus", "4", "--num-gpus", "0", "--object-store-memory", str(OBJECT_STORE_BYTES),
    ]  # fmt: skip
    # By default, a stopping node waits until other nodes have taken over its actors, but no other node has room.
    variables = _environment(raylet) | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    joined = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
    stage.nodes.append(joined.pid)
    member = Node(stage, joined.pid, address)
    try:
        yield member
    finally:
        joined.terminate()
        with suppress(subprocess.TimeoutExpired):
            joined.wait(_STOP_TIMEOUT_S)
        member.kill()  # without a head, the node's HAProxy keeps running
        joined.wait()
        stage.nodes.remove(joined.pid)


def _argument(raylet: int, name: str) -> str:
    for argument in Path(f"/proc/{raylet}/cmdline").read_text().split("\0"):
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    raise BenchmarkError(f"the service's raylet was started without {name}: is this another version of Ray?")


def _environment(raylet: int) -> dict[str, str]:
    """Return the environment of the first node, which Serve reads on each node and which has the token for joining."""
    entries = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
    pairs = (entry.partition(b"=") for entry in entries if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
