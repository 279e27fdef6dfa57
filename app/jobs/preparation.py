"""Items as requests of an engine, checked and tokenized as the HTTP API does it; and outputs as the API's responses.

An item means what the same request over HTTP would, so both pass the API's schemas. Nothing is started here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from app.api.call import Call, RequestLimits, ServedModel
from app.api.endpoints.chat import prepare_chat
from app.api.endpoints.completions import prepare_completion
from app.api.output.completion_writers import ChatFormat, CompletionFormat, single_choice_response
from app.api.output.progress import ChoiceOutput
from app.api.schemas.parameters import refuse_unavailable
from app.api.schemas.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    QueuedRequest,
    from_validation_error,
)
from app.engine.request import Request
from app.errors import CarouselError, InvalidRequest
from app.jobs.items import CHAT_URL, COMPLETIONS_URL, GENERATION_URLS
from app.jobs.job import InvalidItem, Item, ItemOutput, Json

_SCHEMAS: Mapping[str, type[GenerationRequest]] = {CHAT_URL: ChatRequest, COMPLETIONS_URL: CompletionRequest}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedItem:
    """An item that an engine can take."""

    number: int
    id: str
    request: Request
    stop: tuple[str, ...]
    skip_special_tokens: bool
    include_stop: bool = False

    def continued_after(self, token_ids: tuple[int, ...]) -> PreparedItem:
        """The same item after the tokens that are known of it."""
        return replace(self, request=replace(self.request, generated_token_ids=token_ids)) if token_ids else self

    def failed(self, reason: str) -> ItemOutput:
        """The output of this item when it has no text."""
        num_prompt = len(self.request.prompt_token_ids)
        return ItemOutput(number=self.number, id=self.id, prompt_tokens=num_prompt, error=reason)


async def prepare(item: Item, model: ServedModel) -> PreparedItem | InvalidItem:
    """Check and tokenize an item; what is wrong with it becomes the reason for which it is not run."""
    try:
        body = _typed(item, model)
        if isinstance(body, ChatRequest):
            return prepared(item, await prepare_chat(body, model, RequestLimits()))
        assert isinstance(body, CompletionRequest), "there are two kinds of request"
        return prepared(item, await prepare_completion(body, model, RequestLimits()))
    except CarouselError as error:
        reason = error.message
    except Exception as error:  # whatever is in an item, it costs no other item anything
        reason = f"the row cannot be prepared: {error!r:.500}"
    return InvalidItem(number=item.number, id=item.id, reason=reason)


def prepared(item: Item, call: Call) -> PreparedItem:
    """An item of one answer, with what the API has made of it."""
    [request] = call.requests
    return PreparedItem(
        number=item.number,
        id=item.id,
        request=replace(request, request_id=f"item-{item.number}"),
        stop=call.stop,
        skip_special_tokens=call.skip_special_tokens,
        include_stop=call.include_stop,
    )


def check_fits_engines(body: QueuedRequest) -> None:
    """Raise InvalidRequest for what the API can do and engines without it cannot: they make one text, read once."""
    if not isinstance(body, GenerationRequest):
        raise InvalidRequest(f"bulk runs answer {' and '.join(GENERATION_URLS)} only")
    if body.n != 1:
        raise InvalidRequest(f"n is {body.n:,}; an item has one answer: write an item for each", param="n")
    if body.num_samples != 1:
        raise InvalidRequest(f"best_of is {body.best_of}; an item has one answer: leave it out", param="best_of")
    for name, is_asked in (
        ("logprobs", body.asked_logprobs[1] is not None),
        ("prompt_logprobs", body.prompt_logprobs is not None),
        ("return_token_ids", body.return_token_ids),
        ("echo", body.asks_for_echo),
    ):
        if is_asked:
            raise InvalidRequest(f"{name} is not for bulk runs: an item's result holds its text only", param=name)
    if isinstance(body, CompletionRequest) and len(body.prompt) != 1:
        message = f"prompt holds {len(body.prompt):,} prompts; an item has one: write an item for each"
        raise InvalidRequest(message, param="prompt")
    if isinstance(body, ChatRequest) and body.tools and body.tool_choice != "none":
        raise InvalidRequest("an item of a bulk run has no tools; send it to a service", param="tools")


def response_of(url: str, model_name: str, output: ItemOutput) -> Json:
    """The body of the completion that an HTTP client would have got for an engine's output."""
    form, prefix = (ChatFormat(), "chatcmpl") if url == CHAT_URL else (CompletionFormat(), "cmpl")
    text = ChoiceOutput(text=output.text or "", num_tokens=output.completion_tokens, finish_reason=output.finish_reason)
    return single_choice_response(
        form, f"{prefix}-{uuid.uuid4().hex}", model_name, text,
        created=int(time.time()), num_prompt=output.prompt_tokens,
    )  # fmt: skip


def _typed(item: Item, model: ServedModel) -> GenerationRequest:
    schema, body = _SCHEMAS[item.url], dict[str, Any](item.body)
    refuse_unavailable(body, schema)
    try:
        typed = schema.model_validate(body)
    except ValidationError as error:
        raise from_validation_error(error) from None
    check_fits_engines(typed)
    if typed.model is not None and typed.model != model.name:
        raise InvalidRequest(f"there is no model {typed.model[:100]!r}; this run has {model.name!r}", param="model")
    return typed
