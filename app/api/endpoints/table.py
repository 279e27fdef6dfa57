"""The table of all endpoints that compute on replicas. HTTP routes, batches and bulk runs use the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.api.endpoints.chat import check_bulk_chat, prepare_chat
from app.api.endpoints.classification import Classification, ClassificationWriter, prepare_classification
from app.api.endpoints.completions import check_bulk_completion, prepare_completion
from app.api.endpoints.decisions import Decisions, DecisionsWriter, check_one_question, prepare_decisions
from app.api.endpoints.embeddings import Embeddings, EmbeddingsWriter, check_one_text, prepare_embeddings
from app.api.endpoints.messages import CreatedMessage, MessagesWriter, prepare_message
from app.api.endpoints.ranking import Rerank, RerankWriter, Scores, ScoreWriter, prepare_rerank, prepare_score
from app.api.endpoints.responses import Response, ResponsesWriter, prepare_response
from app.api.http.errors import MESSAGES_PATH
from app.api.output.completion_writers import (
    ChatCompletion,
    ChatFormat,
    ChoiceWriter,
    Completion,
    CompletionFormat,
)
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
    GenerationRequest,
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
    response: type[Any]  # the `TypedDict` of the response, from which the OpenAPI document is derived
    aliases: tuple[str, ...] = ()  # other HTTP paths of the endpoint
    # Raises InvalidRequest for a body that a bulk run cannot answer with one text. None: not for bulk runs.
    check_bulk: Callable[[Any], None] | None = None

    @property
    def generates(self) -> bool:
        """Whether the response has generated text."""
        return issubclass(self.schema, GenerationRequest)


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint(
            CHATS_PATH,
            ChatRequest,
            prepare_chat,
            lambda _: ChoiceWriter(ChatFormat()),
            summary="Generate the next message",
            response=ChatCompletion,
            check_bulk=check_bulk_chat,
        ),
        Endpoint(
            COMPLETIONS_PATH,
            CompletionRequest,
            prepare_completion,
            lambda _: ChoiceWriter(CompletionFormat()),
            summary="Continue a text",
            response=Completion,
            check_bulk=check_bulk_completion,
        ),
        Endpoint(
            "/v1/embeddings",
            EmbeddingsRequest,
            prepare_embeddings,
            EmbeddingsWriter,
            summary="Compute embeddings of texts",
            response=Embeddings,
            check_bulk=check_one_text,
        ),
        Endpoint(
            RESPONSES_PATH,
            ResponsesRequest,
            prepare_response,
            ResponsesWriter,
            summary="Generate a response",
            response=Response,
        ),
        Endpoint(
            "/v1/rerank",
            RerankRequest,
            prepare_rerank,
            RerankWriter,
            summary="Sort documents by their relevance to a query",
            response=Rerank,
            check_bulk=lambda _: None,  # all rows of an item are one text
            aliases=("/v2/rerank", "/rerank"),  # the paths for clients of Cohere, and of vLLM, SGLang and TEI
        ),
        Endpoint(
            "/v1/score",
            ScoreRequest,
            prepare_score,
            ScoreWriter,
            summary="Score how well texts match another text",
            response=Scores,
            check_bulk=lambda _: None,  # all rows of an item are one text
            aliases=("/score",),  # the path for vLLM's clients
        ),
        Endpoint(
            "/v1/classify",
            ClassifyRequest,
            prepare_classification,
            ClassificationWriter,
            summary="Compute the probability of each label for texts",
            response=Classification,
            check_bulk=check_one_text,
            aliases=("/classify",),  # the path for vLLM's clients
        ),
        Endpoint(
            "/v1/decisions",
            DecisionsRequest,
            prepare_decisions,
            DecisionsWriter,
            summary="Answer questions about a text by probabilities",
            response=Decisions,
            check_bulk=check_one_question,
        ),
        Endpoint(
            MESSAGES_PATH,
            MessagesRequest,
            prepare_message,
            lambda _: MessagesWriter(),
            summary="Generate a message",
            response=CreatedMessage,
        ),
    )
}
# The paths that rows of a bulk run may name, and whether the endpoint generates text.
BULK_URLS = {path: each.generates for path, each in ENDPOINTS.items() if each.check_bulk is not None}
