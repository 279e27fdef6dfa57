"""POST /v1/classify: each text becomes a request that returns a score for each label of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.api.endpoints.embeddings import Vector, check_number_of_texts, encode_texts, results_of
from app.api.generation import prepare_pooling
from app.api.output.response_state import ResponseState, Writer
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.requests import ClassifyRequest
from app.engine.request import Pooling
from app.errors import Failure, InvalidRequest
from app.json_pieces import Json, Rows


def prepare_classification(body: ClassifyRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Check and tokenize the texts. Raises InvalidRequest."""
    if not model.model_info.labels:
        raise InvalidRequest(f"the model {model.name!r} is no classifier; choose a model with labels", param="model")
    check_number_of_texts(body.input, context.limits)
    pooling = Pooling.SCORE if body.is_activated else Pooling.LOGIT
    return prepare_pooling("classify-", body, model, context, encode_texts(body.input, body, model), pooling)


@dataclass(frozen=True, slots=True)
class ClassificationWriter(Writer):
    """Writes the label and the probabilities of each text, in vLLM's format."""

    body: ClassifyRequest

    async def full_response(self, state: ResponseState) -> Json:
        """Wait for the scores of all texts and write them."""
        labels = state.prepared.model.model_info.labels
        results = await results_of(state, lambda index, scores: _checked(index, scores, labels))
        state.log_end()
        num_tokens = state.prepared.num_prompt_tokens
        return {
            "id": state.prepared.response_id,
            "object": "list",
            "created": state.prepared.created,
            "model": state.prepared.model.name,
            "data": Rows(lambda: ([class_of(each.tolist(), labels, at)] for at, each in enumerate(results))),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def _checked(index: int, scores: Vector, labels: Sequence[str]) -> Vector:
    """Return the scores of a text. Raises Failure if their number is wrong or a score is not finite."""
    if len(scores) != len(labels):
        raise Failure(f"the model gave text {index} {len(scores):,} scores, but has {len(labels):,} labels")
    if not np.isfinite(scores).all():
        raise Failure(f"the model gave text {index} scores that are not finite: {scores[:10].tolist()}")
    return scores


def class_of(probabilities: Sequence[float], labels: Sequence[str], index: int = 0) -> Json:
    """Return the row of a text with its likeliest label. The first label wins a tie."""
    best = max(range(len(labels)), key=probabilities.__getitem__)
    return {"index": index, "label": labels[best], "probs": list(probabilities), "num_classes": len(labels)}
