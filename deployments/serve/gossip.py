"""Shares a model's adapters and scheduler override among its replicas and all processes that send it requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from ray.serve.handle import DeploymentHandle

from app.api.endpoints.adapters import LoadedAdapters
from app.api.endpoints.admin import Answers
from app.api.endpoints.scheduler import ReplicaScheduling
from app.config import PolicyConfig, StrategyConfig
from app.engine.request import Adapter
from app.errors import Unavailable
from app.fleet import Table, adapters_in, merged, with_entry
from deployments.serve.metrics import answers_of, this_deployment
from deployments.serve.transport import (
    OVERRIDE,
    GossipAnswer,
    SchedulerOverride,
    ServeTransport,
    answer_of,
    detached_call,
)


class ModelGossip:
    """Implements `AdapterFleet` and `SchedulerSwitch` with calls to a replica deployment's handle.

    The adapters and the scheduler override are the entries of a table that every process stores. New replicas receive
    the table from the ingresses that connect to them, and new ingresses receive it from the replicas. A replica loads
    an adapter when a request first needs it.
    """

    def __init__(
        self, model: str, handle: DeploymentHandle, transport: ServeTransport, senders: Sequence[DeploymentHandle] = ()
    ) -> None:
        """`senders` are the other deployments that send requests to the model."""
        self._model = model
        self._handle = handle
        self._transport = transport
        self._senders = senders
        self.on_change: Callable[[Iterable[Adapter]], None] = lambda adapters: None

    # ------------------------------------------------------------------ adapters

    @property
    def adapters(self) -> Sequence[Adapter]:
        """See `AdapterFleet`."""
        return adapters_in(self._transport.table)

    async def loaded(self) -> Answers[LoadedAdapters]:
        """See `AdapterFleet`. Also merges the responding replicas' tables into this process's table."""
        answers = await self._ask(self._transport.table)
        replicas = [
            LoadedAdapters(replica_id=each.replica_id, loaded=each.loaded, max_loaded=each.max_loaded)
            for each in answers.reports
        ]
        return Answers(reports=replicas, num_missing=answers.num_missing)

    async def load(self, name: str, path: str) -> Adapter:
        """See `AdapterFleet`."""
        adapter: Adapter = await answer_of(detached_call(self._handle.load_adapter.remote, name, path))
        await self._put(name, adapter)
        return adapter

    async def unload(self, name: str) -> None:
        """See `AdapterFleet`."""
        await self._put(name, None)

    async def _put(self, name: str, adapter: Adapter | None) -> None:
        await self._ask(self._transport.table)
        self.note(with_entry(self._transport.table, name, adapter, now=time.time()))
        await self._ask(self._transport.table)
        await self._tell_senders()

    # ------------------------------------------------------------------ the scheduler

    async def in_force(self) -> Answers[ReplicaScheduling]:
        """See `SchedulerSwitch`."""
        return _scheduling_of(await self._ask(self._transport.table))

    async def switch(self, strategy: StrategyConfig | None, policy: PolicyConfig | None) -> Answers[ReplicaScheduling]:
        """See `SchedulerSwitch`. Raises Unavailable if no replica responds; the override is then stored nowhere."""
        override = SchedulerOverride(strategy=strategy, policy=policy)
        answers = await self._ask(with_entry(self._transport.table, OVERRIDE, override, now=time.time()))
        if not answers.reports:
            raise Unavailable(
                f"no replica of {self._model!r} responded in time; check which scheduler is in use, or try again"
            )
        await self._tell_senders()
        return _scheduling_of(answers)

    # ------------------------------------------------------------------ the table

    def note(self, table: Table) -> None:
        """Merge another process's table into this process's table."""
        self._transport.table = merged([self._transport.table, table])
        self.on_change(self.adapters)

    async def _ask(self, table: Table) -> Answers[GossipAnswer]:
        answers = await answers_of(self._handle, "gossip", table)
        self.note(merged(each.table for each in answers.reports))
        return answers

    async def _tell_senders(self) -> None:
        for sender in (this_deployment(), *self._senders):
            await answers_of(sender, "note_gossip", self._model, self._transport.table)


def _scheduling_of(answers: Answers[GossipAnswer]) -> Answers[ReplicaScheduling]:
    return Answers(reports=list(map(_in_force, answers.reports)), num_missing=answers.num_missing)


def _in_force(replica: GossipAnswer) -> ReplicaScheduling:
    override = replica.table.get(OVERRIDE)
    return ReplicaScheduling(
        replica_id=replica.replica_id,
        group=replica.group,
        scheduler=replica.scheduler,
        switched_at=None if override is None or override.value.is_empty else override.at,
    )
