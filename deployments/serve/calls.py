"""How a fleet reaches its replicas: Serve's handle for control, one socket for each replica for tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from app.engine.request import Request
from app.errors import EngineStopped, Unavailable
from app.fleet import Address, Frame, Lost, frames_from
from deployments.serve.errors import to_carousel_error


@dataclass(frozen=True, slots=True)
class FramesFrom:
    """The argument by which the router knows which replica a call for frames is meant for."""

    replica_id: str


class ServeCalls:
    """`Calls` over the handle of one replica deployment."""

    def __init__(self, handle: DeploymentHandle, ingress_id: str) -> None:
        """`ingress_id` tells this process from other ingresses, and from one that was here before it."""
        self._handle = handle
        self._ingress_id = ingress_id

    async def serve(self, request: Request) -> None:
        """See `Calls`. Serve counts the call as ongoing until the request has ended: it drains and scales by that."""
        response = apart(self._handle.serve.remote, request, self._ingress_id)
        try:
            await response
        except Exception as error:
            shown = to_carousel_error(error)
            if isinstance(shown, Unavailable | EngineStopped):
                raise Lost(f"{type(error).__name__}: {error}", reason="call_failed") from error
            raise shown from error
        finally:
            # Cancelling a call that has failed raises its error once more, as Serve's.
            with suppress(Exception):
                response.cancel()

    async def frames(self, replica_id: str, *, heartbeat_s: float) -> AsyncIterator[Frame]:
        """See `Calls`. Serve's handle tells where the replica listens; the frames come past it."""
        address = await apart(self._handle.frame_address.remote, FramesFrom(replica_id))
        frames = frames_from(Address._make(address), self._ingress_id, heartbeat_s=heartbeat_s)
        async with aclosing(frames):
            async for frame in frames:
                yield frame


def apart(call: Callable[..., Any], *arguments: object) -> Any:
    """Make a call through a handle that Serve does not take for a part of the HTTP request which is being answered.

    Serve knows a call by the id of the HTTP request that it is made in. Of several calls with one id (`n` choices) its
    router would place the first and forget the others, and it would cancel all of them with the HTTP request: also a
    line that was opened in it and carries the tokens of others.
    """
    return Context().run(call, *arguments)
