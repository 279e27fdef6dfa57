"""POST /v1/embeddings: each text becomes a request that returns a vector."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from typing_extensions import TypedDict

from app.api.endpoints.endpoint import Endpoint
from app.api.generation import encode_chat, encode_prompts, prepare_pooling
from app.api.output.readouts import PromptUsage, ReadoutWriter, Vector, prompt_usage, results_of
from app.api.output.response_state import ResponseState
from app.api.prepared_request import PreparedRequest, RequestLimits, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.requests import EmbeddingsRequest, TextsRequest
from app.engine.request import ModelInfo
from app.errors import ContextTooLong, Failure, InvalidRequest
from app.json_pieces import Rows
from app.text.text_pairs import EncodedText


def prepare_embeddings(body: EmbeddingsRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Check and tokenize the texts. Raises InvalidRequest."""
    size = model.model_info.embedding_size
    if model.pooling is None or size is None:
        raise InvalidRequest(f"the model {model.name!r} does not support embeddings; choose another", param="model")
    check_number_of_texts(body.input or (), context.limits)
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest(
            f"`dimensions` is {body.dimensions:,}, but this model's embeddings have only {size:,} dimensions; lower it",
            param="dimensions",
        )
    prompts = [_encoded_chat(body, model)] if body.input is None else encode_texts(body.input, body, model)
    return prepare_pooling("embd-", body, model, context, prompts, model.pooling)


def _encoded_chat(body: EmbeddingsRequest, model: ServedModel) -> EncodedText:
    chat = body.as_chat()
    whole = encode_chat(chat, model, None, may_exceed_context=body.truncate_prompt_tokens is not None)
    prompt = _Cut(body, model, chat.add_special_tokens)(whole)
    _check_length(len(prompt), model.model_info.max_model_len, "messages")
    return EncodedText(prompt)


def check_number_of_texts(texts: Sequence[object], limits: RequestLimits) -> None:
    """Raise InvalidRequest if `input` has more texts than one call may have."""
    if len(texts) > limits.max_inputs:
        raise InvalidRequest(
            f"`input` contains {len(texts):,} texts; this server accepts at most {limits.max_inputs:,} in one call; "
            f"send fewer",
            param="input",
        )


def encode_texts(texts: Sequence[str | list[int]], body: TextsRequest, model: ServedModel) -> list[EncodedText]:
    """Return the tokens of each text of `input`. Raises InvalidRequest if a text is empty or too long."""
    prompts = encode_prompts(
        texts,
        model,
        "input",
        add_special_tokens=body.add_special_tokens,
        may_exceed_context=body.truncate_prompt_tokens is not None,
        cut=_Cut(body, model, body.add_special_tokens),
    )
    for prompt in prompts:
        _check_length(len(prompt), model.model_info.max_model_len, "input")
    return list(map(EncodedText, prompts))


class _Cut:
    """Truncates a text to `truncate_prompt_tokens`, but keeps the tokens that the tokenizer adds around the text."""

    def __init__(self, body: TextsRequest, model: ServedModel, add_special_tokens: bool) -> None:
        most = body.truncate_prompt_tokens
        self._most = model.model_info.max_model_len if most == -1 else most
        self._at_begin = body.truncation_side == "left"
        self._around = model.tokenizer.added_around if add_special_tokens else ((), ())

    def __call__(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the remaining token ids, as transformers does. Raises InvalidRequest if the limit is too low."""
        if self._most is None or len(token_ids) <= self._most:
            return token_ids
        before, after = self._around
        if not (token_ids[: len(before)] == before and token_ids[len(token_ids) - len(after) :] == after):
            before, after = (), ()  # the client sent ids, so the tokenizer added no tokens
        text = token_ids[len(before) : len(token_ids) - len(after)]
        room = self._most - len(before) - len(after)
        if room < 0:
            around = len(before) + len(after)
            raise InvalidRequest(
                f"truncate_prompt_tokens is {self._most:,}; it must be at least {around}, because the tokenizer adds "
                f"{around} tokens to each text",
                param="truncate_prompt_tokens",
            )
        return (*before, *(text[len(text) - room :] if self._at_begin else text[:room]), *after)


def _check_length(num_tokens: int, max_model_len: int, param: str) -> None:
    if num_tokens == 0:
        raise InvalidRequest(
            f"`{param}` contains a text without tokens; each text must have at least one token", param=param
        )
    if num_tokens > max_model_len:
        raise ContextTooLong(
            f"`{param}` contains a text of {num_tokens:,} tokens, but this model accepts at most {max_model_len:,}; "
            f"shorten the text, or send truncate_prompt_tokens: -1 to truncate it",
            param=param,
        )


def check_one_text(body: Any) -> None:
    """Raise InvalidRequest for an item of a bulk run with several texts."""
    if body.input is not None and len(body.input) != 1:
        message = f"`input` contains {len(body.input):,} texts, but an item may have only one; write one item per text"
        raise InvalidRequest(message, param="input")


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    object: Literal["list"]
    data: Rows[Embedding]
    model: str
    usage: PromptUsage


@dataclass(frozen=True, slots=True)
class EmbeddingsWriter(ReadoutWriter[Vector]):
    """Writes the vector of each text."""

    body: EmbeddingsRequest

    def value(self, index: int, numbers: Vector, model_info: ModelInfo) -> Vector:
        return first_numbers(numbers, self.body.dimensions, are_normalised=self.body.is_activated)

    def rows(self, values: Sequence[Vector], model_info: ModelInfo) -> Rows[Embedding]:
        return Rows(lambda: ([self._row(at, each)] for at, each in enumerate(values)))

    def response(self, state: ResponseState, rows: Rows[Embedding]) -> Embeddings:
        return {"object": "list", "data": rows, "model": state.prepared.model.name, "usage": prompt_usage(state)}

    def _row(self, index: int, vector: Vector) -> Embedding:
        return {"object": "embedding", "index": index, "embedding": self._written(vector)}

    def _written(self, vector: Vector) -> list[float] | str:
        if self.body.encoding_format == "float":
            return vector.tolist()  # type: ignore[no-any-return]
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def vectors_of(state: ResponseState) -> list[Vector]:
    """Wait for the vectors of a call's requests, and return them scaled to length 1."""
    return await results_of(state, lambda _, numbers: first_numbers(numbers, None))


def first_numbers(numbers: Vector, dimensions: int | None, *, are_normalised: bool = True) -> Vector:
    """Return the first `dimensions` numbers of a vector, by default scaled to length 1.

    A truncated vector may be all zeros, especially in bfloat16, and is then not scaled. Raises Failure if the length of
    the whole vector is zero or not finite.
    """
    exact = numbers.astype(np.float64)
    length = math.sqrt(exact @ exact)
    if not (math.isfinite(length) and length):
        raise Failure(f"the model returned a vector of length {length}, which cannot be scaled to length 1")
    kept = exact[:dimensions]
    if are_normalised:
        kept = kept / (math.sqrt(kept @ kept) or 1.0)
    return kept.astype(np.float32)


EMBEDDINGS = Endpoint(
    "/v1/embeddings",
    EmbeddingsRequest,
    prepare_embeddings,
    EmbeddingsWriter,
    summary="Compute embeddings of texts",
    response=Embeddings,
    check_bulk=check_one_text,
)
