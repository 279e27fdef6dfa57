"""The ingress deployment: `app.api` over handles to the replicas. No torch here, ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from app.api.completions import ServedModel
from app.api.routes import build_app
from app.config import ApplicationConfig, ServedModelConfig
from app.text.tokenizer import Tokenizer
from deployments.client import ModelClient
from deployments.keys_file import Keys
from deployments.logs import log_where_serve_does
from deployments.loopback import keep_calls_on_loopback
from deployments.metrics import IngressReport, MetricsCollector
from deployments.settings import check_exposure

logger = logging.getLogger(__name__)

READY_CACHE_S = 1.0


class Ingress:
    """One HTTP process. Comes up only when every model has told its facts."""

    def __init__(
        self, config: ApplicationConfig, paths: Mapping[str, str], handles: Mapping[str, DeploymentHandle]
    ) -> None:
        """`paths` are resolved model paths, `handles` the replica deployments, both by the model's name."""
        log_where_serve_does()
        keep_calls_on_loopback()
        self._config = config
        self._paths = paths
        self._metrics = MetricsCollector(handles, config.metrics)
        self._clients = {
            model.name: ModelClient(
                model, handles[model.name], config.ingress.transport, self._metrics.requests.model(model.name)
            )
            for model in config.models
        }
        # Here too, for whoever deploys on a cluster has no launcher that would say so.
        check_exposure(_get_global_client().http_config.host, config.api)
        self._keys = Keys(config.api)
        self._ready_until = 0.0
        self._ready_lock = asyncio.Lock()

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Serve after the constructor; waits for a replica of every model."""
        models = [await self._served_model(model) for model in self._config.models]
        self._following = asyncio.create_task(self._keys.follow())
        metrics = self._metrics
        return build_app(
            models,
            self._config.api,
            self._is_ready,
            metrics=metrics.requests,
            expose=metrics.expose,
            doorkeeper=self._keys.doorkeeper,
        )

    def metrics_report(self) -> IngressReport:
        """What this process has measured, for the ingress that was asked for all of it."""
        return self._metrics.report()

    async def _served_model(self, model: ServedModelConfig) -> ServedModel:
        tokenizer = await asyncio.to_thread(
            Tokenizer.load, self._paths[model.name], revision=model.engine.model.revision
        )
        client = self._clients[model.name]
        facts = await client.facts()
        logger.info("model %s: context %d, vocabulary %d", model.name, facts.max_model_len, facts.vocab_size)
        return ServedModel(
            name=model.name,
            tokenizer=tokenizer,
            facts=facts,
            generate=client.generate,
            created=int(time.time()),
            aliases=model.aliases,
            group_header=model.replicas.group_header,
            session_header=model.replicas.session_header,
        )

    async def _is_ready(self) -> bool:
        """Whether every model has a replica that answers, or may sleep until the first request wakes it.

        A yes holds for a moment; callers share one question.
        """
        async with self._ready_lock:
            if time.monotonic() >= self._ready_until:
                # To ask a model that sleeps would wake it.
                awake = [self._clients[model.name] for model in self._config.models if not model.replicas.may_sleep]
                answers = await asyncio.gather(*(client.answers() for client in awake))
                self._ready_until = time.monotonic() + READY_CACHE_S if all(answers) else 0.0
            return time.monotonic() < self._ready_until
