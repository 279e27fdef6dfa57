"""/v1/batch, the short form: a list of prompts, computed at once or as a job, which is a batch like any other."""

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
from app.api.http.operations import EVENTS, OF_A_LIST, OF_GENERATION, TEXT, Operation, RouteGroup
from app.api.http.sse import EventResponse, WhileConnected
from app.api.request_context import RequestContext, asks_for, with_deadline
from app.api.schemas.fields import MAX_PROMPTS, Metadata, Schema
from app.api.schemas.parameters import STRICT_HEADER, refuse_unknown
from app.batches import (
    CHATS_PATH,
    COMPLETIONS_PATH,
    PIECE_BYTES,
    Answered,
    BatchService,
    JobState,
    NewBatch,
    NewFile,
)
from app.errors import CarouselError, InvalidRequest
from app.json_pieces import DONE, Json, event, event_pieces, joined

_OWN_FIELDS = frozenset(("prompts", "async", "stream", "webhook", "metadata"))
# What stands for each prompt where only what they share is looked at.
_STAND_INS: dict[str, Json] = {
    CHATS_PATH: {"messages": [{"role": "user", "content": "?"}]},
    COMPLETIONS_PATH: {"prompt": "?"},
}
_LIST: Json = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
# A conversation that is none fails alone, so it is no mistake of the list.
_MESSAGES: Json = {"type": "array", "description": "the messages of a chat"}


def _prompts(value: Any) -> Any:
    """Texts, or conversations; what is in a conversation is found out prompt by prompt."""
    if not isinstance(value, list) or not value:
        raise ValueError("should be a list of texts, or a list of conversations, each a list of messages")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"holds {len(value):,} prompts; at most {MAX_PROMPTS:,} are accepted")
    if not all(isinstance(each, str) for each in value) and not all(isinstance(each, list) for each in value):
        raise ValueError("should hold only texts, or only conversations, each a list of messages")
    return value


class PromptListRequest(Schema):
    """The body of POST /v1/batch.

    Every other field is one of a completion (where the prompts are texts) or of a chat, and is that of all prompts.
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
    """A checked body: which endpoint its prompts are for, and the fields that they share."""

    asked: PromptListRequest
    endpoint: str
    shared: Json
    common: SharedBody  # the same, checked

    @property
    def num_samples(self) -> int:
        """Of all prompts."""
        return len(self.asked.prompts) * self.common.parsed.num_samples

    def bodies(self) -> list[Json]:
        """The body that each prompt would have at the endpoint."""
        return [self.shared | own for own in self.own_bodies()]

    def own_bodies(self) -> list[Json]:
        """What each of these bodies has alone."""
        name = "messages" if self.endpoint == CHATS_PATH else "prompt"
        return [{name: prompt} for prompt in self.asked.prompts]


async def prompt_list(body: Mapping[str, Any], handler: RequestHandler, context: RequestContext) -> PromptList:
    """The checked list. Raises InvalidRequest for a mistake that all prompts would share, naming the field."""
    own = {name: value for name, value in body.items() if name in _OWN_FIELDS and value is not None}
    shared = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    if context.is_strict:
        refuse_unknown(own, PromptListRequest)
    asked = PromptListRequest.checked(own)
    for name in ("prompt", "messages"):
        if shared.get(name) is not None:
            raise InvalidRequest(f"{name} is for one request; all of a batch's are in prompts", param=name)
    if asked.stream and asked.is_async:
        raise InvalidRequest("a job is not streamed; leave out stream or async", param="stream")
    endpoint = COMPLETIONS_PATH if isinstance(asked.prompts[0], str) else CHATS_PATH
    stand_in = shared | _STAND_INS[endpoint]
    num_bodies = 1 if asked.is_async else len(asked.prompts)
    common = await handler.check_shared(context, endpoint, stand_in, num_bodies=num_bodies)
    for name in ("webhook", "metadata"):
        if getattr(asked, name) is not None and not asked.is_async:
            raise InvalidRequest(f"{name} is for jobs; send async: true with it", param=name)
    if asked.is_async and common.parsed.deadline_s is not None:
        raise InvalidRequest("a job has all the time of its batch; leave deadline_s out", param="deadline_s")
    return PromptList(asked=asked, endpoint=endpoint, shared=shared, common=common)


class ShortBatchRoutes(RouteGroup):
    """The endpoints, over the request handler and the service that keeps batches."""

    def __init__(self, service: BatchService, handler: RequestHandler) -> None:
        self._service = service
        self._handler = handler

    @Operation(
        "post", "/v1/batch", "Answer many prompts, at once or as a job", "BatchResults", OF_GENERATION,
        (PromptListRequest,), (EVENTS,),
    )  # fmt: skip
    async def create(self, request: Request) -> Response:
        """Answer a list of prompts, or begin a job that does."""
        body = with_deadline(
            await read_json_object(request, self._handler.limits, self._handler.threads), request.headers
        )
        context = self._handler.context(
            reservation_of(request),
            request.state.request_id,
            headers=request.headers,
            is_strict=asks_for(request.headers, STRICT_HEADER),
        )
        prompts = await prompt_list(body, self._handler, context)
        del body
        ignored = prompts.common.ignored_header
        if prompts.asked.is_async:
            return JSONResponse(await self._begin_job(owner_of(request), prompts), headers=ignored)
        self._check_number(prompts)
        endpoint, is_streamed, limits = prompts.endpoint, prompts.asked.stream, self._handler.limits
        outcomes = self._handler.outcomes(prompts.common, prompts.own_bodies(), context)
        del prompts  # while they are computed nothing keeps the body
        if is_streamed:
            return EventResponse(_events(endpoint, outcomes), heartbeat_s=limits.heartbeat_s, headers=lambda: ignored)
        return JsonAnswer(await _answer(request, endpoint, outcomes), self._handler.turns, headers=ignored)

    # Before the ids: it is none.
    @Operation("get", "/v1/batch/stats", "What batches have to do and have done", "BatchStats", OF_A_LIST)
    async def stats(self, request: Request) -> Response:
        """What the caller's batches have to do and have done."""
        return JSONResponse(await self._service.stats(owner_of(request)))

    @Operation("get", "/v1/batch/{batch_id}", "A batch and its results", "BatchResults", OF_A_LIST)
    async def retrieve(self, request: Request) -> Response:
        """A batch, how far it is, and once it has ended what came of each prompt."""
        owner = owner_of(request)
        batch = await self._service.batch(owner, request.path_params["batch_id"])
        results = await results_of(self._service, owner, batch) if JobState(batch["status"]).has_ended else None
        shown = encoded_json(_with_progress(batch)).removesuffix(b"}") + b',"results":' + (results or b"null") + b"}"
        return Response(shown, media_type="application/json")

    def _check_number(self, prompts: PromptList) -> None:
        max_prompts = self._handler.limits.max_prompts
        if prompts.num_samples > max_prompts:
            raise InvalidRequest(
                f"the prompts make {prompts.num_samples:,} choices; this server answers {max_prompts:,} at "
                f"once: send async: true for more",
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
            with suppress(CarouselError):  # else it stays as a file that its owner can delete
                await service.delete_file(owner, file["id"])
            raise
        return _with_progress(batch) | {"results": None}


def _pieces(prompts: PromptList) -> Iterator[bytes]:
    """The lines of the input file, some at a time."""
    lines = (
        {"custom_id": str(number), "method": "POST", "url": prompts.endpoint, "body": body}
        for number, body in enumerate(prompts.bodies())
    )
    return joined((encoded_json(line) + b"\n" for line in lines), at_least=PIECE_BYTES)


def _with_progress(batch: Json) -> Json:
    """The batch with the share of its requests that have ended."""
    counts = batch["request_counts"]
    num_ended = counts["completed"] + counts["failed"]
    return batch | {"progress": num_ended / counts["total"] if counts["total"] else 0.0}


async def _answer(request: Request, endpoint: str, outcomes: AsyncGenerator[ItemOutcome, None]) -> Json:
    began_at = time.monotonic()
    async with WhileConnected(request.receive), aclosing(outcomes):
        ended = sorted([each async for each in outcomes], key=lambda each: each.index)
    refusals = [each.refusal for each in ended if each.refusal is not None]
    if len(refusals) == len(ended):  # none of them could be served now
        raise refusals[0]
    answers = [each.answered(endpoint) for each in ended]
    results = [result(index, str(index), answered) for index, answered in enumerate(answers)]
    return _answered_at_once(endpoint, answers, time.monotonic() - began_at) | {"results": results}


async def _events(endpoint: str, outcomes: AsyncGenerator[ItemOutcome, None]) -> AsyncGenerator[bytes, None]:
    """The entries of a list as events, each as soon as it is there, then the object without them, then [DONE]."""
    began_at, answers = time.monotonic(), list[Answered]()
    async with aclosing(outcomes):
        async for each in outcomes:
            answered = each.answered(endpoint)
            answers.append(replace(answered, body={"usage": answered.body.get("usage")}))
            yield b"".join(event_pieces(result(each.index, str(each.index), answered)))
    yield event(_answered_at_once(endpoint, answers, time.monotonic() - began_at) | {"results": None}) + DONE


def _answered_at_once(endpoint: str, answers: list[Answered], latency_s: float) -> Json:
    """The same object as for a job that has ended, without its results and the fields of stored batches."""
    num_completed = sum(answered.status_code == 200 for answered in answers)
    usages = [answered.body["usage"] for answered in answers if answered.status_code == 200]
    num_input, num_output = (sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
    return {
        "id": None,  # nothing of it is kept
        "object": "batch",
        "endpoint": endpoint,
        "status": JobState.COMPLETED.value,
        "request_counts": {"total": len(answers), "completed": num_completed, "failed": len(answers) - num_completed},
        "progress": 1.0,
        "usage": {"input_tokens": num_input, "output_tokens": num_output, "total_tokens": num_input + num_output},
        **speed(latency_s, num_output),
    }
