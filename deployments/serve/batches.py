"""The batches deployment: files and batches in one process; their items go to replicas or engines. No torch here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.serve.handle import DeploymentHandle

from app.api import RequestHandler
from app.config import ApplicationConfig, ServedModelConfig
from app.errors import CarouselError, Failure, Unavailable, traceback_of
from app.jobs.batch_runner import Execution, FleetExecution
from app.jobs.local_service import LocalBatchService
from app.jobs.preparation import PreparedItem
from app.jobs.results import ResultStore
from app.jobs.runner import Executor, JobRun
from app.metrics import BatchCounts
from deployments.serve.metrics import IngressReport
from deployments.serve.sender import Sender
from deployments.serve.settings import asked_threads

logger = logging.getLogger(__name__)

OPENING_TIMEOUT_S = 10.0


class Batches(Sender):
    """The one process that writes. Another of the same folder waits until this one is gone."""

    def __init__(
        self, config: ApplicationConfig, paths: Mapping[str, str], handles: Mapping[str, DeploymentHandle]
    ) -> None:
        """See `Sender`."""
        super().__init__(config, paths, handles)
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
        return replace(await super().metrics_report(), batches=BatchCounts(**counts) if counts else None)

    def check_health(self) -> None:
        """Called by Serve; raises when the batches could not be opened or the keys' file is not followed.

        Serve replaces this process then.
        """
        super().check_health()
        if self._opening.done():
            self._opening.result().check_health()

    async def _open(self) -> LocalBatchService:
        """Wait for a replica of every model and for the folder, then go on with what is unfinished there."""
        config = self._config
        assert config.batches is not None, "deployed only with batches"
        handler = await self.make_handler()
        execution: Execution
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
