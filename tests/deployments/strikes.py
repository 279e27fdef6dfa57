"""What tests on the cluster do to replicas and batches, and what they look at afterwards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import ray
from ray import serve

from benchmarks.chaos.traffic import Traffic, moment
from benchmarks.chaos.verdict import judged
from deployments.launcher.supervisor import session_members


def replica_pids(application: str, deployment: str) -> list[int]:
    """The pids of a deployment's replicas, among the processes of this session: other clusters have their own."""
    title = f"ray::ServeReplica:{application}:{deployment}"
    found = []
    for pid in session_members(os.getsid(0)):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].strip() == title:
                found.append(pid)
    return found


def replica_states(application: str, deployment: str) -> dict[str, int]:
    """How many replicas Serve counts in each state."""
    return dict(serve.status().applications[application].deployments[deployment].replica_states)


def kill_batches(application: str) -> None:
    """The process that keeps an application's batches ends as by `kill -9`."""
    [name] = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(f"SERVE_REPLICA::{application}#batches#")
    ]
    ray.kill(ray.get_actor(name, namespace="serve"))


def struck(traffic: Traffic, strike: Callable[[], None]) -> None:
    """All requests once; all of them have had their first tokens when it strikes, and have some more to come."""

    async def main() -> None:
        answering = asyncio.ensure_future(traffic.once())
        await has_begun(traffic)
        strike()
        assert not answering.done()
        await answering

    asyncio.run(main())


async def has_begun(traffic: Traffic) -> None:
    """Returns when every request has its first tokens."""
    num_streams = len(traffic.requests)
    await moment(lambda: len(traffic.answers) >= num_streams and all(each.events_s for each in traffic.answers))


def assert_nothing_is_wrong(traffic: Traffic) -> None:
    """Every answer is whole and says what it said before."""
    found = judged(traffic.answers, traffic.reference)
    assert found == dict.fromkeys(found, 0) | {
        "streams": len(traffic.answers), "completed": len(traffic.answers), "other_ends": {},
    }, found  # fmt: skip
