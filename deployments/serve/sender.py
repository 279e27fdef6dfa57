"""The base of the processes that send requests to replicas: the ingresses and the batches process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ray import serve
from ray.serve.handle import DeploymentHandle

from app.api import RequestHandler, fill_indexes, pipelines_of
from app.api.auth.keys import AccountLimits
from app.api.auth.limits import SharedPools
from app.api.endpoints.admin import Answers, ProcessReport, usage_of
from app.config import ApplicationConfig
from app.fleet import Table
from app.metrics import RequestMetrics
from app.usage import Owner, UsageExchange
from app.usage.journal import JOURNALS
from deployments.open_files import allow_many_files
from deployments.ray_internals import keep_calls_on_loopback
from deployments.serve.gossip import ModelGossip
from deployments.serve.keys_file import Keys
from deployments.serve.metrics import (
    IngressReport,
    KnownCounts,
    LaterCounts,
    MetricsCollector,
    ServeSenders,
    answers_of,
    this_deployment,
)
from deployments.serve.model_client import ModelClient, registry_of, served_model
from deployments.serve.process import log_where_serve_does, return_freed_memory
from deployments.serve.tracing import tracer_of_environment


class Sender:
    """Owns a client for each model, the API keys, the metrics, and the gossip with other processes."""

    def __init__(
        self,
        config: ApplicationConfig,
        paths: Mapping[str, str],
        handles: Mapping[str, DeploymentHandle],
        batches: DeploymentHandle | None = None,
        pools: SharedPools | None = None,
    ) -> None:
        """`paths` and `handles` contain resolved model paths and replica deployments by model name.

        `batches` is the batches deployment, or None in its own process. `pools` is shared by the accounts of all keys.
        """
        log_where_serve_does()
        return_freed_memory()
        allow_many_files()  # the launcher, which raises the limit, is not used on a cluster
        keep_calls_on_loopback()
        self._config = config
        self._paths = paths
        self._keys = Keys(config.api, pools)
        self._other_senders = [] if batches is None else [batches]
        requests = RequestMetrics(handles)
        self._clients = {
            model.name: ModelClient(model, handles[model.name], requests.model(model.name)) for model in config.models
        }
        self._metrics = MetricsCollector(
            config.models,
            requests,
            {name: client.fleet for name, client in self._clients.items()},
            ServeSenders(self._other_senders),
        )
        self._gossip = {
            name: ModelGossip(name, handles[name], client.transport, self._other_senders)
            for name, client in self._clients.items()
        }

    async def make_handler(self) -> RequestHandler:
        """Return the request handler once a replica of every model is running. Also starts background tasks."""
        models = [
            await served_model(model, self._paths[model.name], self._clients[model.name])
            for model in self._config.models
        ]
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
        await asyncio.gather(*(gossip.loaded() for gossip in self._gossip.values()))
        self._following = asyncio.create_task(self._keys.follow())
        self._filling = asyncio.create_task(fill_indexes(pipelines))
        self._metrics.loop.start()
        self._metrics.loop.add_queue("bodies", lambda: handler.threads.num_waiting)
        return handler

    def exchange_usage(self, owner: Owner) -> None:
        """Start a task that reports this process's usage to the owner of the ledger."""
        assert self._config.batches is not None, "the ledger is stored in the batches folder"
        authenticator, folder = self._keys.authenticator, Path(self._config.batches.path) / JOURNALS
        exchange = UsageExchange(
            authenticator.pools.usage,
            owner,
            folder,
            AccountLimits(authenticator),
        )
        self._exchanging = asyncio.create_task(exchange.run())

    def check_health(self) -> None:
        """Raise if the keys file is no longer checked for revoked keys. Serve then replaces the process."""
        self._keys.check_health()

    async def metrics_report(self) -> IngressReport:
        """Return this process's metrics. Called by the ingress that answers a scrape."""
        return self._metrics.report()

    def later_counts(self, known: KnownCounts) -> LaterCounts:
        """Return this process's counts that are missing in `known`. Called by the ingress that answers a scrape."""
        return self._metrics.later_counts(known)

    def admin_report(self) -> ProcessReport:
        """Return this process's view of keys and replicas. Called by the ingress that answers an admin request."""
        registries = {model.name: registry_of(model.deployment_name) for model in self._config.models}
        return ProcessReport(
            process=serve.get_replica_context().replica_id.unique_id,
            usage=usage_of(self._keys.authenticator),
            used=self._keys.authenticator.pools.usage.uncounted(),
            replicas={model: registry.describe() for model, registry in registries.items() if registry is not None},
        )

    def note_gossip(self, model: str, table: Table) -> None:
        """Merge the table of a process that has changed the model's adapters or scheduler."""
        self._gossip[model].note(table)

    async def collect_admin_reports(self) -> Answers[ProcessReport]:
        """Return the reports of all processes that send requests and respond in time, always including this one."""
        asked = await asyncio.gather(
            *(answers_of(handle, "admin_report") for handle in (this_deployment(), *self._other_senders))
        )
        reports = {report.process: report for each in asked for report in each.reports}
        ours = self.admin_report()  # Serve may not know this process yet
        return Answers(
            reports=list((reports | {ours.process: ours}).values()), num_missing=sum(each.num_missing for each in asked)
        )
