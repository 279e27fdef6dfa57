"""Batches on engines of their own, beside the replicas: a pool of engines for each model that a batch's items name.

The request handler checks and tokenizes an item; then it is computed as the items of bulk runs are. Tokens of items
that have not ended are kept, so that a later run continues after them. No Ray here: the pool comes from `deployments`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from app.api import RequestHandler
from app.api.prepared_request import PreparedRequest
from app.api.schemas.requests import QueuedRequest
from app.disk import write_atomically
from app.errors import CarouselError, InvalidRequest
from app.jobs.batch_runner import BatchWork, Execution
from app.jobs.executors import OwnerSlots
from app.jobs.items import GENERATION_URLS, seed_of
from app.jobs.job import Answered, InvalidItem, Item, ItemResult
from app.jobs.outputs import BatchFormat
from app.jobs.preparation import PreparedItem, check_fits_engines, prepared, response_of
from app.jobs.results import ItemSet, ResultStore
from app.jobs.runner import Executor, JobRun

logger = logging.getLogger(__name__)

# Two batches side by side end no sooner than one after the other, and need twice the engines.
MAX_AT_ONCE = 1
POOL_ATTEMPTS = 3  # one after the other, and no item has ended by them
POOL_PAUSE_S = 5.0
_MODELS = "models.json"  # in a batch's store of results: the models that its partial tokens are of

# A pool for the model of this name, which reports to the run and continues after the tokens in the store.
MakePool = Callable[[str, JobRun[PreparedItem], ResultStore], Executor[PreparedItem]]


class EngineExecution(Execution):
    """`Execution` by pools of engines that are started for a batch and end with it."""

    endpoints: Sequence[str] | None = GENERATION_URLS

    def __init__(
        self,
        handler: RequestHandler,
        make_pool: MakePool,
        *,
        weights: Mapping[str, Any],
        max_at_once: int = MAX_AT_ONCE,
    ) -> None:
        """`handler` checks and tokenizes items. At most `max_at_once` batches have engines at the same time;
        owners take turns.

        `weights` describe what the models compute with, by their names: tokens of one are not continued by another.
        """
        self._handler = handler
        self._make_pool = make_pool
        self._weights = dict(weights)
        self._places = OwnerSlots(max_at_once)
        self._running: dict[str, BatchWork] = {}  # by the batch's id

    def num_in_flight(self, owner: str) -> int:
        """All items of batches that have engines."""
        return sum(
            work.results.num_items - len(work.results.ended)
            for work in self._running.values()
            if work.job.owner == owner
        )

    async def run(self, work: BatchWork) -> None:
        owner = work.job.owner
        await self._places.acquire(owner)
        self._running[work.job.id] = work
        try:
            await asyncio.to_thread(self._check_weights, work.results)
            while (model := await self._next_model(work)) is not None:
                await self._run_model(work, model)
        finally:
            del self._running[work.job.id]
            self._places.release(owner)

    def _check_weights(self, results: ResultStore) -> None:
        """Drop partial tokens that other weights have made: the service has got another model since. Raises OSError."""
        path, content = results.folder / _MODELS, json.dumps(self._weights, sort_keys=True).encode()
        if not path.exists() or path.read_bytes() != content:
            results.partial.clear()
            write_atomically(path, content)

    async def _next_model(self, work: BatchWork) -> str | None:
        """The model of the first item that has not ended and can run. The items before it end with their refusals."""
        async with aclosing(work.pieces()) as pieces:
            async for piece in pieces:
                for item in piece:
                    call = await self._call(work, item)
                    if isinstance(call, PreparedRequest):
                        return call.model.name
                    work.on_results(work.results.append([BatchFormat(work.job.id).answered(item, call)]))
        return None

    async def _run_model(self, work: BatchWork, model: str) -> None:
        """Return when every item of one model has ended."""
        num_fruitless = 0
        while num_fruitless < POOL_ATTEMPTS:
            num_before = len(work.results.ended)
            try:
                await self._run_pool(work, model)
                return
            except CarouselError as error:
                logger.warning("batch %s: the engines of %s have failed: %s", work.job.id, model, error.message)
            num_fruitless = num_fruitless + 1 if len(work.results.ended) == num_before else 0
            await asyncio.sleep(num_fruitless * POOL_PAUSE_S)
        await self._give_up(work, model)

    async def _run_pool(self, work: BatchWork, model: str) -> None:
        """Raises what the pool raises, for which another pool may be tried."""
        form = BatchFormat(work.job.id, partial(response_of, work.job.endpoint, model))
        run = JobRun[PreparedItem](work.results, form, on_results=work.on_results, on_tokens=work.on_tokens)
        others = ItemSet(work.results.num_items)
        logger.info("batch %s: engines of %s begin", work.job.id, model)

        async def source() -> AsyncGenerator[list[PreparedItem | ItemResult], None]:
            async with aclosing(work.pieces()) as pieces:
                async for piece in pieces:
                    own: list[Item] = []
                    for item in piece:
                        if self._is_of_another(item, model):
                            others.add(item.number)
                        else:
                            own.append(item)
                    calls = [await self._call(work, item) for item in own]
                    yield [
                        prepared(item, call) if isinstance(call, PreparedRequest) else form.answered(item, call)
                        for item, call in zip(own, calls, strict=True)
                    ]

        await run.run(self._make_pool(model, run, work.results), source, left_out=others)

    def _is_of_another(self, item: Item, model: str) -> bool:
        """Whether an item names another model of the service."""
        name = item.body.get("model")
        named = self._handler.names.models.get(name) if isinstance(name, str) else None
        return named is not None and named.name != model

    async def _call(self, work: BatchWork, item: Item) -> PreparedRequest | Answered:
        body = dict(item.body)
        if body.get("seed") is None:  # of the batch's own: the same item in another batch is drawn anew
            body["seed"] = seed_of(f"{work.job.id}-{item.number}")
        return await self._handler.prepare_item(work.job.owner, item.url, body, _check)

    async def _give_up(self, work: BatchWork, model: str) -> None:
        """End the items that engines of a model should have computed."""
        form = BatchFormat(work.job.id)
        reason = f"the engines for this line have failed {POOL_ATTEMPTS} times; the server's log has the reason"
        async with aclosing(work.pieces()) as pieces:
            async for piece in pieces:
                for item in piece:
                    if self._is_of_another(item, model):
                        continue
                    call = await self._call(work, item)
                    invalid = InvalidItem(number=item.number, id=item.id, reason=reason, code="job_failed")
                    result = form.invalid(invalid) if isinstance(call, PreparedRequest) else form.answered(item, call)
                    work.on_results(work.results.append([result]))


def _check(body: QueuedRequest) -> None:
    """Raise InvalidRequest for what engines cannot do, in words for a client that does not know of bulk runs."""
    try:
        check_fits_engines(body)
    except InvalidRequest as error:
        raise InvalidRequest(f"this server's batches run as bulk jobs: {error.message}", param=error.param) from None
