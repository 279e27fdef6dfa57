"""Turns the exceptions of Ray and Serve into CarouselErrors. No other module knows those exceptions."""

from __future__ import annotations

import asyncio

import grpc  # type: ignore[import-untyped]
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException

from app.errors import CarouselError, Failure, Overloaded, Unavailable


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
