"""POST /v1/embeddings: each text becomes a request that ends with a vector."""

from __future__ import annotations

import asyncio
import base64
import math
import sys
import time
import uuid
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from app.api.call import Call, RequestLimits, ServedModel
from app.api.generation import SharedFields, encode_prompts, scheduling_of
from app.api.output.choices import ChoiceDelta
from app.api.output.completion_writers import Writer
from app.api.output.progress import Json, Progress
from app.api.schemas.requests import EmbeddingsRequest
from app.engine.request import Request, SamplingParams
from app.errors import ContextTooLong, Failure, InvalidRequest

MAX_BYTES_ON_THE_LOOP = 50_000  # larger responses are written in a thread, so that the event loop keeps serving streams


def prepare_embeddings(
    body: EmbeddingsRequest, model: ServedModel, limits: RequestLimits, shared: SharedFields | None = None
) -> Call:
    """Check and tokenize the texts. Raises InvalidRequest."""
    size = model.facts.embedding_size
    if model.pooling is None or size is None:
        raise InvalidRequest(f"the model {model.name!r} gives no embeddings; ask another", param="model")
    if len(body.input) > limits.max_inputs:
        raise InvalidRequest(
            f"input holds {len(body.input):,} texts; this server accepts {limits.max_inputs:,} in one call",
            param="input",
        )
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest(
            f"dimensions is {body.dimensions:,}; the embeddings of this model have {size:,}", param="dimensions"
        )
    prompts = encode_prompts(body.input, model, "input", add_special_tokens=body.add_special_tokens)
    call_id = f"embd-{uuid.uuid4().hex}"
    requests: list[Request] = []
    for prompt in prompts:
        _check_length(len(prompt), model.facts.max_model_len)
        request = Request(
            request_id=f"{call_id}-{len(requests)}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=0),
            pooling=model.pooling,
            **scheduling_of(body),
        )
        requests.append(request)
    return Call(
        call_id=call_id,
        created=int(time.time()),
        model=model,
        requests=tuple(requests),
        max_at_once=limits.max_prompts,
    )


def _check_length(num_tokens: int, max_model_len: int) -> None:
    if num_tokens == 0:
        raise InvalidRequest("input has a text without tokens; give each at least one", param="input")
    if num_tokens > max_model_len:
        raise ContextTooLong(
            f"input has a text of {num_tokens:,} tokens; this model accepts {max_model_len:,}; shorten it",
            param="input",
        )


@dataclass(frozen=True, slots=True)
class EmbeddingsWriter(Writer):
    """Writes the response to one call."""

    body: EmbeddingsRequest

    async def full_response(self, progress: Progress, pieces: AsyncGenerator[ChoiceDelta, None]) -> Json:
        """Wait for all vectors and write them."""
        vectors = [b""] * len(progress.outputs)

        def keep(piece: ChoiceDelta) -> None:
            if piece.finish_reason is not None:
                vectors[piece.index] = _vector_of(piece)

        await progress.read(pieces, keep)
        progress.log_end()
        num_tokens = progress.call.num_prompt_tokens
        return {
            "object": "list",
            "data": await self._written(vectors),
            "model": progress.call.model.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    async def _written(self, vectors: list[bytes]) -> list[Json]:
        def write() -> list[Json]:
            return [
                {"object": "embedding", "index": at, "embedding": self._one(each)} for at, each in enumerate(vectors)
            ]

        is_short = sum(map(len, vectors)) <= MAX_BYTES_ON_THE_LOOP
        return write() if is_short else await asyncio.to_thread(write)

    def _one(self, vector: bytes) -> list[float] | str:
        numbers = normalised(array("f", vector)[: self.body.dimensions])
        if self.body.encoding_format == "float":
            return numbers.tolist()
        if sys.byteorder == "big":
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode()


def _vector_of(piece: ChoiceDelta) -> bytes:
    if piece.embedding is None:
        raise Failure(f"the request of text {piece.index} ended without a vector")
    return piece.embedding


def normalised(numbers: array[float]) -> array[float]:
    """The vector of length 1 in the same direction. Raises Failure when there is none."""
    length = math.hypot(*numbers)
    if not (math.isfinite(length) and length):
        raise Failure(f"the model gave a vector of length {length}")
    return array("f", [number / length for number in numbers])
