"""How a fleet reaches its replicas: Serve's handle says where they are; requests and tokens go over sockets."""

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

OVERRIDE = ""  # the name of the scheduler's override in a table; all others are names of adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOverride:
    """The strategy and policy to which an admin has switched a model's replicas; None: as deployed."""

    strategy: StrategyConfig | None
    policy: PolicyConfig | None
    user_config: object = None  # under which a replica has taken it; None: none has yet

    @property
    def is_empty(self) -> bool:
        """Whether all is as deployed."""
        return (self.strategy or self.policy) is None

    def applied_to(self, config: SchedulerConfig) -> SchedulerConfig:
        """The settings with these in their place."""
        given = {"strategy": self.strategy, "policy": self.policy}
        return config.model_copy(update={name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class FramesFrom:
    """The argument that names the one replica to which the router must send a call.

    A replica that was started later learns from the table. While an update of code goes on, ingresses and replicas of
    the version before take part, and read the fields by their places: new ones go to the end and may be missing.
    """

    replica_id: str
    switch: None = None  # of 598b9f6, as the next one: nothing for a replica that knows tables
    adapters: Table = field(default_factory=dict)
    table: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipAnswer:
    """What one replica knows, computes by, and has loaded."""

    replica_id: str
    table: Table
    group: str
    scheduler: SchedulerConfig
    loaded: tuple[str, ...]  # digests of adapters
    max_loaded: int


class ServeTransport:
    """`ReplicaTransport` over the handle of one replica deployment."""

    def __init__(self, handle: DeploymentHandle, ingress_id: str) -> None:
        """`ingress_id` is different for each process, also for one that replaces another."""
        self._handle = handle
        self._ingress_id = ingress_id
        self.table: Table = {}  # as far as this process knows

    async def wake(self) -> None:
        """See `ReplicaTransport`. Serve starts a replica of a model that sleeps when a call waits for one."""
        response = detached_call(self._handle.facts.remote)
        try:
            await answer_of(response)
        finally:
            # Cancelling a call that has failed raises its error once more, as Serve's.
            with suppress(Exception):
                response.cancel()

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        """See `ReplicaTransport`."""
        address = await detached_call(self._handle.frame_address.remote, FramesFrom(replica_id, table=self.table))
        return await connect(Address._make(address), self._ingress_id, reader, heartbeat_s=heartbeat_s)


def detached_call(call: Callable[..., Any], *arguments: object) -> Any:
    """Make a call through a handle that Serve does not take for a part of the HTTP request which is being answered.

    Serve knows a call by the id of the HTTP request that it is made in. Of several calls with one id (`n` choices) its
    router would place the first and forget the others, and it would cancel all of them with the HTTP request: also a
    connection that was opened in it and carries the tokens of others.
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
    """The CarouselError that the other process raised, or one for the exception of Ray or Serve.

    Messages name no host, path or class of ours: they reach clients.
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
