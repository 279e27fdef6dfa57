"""The batches deployment: files and batches in one process, whose lines go to the replicas. No torch here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.serve.handle import DeploymentHandle

from app.api import RequestHandler
from app.api.endpoints.admin import ProcessReport
from app.config import ApplicationConfig
from app.errors import Unavailable
from app.jobs import BatchWorker, LocalBatchService
from app.metrics import BatchCounts
from deployments.ray_internals import keep_calls_on_loopback
from deployments.serve.admin import AdminCollector
from deployments.serve.keys_file import Keys
from deployments.serve.logs import log_where_serve_does
from deployments.serve.metrics import IngressReport, MetricsCollector
from deployments.serve.model_client import ModelClient, cascades_of, served_model

OPENING_TIMEOUT_S = 10.0
JOBS_FOLDER = "jobs"  # in batches.path


class Batches:
    """The one process that writes. Another of the same folder waits until this one is gone."""

    def __init__(
        self, config: ApplicationConfig, paths: Mapping[str, str], handles: Mapping[str, DeploymentHandle]
    ) -> None:
        """`paths` are resolved model paths, `handles` the replica deployments, both by the model's name.

        Raises InvalidSetup when batches should run as Ray jobs and nobody runs any.
        """
        log_where_serve_does()
        keep_calls_on_loopback()
        self._config = config
        self._paths = paths
        self._handles = handles
        self._metrics = MetricsCollector(handles)
        self._keys = Keys(config.api)
        assert config.batches is not None, "deployed only with batches"
        self._worker = _jobs(config, paths) if config.batches.run_as == "ray_job" else None
        # Serve calls this on the loop that everything here runs on.
        self._opening = asyncio.create_task(self._open())

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `BatchService`."""
        await asyncio.wait({self._opening}, timeout=OPENING_TIMEOUT_S)
        if not self._opening.done():
            raise Unavailable("files and batches are being opened or are another process's; try again")
        return await getattr(self._opening.result(), method)(*arguments)

    async def metrics_report(self) -> IngressReport:
        """What this process has measured of the lines that it sent, and what has come of them."""
        is_open = self._opening.done() and not self._opening.exception()
        counts = await self._opening.result().counts() if is_open else {}
        return replace(self._metrics.report(), batches=BatchCounts(**counts) if counts else None)

    def admin_report(self) -> ProcessReport:
        """What this process knows of keys and replicas, for the ingress that an admin has asked."""
        return AdminCollector(self._config.models, self._keys.authenticator).report()

    def check_health(self) -> None:
        """Called by Serve; raises when the batches could not be opened, and Serve replaces this process."""
        if self._opening.done():
            self._opening.result().check_health()

    async def _open(self) -> LocalBatchService:
        """Wait for a replica of every model and for the folder, then go on with what is unfinished there."""
        config = self._config
        assert config.batches is not None, "deployed only with batches"
        models = []
        for model in config.models:
            metrics = self._metrics.requests.model(model.name)
            client = ModelClient(model, self._handles[model.name], metrics)
            models.append(await served_model(model, self._paths[model.name], client))
        cascades = cascades_of(config.cascades, models)
        handler = RequestHandler(
            models, config.api, self._metrics.requests, self._keys.authenticator, cascades=cascades
        )
        self._following = asyncio.create_task(self._keys.follow())
        worker = self._worker and self._worker(handler)
        service = LocalBatchService(Path(config.batches.path), config.batches, handler.handle_item, worker=worker)
        service.start()
        await service.opened()
        return service


def _jobs(config: ApplicationConfig, paths: Mapping[str, str]) -> Callable[[RequestHandler], BatchWorker]:
    """Who works batches off by Ray jobs, once the models are there. Raises InvalidSetup when nobody runs jobs."""
    # Here, as most services need neither Arrow nor Ray's job client, and each would be in every process of theirs.
    from app.jobs.batch_jobs import BatchJobs
    from deployments.serve.ray_jobs import RayJobs

    batches = config.batches
    assert batches is not None, "deployed only with batches"
    folder, server = Path(batches.path) / JOBS_FOLDER, RayJobs.connect(config, paths)

    def worker(handler: RequestHandler) -> BatchWorker:
        return BatchJobs(folder, server, handler.accept_item, max_at_once=batches.jobs.max_at_once)

    return worker
