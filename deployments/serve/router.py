"""The router of a replica deployment's handle. Reports the running replicas to the fleet's registry.

A router runs in the process that owns the handle, and routes only control calls. Requests use sockets instead.

Serve pickles this module by value into that process, so it cannot share state with other modules. It finds the registry
by importing `deployments.serve.model_client`.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from app.errors import CarouselError, Overloaded, Unavailable
from deployments.ray_internals import RefusingRouter


class RegistryRouter(RefusingRouter):
    """Reports running replicas to the registry. Routes a call to the replica that it names, or otherwise to any."""

    # A busy replica may take longer than Serve's default of 0.1 s to report its number of calls.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self) -> None:
        """Look up the deployment's registry. Serve calls this once, before any call is routed."""
        from deployments.serve.model_client import registry_of

        self._registry = registry_of(self.deployment)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks with one replica each, best first. Serve calls this again if no replica accepts the call."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [[replica] for replica in replicas.values()]
        argument = pending_request.args[0] if pending_request.args else None
        replica_id = getattr(argument, "replica_id", None)
        if replica_id is not None:
            if replica_id not in replicas:
                _refuse(pending_request, Unavailable(f"replica {replica_id} no longer accepts calls"))
                return [candidate_replicas]
            return [[replicas[replica_id]]]
        context = pending_request.routing_context
        if context.should_backoff and replicas and not self.select_available_replicas(candidate_replicas):
            num_slots = sum(replica.max_ongoing_requests for replica in candidate_replicas)
            _refuse(pending_request, Overloaded(f"all {len(replicas)} replicas are full ({num_slots} calls)"))
            return [candidate_replicas]
        context.should_backoff = True
        return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Report the running replicas to the registry. Serve calls this when replicas have started or ended."""
        super().update_replicas(replicas)
        if self._registry is not None:
            self._registry.set_replicas({replica.replica_id.unique_id: None for replica in replicas}.keys())

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Report a replica as suspect. Called when a call finds it dead, before the controller notices."""
        super().on_replica_actor_died(replica_id)
        if self._registry is not None:
            self._registry.suspect(replica_id.unique_id)


def _refuse(pending_request: PendingRequest, error: CarouselError) -> None:
    """Refuse a call. The caller must then return replicas, because Serve checks the future only if there are some."""
    if not pending_request.future.done():
        pending_request.future.set_exception(error)
