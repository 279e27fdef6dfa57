"""Connects a fleet to its replicas: Serve's handle returns their addresses; requests and tokens use sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from app.config import PolicyConfig, SchedulerConfig, StrategyConfig
from app.errors import CarouselError, Failure, Overloaded, Unavailable
from app.fleet import Address, FrameReader, Table, connect

OVERRIDE = ""  # the name of the scheduler's override in a table; every other name is an adapter's


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOverride:
    """The strategy and the policy to which an admin has switched a model's replicas; None: as deployed."""

    strategy: StrategyConfig | None
    policy: PolicyConfig | None
    user_config: object = None  # the `user_config` of the replica that applied the override; None: not applied yet

    @property
    def is_empty(self) -> bool:
        """Whether both strategy and policy are as deployed."""
        return (self.strategy or self.policy) is None

    def applied_to(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return `config` with the strategy and the policy of this override."""
        given = {"strategy": self.strategy, "policy": self.policy}
        return config.model_copy(update={name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class FramesFrom:
    """The argument of `Replica.frame_address`, which names the replica to which the router must send the call.

    A replica that was started later learns the table. During an update of the code, ingresses and replicas of the
    previous version read the fields by position, so new fields go to the end, and a receiver may not find them.
    """

    replica_id: str
    switch: None = None  # `switch` and `adapters` are fields of version 598b9f6; a replica with tables ignores them
    adapters: Table = field(default_factory=dict)
    table: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipAnswer:
    """One replica's table, scheduler settings and loaded adapters."""

    replica_id: str
    table: Table
    group: str
    scheduler: SchedulerConfig
    loaded: tuple[str, ...]  # digests of adapters
    max_loaded: int


class ServeTransport:
    """`ReplicaTransport` over the handle of one replica deployment."""

    def __init__(self, handle: DeploymentHandle, ingress_id: str) -> None:
        """`ingress_id` is unique for each process: a process that replaces another has a new id."""
        self._handle = handle
        self._ingress_id = ingress_id
        self.table: Table = {}  # the latest entries that this process knows

    async def wake(self) -> None:
        """See `ReplicaTransport`. A waiting call makes Serve start a replica of a model that has none."""
        response = detached_call(self._handle.facts.remote)
        try:
            await answer_of(response)
        finally:
            # Cancelling a failed call raises the error of the call again, in Serve's form.
            with suppress(Exception):
                response.cancel()

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        """See `ReplicaTransport`."""
        address = await detached_call(self._handle.frame_address.remote, FramesFrom(replica_id, table=self.table))
        return await connect(Address._make(address), self._ingress_id, reader, heartbeat_s=heartbeat_s)


def detached_call(call: Callable[..., Any], *arguments: object) -> Any:
    """Make a call through a handle, in an empty context: Serve must not count the call as part of an HTTP request.

    Serve identifies a call by the id of the HTTP request in whose context the call is made. If several calls had one
    id (`n` choices), Serve's router would place the first call and forget the other calls. Serve would also cancel the
    calls when the HTTP request ends, including the call that opens a connection for the tokens of all requests.
    """
    return Context().run(call, *arguments)


async def answer_of(call: Awaitable[Any]) -> Any:
    """Return the answer of a call to another process. Raises its error as `to_carousel_error` returns it."""
    try:
        return await call
    except CarouselError as error:
        # Frames of Ray's keep the error of the other process, in whose traceback they are. Without its traceback the
        # error is in no reference cycle, and it is not its own cause.
        raise error.with_traceback(None) from None
    except Exception as error:
        raise to_carousel_error(error) from error


def to_carousel_error(error: BaseException) -> CarouselError:
    """Return the CarouselError that the other process raised, or a CarouselError for an exception of Ray or Serve.

    The messages reach clients, so they name no host, path or class.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    if isinstance(error, CarouselError):
        return error
    if isinstance(error, BackPressureError):
        return Overloaded("all replicas are full", retry_after_s=error.retry_after_s or 1.0)
    if isinstance(error, RayActorError | RayServeException | TaskCancelledError | grpc.aio.AioRpcError):
        return Unavailable("the replica that had this request is gone; send the request again")
    if isinstance(error, asyncio.TimeoutError):
        return Unavailable("no replica answered in time")
    if isinstance(error, RayError):
        return Unavailable("the cluster could not carry this request; send it again")
    return Failure("the replica failed on this request; its log says why")
