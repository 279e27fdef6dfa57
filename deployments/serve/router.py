"""Serve's router as the source of the fleet's registry: which replicas there are. Lives in the handle's process.

Requests have sockets of their own; only calls for control are routed here.

Serve pickles this module by value into that process, so nothing here is shared; `deployments.serve.model_client`, which
is imported there, is.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from app.errors import CarouselError, Overloaded, Unavailable
from deployments.ray_internals import RefusingRouter


class RegistryRouter(RefusingRouter):
    """Tells the registry which replicas take requests. A call goes to the replica that it names, or to any."""

    # A busy replica may need longer than Serve's 0.1 s to answer how many calls it has.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self) -> None:
        """Called by Serve once, before any call."""
        from deployments.serve.model_client import registry_of

        self._registry = registry_of(self.deployment)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in order of preference, as ranks of one. Called again when none of them took the call."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [[replica] for replica in replicas.values()]
        argument = pending_request.args[0] if pending_request.args else None
        replica_id = getattr(argument, "replica_id", None)
        if replica_id is not None:  # it is for one replica and no other
            if replica_id not in replicas:
                _refuse(pending_request, Unavailable(f"replica {replica_id} takes no more calls"))
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
        """Called by Serve when replicas have come or gone."""
        super().update_replicas(replicas)
        if self._registry is not None:
            self._registry.set_replicas({replica.replica_id.unique_id: None for replica in replicas}.keys())

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a call has found a replica dead, some time before the controller says so."""
        super().on_replica_actor_died(replica_id)
        if self._registry is not None:
            self._registry.suspect(replica_id.unique_id)


def _refuse(pending_request: PendingRequest, error: CarouselError) -> None:
    """Serve looks at the future only when it is given a replica to try; the caller does so next."""
    if not pending_request.future.done():
        pending_request.future.set_exception(error)
