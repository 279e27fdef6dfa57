"""Requests that leave a replica take their KV memory along: real engines, their sockets, one fleet."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from app.build import build_engine
from app.config import ReplicasConfig
from app.engine.async_engine import AsyncEngine
from app.engine.batch import StepBatch, StepResult
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
from app.fleet.dispatch import DECODE, PREFILL, GroupChooser, make_policy
from tests.kit.engine import Outcome, make_request
from tests.kit.fleet import Counts
from tests.kit.models import config_of
from tests.model.test_recurrent_layers import HYBRIDS
from tests.tiny_models import save_random_model
from tests.waiting import PATIENCE_S, until

BLOCK_SIZE = 16


@pytest.fixture(params=["", "qwen3_5_text"], ids=["the bundled model", "with recurrent layers"])
def model_path(request: pytest.FixtureRequest, demo_path: Path, tmp_path: Path) -> Path:
    if not request.param:
        return demo_path
    return save_random_model(tmp_path, request.param, max_position_embeddings=512, **HYBRIDS[request.param])


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine computing may be quicker."""
    for name in ("MIN_PATIENCE_S", "FIRST_PATIENCE_S"):
        monkeypatch.setattr(f"app.engine.fetches.{name}", PATIENCE_S)


class Replica:
    """One engine with its server of frames."""

    def __init__(self, path: Path, group: str = "") -> None:
        config = config_of(path, cache={"num_blocks": 120, "block_size": BLOCK_SIZE}, dtype="float32")
        self.engine: AsyncEngine = build_engine(config, ReplicasConfig(num_replicas=2))
        report = partial(report_of_engine, self.engine, group=group, weights=7)
        self.server = FrameServer("127.0.0.1", self.engine, report)

    @property
    def num_fetched_tokens(self) -> int:
        store = self.engine.measurements().store
        assert store is not None
        assert store.num_received * BLOCK_SIZE == store.num_fetched_tokens
        return store.num_fetched_tokens

    def hold_at(self, position: int) -> threading.Event:
        """Compute no token from this position on, until the event is set. The engine has a thread of its own."""
        runner, goes_on = self.engine._engine.runner, threading.Event()
        run = runner.run

        def held(batch: StepBatch) -> StepResult:
            if any(item.start >= position for item in batch.scheduled):
                goes_on.wait()
            return run(batch)

        runner.run = held  # type: ignore[method-assign]
        return goes_on

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


class Moves:
    """A fleet of two replicas, and what its callers have heard."""

    def __init__(self, replicas: dict[str, Replica], *, has_roles: bool) -> None:
        self.replicas = replicas
        self.registry = ReplicaRegistry(
            make_policy("round_robin", random.Random(1)),
            GroupChooser([]),
            block_size=BLOCK_SIZE,
            clock=time.monotonic,
            has_roles=has_roles,
        )
        self.counts, self.heard = Counts(), Outcome()
        limits = FailoverLimits(place_timeout_s=60.0, silence_s=60.0, step_s=60.0, drain_s=0.0)
        self.fleet = Fleet(Transport(replicas), self.registry, limits, self.counts)

    async def serve_from(self, *replica_ids: str) -> None:
        self.registry.set_replicas(replica_ids)
        await until(lambda: len(self.registry.reports) == len(replica_ids))

    async def answer(self, request: Request) -> list[int]:
        async for delta in self.fleet.generate(request):
            self.heard.book([delta])
        return self.heard.token_ids[request.request_id]

    def start(self, requests: Iterable[Request]) -> list[asyncio.Task[list[int]]]:
        return [asyncio.create_task(self.answer(each)) for each in requests]


@asynccontextmanager
async def moves(path: Path, *groups: str) -> AsyncIterator[Moves]:
    """Of two replicas, with these roles or without."""
    async with AsyncExitStack() as stack:
        replicas: dict[str, Replica] = {}
        for name, group in zip(("r0", "r1"), groups or ("", ""), strict=True):
            replicas[name] = await asyncio.to_thread(Replica, path, group)
            stack.push_async_callback(replicas[name].close)
        made = Moves(replicas, has_roles=bool(groups))
        stack.callback(made.fleet.close)
        yield made


def requests_of(*lengths: int, cache_salt: str = "") -> list[Request]:
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(5, 200) for _ in range(length)) for length in lengths]
    return [make_request(each, max_tokens=60, ignore_eos=True, cache_salt=cache_salt) for each in prompts]


async def test_a_stream_that_leaves_its_replica_goes_on_from_its_kv_memory(model_path: Path) -> None:
    async with moves(model_path) as made:
        await made.serve_from("r1")
        expected = [await made.answer(each) for each in requests_of(400, 400, cache_salt="another")]
        await made.serve_from("r0")
        requests = requests_of(400, 400)
        goes_on = made.replicas["r0"].hold_at(430)
        answers = made.start(requests)
        await until(lambda: all(len(made.heard.token_ids.get(each.request_id, ())) >= 5 for each in requests))
        await made.serve_from("r0", "r1")
        await made.serve_from("r1")
        draining = asyncio.create_task(made.replicas["r0"].server.drain())
        await until(lambda: made.counts.resumes.total() == len(requests))
        goes_on.set()
        assert await asyncio.gather(*answers) == expected
        await draining
        assert made.counts.resumes == {"ending": 2}
        assert made.replicas["r1"].num_fetched_tokens >= 2 * 400


async def test_long_prompts_are_computed_by_the_replica_for_them_and_go_on_at_the_other(model_path: Path) -> None:
    lengths = (400, 300, 20)
    async with moves(model_path) as made:
        await made.serve_from("r0")
        expected = [await made.answer(each) for each in requests_of(*lengths)]
    async with moves(model_path, PREFILL, DECODE) as made:
        await made.serve_from("r0")
        assert [await made.answer(each) for each in requests_of(*lengths, cache_salt="alone")] == expected
        assert not made.counts.resumes, "there is no other"
        await made.serve_from("r0", "r1")
        assert await asyncio.gather(*made.start(requests_of(*lengths))) == expected
        assert made.counts.resumes == {"decode": 2}
        assert made.replicas["r1"].num_fetched_tokens >= 400 + 288, "and what was generated before they left"
        assert await asyncio.gather(*made.start(requests_of(*lengths))) == expected
        assert made.counts.resumes == {"decode": 2}, "they are cached where they went on"
        assert made.replicas["r0"].num_fetched_tokens == 0
