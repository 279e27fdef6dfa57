"""POST /v1/classify: each text becomes a request that returns a score for each label of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import TypedDict

from app.api.endpoints.embeddings import check_number_of_texts, check_one_text, encode_texts
from app.api.endpoints.endpoint import Endpoint
from app.api.generation import prepare_pooling
from app.api.output.readouts import ListOfRows, ReadoutWriter, Vector
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.requests import ClassifyRequest
from app.engine.request import ModelInfo, Pooling
from app.errors import Failure, InvalidRequest
from app.json_pieces import Rows


def prepare_classification(body: ClassifyRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Check and tokenize the texts. Raises InvalidRequest."""
    if not model.model_info.labels:
        raise InvalidRequest(f"the model {model.name!r} is not a classifier; choose a model with labels", param="model")
    check_number_of_texts(body.input, context.limits)
    pooling = Pooling.SCORE if body.is_activated else Pooling.LOGIT
    return prepare_pooling("classify-", body, model, context, encode_texts(body.input, body, model), pooling)


class Label(TypedDict):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(ListOfRows):
    data: Rows[Label]


@dataclass(frozen=True, slots=True)
class ClassificationWriter(ReadoutWriter[Vector]):
    """Writes the label and the probabilities of each text, in vLLM's format."""

    body: ClassifyRequest

    def value(self, index: int, numbers: Vector, model_info: ModelInfo) -> Vector:
        labels = model_info.labels
        if len(numbers) != len(labels):
            raise Failure(
                f"the model returned {len(numbers):,} scores for the text with index {index}, but it has "
                f"{len(labels):,} labels"
            )
        if not np.isfinite(numbers).all():
            raise Failure(f"the scores for the text with index {index} are not finite: {numbers[:10].tolist()}")
        return numbers

    def rows(self, values: Sequence[Vector], model_info: ModelInfo) -> Rows[Label]:
        labels = model_info.labels
        return Rows(lambda: ([_label(at, each.tolist(), labels)] for at, each in enumerate(values)))


def _label(index: int, probabilities: list[float], labels: Sequence[str]) -> Label:
    """Return the row of a text with its likeliest label. The first label wins a tie."""
    best = max(range(len(labels)), key=probabilities.__getitem__)
    return {"index": index, "label": labels[best], "probs": probabilities, "num_classes": len(labels)}


CLASSIFY = Endpoint(
    "/v1/classify",
    ClassifyRequest,
    prepare_classification,
    ClassificationWriter,
    summary="Compute the probability of each label for texts",
    response=Classification,
    check_bulk=check_one_text,
    aliases=("/classify",),  # the path for vLLM's clients
)
