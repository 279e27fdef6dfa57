"""Responses that consist of numbers: each request of a call returns a vector, scores or probabilities."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict

from app.api.output.choices import ChoiceDelta
from app.api.output.response_state import ResponseState, Writer
from app.engine.request import ModelInfo
from app.errors import Failure
from app.json_pieces import Rows, as_json

Vector = npt.NDArray[np.float32]
T = TypeVar("T")


class PromptUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class ListOfRows(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PromptUsage


class ReadoutWriter(Writer, Generic[T]):
    """Writes a list of rows. Bulk runs, which have no `ResponseState`, write the same rows from the numbers alone."""

    is_one_row: ClassVar[bool] = True  # whether an item of a bulk run asks for one row

    async def full_response(self, state: ResponseState) -> Mapping[str, Any]:
        """Wait for the numbers of all requests and return the response."""
        values = await self.values(state)
        state.log_end()
        return self.response(state, self.rows(values, state.prepared.model.model_info))

    async def values(self, state: ResponseState) -> Sequence[T]:
        """Wait for all requests and return their values. Raises Failure."""
        model_info = state.prepared.model.model_info
        return await results_of(state, lambda index, numbers: self.value(index, numbers, model_info))

    def text(self, model_info: ModelInfo, numbers: Sequence[Any]) -> str:
        """Return the result of a bulk item as JSON: its row or its rows. `numbers` has an entry for each request.

        Raises Failure if the model returned invalid numbers.
        """
        rows = list(self.rows(self.values_of(numbers, model_info), model_info))
        return as_json(rows[0] if self.is_one_row else rows).decode()

    def values_of(self, numbers: Sequence[Any], model_info: ModelInfo) -> Sequence[T]:
        """Return the values of finished requests that returned these numbers. Raises Failure."""
        return [self.value(index, each, model_info) for index, each in enumerate(numbers)]

    def value(self, index: int, numbers: Any, model_info: ModelInfo) -> T:
        """Check the numbers of the request with this index, and return its value. Raises Failure."""
        raise NotImplementedError

    @abstractmethod
    def rows(self, values: Sequence[T], model_info: ModelInfo) -> Rows[Any]:
        """Return the rows built from the values of all requests."""

    def response(self, state: ResponseState, rows: Rows[Any]) -> Mapping[str, Any]:
        """Return the response with these rows: by default in vLLM's format, with the fields of `ListOfRows`."""
        prepared = state.prepared
        return {
            "id": prepared.response_id,
            "object": "list",
            "created": prepared.created,
            "model": prepared.model.name,
            "data": rows,
            "usage": prompt_usage(state),
        }


def prompt_usage(state: ResponseState) -> PromptUsage:
    num_tokens = state.prepared.num_prompt_tokens
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def results_of(state: ResponseState, make: Callable[[int, Vector], T]) -> list[T]:
    """Wait for the output of all requests of a call; return the result of `make(index, output)` for each.

    An output is a vector of any length, or the scores of labels. Raises Failure if a request ends without an output.
    """
    results: dict[int, T] = {}

    def keep(piece: ChoiceDelta) -> None:
        if piece.finish_reason is not None:
            if piece.embedding is None:
                raise Failure(f"the request for the text with index {piece.index} ended without a vector")
            results[piece.index] = make(piece.index, np.frombuffer(piece.embedding, np.float32))

    await state.read(keep)
    return [results[index] for index in range(len(state.outputs))]
