"""Connects a fleet to its replicas. Serve's handle provides their addresses; requests and tokens use sockets."""

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

OVERRIDE = ""  # the key of the scheduler's override in a table; all other keys are names of adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOverride:
    """The strategy and policy to which an admin has switched a model's replicas. None keeps the deployed one."""

    strategy: StrategyConfig | None
    policy: PolicyConfig | None
    user_config: object = None  # the `user_config` under which a replica has applied it; None if not yet

    @property
    def is_empty(self) -> bool:
        """Whether the override changes nothing."""
        return (self.strategy or self.policy) is None

    def applied_to(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return `config` with this override's strategy and policy."""
        given = {"strategy": self.strategy, "policy": self.policy}
        return config.model_copy(update={name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class FramesFrom:
    """The argument of `Replica.frame_address`, which tells the router to which replica it must send the call.

    It also brings the table to replicas that have started later. During an update, processes of the previous version
    read the fields by position, so new fields must be appended, and receivers must expect that they are missing.
    """

    replica_id: str
    switch: None = None  # `switch` and `adapters` are only read by replicas of version 598b9f6
    adapters: Table = field(default_factory=dict)
    table: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipAnswer:
    """A replica's table, scheduler settings and loaded adapters."""

    replica_id: str
    table: Table
    group: str
    scheduler: SchedulerConfig
    loaded: tuple[str, ...]  # digests of adapters
    max_loaded: int


class ServeTransport:
    """Implements `ReplicaTransport` by the handle of a replica deployment."""

    def __init__(self, handle: DeploymentHandle, ingress_id: str) -> None:
        """ingress_id: unique for each process, so that a restarted process has a new one."""
        self._handle = handle
        self._ingress_id = ingress_id
        self.table: Table = {}  # the newest entries that this process knows

    async def wake(self) -> None:
        """See `ReplicaTransport`. A call that waits makes Serve start a replica if there is none."""
        response = detached_call(self._handle.facts.remote)
        try:
            await answer_of(response)
        finally:
            # Cancelling a failed call raises its error again, wrapped by Serve.
            with suppress(Exception):
                response.cancel()

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        """See `ReplicaTransport`."""
        address = await detached_call(self._handle.frame_address.remote, FramesFrom(replica_id, table=self.table))
        return await connect(Address._make(address), self._ingress_id, reader, heartbeat_s=heartbeat_s)


def detached_call(call: Callable[..., Any], *arguments: object) -> Any:
    """Make a call through a handle in an empty context, so that Serve does not see it as part of an HTTP request.

    Serve identifies a call by the id of the HTTP request in whose context it is made. If several calls shared an id
    (`n` choices), Serve's router would place the first and forget the others. Serve would also cancel all of them when
    the HTTP request ends, even one that opens a connection for the tokens of all requests.
    """
    return Context().run(call, *arguments)


async def answer_of(call: Awaitable[Any]) -> Any:
    """Wait for a call to another process and return its result. Raises its error as a CarouselError."""
    try:
        return await call
    except CarouselError as error:
        # The error's traceback refers to frames of Ray that refer to the error. Dropping the traceback breaks the
        # cycle, and `from None` keeps the error from becoming its own cause.
        raise error.with_traceback(None) from None
    except Exception as error:
        raise to_carousel_error(error) from error


def to_carousel_error(error: BaseException) -> CarouselError:
    """Return the CarouselError that another process has raised, or one that stands for an error of Ray or Serve.

    Its message reaches clients, so it must not reveal hosts, paths or classes.
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
