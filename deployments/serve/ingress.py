"""The ingress deployment: `app.api` over handles to the replicas. No torch here, ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.routing import Route
from starlette.types import ASGIApp

from app.api import RequestHandler, batch_routes, build_app, fill_indexes, pipelines_of
from app.api.auth.limits import SharedPools
from app.api.endpoints.admin import ProcessReport
from app.api.endpoints.cancellation import RunningCalls
from app.api.http.guard import owner_of
from app.config import ApplicationConfig
from app.fleet import Table
from app.jobs import BatchService
from deployments.ray_internals import accept_odd_headers, http_host, keep_calls_on_loopback, leave_request_ids_alone
from deployments.serve.admin import AdminCollector
from deployments.serve.gossip import ModelGossip
from deployments.serve.keys_file import Keys
from deployments.serve.metrics import IngressReport, MetricsCollector, answers_of
from deployments.serve.model_client import ModelClient, served_model
from deployments.serve.process import freeze_loaded, log_where_serve_does, return_freed_memory
from deployments.serve.ray_metrics import RayMetrics, families_of_requests
from deployments.serve.settings import check_exposure, max_ingress_requests
from deployments.serve.tracing import tracer_of_environment
from deployments.serve.transport import to_carousel_error

READY_CACHE_S = 1.0


class Ingress:
    """One HTTP process. It is ready once a replica of every model has sent its facts."""

    def __init__(
        self,
        config: ApplicationConfig,
        paths: Mapping[str, str],
        handles: Mapping[str, DeploymentHandle],
        batches: DeploymentHandle | None = None,
    ) -> None:
        """`paths` are resolved model paths, `handles` the replica deployments, both by the model's name.

        `batches` is the deployment that keeps files and batches, where they are served.
        """
        log_where_serve_does()
        return_freed_memory()
        keep_calls_on_loopback()
        accept_odd_headers()
        leave_request_ids_alone()
        self._config = config
        self._paths = paths
        self._batches = batches
        self._metrics = MetricsCollector(handles, batches)
        self._clients = {
            model.name: ModelClient(model, handles[model.name], self._metrics.requests.model(model.name))
            for model in config.models
        }
        # Here too: on a cluster no launcher has checked it.
        check_exposure(http_host(), config.api)
        self._keys = Keys(config.api, SharedPools(max_ingress_requests(config)))
        self._admin = AdminCollector(config.models, self._keys.authenticator, batches)
        senders = [] if batches is None else [batches]
        self._gossip = {
            name: ModelGossip(name, handles[name], client.transport, senders) for name, client in self._clients.items()
        }
        self._running = RunningCalls({name: client.fleet for name, client in self._clients.items()})
        self._ready_until = 0.0
        self._ready_lock = asyncio.Lock()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve after the constructor; waits for a replica of every model."""
        models = [
            await served_model(model, self._paths[model.name], self._clients[model.name])
            for model in self._config.models
        ]
        freeze_loaded()
        self._following = asyncio.create_task(self._keys.follow())
        to_ray = RayMetrics(lambda: families_of_requests(self._metrics.requests.snapshot()))
        self._handing_over = asyncio.create_task(to_ray.hand_over_for_ever())
        pipelines = pipelines_of(self._config, models)
        handler = RequestHandler(
            models,
            self._config.api,
            self._metrics.requests,
            self._keys.authenticator,
            pipelines=pipelines,
            tracer=tracer_of_environment(),
        )
        for name, gossip in self._gossip.items():
            gossip.on_change = partial(handler.names.serve_adapters, name)
        await asyncio.gather(*(gossip.found() for gossip in self._gossip.values()))
        self._filling = asyncio.create_task(fill_indexes(pipelines))
        self._metrics.loop.start()
        self._metrics.loop.add_queue("bodies", lambda: handler.threads.num_waiting)
        return build_app(
            handler,
            self._is_ready,
            expose=self._metrics.expose,
            batch_routes=self._batch_routes(handler),
            collect=self._admin.collect,
            fleets={name: client.fleet for name, client in self._clients.items()},
            switches=self._gossip,
            adapters=self._gossip,
            running=self._running,
            cancel=self._cancel,
        )

    def check_health(self) -> None:
        """Called by Serve; raises when this process would not notice that a key is revoked, and Serve replaces it."""
        self._keys.check_health()

    def metrics_report(self) -> IngressReport:
        """What this process has measured, for the ingress that answers the scrape."""
        return self._metrics.report()

    def admin_report(self) -> ProcessReport:
        """What this process knows, for the ingress that answers the admin."""
        return self._admin.report()

    def note_gossip(self, model: str, table: Table) -> None:
        """Another ingress has loaded or unloaded adapters, or has switched a model's replicas."""
        self._gossip[model].note(table)

    async def cancel_request(self, request_id: str, account: str | None) -> bool:
        """Whether this process had the request, which it has cancelled; for the ingress that was asked."""
        return await self._running.cancel(request_id, account)

    async def _cancel(self, request_id: str, account: str | None) -> bool:
        if await self.cancel_request(request_id, account):
            return True
        context = serve.get_replica_context()
        this_deployment = serve.get_deployment_handle(context.deployment, context.app_name)
        return any((await answers_of(this_deployment, "cancel_request", request_id, account)).reports)

    def _batch_routes(self, handler: RequestHandler) -> list[Route]:
        if self._batches is None:
            return []
        return batch_routes(cast(BatchService, _RemoteService(self._batches)), handler, owner_of=owner_of)

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


class _RemoteService:
    """`BatchService` over the handle of the batches deployment: each method is one call to it."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._call, method)

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await self._handle.call.remote(method, *arguments)
        except Exception as error:
            raise to_carousel_error(error) from error
