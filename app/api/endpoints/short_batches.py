"""/v1/batch, the short form of batches: a list of prompts, answered directly or as a job. A job is a stored batch."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.endpoints.batch_results import encoded_json, result, results_of, speed
from app.api.endpoints.batches import WebhookRequest
from app.api.endpoints.files import upload
from app.api.handler import ItemOutcome, RequestHandler, SharedBody
from app.api.http.answers import JsonAnswer
from app.api.http.body import read_json_object
from app.api.http.guard import owner_of, reservation_of
from app.api.http.operations import EVENTS, GENERATION_REFUSALS, LIST_REFUSALS, TEXT, Operation, RouteGroup
from app.api.http.sse import EventResponse, WhileConnected
from app.api.request_context import RequestContext, is_header_set, with_deadline
from app.api.schemas.fields import MAX_PROMPTS, Metadata, Schema
from app.api.schemas.parameters import STRICT_HEADER, refuse_unknown
from app.batches import (
    CHATS_PATH,
    COMPLETIONS_PATH,
    PIECE_BYTES,
    BatchService,
    ItemResponse,
    JobState,
    NewBatch,
    NewFile,
)
from app.errors import CarouselError, InvalidRequest
from app.json_pieces import DONE, Json, event, event_pieces, joined

_OWN_FIELDS = frozenset(("prompts", "async", "stream", "webhook", "metadata"))
# Replaces the prompts while the shared fields are checked.
_PLACEHOLDERS: dict[str, Json] = {
    CHATS_PATH: {"messages": [{"role": "user", "content": "?"}]},
    COMPLETIONS_PATH: {"prompt": "?"},
}
_LIST: Json = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
# An invalid conversation fails on its own, so the schema of the list does not check it.
_MESSAGES: Json = {"type": "array", "description": "the messages of a chat"}


def _prompts(value: Any) -> Any:
    """Check that the prompts are all texts or all conversations. Each conversation is checked separately later."""
    if not isinstance(value, list) or not value:
        raise ValueError("should be a list of texts, or a list of conversations, each a list of messages")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"contains {len(value):,} prompts; at most {MAX_PROMPTS:,} are accepted")
    if not all(isinstance(each, str) for each in value) and not all(isinstance(each, list) for each in value):
        raise ValueError("should contain only texts, or only conversations, each a list of messages")
    return value


class PromptListRequest(Schema):
    """The body of POST /v1/batch.

    All other fields apply to every prompt: the fields of a completion if the prompts are texts, otherwise of a chat.
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    prompts: Annotated[
        list[Any],
        BeforeValidator(_prompts),
        WithJsonSchema({"anyOf": [_LIST | {"items": TEXT}, _LIST | {"items": _MESSAGES}]}),
    ]
    is_async: bool = Field(False, alias="async")
    stream: bool = False
    webhook: WebhookRequest | None = None
    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptList:
    """A checked body: the endpoint of its prompts, and the fields that the prompts share."""

    asked: PromptListRequest
    endpoint: str
    shared: Json
    common: SharedBody  # the shared fields, checked

    @property
    def num_samples(self) -> int:
        """The number of samples of all prompts together."""
        return len(self.asked.prompts) * self.common.parsed.num_samples

    def bodies(self) -> list[Json]:
        """Return the full body of each prompt for the endpoint."""
        return [self.shared | own for own in self.prompt_bodies()]

    def prompt_bodies(self) -> list[Json]:
        """Return a body with only the prompt, for each prompt."""
        name = "messages" if self.endpoint == CHATS_PATH else "prompt"
        return [{name: prompt} for prompt in self.asked.prompts]


async def prompt_list(body: Mapping[str, Any], handler: RequestHandler, context: RequestContext) -> PromptList:
    """Return the checked list. Raises InvalidRequest, which names the field, for a mistake in the shared fields."""
    own = {name: value for name, value in body.items() if name in _OWN_FIELDS and value is not None}
    shared = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    if context.is_strict:
        refuse_unknown(own, PromptListRequest)
    asked = PromptListRequest.checked(own)
    for name in ("prompt", "messages"):
        if shared.get(name) is not None:
            raise InvalidRequest(
                f"`{name}` is only for single requests; send the texts or conversations of a batch in `prompts`",
                param=name,
            )
    if asked.stream and asked.is_async:
        raise InvalidRequest("a job cannot be streamed; remove stream or async", param="stream")
    endpoint = COMPLETIONS_PATH if isinstance(asked.prompts[0], str) else CHATS_PATH
    stand_in = shared | _PLACEHOLDERS[endpoint]
    num_bodies = 1 if asked.is_async else len(asked.prompts)
    common = await handler.check_shared(context, endpoint, stand_in, num_bodies=num_bodies)
    for name in ("webhook", "metadata"):
        if getattr(asked, name) is not None and not asked.is_async:
            raise InvalidRequest(f"{name} is only for jobs; remove it, or also send async: true", param=name)
    if asked.is_async and common.parsed.deadline_s is not None:
        raise InvalidRequest(
            "the requests of a job have no deadlines of their own, only that of the whole batch; remove deadline_s",
            param="deadline_s",
        )
    return PromptList(asked=asked, endpoint=endpoint, shared=shared, common=common)


class ShortBatchRoutes(RouteGroup):
    """The routes of `/v1/batch`, which use the request handler and the service that stores batches."""

    def __init__(self, service: BatchService, handler: RequestHandler) -> None:
        self._service = service
        self._handler = handler

    @Operation(
        "post", "/v1/batch", "Answer many prompts, directly or as a job", "BatchResults", GENERATION_REFUSALS,
        (PromptListRequest,), (EVENTS,),
    )  # fmt: skip
    async def create(self, request: Request) -> Response:
        body = with_deadline(
            await read_json_object(request, self._handler.limits, self._handler.threads), request.headers
        )
        context = self._handler.context(
            reservation_of(request),
            request.state.request_id,
            headers=request.headers,
            is_strict=is_header_set(request.headers, STRICT_HEADER),
        )
        prompts = await prompt_list(body, self._handler, context)
        del body
        ignored = prompts.common.ignored_header
        if prompts.asked.is_async:
            return JSONResponse(await self._begin_job(owner_of(request), prompts), headers=ignored)
        self._check_number(prompts)
        endpoint, is_streamed, limits = prompts.endpoint, prompts.asked.stream, self._handler.limits
        outcomes = self._handler.outcomes(prompts.common, prompts.prompt_bodies(), context)
        del prompts  # otherwise the body would stay in memory until all prompts are answered
        if is_streamed:
            return EventResponse(_events(endpoint, outcomes), heartbeat_s=limits.heartbeat_s, headers=lambda: ignored)
        return JsonAnswer(await _answer(request, endpoint, outcomes), self._handler.turns, headers=ignored)

    # This route comes before the route with an id, which would match `stats`.
    @Operation("get", "/v1/batch/stats", "The remaining and finished work of batches", "BatchStats", LIST_REFUSALS)
    async def stats(self, request: Request) -> Response:
        return JSONResponse(await self._service.stats(owner_of(request)))

    @Operation("get", "/v1/batch/{batch_id}", "A batch and its results", "BatchResults", LIST_REFUSALS)
    async def retrieve(self, request: Request) -> Response:
        """Return a batch, its progress, and, once the batch has ended, the result of each prompt."""
        owner = owner_of(request)
        batch = await self._service.batch(owner, request.path_params["batch_id"])
        results = await results_of(self._service, owner, batch) if JobState(batch["status"]).has_ended else None
        shown = encoded_json(_with_progress(batch)).removesuffix(b"}") + b',"results":' + (results or b"null") + b"}"
        return Response(shown, media_type="application/json")

    def _check_number(self, prompts: PromptList) -> None:
        max_prompts = self._handler.limits.max_prompts
        if prompts.num_samples > max_prompts:
            raise InvalidRequest(
                f"the prompts request {prompts.num_samples:,} choices in total; this server answers at most "
                f"{max_prompts:,} directly; send async: true to run them as a job",
                param="prompts",
            )

    async def _begin_job(self, owner: str, prompts: PromptList) -> Json:
        service, asked = self._service, prompts.asked
        input_name = "prompts.jsonl"
        async with upload(service, owner) as upload_id:
            for piece in _pieces(prompts):
                await service.append(upload_id, piece)
            file = await service.finish_upload(upload_id, NewFile(filename=input_name, purpose="batch"))
        try:
            batch = await service.create_batch(
                NewBatch(
                    owner=owner,
                    endpoint=prompts.endpoint,
                    input_file_id=file["id"],
                    metadata=asked.metadata,
                    webhook=None if asked.webhook is None else asked.webhook.as_receiver(),
                )
            )
        except CarouselError:
            with suppress(CarouselError):  # the owner can still delete the file
                await service.delete_file(owner, file["id"])
            raise
        return _with_progress(batch) | {"results": None}


def _pieces(prompts: PromptList) -> Iterator[bytes]:
    """Yield the lines of the input file, several in each piece."""
    lines = (
        {"custom_id": str(number), "method": "POST", "url": prompts.endpoint, "body": body}
        for number, body in enumerate(prompts.bodies())
    )
    return joined((encoded_json(line) + b"\n" for line in lines), at_least=PIECE_BYTES)


def _with_progress(batch: Json) -> Json:
    """Return the batch with its progress: the share of its requests that have ended."""
    counts = batch["request_counts"]
    num_ended = counts["completed"] + counts["failed"]
    return batch | {"progress": num_ended / counts["total"] if counts["total"] else 0.0}


async def _answer(request: Request, endpoint: str, outcomes: AsyncGenerator[ItemOutcome, None]) -> Json:
    began_at = time.monotonic()
    async with WhileConnected(request.receive), aclosing(outcomes):
        ended = sorted([each async for each in outcomes], key=lambda each: each.index)
    refusals = [each.refusal for each in ended if each.refusal is not None]
    if len(refusals) == len(ended):  # no prompt could be served now
        raise refusals[0]
    answers = [each.answered(endpoint) for each in ended]
    results = [result(index, str(index), answered) for index, answered in enumerate(answers)]
    return _answered_at_once(endpoint, answers, time.monotonic() - began_at) | {"results": results}


async def _events(endpoint: str, outcomes: AsyncGenerator[ItemOutcome, None]) -> AsyncGenerator[bytes, None]:
    """Yield each prompt's entry as an event once the prompt is answered, then the batch object, then [DONE]."""
    began_at, answers = time.monotonic(), list[ItemResponse]()
    async with aclosing(outcomes):
        async for each in outcomes:
            answered = each.answered(endpoint)
            answers.append(replace(answered, body={"usage": answered.body.get("usage")}))
            yield b"".join(event_pieces(result(each.index, str(each.index), answered)))
    yield event(_answered_at_once(endpoint, answers, time.monotonic() - began_at) | {"results": None}) + DONE


def _answered_at_once(endpoint: str, answers: list[ItemResponse], latency_s: float) -> Json:
    """Return the batch object for prompts that were answered directly.

    It looks like a finished job's, but lacks the results and the fields that only stored batches have.
    """
    num_completed = sum(answered.status_code == 200 for answered in answers)
    usages = [answered.body["usage"] for answered in answers if answered.status_code == 200]
    num_input, num_output = (sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
    return {
        "id": None,  # the batch is not stored
        "object": "batch",
        "endpoint": endpoint,
        "status": JobState.COMPLETED.value,
        "request_counts": {"total": len(answers), "completed": num_completed, "failed": len(answers) - num_completed},
        "progress": 1.0,
        "usage": {"input_tokens": num_input, "output_tokens": num_output, "total_tokens": num_input + num_output},
        **speed(latency_s, num_output),
    }
