"""The input as a stream of prepared rows. Ray Data reads and tokenizes the rows in separate processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy
import ray
from ray.exceptions import RayError

from app.api import RequestHandler, ServedModel
from app.api.endpoints.table import BULK_URLS
from app.api.output.readouts import ReadoutWriter
from app.batches import ItemResponse
from app.config import ApiConfig, ServedModelConfig
from app.engine.request import ModelInfo, Request, TokenDelta
from app.jobs.input_files import InputPiece, InputRows, read_piece
from app.jobs.items import RowSettings, item_of
from app.jobs.job import InvalidItem, Item
from app.jobs.results import ItemSet
from app.text import Tokenizer
from deployments.bulk.engine_worker import PreparedItem
from deployments.serve.settings import pooling_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The settings for preparing rows. Sent to every process that prepares them."""

    served: ServedModelConfig
    tokenizer_path: str
    model_info: Any  # Ray reference to the `ModelInfo` of an engine, which may still be loading
    rows: RowSettings


def prepared_items(
    found: InputRows, ended: ItemSet, how: Preparation
) -> Generator[list[PreparedItem | InvalidItem], None, None]:
    """Yield the items that are not in `ended`, in batches and roughly in order. Items that cannot run are InvalidItems.

    An item may be yielded twice if a process dies. Items are only missing if an input file has changed.
    """
    open_pieces = [piece for piece in found.pieces if not ended.has_all(piece.first_number, piece.num_rows)]
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # `ray.data.range` would start tasks that reserve CPUs, and the engines may have reserved all CPUs.
    items = [{"number": number} for number in range(len(open_pieces))]
    numbers = ray.data.from_items(items, override_num_blocks=len(items))
    prepared = numbers.map_batches(
        ItemPreparer,
        fn_constructor_args=(how, open_pieces, ended.to_bytes()),
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=max_preparers()),
        num_cpus=0,  # no reservation, because the engines may have reserved all CPUs
    )
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the logged errors are also raised here
    for batch in prepared.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=1):
        yield list(batch["prepared"])


def max_preparers() -> int:
    """Return the maximum number of processes that prepare rows."""
    cpus_per_preparer = 8  # of the cluster's CPUs; one process prepares a few thousand rows per second
    return 1 + int(ray.cluster_resources().get("CPU", 1)) // cpus_per_preparer


class ItemPreparer:
    """Reads pieces of the input and tokenizes their rows. Runs in a process of Ray Data's actor pool."""

    def __init__(self, how: Preparation, pieces: Sequence[InputPiece], ended: bytes) -> None:
        self._how = how
        self._pieces = pieces
        self._ended = ItemSet.from_bytes(ended)
        self._handler: RequestHandler | None = None  # created on first use, because engines may still be loading

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            handler = self._handler = self._handler or self._load()
        except RayError:  # the engine has died; the next pass uses another engine's model info
            return
        items_in_a_piece = 128
        for number in batch["number"]:
            rows = (row for row in read_piece(self._pieces[number]) if row.number not in self._ended)
            while some := [item_of(row, self._how.rows, BULK_URLS) for row in islice(rows, items_in_a_piece)]:
                prepared = asyncio.run(_prepared(some, handler))
                column = numpy.empty(len(prepared), dtype=object)
                column[:] = prepared
                yield {"prepared": column}

    def _load(self) -> RequestHandler:
        """Create the handler. Raises RayError if the engine that provides the model info has died."""
        served = self._how.served
        tokenizer = Tokenizer.load(self._how.tokenizer_path, served.engine.model.revision)
        model_info: ModelInfo = ray.get(self._how.model_info)
        model = ServedModel(
            name=served.name,
            tokenizer=tokenizer,
            model_info=model_info,
            generate=_elsewhere,
            created=0,
            pooling=pooling_of(served, model_info),
        )
        return RequestHandler([model], ApiConfig())


async def _prepared(items: Iterable[Item | InvalidItem], handler: RequestHandler) -> list[PreparedItem | InvalidItem]:
    return [item if isinstance(item, InvalidItem) else await prepare_row(item, handler) for item in items]


def _elsewhere(request: Request) -> AsyncIterator[TokenDelta]:
    raise AssertionError("this process only prepares rows and has no engine")


async def prepare_row(item: Item, handler: RequestHandler) -> PreparedItem | InvalidItem:
    """Validate and tokenize an item, like the same request over HTTP. An InvalidItem's reason is the API's error."""
    prepared = await handler.prepare_bulk_item(item.url, item.body)
    if isinstance(prepared, ItemResponse):
        return InvalidItem(number=item.number, id=item.id, reason=str(prepared.body["error"]["message"])[:1000])
    writer, call = prepared
    requests = [
        replace(request, request_id=f"item-{item.number}" + (f"-{index}" if index else ""))
        for index, request in enumerate(call.requests)
    ]
    return PreparedItem(
        number=item.number,
        id=item.id,
        requests=tuple(requests),
        stop=call.stop,
        stop_tokens=call.stop_tokens,
        skip_special_tokens=call.skip_special_tokens,
        include_stop=call.include_stop,
        text_of_numbers=partial(writer.text, call.model.model_info) if isinstance(writer, ReadoutWriter) else None,
    )
