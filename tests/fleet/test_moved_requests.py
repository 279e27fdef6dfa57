"""Requests that leave a replica take their KV memory along: real engines, their sockets, one fleet."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from app.build import build_engine
from app.config import ReplicasConfig
from app.engine.async_engine import AsyncEngine
from app.engine.request import Request
from app.fleet import (
    Address,
    FailoverLimits,
    Fleet,
    FrameReader,
    FrameServer,
    ReplicaRegistry,
    connect,
    report_of_engine,
)
from app.fleet.dispatch import GroupChooser, make_policy
from tests.kit.engine import Outcome, make_request
from tests.kit.fleet import Counts
from tests.kit.models import config_of
from tests.waiting import until

BLOCK_SIZE = 16


class Replica:
    """One engine of the bundled model with its server of frames."""

    def __init__(self, path: Path) -> None:
        config = config_of(path, cache={"num_blocks": 120, "block_size": BLOCK_SIZE}, dtype="float32")
        self.engine: AsyncEngine = build_engine(config, ReplicasConfig(num_replicas=2))
        self.server = FrameServer("127.0.0.1", self.engine, partial(report_of_engine, self.engine, weights=7))

    async def close(self) -> None:
        await self.server.close()
        await asyncio.to_thread(self.engine.shutdown)


class Transport:
    """Connects to replicas by their addresses."""

    def __init__(self, replicas: dict[str, Replica]) -> None:
        self._replicas = replicas

    async def wake(self) -> None:
        raise AssertionError("there are replicas")

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        address: Address = await self._replicas[replica_id].server.open()
        return await connect(address, "ingress", reader, heartbeat_s=heartbeat_s)


async def answer(fleet: Fleet, request: Request, heard: Outcome) -> None:
    async for delta in fleet.generate(request):
        heard.book([delta])


async def test_a_stream_that_leaves_its_replica_goes_on_from_its_kv_memory(demo_path: Path) -> None:
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(5, 700) for _ in range(400)) for _ in range(2)]
    requests = [make_request(prompt, max_tokens=60, cache_salt="before") for prompt in prompts]
    async with AsyncExitStack() as stack:
        replicas: dict[str, Replica] = {}
        for name in ("r0", "r1"):
            replicas[name] = await asyncio.to_thread(Replica, demo_path)
            stack.push_async_callback(replicas[name].close)
        registry = ReplicaRegistry(
            make_policy("round_robin", rng), GroupChooser([]), block_size=BLOCK_SIZE, clock=time.monotonic
        )
        limits: dict[str, Any] = {"place_timeout_s": 60.0, "silence_s": 60.0, "step_s": 60.0, "drain_s": 0.0}
        counts = Counts()
        fleet = Fleet(Transport(replicas), registry, FailoverLimits(**limits), counts)
        stack.callback(fleet.close)
        registry.set_replicas(["r1"])
        await until(lambda: len(registry.reports) == 1)
        expected = Outcome()
        for request in requests:
            await answer(fleet, request, expected)
        registry.set_replicas(["r0"])
        await until(lambda: len(registry.reports) == 1)
        heard = Outcome()
        again = [make_request(each.prompt_token_ids, max_tokens=60) for each in requests]
        answers = [asyncio.create_task(answer(fleet, each, heard)) for each in again]
        registry.set_replicas(["r0", "r1"])
        await until(lambda: all(len(heard.token_ids[each.request_id]) >= 5 for each in again))
        registry.set_replicas(["r1"])
        draining = asyncio.create_task(replicas["r0"].server.drain())
        await asyncio.gather(*answers)
        await draining
        assert [heard.token_ids[each.request_id] for each in again] == [
            expected.token_ids[each.request_id] for each in requests
        ]
        assert counts.resumes == {"left": 2}
        store = replicas["r1"].engine.measurements().store
        assert store is not None
        assert store.num_fetched_tokens >= 2 * 400
        assert store.num_received * BLOCK_SIZE == store.num_fetched_tokens
