"""The batches deployment: a process without torch that stores files and batches, and sends items to replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.serve.handle import DeploymentHandle

from app.api.auth.limits import SharedPools
from app.config import ApplicationConfig
from app.errors import CarouselError, Failure, Unavailable, traceback_of
from app.jobs.executors import FleetExecution
from app.jobs.local_service import LocalBatchService
from deployments.serve.following import Feed, FeedChange, FeedItem
from deployments.serve.metrics import IngressReport
from deployments.serve.sender import Sender

logger = logging.getLogger(__name__)


class Batches(Sender):
    """The only writer of the batches folder. A second process waits until the first one has released the folder."""

    def __init__(
        self, config: ApplicationConfig, paths: Mapping[str, str], handles: Mapping[str, DeploymentHandle]
    ) -> None:
        # Batch items can wait, so this process requests a share of a key's limits only when it needs one.
        super().__init__(config, paths, handles, pools=SharedPools(first_share=0.0, shares_budgets=True))
        self._feeds: dict[str, Feed] = {}
        # Serve calls the constructor on the event loop, so a task can be started here.
        self._opening = asyncio.create_task(self._open())

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `BatchService`. Raises a Failure without details for any error except CarouselErrors."""
        service = await self._opened()
        try:
            return await getattr(service, method)(*arguments)
        except CarouselError:
            raise
        except Exception as error:  # Serve would log the message, which may quote a request
            logger.error("`%s` of the batches process failed: %s", method, traceback_of(error))
            raise Failure("the batches process failed to handle this request; see its log for the reason") from None

    async def _opened(self) -> LocalBatchService:
        opening_timeout_s = 10.0
        await asyncio.wait({self._opening}, timeout=opening_timeout_s)
        if not self._opening.done():
            raise Unavailable("the batches folder is being opened, or another process is still using it; try again")
        return self._opening.result()

    async def feed(self, stream_id: str) -> AsyncGenerator[list[FeedItem], None]:
        """Stream the stored answers that an ingress is reading. `change_feed` adds and removes its readers."""
        feed = self._feeds[stream_id] = Feed(await self._opened())
        try:
            async with aclosing(feed.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            del self._feeds[stream_id]

    async def change_feed(self, stream_id: str, change: FeedChange) -> None:
        """Update a stream's readers and their consumed bytes. Raises Unavailable if the stream has ended."""
        feed = self._feeds.get(stream_id)
        if feed is None:
            raise Unavailable("this stream of answers has ended; open a new one")
        feed.change(change)

    async def metrics_report(self) -> IngressReport:
        """Return this process's metrics, including `LocalBatchService.counts` once the folder is open."""
        is_open = self._opening.done() and not self._opening.exception()
        counts = await self._opening.result().counts() if is_open else {}
        return replace(await super().metrics_report(), batches=counts)

    def check_health(self) -> None:
        """Raise if the folder cannot be opened or the keys file is no longer read. Serve then replaces the process."""
        super().check_health()
        if self._opening.done():
            self._opening.result().check_health()

    async def _open(self) -> LocalBatchService:
        """Wait for a replica of every model and for the folder, then resume unfinished batches."""
        config = self._config
        assert config.batches is not None, "this process is deployed only if batches are configured"
        handler = await self.make_handler()
        execution = FleetExecution(handler.handle_item, max_in_flight=config.max_items_in_flight)
        service = LocalBatchService(Path(config.batches.path), config.batches, execution, handler.keep)
        service.start()
        self.exchange_usage(service)
        await service.opened()
        return service
