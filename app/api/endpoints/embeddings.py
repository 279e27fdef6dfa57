"""POST /v1/embeddings: each text becomes a request that returns a vector."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from app.api.generation import encode_chat, encode_prompts, prepare_pooling
from app.api.output.choices import ChoiceDelta
from app.api.output.response_state import ResponseState, Writer
from app.api.prepared_request import PreparedRequest, RequestLimits, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.requests import EmbeddingsRequest, TextsRequest
from app.errors import ContextTooLong, Failure, InvalidRequest
from app.json_pieces import Json, Rows
from app.text.text_pairs import EncodedText

Vector = npt.NDArray[np.float32]
T = TypeVar("T")


def prepare_embeddings(body: EmbeddingsRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Check and tokenize the texts. Raises InvalidRequest."""
    size = model.model_info.embedding_size
    if model.pooling is None or size is None:
        raise InvalidRequest(f"the model {model.name!r} gives no embeddings; choose another model", param="model")
    check_number_of_texts(body.input or (), context.limits)
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest(
            f"dimensions is {body.dimensions:,}; this model's embeddings have {size:,}; lower it", param="dimensions"
        )
    prompts = [_encoded_chat(body, model)] if body.input is None else encode_texts(body.input, body, model)
    return prepare_pooling("embd-", body, model, context, prompts, model.pooling)


def _encoded_chat(body: EmbeddingsRequest, model: ServedModel) -> EncodedText:
    chat = body.as_chat()
    whole = encode_chat(chat, model, None, is_cut_or_counted=body.truncate_prompt_tokens is not None)
    prompt = _Cut(body, model, chat.add_special_tokens)(whole)
    _check_length(len(prompt), model.model_info.max_model_len, "messages")
    return EncodedText(prompt)


def check_number_of_texts(texts: Sequence[object], limits: RequestLimits) -> None:
    """Raise InvalidRequest if `input` has more texts than one call may have."""
    if len(texts) > limits.max_inputs:
        raise InvalidRequest(
            f"input holds {len(texts):,} texts; this server accepts {limits.max_inputs:,} in one call", param="input"
        )


def encode_texts(texts: Sequence[str | list[int]], body: TextsRequest, model: ServedModel) -> list[EncodedText]:
    """Return the tokens of each text of `input`. Raises InvalidRequest if a text is empty or too long."""
    prompts = encode_prompts(
        texts,
        model,
        "input",
        add_special_tokens=body.add_special_tokens,
        is_cut_or_counted=body.truncate_prompt_tokens is not None,
        cut=_Cut(body, model, body.add_special_tokens),
    )
    for prompt in prompts:
        _check_length(len(prompt), model.model_info.max_model_len, "input")
    return list(map(EncodedText, prompts))


class _Cut:
    """Cuts a text to `truncate_prompt_tokens`. The tokens that the tokenizer puts around the text are kept."""

    def __init__(self, body: TextsRequest, model: ServedModel, add_special_tokens: bool) -> None:
        most = body.truncate_prompt_tokens
        self._most = model.model_info.max_model_len if most == -1 else most
        self._at_begin = body.truncation_side == "left"
        self._around = model.tokenizer.added_around if add_special_tokens else ((), ())

    def __call__(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the token ids that remain, cut as transformers does. Raises InvalidRequest if the limit is too low."""
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
                f"truncate_prompt_tokens is {self._most:,}; the tokenizer puts {around} tokens around each text, so it "
                f"must be at least {around}",
                param="truncate_prompt_tokens",
            )
        return (*before, *(text[len(text) - room :] if self._at_begin else text[:room]), *after)


def _check_length(num_tokens: int, max_model_len: int, param: str) -> None:
    if num_tokens == 0:
        raise InvalidRequest(f"{param} has a text without tokens; send at least one token per text", param=param)
    if num_tokens > max_model_len:
        raise ContextTooLong(
            f"{param} has a text of {num_tokens:,} tokens; this model accepts {max_model_len:,}; shorten the text, or "
            f"send truncate_prompt_tokens: -1 to cut it",
            param=param,
        )


@dataclass(frozen=True, slots=True)
class EmbeddingsWriter(Writer):
    """Writes the response to one call."""

    body: EmbeddingsRequest

    async def full_response(self, state: ResponseState) -> Json:
        """Wait for all vectors and return them as the response."""
        body = self.body
        vectors = await vectors_of(state, dimensions=body.dimensions, are_normalised=body.is_activated)
        state.log_end()
        num_tokens = state.prepared.num_prompt_tokens
        return {
            "object": "list",
            "data": Rows(lambda: ([self._row(at, each)] for at, each in enumerate(vectors))),
            "model": state.prepared.model.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _row(self, index: int, vector: Vector) -> Json:
        return {"object": "embedding", "index": index, "embedding": self._written(vector)}

    def _written(self, vector: Vector) -> list[float] | str:
        if self.body.encoding_format == "float":
            return vector.tolist()  # type: ignore[no-any-return]
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def vectors_of(
    state: ResponseState, *, dimensions: int | None = None, are_normalised: bool = True
) -> list[Vector]:
    """Wait for the vectors of all requests of a call. Each vector is cut to its first `dimensions` numbers, if given.

    The vectors are scaled to length 1, unless `are_normalised` is false. A cut vector may be all zeros, above all in
    bfloat16; it stays all zeros.
    """
    return await results_of(state, lambda _, numbers: first_numbers(numbers, dimensions, are_normalised=are_normalised))


async def results_of(state: ResponseState, make: Callable[[int, Vector], T]) -> list[T]:
    """Wait for the output of all requests of a call; return the result of `make(index, output)` for each.

    An output is a vector of any length, or the scores of labels. Raises Failure if a request ends without an output.
    """
    results: dict[int, T] = {}

    def keep(piece: ChoiceDelta) -> None:
        if piece.finish_reason is not None:
            if piece.embedding is None:
                raise Failure(f"the request of text {piece.index} ended without a vector")
            results[piece.index] = make(piece.index, np.frombuffer(piece.embedding, np.float32))

    await state.read(keep)
    return [results[index] for index in range(len(state.outputs))]


def first_numbers(numbers: Vector, dimensions: int | None, *, are_normalised: bool = True) -> Vector:
    """Return the first `dimensions` numbers of a vector, by default scaled to length 1.

    Raises Failure if the length of the whole vector is zero or not finite.
    """
    exact = numbers.astype(np.float64)
    length = math.sqrt(exact @ exact)
    if not (math.isfinite(length) and length):
        raise Failure(f"the model gave a vector of length {length}")
    kept = exact[:dimensions]
    if are_normalised:
        kept = kept / (math.sqrt(kept @ kept) or 1.0)
    return kept.astype(np.float32)
