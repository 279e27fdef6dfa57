"""Collects the metrics of all ingresses and replicas, because a scrape of /metrics reaches only one ingress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from app.api.endpoints.admin import Answers
from app.config import ServedModelConfig
from app.errors import described
from app.fleet import Fleet
from app.json_pieces import Json
from app.metrics import (
    EngineCounts,
    InvalidReport,
    Known,
    Later,
    LoopMonitor,
    LoopSnapshot,
    ProcessCounts,
    ReplicaMetrics,
    RequestMetrics,
    Scrape,
    Snapshot,
    decoded,
    num_counted,
    pieces,
    sum_counts,
)
from app.metrics.requests import merge
from deployments.ray_internals import begin_call_on_all_replicas
from deployments.serve.autoscaling import advice
from deployments.serve.shared_look import SharedQuery

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 2.0
_READ_IN_A_TURN = 50  # replica reports to decode before other tasks can run


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressReport:
    """The metrics of a process that sends requests."""

    deployment: str  # "ingress" or "batches"
    ingress_id: str
    requests: Snapshot
    loop: LoopSnapshot
    batches: Mapping[str, int] = field(default_factory=dict)  # `LocalBatchService.counts`, in the batches process


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCounts:
    """A summary of the counts that an ingress has stored, so that other ingresses can send the missing ones."""

    replicas: Mapping[str, Known[EngineCounts]]  # by model
    senders: Known[Snapshot]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterCounts:
    """An ingress's counts that are missing in the `KnownCounts` of another ingress."""

    replicas: Mapping[str, Later[EngineCounts]]  # by model
    senders: Later[Snapshot]


class AllSenders(Protocol):
    """All processes that send requests. Tests implement this within one process."""

    @property
    def itself(self) -> tuple[str, str]:
        """This process's deployment and id."""
        ...

    async def reports(self) -> Answers[IngressReport]:
        """Return the reports of all processes that respond in time, possibly including this process."""
        ...

    async def later_counts(self, known: KnownCounts) -> Answers[LaterCounts]:
        """Return the counts that are missing in `known`, from each ingress that responds in time."""
        ...


class ServeSenders:
    """Implements `AllSenders` with calls to Serve's handles."""

    def __init__(self, others: Sequence[DeploymentHandle]) -> None:
        """`others` are the other deployments that send requests."""
        self._others = others

    @property
    def itself(self) -> tuple[str, str]:
        """See `AllSenders`."""
        context = serve.get_replica_context()
        return context.deployment, context.replica_id.unique_id

    async def reports(self) -> Answers[IngressReport]:
        """See `AllSenders`."""
        asked = await asyncio.gather(
            *(answers_of(handle, "metrics_report") for handle in (this_deployment(), *self._others))
        )
        return Answers(
            reports=[report for each in asked for report in each.reports],
            num_missing=sum(each.num_missing for each in asked),
        )

    async def later_counts(self, known: KnownCounts) -> Answers[LaterCounts]:
        """See `AllSenders`."""
        return await answers_of(this_deployment(), "later_counts", known)


class MetricsCollector:
    """Collects the metrics of this process and, for a scrape, those of all other processes."""

    def __init__(
        self,
        models: Sequence[ServedModelConfig],
        requests: RequestMetrics,
        fleets: Mapping[str, Fleet],
        senders: AllSenders,
    ) -> None:
        """`requests` has this process's own measurements. `fleets` is by model name."""
        self._models = models
        self.requests = requests
        self.loop = LoopMonitor()  # the caller must start it
        self._fleets = fleets
        self._senders = senders
        self._known = {name: ProcessCounts(lambda counts: counts.num_counted, sum_counts) for name in fleets}
        self._known_senders: ProcessCounts[Snapshot] = ProcessCounts(num_counted, merge)
        self._present: dict[str, Collection[str]] = dict.fromkeys(fleets, ())  # replicas in the last scrape
        self._unread: dict[str, Collection[str]] = dict.fromkeys(fleets, ())  # replicas whose metrics could not be read
        self.expose = SharedQuery(self._expose)
        self.wanted_replicas = SharedQuery(self._wanted_replicas)

    def report(self) -> IngressReport:
        """Return the metrics of this process only."""
        deployment, ingress_id = self._senders.itself
        return IngressReport(
            deployment=deployment,
            ingress_id=ingress_id,
            requests=self.requests.snapshot(),
            loop=self.loop.snapshot(),
        )

    def later_counts(self, known: KnownCounts) -> LaterCounts:
        """Return this process's counts that are missing in `known`. See `AllSenders`."""
        return LaterCounts(
            replicas={
                name: here.beyond(known.replicas[name]) for name, here in self._known.items() if name in known.replicas
            },
            senders=self._known_senders.beyond(known.senders),
        )

    async def _expose(self) -> list[bytes]:
        """Return the text of /metrics in pieces, for all ingresses and replicas that respond in time."""
        text = []
        for piece in pieces(await self._scrape()):
            text.append(piece)
            await asyncio.sleep(0)
        return text

    async def _wanted_replicas(self) -> list[Json]:
        """Return each autoscaled model's current and desired number of replicas, and the reason."""
        if all(model.replicas.autoscaling is None for model in self._models):
            return []
        scrape = await self._scrape()
        return [
            {"model": name, "replicas": len(scrape.replicas[name]), "wanted": number, "why": reason}
            for name, (number, _, reason) in scrape.wanted.items()
        ]

    async def _scrape(self) -> Scrape:
        asking = asyncio.gather(*map(self._ask_replicas, self._fleets))
        senders, replicas = await asyncio.gather(self._senders.reports(), asking)
        answered = dict(zip(self._fleets, replicas, strict=True))
        by_id = {report.ingress_id: report for report in (*senders.reports, self.report())}
        self._known_senders.learn({ingress_id: report.requests for ingress_id, report in by_id.items()})
        num_silent = await self._learn_of_gone(by_id)
        in_flight = merge([report.requests for report in by_id.values()])
        uses = {name: [metrics.use for metrics in each.metrics] for name, each in answered.items()}
        wanted = {
            model.name: decision
            for model in self._models
            if (decision := advice(model, uses[model.name], in_flight[model.name].num_in_flight)) is not None
        }
        return Scrape(
            wanted=wanted,
            requests=self._known_senders.of(sorted(by_id)),
            gone_requests=self._known_senders.without(by_id),
            loops={(report.deployment, ingress_id): report.loop for ingress_id, report in by_id.items()},
            batches=next((report.batches for report in by_id.values() if report.batches), {}),
            replicas={name: each.metrics for name, each in answered.items()},
            ever={name: known.without() for name, known in self._known.items()},
            num_missing=senders.num_missing + num_silent + sum(each.num_missing for each in answered.values()),
        )

    async def _ask_replicas(self, model: str) -> _Answered:
        """Request the metrics of a model's replicas, and store their counts."""
        answers = await self._fleets[model].ask_metrics(SCRAPE_TIMEOUT_S)
        found: dict[str, ReplicaMetrics] = {}
        unread: dict[str, str] = {}
        for number, replica_id in enumerate(answers):
            if number % _READ_IN_A_TURN == 0:
                await asyncio.sleep(0)
            answer, answers[replica_id] = answers[replica_id], None  # to free memory: 1,000 answers use 20 MB
            if answer is None:
                continue
            try:
                found[replica_id] = decoded(answer)
            except InvalidReport as error:
                unread[replica_id] = str(error)
        self._note_unread(model, unread)
        self._known[model].learn({replica_id: each.counts for replica_id, each in found.items()})
        self._present[model] = answers.keys()
        return _Answered(list(found.values()), len(answers) - len(found))

    def _note_unread(self, model: str, unread: Mapping[str, str]) -> None:
        """Log how many replicas' metrics cannot be read, whenever there is a new one among them."""
        new = unread.keys() - self._unread[model]
        self._unread[model] = frozenset(unread)
        if new:
            example = min(new)
            logger.warning(
                "the metrics of %d replicas of %s cannot be read and are missing from /metrics; replica %s: %s",
                len(unread), model, example, unread[example],
            )  # fmt: skip

    async def _learn_of_gone(self, senders: Collection[str]) -> int:
        """Fetch other ingresses' counts of processes that have ended. Returns how many ingresses did not respond.

        Only ingresses collect metrics, so only they have the counts of ended processes.
        """
        known = KnownCounts(
            replicas={name: each.known() for name, each in self._known.items()}, senders=self._known_senders.known()
        )
        answers = await self._senders.later_counts(known)
        for later in answers.reports:
            for name, each in later.replicas.items():
                self._known[name].learn_later(each)
            self._known_senders.learn_later(later.senders)
        for name, each_known in self._known.items():
            each_known.set_running(self._present[name])
        self._known_senders.set_running(senders)
        return answers.num_missing


@dataclass(frozen=True, slots=True)
class _Answered:
    """The metrics of a model's replicas, and the number of replicas whose metrics are missing."""

    metrics: Sequence[ReplicaMetrics]
    num_missing: int


def this_deployment() -> DeploymentHandle:
    """Return a handle to the deployment of this process."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


async def answers_of(handle: DeploymentHandle, method: str, *arguments: object) -> Answers[Any]:
    """Call a method on all replicas of a deployment. Returns the results that arrive within `SCRAPE_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            calls = await begin_call_on_all_replicas(handle, method, *arguments)
    except DeploymentUnavailableError:  # it currently has no replicas
        return Answers(reports=[])
    except Exception as error:
        logger.warning("`%s` of deployment %s failed: %s", method, handle.deployment_name, described(error))
        return Answers(reports=[], num_missing=1)
    tasks = [asyncio.ensure_future(call.get_async()) for call in calls]
    done, late = await asyncio.wait(tasks, timeout=SCRAPE_TIMEOUT_S)
    for task in late:
        task.cancel()
    reports = [task.result() for task in done if not task.cancelled() and task.exception() is None]
    return Answers(reports=reports, num_missing=len(tasks) - len(reports))
