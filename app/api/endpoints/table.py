"""The table of all endpoints that compute on replicas. HTTP routes, batches and bulk runs use the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.api.endpoints.chat import prepare_chat
from app.api.endpoints.classification import ClassificationWriter, prepare_classification
from app.api.endpoints.completions import prepare_completion
from app.api.endpoints.decisions import DecisionsWriter, prepare_decisions
from app.api.endpoints.embeddings import EmbeddingsWriter, prepare_embeddings
from app.api.endpoints.messages import MessagesWriter, prepare_message
from app.api.endpoints.ranking import RerankWriter, ScoreWriter, prepare_rerank, prepare_score
from app.api.endpoints.responses import ResponsesWriter, prepare_response
from app.api.http.errors import MESSAGES_PATH
from app.api.output.completion_writers import ChatFormat, ChoiceWriter, CompletionFormat
from app.api.output.response_state import Writer
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.decisions import DecisionsRequest
from app.api.schemas.messages import MessagesRequest
from app.api.schemas.ranking import RerankRequest, ScoreRequest
from app.api.schemas.requests import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingsRequest,
    QueuedRequest,
)
from app.api.schemas.responses import ResponsesRequest
from app.batches import CHATS_PATH, COMPLETIONS_PATH, RESPONSES_PATH


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that computes on replicas."""

    path: str
    schema: type[QueuedRequest]
    prepare: Callable[[Any, ServedModel, RequestContext], PreparedRequest]  # checks and tokenizes a body of the schema
    writer: Callable[[Any], Writer]  # writes the response to a body of the schema
    summary: str  # the summary in the OpenAPI document
    response: str  # the name of the response's schema in the OpenAPI document
    aliases: tuple[str, ...] = ()  # other HTTP paths of the endpoint


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint(
            CHATS_PATH,
            ChatRequest,
            prepare_chat,
            lambda _: ChoiceWriter(ChatFormat()),
            summary="Generate the next message",
            response="ChatCompletion",
        ),
        Endpoint(
            COMPLETIONS_PATH,
            CompletionRequest,
            prepare_completion,
            lambda _: ChoiceWriter(CompletionFormat()),
            summary="Continue a text",
            response="Completion",
        ),
        Endpoint(
            "/v1/embeddings",
            EmbeddingsRequest,
            prepare_embeddings,
            EmbeddingsWriter,
            summary="Compute embeddings of texts",
            response="Embeddings",
        ),
        Endpoint(
            RESPONSES_PATH,
            ResponsesRequest,
            prepare_response,
            ResponsesWriter,
            summary="Generate a response",
            response="Response",
        ),
        Endpoint(
            "/v1/rerank",
            RerankRequest,
            prepare_rerank,
            RerankWriter,
            summary="Sort documents by their relevance to a query",
            response="Rerank",
            aliases=("/v2/rerank", "/rerank"),  # the paths for clients of Cohere, and of vLLM, SGLang and TEI
        ),
        Endpoint(
            "/v1/score",
            ScoreRequest,
            prepare_score,
            ScoreWriter,
            summary="Score how well texts match another text",
            response="Scores",
            aliases=("/score",),  # the path for vLLM's clients
        ),
        Endpoint(
            "/v1/classify",
            ClassifyRequest,
            prepare_classification,
            ClassificationWriter,
            summary="Compute the probability of each label for texts",
            response="Classification",
            aliases=("/classify",),  # the path for vLLM's clients
        ),
        Endpoint(
            "/v1/decisions",
            DecisionsRequest,
            prepare_decisions,
            DecisionsWriter,
            summary="Answer questions about a text by probabilities",
            response="Decisions",
        ),
        Endpoint(
            MESSAGES_PATH,
            MessagesRequest,
            prepare_message,
            lambda _: MessagesWriter(),
            summary="Generate a message",
            response="CreatedMessage",
        ),
    )
}
