"""Computes vectors and scores of the user's last text, and vectors of a pipeline's own texts (examples and indexes)."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from app.api.auth.limits import Account, Reservation
from app.api.endpoints.embeddings import vectors_of
from app.api.endpoints.table import ENDPOINTS
from app.api.generation import prepare_pooling
from app.api.output.readouts import Vector, results_of
from app.api.output.response_state import ResponseState
from app.api.pipelines.run import PipelineRun, Step, StepReport
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.requests import EmbeddingsRequest
from app.engine.request import Pooling
from app.errors import Failure, InvalidRequest, Overloaded
from app.metrics import RequestMetrics

Matrix = npt.NDArray[np.float32]


async def question_vector(run: PipelineRun, model: ServedModel, step: Step) -> tuple[Vector, StepReport]:
    """Return the vector of the user's last text, normalised to length 1, and the step's report.

    The caller must end the report.
    """
    prepared = await run.request_aside(_VECTORS, model, question_param="input", input=[run.question])
    state, report = run.begin(prepared, step)
    [vector] = await vectors_of(state)
    return vector, report


async def question_scores(run: PipelineRun, model: ServedModel, step: Step) -> tuple[Vector, StepReport]:
    """Return each label's score for the user's last text, and the step's report.

    Raises Failure if a score is not finite.
    """
    prepared = await run.request_aside(_VECTORS, model, question_param="input", input=[run.question])
    state, report = run.begin(prepared, step)
    [scores] = await results_of(state, lambda index, numbers: numbers)
    if not np.isfinite(scores).all():
        raise Failure(f"{model.name} returned scores that are not finite: {scores.tolist()}")
    return scores, report


async def cosines(matrix: Matrix, vector: Vector) -> Vector:
    """Return the cosine similarity of `vector` to each row of `matrix`: [num_vectors].

    The vector and the rows must have length 1. matrix: [num_vectors, embedding_size].
    """
    # This many multiplications take about a millisecond, so they may run on the event loop.
    products_on_the_loop = 1_000_000
    if matrix.size <= products_on_the_loop:
        return matrix @ vector
    return await asyncio.to_thread(np.matmul, matrix, vector)


async def service_vectors(
    texts: Sequence[str],
    model: ServedModel,
    *,
    is_background: bool,
    on_progress: Callable[[int], object] = lambda number: None,
) -> list[Vector]:
    """Return the vectors, normalised to length 1, of the service's own texts. No key is charged for them.

    Waits and retries while the replicas are full. `on_progress` is called with the number of vectors so far.
    """
    vectors: list[Vector] = []
    account = Account(None, time.monotonic)
    context = RequestContext(reservation=Reservation(account), request_id=uuid.uuid4().hex)
    at_once = 32  # texts in one call
    while len(vectors) < len(texts):
        some: list[str | list[int]] = [*texts[len(vectors) : len(vectors) + at_once]]
        body = EmbeddingsRequest.model_construct(input=some, service_tier="flex" if is_background else "auto")
        prepared = await asyncio.to_thread(_prepare_vectors, body, replace(model, deadline_s=None), context)
        try:
            vectors += await vectors_of(ResponseState.begin(prepared, context, RequestMetrics()))
        except Overloaded as error:
            longest_pause_s = 1.0  # `retry_after_s` may be the time until the whole queue is empty
            await asyncio.sleep(min(error.retry_after_s, longest_pause_s))
        on_progress(len(vectors))
    return vectors


def _prepare_vectors(body: EmbeddingsRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Prepare as for /v1/embeddings, but truncate texts to the model's context, and ask a classifier for its scores."""
    longest = model.model_info.max_model_len
    texts = [text for text in body.input or () if isinstance(text, str)]
    prompts = model.tokenizer.texts(texts, max_tokens=longest, longest=longest).encoded()
    if not all(prompt.token_ids for prompt in prompts):
        raise InvalidRequest("a text has no tokens; each text must have at least one token", param="input")
    pooling = Pooling.SCORE if model.model_info.labels else model.pooling
    return prepare_pooling("embd-", body, model, context, prompts, pooling)


_VECTORS = replace(ENDPOINTS["/v1/embeddings"], prepare=_prepare_vectors)
