"""Collects what admins ask for: their request reaches one ingress, and the answer is about all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from ray import serve
from ray.serve.handle import DeploymentHandle

from app.api.auth.keys import Authenticator
from app.api.endpoints.admin import Findings, ProcessReport, usage_of
from app.api.endpoints.scheduler import ReplicaScheduling, SchedulingFindings
from app.config import PolicyConfig, ServedModelConfig, StrategyConfig
from app.errors import Unavailable
from deployments.serve.metrics import answers_of
from deployments.serve.registries import registry_of
from deployments.serve.transport import Scheduling, ServeTransport, Switch


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


class FleetSwitch:
    """`SchedulerSwitch` over the handle of one replica deployment.

    The replicas keep what they were switched to; the connections of all ingresses bring it to those that start later.
    """

    def __init__(self, model: str, handle: DeploymentHandle, transport: ServeTransport) -> None:
        self._model = model
        self._handle = handle
        self._transport = transport

    async def in_force(self) -> SchedulingFindings:
        """See `SchedulerSwitch`. This process knows the last switch then."""
        return await self._ask(None)

    async def switch(self, strategy: StrategyConfig | None, policy: PolicyConfig | None) -> SchedulingFindings:
        """See `SchedulerSwitch`. Raises Unavailable when there is no replica to switch."""
        before = self._transport.switch
        # Later than the one before also where that was made by a clock that is ahead.
        at = max(time.time(), 0.0 if before is None else before.at + 0.001)
        findings = await self._ask(Switch(at=at, strategy=strategy, policy=policy))
        if not findings.replicas:
            raise Unavailable(f"no replica of {self._model!r} has answered; a switch lasts as long as one has it")
        context = serve.get_replica_context()
        this_deployment = serve.get_deployment_handle(context.deployment, context.app_name)
        await answers_of(this_deployment, "note_switch", self._model, self._transport.switch)
        return findings

    async def _ask(self, switch: Switch | None) -> SchedulingFindings:
        answers = await answers_of(self._handle, "scheduling", switch)
        known = [each.switch for each in answers.reports if each.switch is not None]
        self._transport.switch = max(known, key=lambda each: each.at, default=None)
        return SchedulingFindings(replicas=list(map(_found, answers.reports)), num_missing=answers.num_missing)


def _found(scheduling: Scheduling) -> ReplicaScheduling:
    switch = scheduling.switch
    is_switched = switch is not None and (switch.strategy or switch.policy) is not None
    return ReplicaScheduling(
        replica_id=scheduling.replica_id,
        group=scheduling.group,
        scheduler=scheduling.scheduler,
        switched_at=switch.at if switch is not None and is_switched else None,
    )
