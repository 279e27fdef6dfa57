"""Connects a fleet to its replicas. Serve's handle provides the addresses of sockets for requests and tokens."""

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

OVERRIDE = ""  # the table's key for the scheduler override; all other keys are names of adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOverride:
    """The strategy and policy to which an admin has switched a model's replicas. None means the deployed one."""

    strategy: StrategyConfig | None
    policy: PolicyConfig | None
    user_config: object = None  # the `user_config` when a replica applied it; None before that

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
    """The argument of `Replica.frame_address`. It tells the router to which replica the call must be sent.

    It also carries the table to new replicas. During an update, processes of the previous version read the fields by
    position, so new fields must be appended, and receivers must tolerate missing fields.
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
    """Implements `ReplicaTransport` with the handle of a replica deployment."""

    def __init__(self, handle: DeploymentHandle, ingress_id: str) -> None:
        """`ingress_id` must be unique for each process. A restarted process needs a new one."""
        self._handle = handle
        self._ingress_id = ingress_id
        self.table: Table = {}  # the latest entries that this process has received

    async def wake(self) -> None:
        """See `ReplicaTransport`. A waiting call makes Serve start a replica if there is none."""
        response = detached_call(self._handle.facts.remote)
        try:
            await answer_of(response)
        finally:
            # Cancelling a failed call raises its error again, wrapped in an error of Serve.
            with suppress(Exception):
                response.cancel()

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        """See `ReplicaTransport`."""
        address = await detached_call(self._handle.frame_address.remote, FramesFrom(replica_id, table=self.table))
        return await connect(Address._make(address), self._ingress_id, reader, heartbeat_s=heartbeat_s)


def detached_call(call: Callable[..., Any], *arguments: object) -> Any:
    """Make a call through a handle in an empty context, so that Serve does not treat it as part of an HTTP request.

    Serve identifies a call by the id of the HTTP request in its context. If several calls shared an id (`n` choices),
    Serve's router would route only the first call. Serve would also cancel the calls when the HTTP request ends, even a
    call that opens a connection for the tokens of all requests.
    """
    return Context().run(call, *arguments)


async def answer_of(call: Awaitable[Any]) -> Any:
    """Wait for a call to another process, and return its result. Converts its error to a CarouselError."""
    try:
        return await call
    except CarouselError as error:
        # The error's traceback refers to frames of Ray that refer to the error. Removing the traceback breaks this
        # cycle, and `from None` prevents the error from becoming its own cause.
        raise error.with_traceback(None) from None
    except Exception as error:
        raise to_carousel_error(error) from error


def to_carousel_error(error: BaseException) -> CarouselError:
    """Return the CarouselError that another process has raised, or one that represents an error of Ray or Serve.

    Clients see its message, so it must not reveal hosts, paths or classes.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    if isinstance(error, CarouselError):
        return error
    if isinstance(error, BackPressureError):
        return Overloaded("all replicas are full", retry_after_s=error.retry_after_s or 1.0)
    if isinstance(error, RayActorError | RayServeException | TaskCancelledError | grpc.aio.AioRpcError):
        return Unavailable("the replica that was serving this request was lost; send the request again")
    if isinstance(error, asyncio.TimeoutError):
        return Unavailable("no replica responded in time; try again")
    if isinstance(error, RayError):
        return Unavailable("the cluster failed to deliver this request; send it again")
    return Failure("the replica failed to process this request; see its log for the reason")
