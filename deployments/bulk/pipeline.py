"""The input as a stream of prepared rows. Ray Data reads and tokenizes the rows in processes beside the engines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy
import ray
from ray.exceptions import RayError

from app.api import RequestHandler, ServedModel
from app.api.endpoints.classification import class_of
from app.api.endpoints.decisions import answer_to
from app.api.schemas.decisions import AnyQuestion, DecisionsRequest
from app.api.schemas.requests import ChatRequest, ClassifyRequest, CompletionRequest, GenerationRequest, QueuedRequest
from app.batches import ItemResponse
from app.config import ApiConfig
from app.engine.request import Request, TokenDelta
from app.errors import InvalidRequest
from app.jobs.input_files import InputFile, InputPiece, InputRows, read_piece
from app.jobs.items import ENGINE_URLS, RowSettings, item_of
from app.jobs.job import InvalidItem, Item
from app.jobs.results import ItemSet
from app.text import Tokenizer
from deployments.bulk.engine_worker import PreparedItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The settings that turn rows into requests, sent to every process that prepares rows."""

    tokenizer_path: str
    revision: str | None
    model_name: str
    model_info: Any  # Ray reference to the `ModelInfo` of an engine that may still be loading
    rows: RowSettings


def prepared_items(
    found: InputRows, ended: ItemSet, how: Preparation
) -> Generator[list[PreparedItem | InvalidItem], None, None]:
    """Yield batches of the items that are not in `ended`, roughly in order. An item that cannot run is an InvalidItem.

    An item may be yielded twice if a process died. No item is left out unless an input file has changed.
    """
    open_pieces = [piece for piece in found.pieces if not ended.has_all(piece.first_number, piece.num_rows)]
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    pieces = ray.data.from_items([_columns(piece) for piece in open_pieces], override_num_blocks=len(open_pieces))
    prepared = pieces.map_batches(
        ItemPreparer,
        fn_constructor_args=(how, ended.to_bytes()),
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=max_preparers()),
        num_cpus=0,  # reserves nothing: engines that fill the cluster would otherwise block their own input
    )
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # Ray Data raises its errors here as well
    for batch in prepared.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=1):
        yield list(batch["prepared"])


def max_preparers() -> int:
    """Return the largest number of processes that tokenize."""
    cpus_per_preparer = 8  # CPUs of the cluster; one process tokenizes some thousand rows a second
    return 1 + int(ray.cluster_resources().get("CPU", 1)) // cpus_per_preparer


class ItemPreparer:
    """Reads pieces of the input and tokenizes their rows, in one process of Ray Data's actor pool."""

    def __init__(self, how: Preparation, ended: bytes) -> None:
        self._how = how
        self._ended = ItemSet.from_bytes(ended)
        self._handler: RequestHandler | None = None  # created on first use: this process starts beside the engines

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            handler = self._handler = self._handler or self._load()
        except RayError:  # the engine that loads the model info died; the next pass asks another engine
            return
        items_in_a_piece = 128
        for piece in _pieces(batch):
            rows = (row for row in read_piece(piece) if row.number not in self._ended)
            while some := [item_of(row, self._how.rows) for row in islice(rows, items_in_a_piece)]:
                prepared = asyncio.run(_prepared(some, handler))
                column = numpy.empty(len(prepared), dtype=object)
                column[:] = prepared
                yield {"prepared": column}

    def _load(self) -> RequestHandler:
        """Create the handler. Raises RayError if the engine that loads the model info has died."""
        tokenizer = Tokenizer.load(self._how.tokenizer_path, self._how.revision)  # meanwhile the engine still loads
        model = ServedModel(
            name=self._how.model_name,
            tokenizer=tokenizer,
            model_info=ray.get(self._how.model_info),
            generate=_elsewhere,
            created=0,
        )
        return RequestHandler([model], ApiConfig())


async def _prepared(items: Iterable[Item | InvalidItem], handler: RequestHandler) -> list[PreparedItem | InvalidItem]:
    return [item if isinstance(item, InvalidItem) else await prepare_row(item, handler) for item in items]


def _columns(piece: InputPiece) -> dict[str, Any]:
    columns = asdict(piece)
    file: dict[str, Any] = columns.pop("file")
    return columns | file


def _pieces(batch: dict[str, Any]) -> Iterator[InputPiece]:
    for values in zip(*batch.values(), strict=True):
        columns: dict[str, Any] = dict(zip(batch, values, strict=True))
        file = InputFile(**{field.name: str(columns.pop(field.name)) for field in fields(InputFile)})
        yield InputPiece(file=file, **{name: int(value) for name, value in columns.items()})


def _elsewhere(request: Request) -> AsyncIterator[TokenDelta]:
    raise AssertionError("this process only prepares rows; the engines compute them")


# Items as engine requests. An item has the meaning of the equal request over HTTP.


async def prepare_row(item: Item, handler: RequestHandler) -> PreparedItem | InvalidItem:
    """Check and tokenize an item of a bulk run. The `reason` of an InvalidItem is the API's error message."""
    prepared = await handler.prepare_bulk_item(item.url, item.body, check_fits_engines)
    if isinstance(prepared, ItemResponse):
        return InvalidItem(number=item.number, id=item.id, reason=str(prepared.body["error"]["message"])[:1000])
    body, call = prepared
    [request] = call.requests
    return PreparedItem(
        number=item.number,
        id=item.id,
        request=replace(request, request_id=f"item-{item.number}"),
        stop=call.stop,
        stop_tokens=call.stop_tokens,
        skip_special_tokens=call.skip_special_tokens,
        include_stop=call.include_stop,
        text_of_numbers=_text_of_numbers(body, call.model),
    )


def _text_of_numbers(body: QueuedRequest, model: ServedModel) -> Callable[[Sequence[float]], str] | None:
    """Return a picklable function that makes the item's text from numbers, or None if the text is generated."""
    if isinstance(body, DecisionsRequest):
        return partial(_decision, body.questions[0])
    return partial(_class, model.model_info.labels) if isinstance(body, ClassifyRequest) else None


def _class(labels: Sequence[str], scores: Sequence[float]) -> str:
    return json.dumps(class_of(scores, labels), ensure_ascii=False)


def _decision(question: AnyQuestion, logprobs: Sequence[float]) -> str:
    return json.dumps(answer_to(question, logprobs), ensure_ascii=False)


def check_fits_engines(body: QueuedRequest) -> None:
    """Raise InvalidRequest for a request that only the API can answer: an engine produces one text for each item."""
    if isinstance(body, DecisionsRequest):
        if len(body.questions) != 1:
            message = f"questions holds {len(body.questions):,}; an item has one question: write an item for each"
            raise InvalidRequest(message, param="questions")
        return
    if isinstance(body, ClassifyRequest):
        if len(body.input) != 1:
            message = f"input holds {len(body.input):,} texts; an item has one text: write an item for each text"
            raise InvalidRequest(message, param="input")
        return
    if not isinstance(body, GenerationRequest):
        raise InvalidRequest(f"bulk runs answer {', '.join(ENGINE_URLS)} only")
    if body.n != 1:
        raise InvalidRequest(f"n is {body.n:,}; an item has one answer: write an item for each answer", param="n")
    if body.num_samples != 1:
        raise InvalidRequest(f"best_of is {body.best_of}; an item has one answer: leave it out", param="best_of")
    for name, is_asked in (
        ("logprobs", body.asked_logprobs[1] is not None),
        ("prompt_logprobs", body.prompt_logprobs is not None),
        ("return_token_ids", body.return_token_ids),
        ("echo", isinstance(body, CompletionRequest) and body.echo),
    ):
        if is_asked:
            raise InvalidRequest(f"{name} is not for bulk runs: an item's result holds its text only", param=name)
    if isinstance(body, CompletionRequest) and len(body.prompt) != 1:
        message = f"prompt holds {len(body.prompt):,} prompts; an item has one prompt: write an item for each prompt"
        raise InvalidRequest(message, param="prompt")
    if isinstance(body, ChatRequest) and body.tools and body.tool_choice != "none":
        raise InvalidRequest("an item of a bulk run has no tools; send it to a service", param="tools")
