"""Collects what all ingresses and replicas have measured: a scrape reaches one ingress, and its answer is about all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from app.api.endpoints.admin import Answers
from app.config import ServedModelConfig
from app.errors import described
from app.json_pieces import Json
from app.metrics import (
    EngineReport,
    KnownReports,
    LoopMonitor,
    LoopSnapshot,
    RequestMetrics,
    Scrape,
    Snapshot,
    exposition,
    num_counted,
)
from app.metrics.requests import merge
from deployments.ray_internals import begin_call_on_all_replicas
from deployments.serve.autoscaling import advice
from deployments.serve.shared_look import SharedLook

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressReport:
    """What one process that sends requests has measured."""

    deployment: str  # "ingress" or "batches"
    ingress_id: str
    requests: Snapshot
    loop: LoopSnapshot
    batches: Mapping[str, int] = field(default_factory=dict)  # `LocalBatchService.counts` where it has the folder


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCounts:
    """How much of each process is known somewhere, as the reports tell it: of replicas by model and id."""

    replicas: Mapping[str, Mapping[str, int]]
    senders: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterReports:
    """Reports of processes, most of them gone, that count more than another ingress knows."""

    replicas: Mapping[str, Mapping[str, EngineReport]]
    senders: Mapping[str, Snapshot]


class MetricsCollector:
    """One for each ingress process: has its measurements, and asks the others for theirs at each scrape."""

    def __init__(
        self,
        models: Sequence[ServedModelConfig],
        handles: Mapping[str, DeploymentHandle],
        other_senders: Sequence[DeploymentHandle] = (),
    ) -> None:
        """`handles` are the replica deployments by the model's name; `other_senders` send them requests, too."""
        self._models = models
        self.requests = RequestMetrics(handles)
        self.loop = LoopMonitor()  # to be started
        self._handles = handles
        self._senders = other_senders
        self._known = {name: KnownReports(_num_steps) for name in handles}
        self._known_senders = KnownReports(num_counted)
        self.expose = SharedLook(self._expose)

    def report(self) -> IngressReport:
        """What this process has measured."""
        context = serve.get_replica_context()
        return IngressReport(
            deployment=context.deployment,
            ingress_id=context.replica_id.unique_id,
            requests=self.requests.snapshot(),
            loop=self.loop.snapshot(),
        )

    def later_reports(self, known: KnownCounts) -> LaterReports:
        """What this process knows beyond what the one that asks does."""
        return LaterReports(
            replicas={name: here.beyond(known.replicas.get(name, {})) for name, here in self._known.items()},
            senders=self._known_senders.beyond(known.senders),
        )

    async def _expose(self) -> bytes:
        """The text of /metrics, summed over all ingresses and replicas that answer in time."""
        return await asyncio.to_thread(exposition, await self._scrape())

    async def wanted_replicas(self) -> list[Json]:
        """Of each model with autoscaling how many replicas there are and should be, and why."""
        if all(model.replicas.autoscaling is None for model in self._models):
            return []
        scrape = await self._scrape()
        return [
            {"model": name, "replicas": len(scrape.replicas[name]), "wanted": number, "why": reason}
            for name, (number, _, reason) in scrape.wanted.items()
        ]

    async def _scrape(self) -> Scrape:
        senders = [this_deployment(), *self._senders]
        asked = await asyncio.gather(
            *(answers_of(handle, "metrics_report") for handle in (*senders, *self._handles.values()))
        )
        ingresses = [report for each in asked[: len(senders)] for report in each.reports]
        replicas = {name: each.reports for name, each in zip(self._handles, asked[len(senders) :], strict=True)}
        self._learn(ingresses, replicas)
        await self._learn_of_gone()
        by_id = {report.ingress_id: report for report in (*ingresses, self.report())}
        in_flight = merge([report.requests for report in by_id.values()])
        wanted = {
            model.name: decision
            for model in self._models
            if (decision := advice(model, replicas[model.name], in_flight[model.name].num_in_flight)) is not None
        }
        return Scrape(
            wanted=wanted,
            requests=[report.requests for report in by_id.values()],
            loops={(report.deployment, ingress_id): report.loop for ingress_id, report in by_id.items()},
            batches=next((report.batches for report in ingresses if report.batches), {}),
            replicas=replicas,
            gone_requests=self._known_senders.gone(by_id),
            gone={
                name: known.gone({each.replica_id for each in replicas[name]}) for name, known in self._known.items()
            },
            num_missing=sum(each.num_missing for each in asked),
        )

    def _learn(self, ingresses: Sequence[IngressReport], replicas: Mapping[str, Sequence[EngineReport]]) -> None:
        for name, known in self._known.items():
            known.learn({report.replica_id: report for report in replicas[name]})
        self._known_senders.learn({ingress.ingress_id: ingress.requests for ingress in ingresses})

    async def _learn_of_gone(self) -> None:
        """Ask the other ingresses for the last reports of processes that are gone. Only ingresses answer scrapes."""
        counts = KnownCounts(
            replicas={name: known.counts() for name, known in self._known.items()}, senders=self._known_senders.counts()
        )
        for later in (await answers_of(this_deployment(), "later_reports", counts)).reports:
            for name, known in self._known.items():
                known.learn(later.replicas.get(name, {}))
            self._known_senders.learn(later.senders)


def this_deployment() -> DeploymentHandle:
    """The handle of the deployment that this process is a replica of."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


def _num_steps(report: EngineReport) -> int:
    return report.stats.total_steps


async def answers_of(handle: DeploymentHandle, method: str, *arguments: object) -> Answers[Any]:
    """What a method gives on all replicas of a deployment that answer in time."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            calls = await begin_call_on_all_replicas(handle, method, *arguments)
    except DeploymentUnavailableError:  # it has no replicas now
        return Answers(reports=[])
    except Exception as error:
        logger.warning("no %s of %s: %s", method, handle.deployment_name, described(error))
        return Answers(reports=[], num_missing=1)
    tasks = [asyncio.ensure_future(call.get_async()) for call in calls]
    done, late = await asyncio.wait(tasks, timeout=SCRAPE_TIMEOUT_S)
    for task in late:
        task.cancel()
    reports = [task.result() for task in done if not task.cancelled() and task.exception() is None]
    return Answers(reports=reports, num_missing=len(tasks) - len(reports))
