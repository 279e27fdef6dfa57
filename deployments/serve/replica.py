"""The replica deployment: one engine behind a socket for requests. Thin: it adds no behaviour to the engine.

Calls through Serve's handle are for control only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from app.assembly import Devices, adapter_at, build_engine, digest_of_weights
from app.config import SchedulerConfig, ServedModelConfig
from app.engine.adapter_store import AdapterStats
from app.engine.engine import NO_ADAPTERS
from app.engine.request import Adapter, ModelInfo
from app.engine.stats import EngineStats
from app.errors import InvalidSetup, UnsupportedAdapter
from app.fleet import AdapterEntry, AdapterTable, Address, FrameServer, adapters_in, merged, report_of
from app.fleet.dispatch import ReplicaReport, group_of_rank
from app.metrics import EngineReport, LoopMonitor
from deployments.ray_internals import keep_calls_on_loopback
from deployments.serve.autoscaling import use_of
from deployments.serve.logs import log_where_serve_does
from deployments.serve.memory import freeze_loaded
from deployments.serve.ray_metrics import RayMetrics, families_of_engine
from deployments.serve.settings import groups_of, retuned
from deployments.serve.transport import FramesFrom, ReplicaAdapters, Scheduling, Switch
from deployments.threads import AskedThreads, keep_waits_for_the_interpreter_short, with_threads


class Replica:
    """One Serve actor with one device and one engine."""

    def __init__(self, model: ServedModelConfig, threads: AskedThreads) -> None:
        """Load the weights and start the engine. `threads`: of all engines of the application.

        Raises:
            InvalidSetup: the model cannot be served as configured.
        """
        log_where_serve_does()
        keep_calls_on_loopback()
        self._group = group_of_rank(serve.get_replica_context().rank.rank, groups_of(model))
        self._deployed = self._tuned = model.scheduler_of(self._group)
        self._user_config: object = {}
        self._switch: Switch | None = None
        devices = Devices.of(model.replicas)
        config = with_threads(model.engine_with_adapters, threads, num_ranks=devices.tensor_parallel)
        self._engine = build_engine(config.model_copy(update={"scheduler": self._deployed}), devices)
        self._weights = digest_of_weights(model.engine)
        self._adapters = self._configured_adapters(model.adapters)
        self._frame_server = FrameServer(ray.util.get_node_ip_address(), self._engine, self._report)
        freeze_loaded()
        if model.replicas.num_gpus > 0:  # on two cores of a CPU it costs a tenth of the tokens
            keep_waits_for_the_interpreter_short()
        self._loop = LoopMonitor()
        # Serve calls this on the loop. Without causes: the engine's thread would be interrupted for them.
        self._loop.start(names_causes=False)
        to_ray = RayMetrics(lambda: families_of_engine(model.name, self.metrics_report()))
        self._handing_over = asyncio.create_task(to_ray.hand_over_for_ever())

    async def reconfigure(self, user_config: object) -> None:
        """Called by Serve with the deployment's `user_config`: `{"scheduler": {...}}`, see `settings.retuned`.

        Returns once the settings hold, so that Serve calls the deployment healthy when every replica has them. No
        request is lost. Raises InvalidSetup when they cannot; Serve's status then has the reason.
        """
        self._tuned = retuned(self._deployed, user_config)
        self._user_config, self._switch = user_config or {}, None
        await self._engine.reconfigure(self._tuned)

    async def scheduling(self, switch: Switch | None = None) -> Scheduling:
        """What is in force, after a switch if one is given. A switch from before another `user_config` is none."""
        is_of_now = switch is not None and switch.user_config in (None, self._user_config)
        if switch is not None and is_of_now and switch.is_after(self._switch):
            self._switch = replace(switch, user_config=self._user_config)
            await self._engine.reconfigure(self._scheduler)
        return Scheduling(
            replica_id=serve.get_replica_context().replica_id.unique_id,
            group=self._group,
            scheduler=self._scheduler,
            switch=self._switch,
        )

    @property
    def _scheduler(self) -> SchedulerConfig:
        return self._tuned if self._switch is None else self._switch.applied_to(self._tuned)

    def _configured_adapters(self, paths: Mapping[str, str]) -> AdapterTable:
        """Each is loaded once, so that a replica does not start with one that cannot be used."""
        if paths and self._engine.adapters is None:
            raise InvalidSetup(f"models[].adapters: got {', '.join(paths)}; {NO_ADAPTERS}")
        found = {name: adapter_at(name, path) for name, path in paths.items()}
        for adapter in found.values():
            assert self._engine.adapters is not None, "checked above"
            self._engine.adapters.hold(adapter).release()
        return {name: AdapterEntry(0.0, adapter) for name, adapter in found.items()}

    async def adapters(self, table: AdapterTable) -> ReplicaAdapters:
        """What this replica knows of adapters and has loaded, after it has learnt what another process knows."""
        before = {each.digest for each in adapters_in(self._adapters)}
        self._adapters = merged([self._adapters, table])
        store = self._engine.adapters
        if store is not None:
            for digest in before - {each.digest for each in adapters_in(self._adapters)}:
                store.unload(digest)
        stats = AdapterStats() if store is None else store.stats()
        return ReplicaAdapters(
            replica_id=serve.get_replica_context().replica_id.unique_id,
            table=self._adapters,
            loaded=stats.loaded,
            max_loaded=stats.max_loaded,
        )

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Load an adapter that is not served yet. Raises UnsupportedAdapter, and Overloaded when there is no room."""
        if self._engine.adapters is None:
            raise UnsupportedAdapter(NO_ADAPTERS)
        adapter = await asyncio.to_thread(adapter_at, name, path)
        await self._engine.load_adapter(adapter)
        return adapter

    async def frame_address(self, caller: FramesFrom) -> Address:
        """Where ingresses connect to this replica, for requests and frames."""
        await self.scheduling(caller.switch)
        await self.adapters(caller.adapters)
        return await self._frame_server.open()

    def facts(self) -> ModelInfo:
        """What the engine knows about its model."""
        return self._engine.facts

    def stats(self) -> EngineStats:
        """A snapshot of the engine."""
        return self._engine.stats()

    def metrics_report(self) -> EngineReport:
        """What the engine counts and measures, for /metrics."""
        return EngineReport(
            replica_id=serve.get_replica_context().replica_id.unique_id,
            stats=self._engine.stats(),
            measurements=self._engine.measurements(),
            group=self._group,
            loop=self._loop.snapshot(),
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve about once a second, for the autoscaling policy."""
        return use_of(self._engine.stats(), self._engine.measurements())

    def check_health(self) -> None:
        """Called by Serve; raises when the engine no longer runs, and Serve replaces this replica."""
        self._engine.check_health()

    def _report(self) -> ReplicaReport:
        engine = self._engine
        return report_of(
            engine.stats(),
            num_requests=engine.num_requests,
            group=self._group,
            max_requests=engine.max_requests,
            step_age_s=engine.step_age_s,
            weights=self._weights,
            adapters=None if engine.adapters is None else engine.adapters.stats().loaded,
            sleep=engine.sleep,
        )

    async def _drain(self) -> None:
        await self._frame_server.drain()
        self._engine.shutdown()

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        # Serve calls this when this replica stops, and awaits the result for at most `drain_timeout_s`: it knows no
        # requests that came over sockets. Python calls it, too, also when the constructor has failed.
        if not hasattr(self, "_frame_server"):
            return None
        if not self._frame_server.is_idle:
            return self._drain()
        self._engine.shutdown()
        return None
