"""How a fleet reaches its replicas: Serve's handle for requests, one socket for each replica for tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from app.engine.request import Request
from app.errors import EngineStopped, Unavailable
from app.fleet import Address, FrameReader, ReplicaLost, connect
from deployments.serve.errors import to_carousel_error


@dataclass(frozen=True, slots=True)
class FramesFrom:
    """The argument that names the one replica to which the router must send a call."""

    replica_id: str


class ServeTransport:
    """`ReplicaTransport` over the handle of one replica deployment."""

    def __init__(self, handle: DeploymentHandle, ingress_id: str) -> None:
        """`ingress_id` is different for each process, also for one that replaces another."""
        self._handle = handle
        self._ingress_id = ingress_id

    async def serve(self, request: Request) -> None:
        """See `ReplicaTransport`. Serve counts the call as ongoing until the request has ended there: it drains and
        scales by that."""
        response = detached_call(self._handle.serve.remote, request, self._ingress_id)
        try:
            await response
        except Exception as error:
            shown = to_carousel_error(error)
            if isinstance(shown, Unavailable | EngineStopped):
                raise ReplicaLost(f"{type(error).__name__}: {error}", reason="call_failed") from error
            raise shown from error
        finally:
            # Cancelling a call that has failed raises its error once more, as Serve's.
            with suppress(Exception):
                response.cancel()

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        """See `ReplicaTransport`. Serve's handle says where the replica listens; the frames do not go through Serve."""
        address = await detached_call(self._handle.frame_address.remote, FramesFrom(replica_id))
        return await connect(Address._make(address), self._ingress_id, reader, heartbeat_s=heartbeat_s)


def detached_call(call: Callable[..., Any], *arguments: object) -> Any:
    """Make a call through a handle that Serve does not take for a part of the HTTP request which is being answered.

    Serve knows a call by the id of the HTTP request that it is made in. Of several calls with one id (`n` choices) its
    router would place the first and forget the others, and it would cancel all of them with the HTTP request: also a
    connection that was opened in it and carries the tokens of others.
    """
    return Context().run(call, *arguments)
