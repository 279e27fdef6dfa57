"""Items as requests of an engine, checked and tokenized by the request handler; outputs as the API's responses.

An item means what the same request over HTTP would. Nothing is started here.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace

from app.api import RequestHandler
from app.api.output.completion_writers import ChatFormat, CompletionFormat, single_choice_response
from app.api.output.response_state import ChoiceOutput, GrowingText
from app.api.prepared_request import PreparedRequest
from app.api.schemas.requests import ChatRequest, CompletionRequest, GenerationRequest, QueuedRequest
from app.engine.request import Request
from app.errors import InvalidRequest
from app.jobs.items import CHAT_URL, GENERATION_URLS
from app.jobs.job import Answered, InvalidItem, Item, ItemOutput, Json
from app.jobs.outputs import error_message


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


async def prepare_row(item: Item, handler: RequestHandler) -> PreparedItem | InvalidItem:
    """An item of a bulk run, checked and tokenized. What is wrong with it is the reason why it is not run."""
    call = await handler.prepare_item("", item.url, item.body, check_fits_engines)
    if isinstance(call, Answered):
        return InvalidItem(number=item.number, id=item.id, reason=error_message(call.body))
    return prepared(item, call)


def prepared(item: Item, call: PreparedRequest) -> PreparedItem:
    """An item and its call, which `check_fits_engines` has passed: it has one request."""
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
    """Raise InvalidRequest for what the API can do and engines without it cannot: they make one text for an item."""
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
    text = GrowingText(output.text or "")
    choice = ChoiceOutput(text, num_tokens=output.completion_tokens, finish_reason=output.finish_reason)
    return single_choice_response(
        form, f"{prefix}-{uuid.uuid4().hex}", model_name, choice,
        created=int(time.time()), num_prompt=output.prompt_tokens,
    )  # fmt: skip
