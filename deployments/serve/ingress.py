"""The ingress deployment: serves `app.api` over handles to the replicas. Its process never imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from app.api import build_app
from app.api.auth.limits import SharedPools
from app.api.endpoints.cancellation import RunningCalls
from app.batches import AnswerPart, BatchService, NewResponse
from app.config import ApplicationConfig
from app.errors import BodyTooLarge, CarouselError
from deployments.ray_internals import (
    accept_odd_headers,
    http_host,
    leave_request_ids_alone,
    max_call_bytes,
    use_own_protocol,
)
from deployments.serve.following import FeedItem, Following, WantedAnswer
from deployments.serve.metrics import answers_of, this_deployment
from deployments.serve.process import collect_in_pieces, collect_later, freeze_loaded
from deployments.serve.ray_metrics import RayMetrics, families_of_requests
from deployments.serve.sender import Sender
from deployments.serve.settings import check_exposure, max_ingress_requests
from deployments.serve.shared_look import SharedQuery
from deployments.serve.transport import answer_of, detached_call, to_carousel_error

_ROOM_FOR_THE_REST = 64 * 1024  # bytes reserved in a call for everything except the request's body
READY_CACHE_S = 1.0  # how long a readiness result is reused, because probes need no key and anyone can send many


class Ingress(Sender):
    """An HTTP process. Ready once a replica of every model has sent its model info."""

    def __init__(
        self,
        config: ApplicationConfig,
        paths: Mapping[str, str],
        handles: Mapping[str, DeploymentHandle],
        batches: DeploymentHandle | None = None,
    ) -> None:
        """See `Sender`. `batches` is the deployment that stores files and batches, or None if it is not configured."""
        collect_later()
        pools = SharedPools(
            max_ingress_requests(config),
            first_share=1 / config.ingress.num_replicas,
            shares_budgets=batches is not None,
        )
        super().__init__(config, paths, handles, batches, pools)
        accept_odd_headers()
        leave_request_ids_alone()
        use_own_protocol()
        # Checked again here, because the launcher is not used on a cluster.
        check_exposure(http_host(), config.api)
        self._service = None if batches is None else cast(BatchService, _RemoteService(batches))
        self._fleets = {name: client.fleet for name, client in self._clients.items()}
        self._running = RunningCalls(self._fleets)
        self._is_ready = SharedQuery(self._look_at_replicas, holds_s=READY_CACHE_S)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application once a replica of every model is running. Called by Serve after construction."""
        handler = await self.make_handler()
        service = self._service
        if service is not None:
            self.exchange_usage(service)
        freeze_loaded()
        collect_in_pieces()
        to_ray = RayMetrics(lambda: families_of_requests(self._metrics.requests.snapshot()))
        self._handing_over = asyncio.create_task(to_ray.export_forever())
        return build_app(
            handler,
            self._is_ready,
            expose=self._metrics.expose,
            batches=service,
            collect=self.collect_admin_reports,
            wanted_replicas=self._metrics.wanted_replicas,
            fleets=self._fleets,
            switches=self._gossip,
            adapters=self._gossip,
            running=self._running,
            cancel=self._cancel,
        )

    async def cancel_request(self, request_id: str, account: str | None) -> bool:
        """Cancel a request. Returns whether this process was running it. Also called by other ingresses."""
        return await self._running.cancel(request_id, account)

    async def _cancel(self, request_id: str, account: str | None) -> bool:
        if await self.cancel_request(request_id, account):
            return True
        return any((await answers_of(this_deployment(), "cancel_request", request_id, account)).reports)

    async def _look_at_replicas(self) -> bool:
        """Return whether every model has a responsive replica. Models that may sleep always count as ready."""
        # A call to a sleeping model would wake it up.
        awake = [self._clients[model.name] for model in self._config.models if not model.replicas.may_sleep]
        return all(await asyncio.gather(*(client.answers() for client in awake)))


class _RemoteService:
    """Implements `BatchService` with calls to the batches deployment.

    Calls are detached from HTTP requests, because a client that disconnects must not cancel work that is half done or
    that other clients need.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._following = Following(self._open_feed, partial(self._detached, "change_feed"))

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._detached, "call", method)

    async def create_response(self, new: NewResponse) -> None:
        """See `BatchService`. Raises BodyTooLarge if the body does not fit in a Serve call."""
        limit = max_call_bytes() - _ROOM_FOR_THE_REST
        if len(new.body) > limit:
            raise BodyTooLarge(
                f"the body has {len(new.body):,} bytes; the limit for stored responses is {limit:,}, unless the "
                f"cluster is started with a higher RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
            )
        await self._detached("call", "create_response", new)

    def follow_response(
        self, owner: str, response_id: str, offset: int = 0, *, waits: bool = True, is_continued: bool = False
    ) -> AsyncGenerator[AnswerPart, None]:
        """See `BatchService`."""
        return self._following.follow(WantedAnswer(owner, response_id, offset, waits, is_continued))

    async def _open_feed(self, stream_id: str) -> AsyncGenerator[list[FeedItem], None]:
        messages = detached_call(
            self._handle.options(stream=True, response_serialization="pickle").feed.remote, stream_id
        )
        try:
            async for message in messages:
                yield message
        except CarouselError:
            raise  # `raise error from error` would create a reference cycle
        except Exception as error:
            raise to_carousel_error(error) from error

    async def _detached(self, method: str, *arguments: object) -> Any:
        return await answer_of(detached_call(getattr(self._handle, method).remote, *arguments))
