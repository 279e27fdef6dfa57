"""The replica deployment: serves requests on an engine over a socket, and control calls through Serve's handle."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ReplicaRank

from app import progress
from app.build import build_engine
from app.config import SchedulerConfig, ServedModelConfig
from app.engine.adapter_store import AdapterStats
from app.engine.engine import NO_ADAPTERS
from app.engine.request import Adapter, ModelInfo
from app.engine.stats import EngineStats
from app.errors import InvalidSetup, UnsupportedAdapter
from app.fleet import Address, Entry, FrameServer, Table, adapters_in, merged, report_of_engine
from app.fleet.dispatch import group_of_rank
from app.metrics import EngineReport, LoopMonitor, encoded, replica_metrics
from app.model.adapter_files import adapter_at
from app.model.weights_digest import digest_of_weights
from deployments.ray_internals import StopsWithServe, keep_calls_on_loopback
from deployments.serve.autoscaling import use_of
from deployments.serve.process import collect_later, freeze_loaded, log_where_serve_does
from deployments.serve.ray_metrics import RayMetrics, families_of_engine
from deployments.serve.settings import apply_override, groups_of
from deployments.serve.transport import OVERRIDE, FramesFrom, GossipAnswer
from deployments.threads import RequestedThreads, pin_to_near_cpus, shorten_gil_switch_interval, with_threads


class Replica(StopsWithServe):
    """A Serve actor that runs one engine."""

    def __init__(self, model: ServedModelConfig, threads: RequestedThreads) -> None:
        """Load the weights and start the engine. `threads` lists `num_threads` of all the application's engines.

        Raises InvalidSetup if the model cannot be served as configured.
        """
        collect_later()
        log_where_serve_does()
        keep_calls_on_loopback()
        progress.begin(model.name)
        progress.report_step("importing torch")
        self._model = model
        self._group = group_of_rank(serve.get_replica_context().rank.rank, groups_of(model))
        self._tuned = model.scheduler_of(self._group)
        self._user_config: object = {}
        config = with_threads(model.engine_with_adapters, threads, num_ranks=model.replicas.tensor_parallel)
        pin_to_near_cpus(threads, model.replicas)
        self._engine = build_engine(config.with_setting("scheduler", self._tuned), model.replicas)
        self._engine.prepare_for_grammars()
        self._table = self._configured_adapters(model.adapters)
        report = partial(report_of_engine, self._engine, weights=digest_of_weights(model.engine))
        self._frame_server = FrameServer(
            ray.util.get_node_ip_address(), self._engine, lambda: report(group=self._group), self._metrics
        )
        freeze_loaded()
        progress.report_step(progress.JOINING)
        if model.replicas.num_gpus > 0:  # without a GPU, on two CPU cores, short waits cost 10% of the throughput
            shorten_gil_switch_interval()
        self._loop = LoopMonitor()
        # Serve calls the constructor on the event loop. Finding a stall's cause would interrupt the engine's thread.
        self._loop.start(names_causes=False)
        to_ray = RayMetrics(lambda: families_of_engine(model.name, self._engine_report()))
        self._handing_over = asyncio.create_task(to_ray.export_forever())

    async def reconfigure(self, user_config: object, rank: ReplicaRank) -> None:
        """Apply a `user_config` and a rank. Serve calls this after construction and whenever one of them changes.

        `user_config` is `{"scheduler": {...}}` (see `settings.apply_override`). The rank determines the group: a new
        replica that receives an ended replica's rank also receives its group, so that no group is empty after updates
        and scaling.

        Returns once the settings are in effect, so that Serve reports the deployment as healthy only when all replicas
        use them. No requests are lost. Raises InvalidSetup if the settings cannot be applied. Serve's status shows the
        error if it was caused by a `user_config`.
        """
        group, user_config = group_of_rank(rank.rank, groups_of(self._model)), user_config or {}
        if (group, user_config) == (self._group, self._user_config):
            return
        before = self._tuned
        self._tuned = apply_override(self._model.scheduler_of(group), user_config)
        if user_config != self._user_config:
            self._user_config = user_config
            self._table = {name: entry for name, entry in self._table.items() if name != OVERRIDE}
        try:
            await self._engine.reconfigure(self._scheduler)
        except InvalidSetup:
            self._tuned = before
            raise
        self._group = group

    async def gossip(self, table: Table = MappingProxyType({})) -> GossipAnswer:
        """Merge another process's table, apply the changes, and return this replica's state.

        An override that was made under a different `user_config` is ignored.
        """
        before, override = self._table, table.get(OVERRIDE)
        if override is not None and override.value.user_config not in (None, self._user_config):
            table = {name: entry for name, entry in table.items() if name != OVERRIDE}
        elif override is not None:
            table = {**table, OVERRIDE: Entry(override.at, replace(override.value, user_config=self._user_config))}
        self._table = after = merged([before, table])
        if after.get(OVERRIDE) != before.get(OVERRIDE):
            await self._engine.reconfigure(self._scheduler)
        store = self._engine.adapters
        if store is not None:
            served = {each.digest for each in adapters_in(after)}
            for digest in {each.digest for each in adapters_in(before)} - served:
                store.unload(digest)
        stats = AdapterStats() if store is None else store.stats()
        return GossipAnswer(
            replica_id=serve.get_replica_context().replica_id.unique_id,
            table=after,
            group=self._group,
            scheduler=self._scheduler,
            loaded=stats.loaded,
            max_loaded=stats.max_loaded,
        )

    @property
    def _scheduler(self) -> SchedulerConfig:
        override = self._table.get(OVERRIDE)
        return self._tuned if override is None else override.value.applied_to(self._tuned)

    def _configured_adapters(self, paths: Mapping[str, str]) -> Table:
        """Return the table of configured adapters. Loads each once, so that startup fails if one is unusable."""
        if paths and self._engine.adapters is None:
            raise InvalidSetup(f"models[].adapters: got {', '.join(paths)}; {NO_ADAPTERS}")
        found = {name: adapter_at(name, path) for name, path in paths.items()}
        for adapter in found.values():
            assert self._engine.adapters is not None, "checked above"
            self._engine.adapters.hold(adapter).release()
        return {name: Entry(0.0, adapter) for name, adapter in found.items()}

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Load a new adapter. Raises UnsupportedAdapter, or Overloaded if memory is full."""
        if self._engine.adapters is None:
            raise UnsupportedAdapter(NO_ADAPTERS)
        adapter = await asyncio.to_thread(adapter_at, name, path)
        await self._engine.load_adapter(adapter)
        return adapter

    async def frame_address(self, caller: FramesFrom) -> Address:
        """Merge the caller's table, and return the address of this replica's socket for requests and tokens."""
        await self.gossip(getattr(caller, "table", {}))
        return await self._frame_server.open()

    def facts(self) -> ModelInfo:
        """Return the engine's model info."""
        return self._engine.model_info

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's state."""
        return self._engine.stats()

    def _metrics(self) -> bytes:
        """Return the encoded metrics, which the frame server sends to ingresses for /metrics."""
        return encoded(replica_metrics(self._model.name, self._engine_report(), self.record_autoscaling_stats()))

    def _engine_report(self) -> EngineReport:
        """Return the engine's counts and measurements."""
        return EngineReport(
            replica_id=serve.get_replica_context().replica_id.unique_id,
            stats=self._engine.stats(),
            measurements=self._engine.measurements(),
            group=self._group,
            loop=self._loop.snapshot(),
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the values that the autoscaling policy needs. Serve calls this every two seconds."""
        return use_of(self._engine.stats(), self._engine.measurements())

    def check_health(self) -> None:
        """Raise if the engine is no longer running. Serve then replaces the replica."""
        self._engine.check_health()

    def stop(self) -> Coroutine[Any, Any, None] | None:
        """See `StopsWithServe`. The coroutine waits for the requests on sockets, which Serve does not count."""
        if not hasattr(self, "_frame_server"):  # the constructor has failed
            return None
        if not self._frame_server.is_idle:
            return self._drain()
        self._engine.shutdown()
        return None

    async def _drain(self) -> None:
        await self._frame_server.drain()
        self._engine.shutdown()
