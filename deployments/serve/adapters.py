"""The LoRA adapters of one model on all of its replicas, and in all processes that send them requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from ray import serve
from ray.serve.handle import DeploymentHandle

from app.api.endpoints.adapters import AdapterFindings, LoadedAdapters
from app.engine.request import Adapter
from app.fleet import AdapterEntry, AdapterTable, adapters_in, merged
from deployments.serve.errors import to_carousel_error
from deployments.serve.metrics import answers_of
from deployments.serve.transport import ReplicaAdapters, ServeTransport, detached_call


class FleetAdapters:
    """`AdapterFleet` over the handle of one replica deployment. Each process that sends requests has one.

    Every process keeps a table of all adapters. Replicas and processes that start later learn it from the others; a
    replica loads an adapter when a request needs it.
    """

    def __init__(
        self,
        model: str,
        handle: DeploymentHandle,
        transport: ServeTransport,
        senders: Sequence[DeploymentHandle] = (),
    ) -> None:
        """`senders`: the other deployments that send requests."""
        self._model = model
        self._handle = handle
        self._transport = transport
        self._senders = senders
        self.on_change: Callable[[Iterable[Adapter]], None] = lambda adapters: None

    async def found(self) -> AdapterFindings:
        """See `AdapterFleet`. This process and all replicas know the same afterwards."""
        answers = await answers_of(self._handle, "adapters", self._transport.adapters)
        replicas: Sequence[ReplicaAdapters] = answers.reports
        self.note(merged(each.table for each in replicas))
        return AdapterFindings(
            adapters=adapters_in(self._transport.adapters),
            replicas=[
                LoadedAdapters(replica_id=each.replica_id, loaded=each.loaded, max_loaded=each.max_loaded)
                for each in replicas
            ],
            num_missing=answers.num_missing,
        )

    async def load(self, name: str, path: str) -> Adapter:
        """See `AdapterFleet`."""
        try:
            adapter: Adapter = await detached_call(self._handle.load_adapter.remote, name, path)
        except Exception as error:
            raise to_carousel_error(error) from error
        await self._tell(name, adapter)
        return adapter

    async def unload(self, name: str) -> None:
        """See `AdapterFleet`."""
        await self._tell(name, None)

    def note(self, table: AdapterTable) -> None:
        """What another process knows."""
        self._transport.adapters = merged([self._transport.adapters, table])
        self.on_change(adapters_in(self._transport.adapters))

    async def _tell(self, name: str, adapter: Adapter | None) -> None:
        await self.found()
        known = self._transport.adapters.get(name)
        # Later than the one before also where that was made by a clock that is ahead.
        at = max(time.time(), 0.0 if known is None else known.at + 0.001)
        self.note({name: AdapterEntry(at, adapter)})
        await self.found()
        context = serve.get_replica_context()
        this_deployment = serve.get_deployment_handle(context.deployment, context.app_name)
        for sender in (this_deployment, *self._senders):
            await answers_of(sender, "note_adapters", self._model, self._transport.adapters)
