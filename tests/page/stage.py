"""The real page, API, fleet, frames and engines in one process, with a model that only sleeps. No Ray."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvicorn

from app.api import RequestHandler, ServedModel, build_app
from app.api.endpoints.admin import Answers
from app.api.endpoints.scheduler import ReplicaScheduling
from app.build import build_engine
from app.config import ApiConfig, AutoscalingConfig, BatchesConfig, EngineConfig, PolicyConfig, StrategyConfig
from app.engine.async_engine import AsyncEngine
from app.fleet import (
    Address,
    FailoverLimits,
    Fleet,
    FrameReader,
    FrameServer,
    ReplicaRegistry,
    report_of_engine,
)
from app.fleet import connect as connect_frames
from app.fleet.autoscaling import AutoscalingLoad, decide
from app.fleet.dispatch import GroupChooser, make_policy
from app.jobs.executors import FleetExecution
from app.jobs.local_service import LocalBatchService
from app.json_pieces import Json
from app.metrics import ModelMetrics
from app.text import Tokenizer
from tests.kit.service import ring
from tests.waiting import eventually

MODEL = "demo"


class StagedReplica:
    """An engine behind a socket."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.server = FrameServer("127.0.0.1", engine, lambda: report_of_engine(engine))

    async def close(self) -> None:
        """As when its process dies: its connections break."""
        await self.server.close()
        await asyncio.to_thread(self.engine.shutdown)


class Stage:
    """A service with some replicas on a port of its own. Use it `with`."""

    def __init__(
        self,
        demo_path: Path,
        *,
        num_replicas: int = 2,
        keys: Sequence[Mapping[str, Any]] = (),
        batches: Path | None = None,
        **engine: Any,
    ) -> None:
        """`engine` are branches of the engine's settings; the model is simulated. Batches, if any, are in a folder."""
        self._batches = batches
        self._exits = AsyncExitStack()
        self._path = str(demo_path)
        self._num_replicas = num_replicas
        self._keys = keys
        self._config = EngineConfig.model_validate(
            {"model": {"path": self._path, "simulated": {"step_ms": 10.0, "per_token_ms": 0.05}}} | engine
        )
        self._scheduler = self._config.scheduler
        self.replicas: dict[str, StagedReplica] = {}
        self._num_started = 0
        self.url = ""

    def __enter__(self) -> Stage:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._call(self._begin())
        eventually(lambda: self._server.started, every_s=0.005)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def kill(self, replica_id: str) -> None:
        """Its connections break, and Serve says a while later that it is gone."""
        self._call(self._kill(replica_id))

    def replace(self, replica_id: str) -> None:
        """Serve says that it is gone, and has started another."""
        self._call(self._replace(replica_id))

    # ------------------------------------------------------------------ in the loop

    def _call(self, what: Coroutine[Any, Any, None]) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(what, self._loop)
        future.result()

    async def _begin(self) -> None:
        self.registry = ReplicaRegistry(
            make_policy("least_loaded", random.Random(1)), GroupChooser([]), block_size=16, clock=time.monotonic
        )
        for _ in range(self._num_replicas):
            self._start_replica()
        limits = FailoverLimits(place_timeout_s=5, silence_s=10, step_s=30)
        self.fleet = Fleet(self, self.registry, limits, ModelMetrics(time.monotonic))
        self.registry.set_replicas(list(self.replicas))
        model = ServedModel(
            name=MODEL,
            tokenizer=Tokenizer.load(self._path),
            model_info=next(iter(self.replicas.values())).engine.model_info,
            generate=self.fleet.generate,
            created=0,
        )
        handler = RequestHandler([model], ApiConfig(), authenticator=ring(self._keys) if self._keys else None)
        app = build_app(
            handler,
            self._is_ready,
            fleets={MODEL: self.fleet},
            switches={MODEL: self},
            batches=await self._batch_service(handler),
            wanted_replicas=self._wanted_replicas,
        )
        config = uvicorn.Config(app, port=0, ws="none", lifespan="off", log_level="error")
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve())

    async def _batch_service(self, handler: RequestHandler) -> LocalBatchService | None:
        if self._batches is None:
            return None
        execution = FleetExecution(handler.handle_item, max_in_flight=8)
        config = BatchesConfig.model_validate({"webhooks": {"allowed_networks": ["127.0.0.0/8"]}})
        service = LocalBatchService(self._batches, config, execution, handler.keep)
        return await self._exits.enter_async_context(service)

    async def _end(self) -> None:
        await self._serving
        await self._exits.aclose()
        self.fleet.close()
        for replica in self.replicas.values():
            await replica.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _start_replica(self) -> None:
        self._num_started += 1
        self.replicas[f"replica{self._num_started}"] = StagedReplica(build_engine(self._config))

    async def _kill(self, replica_id: str) -> None:
        await self.replicas[replica_id].close()

    async def _replace(self, replica_id: str) -> None:
        del self.replicas[replica_id]
        self._start_replica()
        self.registry.set_replicas(list(self.replicas))

    async def _is_ready(self) -> bool:
        return True

    async def _wanted_replicas(self) -> list[Json]:
        """By the service's rule."""
        stats, number = [each.engine.stats() for each in self.replicas.values()], len(self.replicas)
        load = AutoscalingLoad(
            target=number,
            num_running=number,
            num_reporting=number,
            num_outstanding_tokens=sum(
                each.engine.measurements().num_outstanding_tokens for each in self.replicas.values()
            ),
            speeds=[each.speed for each in stats],
            num_replica_requests=sum(each.num_running + each.num_waiting for each in stats),
            kv_use=sum(1 - each.num_free_blocks / each.num_blocks for each in stats),
            num_queued=0,
            num_slots=self._config.scheduler.max_running,
        )
        wanted = decide(load, AutoscalingConfig(mode="advise"))
        return [{"model": MODEL, "replicas": number, "wanted": wanted.number, "why": wanted.reason}]

    # ------------------------------------------------------------------ as what switches the replicas

    async def in_force(self) -> Answers[ReplicaScheduling]:
        return Answers(
            reports=[
                ReplicaScheduling(replica_id=name, group="", scheduler=self._scheduler, switched_at=None)
                for name in self.replicas
            ]
        )

    async def switch(self, strategy: StrategyConfig | None, policy: PolicyConfig | None) -> Answers[ReplicaScheduling]:
        given = {"strategy": strategy, "policy": policy}
        changes = {name: value for name, value in given.items() if value is not None}
        self._scheduler = self._config.scheduler.model_copy(update=changes)
        for replica in self.replicas.values():
            await replica.engine.reconfigure(self._scheduler)
        return await self.in_force()

    # ------------------------------------------------------------------ as the fleet's transport

    async def wake(self) -> None:
        await asyncio.sleep(1)

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        address: Address = await self.replicas[replica_id].server.open()
        return await connect_frames(address, "stage", reader, heartbeat_s=heartbeat_s)
