"""What models say of the last text of the user, and vectors of a pipeline's own texts, such as examples and indexes."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

from app.api.auth.limits import Account, Reservation
from app.api.endpoints.embeddings import numbers_of, vectors_of
from app.api.endpoints.table import ENDPOINTS
from app.api.generation import SharedFields, prepare_pooling
from app.api.output.response_state import ResponseState
from app.api.pipelines.run import PipelineRun, Step
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.requests import EmbeddingsRequest
from app.engine.request import Pooling
from app.errors import Failure, InvalidRequest, Overloaded
from app.metrics import RequestMetrics


async def question_vector(run: PipelineRun, model: ServedModel, step: Step) -> array[float]:
    """The vector of the last text of the user, of length 1."""
    prepared = await run.request_aside(_VECTORS, model, question_param="input", input=[run.question])
    state = run.begin(prepared, step)
    [vector] = await vectors_of(state)
    return vector


async def question_scores(run: PipelineRun, model: ServedModel, step: Step) -> array[float]:
    """The score of each label of a classifier for the last text of the user. Raises Failure for one that is none."""
    prepared = await run.request_aside(_VECTORS, model, question_param="input", input=[run.question])
    state = run.begin(prepared, step)
    [scores] = await numbers_of(state)
    if not all(map(isfinite, scores)):
        raise Failure(f"{model.name} gave the scores {scores.tolist()}")
    return scores


async def own_vectors(
    texts: Sequence[str],
    model: ServedModel,
    *,
    is_background: bool,
    on_progress: Callable[[int], object] = lambda number: None,
) -> list[array[float]]:
    """The vectors of texts of the service's own, of length 1, which no key pays for.

    Where the replicas are full, it waits and tries again. `on_progress` is told how many there are.
    """
    vectors: list[array[float]] = []
    account = Account(None, time.monotonic)
    context = RequestContext(reservation=Reservation(account), request_id=uuid.uuid4().hex)
    at_once = 32  # own texts in one call
    while len(vectors) < len(texts):
        some: list[str | list[int]] = [*texts[len(vectors) : len(vectors) + at_once]]
        body = EmbeddingsRequest.model_construct(input=some, service_tier="flex" if is_background else "auto")
        prepared = _prepare_vectors(body, replace(model, deadline_s=None), context)
        try:
            vectors += await vectors_of(ResponseState.begin(prepared, context, RequestMetrics()))
        except Overloaded as error:
            await asyncio.sleep(error.retry_after_s)
        on_progress(len(vectors))
    return vectors


def _prepare_vectors(
    body: EmbeddingsRequest, model: ServedModel, context: RequestContext, shared: SharedFields | None = None
) -> PreparedRequest:
    """As for /v1/embeddings, but texts are cut to what the model reads, and a classifier gives its scores."""
    longest = model.facts.max_model_len
    texts = [text for text in body.input if isinstance(text, str)]
    prompts = model.tokenizer.encode_up_to(texts, longest, longest=longest)
    if not all(prompt.token_ids for prompt in prompts):
        raise InvalidRequest("there is a text without tokens; give each at least one", param="input")
    pooling = Pooling.SCORE if model.facts.labels else model.pooling
    return prepare_pooling("embd-", body, model, context, prompts, pooling)


_VECTORS = replace(ENDPOINTS["/v1/embeddings"], prepare=_prepare_vectors)
