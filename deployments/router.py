"""Adapter from Serve's RequestRouter to `app.dispatch`: lives in the process that holds the handle, one per ingress.

Serve pickles this module by value into that process, so nothing here is shared with other modules of the process.
Each ingress counts only what it has sent itself: its load signal is a ledger, not a poll, so it is never stale.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.dispatch import Ends, Ledger, RequestSize, make_policy
from app.engine.pace import RetryTimes
from app.engine.request import Request
from app.errors import Overloaded


class DispatchRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Tries the replicas in the order that the dispatch policy gives; refuses at once when all of them are full."""

    # A replica that is busy computing may take longer than Serve's 0.1 s to say how full it is; the order is worth it.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, *, dispatch: Mapping[str, Any]) -> None:
        """Called by Serve once, before any request, with the router's kwargs."""
        self._rng = random.Random()
        self._policy = make_policy(dispatch, self._rng)
        self._calls = Calls()
        self._ends = Ends()
        self._retry_times = RetryTimes()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in order of preference, as ranks of one. Called again when none of them took the request."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [[replica] for replica in replicas.values()]
        context = pending_request.routing_context
        if context.should_backoff and replicas and not self.select_available_replicas(candidate_replicas):
            if not pending_request.future.done():
                pending_request.future.set_exception(self._full(candidate_replicas))
            # Serve looks at the future only when it is given a replica to try.
            return [candidate_replicas]
        context.should_backoff = True
        return [[replicas[replica_id]] for replica_id in self._order(list(replicas), pending_request)]

    def _order(self, replica_ids: list[str], pending_request: PendingRequest) -> list[str]:
        charge = Charge.of(pending_request)
        if charge is None:
            # A control call: any replica will do, and it takes nobody's turn.
            return self._rng.sample(replica_ids, len(replica_ids))
        self._calls.drop(charge)
        loads = self._calls.ledger.loads(replica_ids, now=time.monotonic())
        order = self._policy.decide(loads, charge.size).order
        if order:
            # Booked before it is sent: requests placed in the same moment must see each other.
            self._calls.book(charge, order[0])
        return order

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        # Serve has no hook for "this request went to that replica after all" nor for "it went nowhere".
        charge = Charge.of(pending_request)
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._remove_pending_request_from_indices(pending_request)
            if charge is not None:
                self._calls.drop(charge)
            raise
        if charge is not None:
            self._calls.book(charge, replica.replica_id.unique_id)
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a request that was sent has ended in any way."""
        if self._calls.complete(internal_request_id, replica_id.unique_id):
            self._ends.note(time.monotonic())

    def _full(self, replicas: list[RunningReplica]) -> Overloaded:
        now = time.monotonic()
        num_slots = sum(replica.max_ongoing_requests for replica in replicas)
        return Overloaded(
            f"all {len(replicas)} replicas are full ({num_slots} requests); try again shortly",
            retry_after_s=self._retry_times.next_after(now, ended_per_s=self._ends.per_s(now)),
        )

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas have come or gone."""
        super().update_replicas(replicas)
        self._calls.keep_only({replica.replica_id.unique_id for replica in replicas})


@dataclass(frozen=True, slots=True)
class Charge:
    """What one request adds to the load of its replica.

    All calls made for one HTTP request share Serve's internal id; only our own request id tells them apart.
    """

    internal_request_id: str
    request_id: str
    size: RequestSize

    @classmethod
    def of(cls, pending_request: PendingRequest) -> Charge | None:
        """The charge of the Request among the call's arguments; None for a control call."""
        request = _find_request(pending_request.args)
        if request is None:
            return None
        size = RequestSize(
            num_prompt_tokens=len(request.prompt_token_ids), num_expected_tokens=request.sampling.max_tokens
        )
        return cls(pending_request.metadata.internal_request_id, request.request_id, size)


class Calls:
    """The ledger by Serve's internal ids. One loop, no locks.

    Entries leave when Serve reports the end of the call, when the request was placed nowhere, or with their replica.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._placed: dict[str, dict[str, str]] = {}  # internal id → request id → replica id

    def book(self, charge: Charge, replica_id: str) -> None:
        """Put a request on a replica; it leaves the one it was on."""
        self._placed.setdefault(charge.internal_request_id, {})[charge.request_id] = replica_id
        self.ledger.place(
            charge.request_id,
            replica_id,
            num_prompt_tokens=charge.size.num_prompt_tokens,
            num_expected_tokens=charge.size.num_expected_tokens,
        )

    def drop(self, charge: Charge) -> None:
        """Take a request off the replica it is on, if any."""
        self._end(charge.internal_request_id, charge.request_id)

    def complete(self, internal_request_id: str, replica_id: str) -> bool:
        """Take one request with this internal id off this replica; which one makes no difference to the sums.

        False when there is none.
        """
        for request_id, place in self._placed.get(internal_request_id, {}).items():
            if place == replica_id:
                self._end(internal_request_id, request_id)
                return True
        return False

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget the replicas that are gone, with all they had."""
        everything = [(call, *placed) for call, siblings in self._placed.items() for placed in siblings.items()]
        for internal_request_id, request_id, replica_id in everything:
            if replica_id not in replica_ids:
                self._end(internal_request_id, request_id)
        self.ledger.keep_only(replica_ids)

    def _end(self, internal_request_id: str, request_id: str) -> None:
        siblings = self._placed.get(internal_request_id, {})
        if siblings.pop(request_id, None) is not None:
            self.ledger.end(request_id)
        if not siblings:
            self._placed.pop(internal_request_id, None)


def _find_request(arguments: Iterable[Any]) -> Request | None:
    return next((argument for argument in arguments if isinstance(argument, Request)), None)
