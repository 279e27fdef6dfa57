"""Collects what admins ask for: their request reaches one ingress, and the answer is about all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ray import serve
from ray.serve.handle import DeploymentHandle

from app.api.auth.keys import Authenticator
from app.api.endpoints.admin import Findings, ProcessReport, usage_of
from app.config import ServedModelConfig
from deployments.serve.metrics import answers_of
from deployments.serve.model_client import registry_of


class AdminCollector:
    """One for each process that sends requests: reports what this process knows, and asks the others."""

    def __init__(
        self, models: Iterable[ServedModelConfig], authenticator: Authenticator, batches: DeploymentHandle | None = None
    ) -> None:
        """`batches` is the deployment that sends the requests of batches, where it is served."""
        self._registries = {model.name: registry_of(model.deployment_name) for model in models}
        self._authenticator = authenticator
        self._others = [] if batches is None else [batches]

    def report(self) -> ProcessReport:
        """What this process knows."""
        return ProcessReport(
            process=serve.get_replica_context().replica_id.unique_id,
            usage=usage_of(self._authenticator),
            replicas={
                model: registry.describe() for model, registry in self._registries.items() if registry is not None
            },
        )

    async def collect(self) -> Findings:
        """The reports of all ingresses, and of the process that runs batches, as far as they answer in time."""
        context = serve.get_replica_context()
        this_deployment = serve.get_deployment_handle(context.deployment, context.app_name)
        asked = await asyncio.gather(
            *(answers_of(handle, "admin_report") for handle in (this_deployment, *self._others))
        )
        reports = {report.process: report for each in asked for report in each.reports}
        ours = self.report()  # also while Serve's routing does not know this process yet
        return Findings(
            reports=list((reports | {ours.process: ours}).values()), num_missing=sum(each.num_missing for each in asked)
        )
