"""What models say of the last text of the user, and vectors of a pipeline's own texts, such as examples and indexes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

from app.api.endpoints.embeddings import numbers_of, vectors_of
from app.api.endpoints.table import ENDPOINTS
from app.api.generation import SharedFields, pooling_call
from app.api.output.choices import generate_choices
from app.api.output.response_state import ResponseState
from app.api.pipelines.run import PipelineRun, Step
from app.api.prepared_request import PreparedRequest, RequestLimits, ServedModel
from app.api.schemas.requests import EmbeddingsRequest
from app.engine.request import Pooling
from app.errors import Failure, InvalidRequest, Overloaded
from app.metrics import RequestMetrics

_AT_ONCE = 32  # own texts in one call


async def question_vector(run: PipelineRun, model: ServedModel, step: Step) -> array[float]:
    """The vector of the last text of the user, of length 1."""
    call = await run.call_aside(_VECTORS, model, question_param="input", input=[run.question])
    state = run.begin(call, step)
    [vector] = await vectors_of(state, generate_choices(state.call))
    return vector


async def question_scores(run: PipelineRun, model: ServedModel, step: Step) -> array[float]:
    """The score of each label of a classifier for the last text of the user. Raises Failure for one that is none."""
    call = await run.call_aside(_VECTORS, model, question_param="input", input=[run.question])
    state = run.begin(call, step)
    [scores] = await numbers_of(state, generate_choices(state.call))
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
    while len(vectors) < len(texts):
        some: list[str | list[int]] = [*texts[len(vectors) : len(vectors) + _AT_ONCE]]
        body = EmbeddingsRequest.model_construct(input=some, service_tier="flex" if is_background else "auto")
        call = _prepare_vectors(body, model, RequestLimits())
        call = replace(call, requests=tuple(replace(each, deadline_s=None) for each in call.requests))
        state = ResponseState.measured(call, call.call_id, RequestMetrics(), arrived_at=0.0)
        try:
            vectors += await vectors_of(state, generate_choices(call))
        except Overloaded as error:
            await asyncio.sleep(error.retry_after_s)
        on_progress(len(vectors))
    return vectors


def _prepare_vectors(
    body: EmbeddingsRequest, model: ServedModel, limits: RequestLimits, shared: SharedFields | None = None
) -> PreparedRequest:
    """As for /v1/embeddings, but texts are cut to what the model reads, and a classifier gives its scores."""
    longest = model.facts.max_model_len
    texts = [text for text in body.input if isinstance(text, str)]
    prompts = model.tokenizer.encode_up_to(texts, longest, longest=longest)
    if not all(prompt.token_ids for prompt in prompts):
        raise InvalidRequest("there is a text without tokens; give each at least one", param="input")
    pooling = Pooling.SCORE if model.facts.labels else model.pooling
    return pooling_call("embd", body, model, limits, prompts, pooling)


_VECTORS = replace(ENDPOINTS["/v1/embeddings"], prepare=_prepare_vectors)
