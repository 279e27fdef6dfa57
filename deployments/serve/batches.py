"""The batches deployment: files and batches in one process; their items go to replicas or engines. No torch here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray.serve.handle import DeploymentHandle

from app.api import RequestHandler, ServedModel, fill_indexes, pipelines_of
from app.api.endpoints.admin import ProcessReport
from app.config import ApplicationConfig, ServedModelConfig
from app.errors import CarouselError, Failure, Unavailable, traceback_of
from app.fleet import Table
from app.jobs.batch_runner import Execution, FleetExecution
from app.jobs.local_service import LocalBatchService
from app.jobs.preparation import PreparedItem
from app.jobs.results import ResultStore
from app.jobs.runner import Executor, JobRun
from app.metrics import BatchCounts
from deployments.ray_internals import keep_calls_on_loopback
from deployments.serve.admin import AdminCollector
from deployments.serve.gossip import ModelGossip
from deployments.serve.keys_file import Keys
from deployments.serve.metrics import IngressReport, MetricsCollector
from deployments.serve.model_client import ModelClient, served_model
from deployments.serve.process import log_where_serve_does, return_freed_memory
from deployments.serve.settings import asked_threads
from deployments.serve.tracing import tracer_of_environment

logger = logging.getLogger(__name__)

OPENING_TIMEOUT_S = 10.0


class Batches:
    """The one process that writes. Another of the same folder waits until this one is gone."""

    def __init__(
        self, config: ApplicationConfig, paths: Mapping[str, str], handles: Mapping[str, DeploymentHandle]
    ) -> None:
        """`paths` are resolved model paths, `handles` the replica deployments, both by the model's name."""
        log_where_serve_does()
        return_freed_memory()
        keep_calls_on_loopback()
        self._config = config
        self._paths = paths
        self._handles = handles
        self._metrics = MetricsCollector(handles)
        self._gossip: dict[str, ModelGossip] = {}  # by the model's name, once it is open
        self._keys = Keys(config.api)
        assert config.batches is not None, "deployed only with batches"
        # Serve calls this on the loop that everything here runs on.
        self._opening = asyncio.create_task(self._open())

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `BatchService`."""
        await asyncio.wait({self._opening}, timeout=OPENING_TIMEOUT_S)
        if not self._opening.done():
            raise Unavailable("files and batches are being opened or are another process's; try again")
        try:
            return await getattr(self._opening.result(), method)(*arguments)
        except CarouselError:
            raise
        except Exception as error:  # Serve would log it with its message
            logger.error("%s of files and batches failed: %s", method, traceback_of(error))
            raise Failure("the process of files and batches failed on this request; its log has the reason") from None

    async def metrics_report(self) -> IngressReport:
        """What this process has measured of the lines that it sent, and what has come of them."""
        is_open = self._opening.done() and not self._opening.exception()
        counts = await self._opening.result().counts() if is_open else {}
        return replace(self._metrics.report(), batches=BatchCounts(**counts) if counts else None)

    def admin_report(self) -> ProcessReport:
        """What this process knows of keys and replicas, for the ingress that an admin has asked."""
        return AdminCollector(self._config.models, self._keys.authenticator).report()

    def note_gossip(self, model: str, table: Table) -> None:
        """An ingress has loaded or unloaded adapters, or has switched a model's replicas."""
        if model in self._gossip:
            self._gossip[model].note(table)

    def check_health(self) -> None:
        """Called by Serve; raises when the batches could not be opened or the keys' file is not followed.

        Serve replaces this process then.
        """
        self._keys.check_health()
        if self._opening.done():
            self._opening.result().check_health()

    async def _open(self) -> LocalBatchService:
        """Wait for a replica of every model and for the folder, then go on with what is unfinished there."""
        config = self._config
        assert config.batches is not None, "deployed only with batches"
        models: list[ServedModel] = []
        execution: Execution
        for model in config.models:
            metrics = self._metrics.requests.model(model.name)
            client = ModelClient(model, self._handles[model.name], metrics)
            models.append(await served_model(model, self._paths[model.name], client))
            self._gossip[model.name] = ModelGossip(model.name, self._handles[model.name], client.transport)
        pipelines = pipelines_of(config, models)
        handler = RequestHandler(
            models, config.api, self._metrics.requests, self._keys.authenticator, pipelines=pipelines,
            tracer=tracer_of_environment(),
        )  # fmt: skip
        for name, gossip in self._gossip.items():
            gossip.on_change = partial(handler.names.serve_adapters, name)
            await gossip.found()
        self._filling = asyncio.create_task(fill_indexes(pipelines))
        self._metrics.loop.start()
        self._metrics.loop.add_queue("bodies", lambda: handler.threads.num_waiting)
        self._following = asyncio.create_task(self._keys.follow())
        if config.batches.engines:
            execution = _engine_execution(config, self._paths, handler)
        else:
            execution = FleetExecution(handler.handle_item, max_in_flight=config.batches.max_in_flight)
        service = LocalBatchService(Path(config.batches.path), config.batches, execution)
        service.start()
        await service.opened()
        return service


def _engine_execution(config: ApplicationConfig, paths: Mapping[str, str], handler: RequestHandler) -> Execution:
    """Batches on engines of their own, as actors of this cluster."""
    # Here, as most services need no pool, and its modules would be in each of their processes.
    from app.jobs.engine_batches import EngineExecution
    from deployments.bulk.pool import EnginePool

    assert config.batches is not None, "deployed only with batches"
    num_engines = config.batches.engines
    served = {model.name: on_engines(model, paths[model.name], num_engines) for model in config.models}

    def make_pool(name: str, run: JobRun[PreparedItem], results: ResultStore) -> Executor[PreparedItem]:
        return EnginePool(served[name], run, results.partial, threads=asked_threads(config))

    return EngineExecution(
        handler,
        make_pool,
        weights={name: model.engine.model.model_dump(mode="json") for name, model in served.items()},
    )


def on_engines(model: ServedModelConfig, path: str, num_engines: int) -> ServedModelConfig:
    """The model with its own settings, at its resolved path, on so many engines."""
    engine = model.engine.model_copy(update={"model": model.engine.model.model_copy(update={"path": path})})
    replicas = model.replicas.model_copy(update={"num_replicas": num_engines, "autoscaling": None})
    return model.model_copy(update={"engine": engine, "replicas": replicas})
