"""A request that comes in a batch, as a line of a file or one of a list: the same use case and answers as over HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from app.api.auth.callers import in_the_name_of, model_for, most_tokens
from app.api.auth.keys import Doorkeeper, OpenDoor
from app.api.auth.limits import Account, Visit
from app.api.cascades import Cascade, Verdict, judge
from app.api.endpoints.completions import (
    Call,
    ServedModel,
    by_any_name,
    prepare_chat,
    prepare_completion,
    prepare_reply,
)
from app.api.endpoints.embeddings import EmbeddingsWriter, prepare_embeddings
from app.api.endpoints.responses import ReplyWriter
from app.api.http.body import parse
from app.api.http.errors import error_body, error_status, log_error
from app.api.http.hints import with_hints
from app.api.output.choices import generate_pieces
from app.api.output.completion_writers import ChatFormat, ChoiceWriter, CompletionFormat, Progress, WholeWriter
from app.api.schemas.parameters import UnknownFields
from app.api.schemas.requests import ChatRequest, CompletionRequest, EmbeddingsRequest, GenerationRequest, QueuedRequest
from app.api.schemas.responses import ResponsesRequest
from app.config import ApiConfig
from app.engine.request import MAX_PRIORITY
from app.errors import CarouselError, DeadlineMissed, EngineStopped, InvalidRequest, Overloaded, Unavailable
from app.jobs import Answered, Json
from app.metrics import NO_MODEL, RequestMetrics


@dataclass(frozen=True, slots=True)
class _Endpoint:
    schema: type[QueuedRequest]
    prepare: Callable[[Any, ServedModel, ApiConfig], Awaitable[Call]]
    writer: Callable[[Any], WholeWriter]  # for a body of that schema


_ENDPOINTS = {
    "/v1/chat/completions": _Endpoint(ChatRequest, prepare_chat, lambda _: ChoiceWriter(ChatFormat())),
    "/v1/completions": _Endpoint(CompletionRequest, prepare_completion, lambda _: ChoiceWriter(CompletionFormat())),
    "/v1/embeddings": _Endpoint(EmbeddingsRequest, prepare_embeddings, EmbeddingsWriter),
    "/v1/responses": _Endpoint(ResponsesRequest, prepare_reply, ReplyWriter),
}
BATCH_ENDPOINTS = tuple(_ENDPOINTS)
# The fields that a line does not choose.
_LOWEST_CLASS: dict[str, Any] = {"priority": MAX_PRIORITY, "service_tier": "flex"}


@dataclass(slots=True)
class _Asker:
    """In whose name requests run, by which headers, and what they have come to."""

    visit: Visit
    headers: Mapping[str, str] = field(default_factory=dict)
    begun: list[Progress] = field(default_factory=list)
    num_tokens_in_vain: int = 0  # of small models in cascades, where the large one answers

    def __post_init__(self) -> None:
        self.visit.num_used = lambda: sum(progress.num_tokens() for progress in self.begun) + self.num_tokens_in_vain


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A line that may run elsewhere."""

    model: str  # whose own name this is, as in `body`
    body: Json  # as it was sent, and no longer outputs than its key may have


class Answering:
    """Answers requests of batches from the served models: `answer` is the seam that `app.jobs` asks for."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: ApiConfig,
        metrics: RequestMetrics,
        doorkeeper: Doorkeeper | None = None,
        *,
        cascades: Sequence[Cascade] = (),
    ) -> None:
        """`metrics` measures lines as it does requests; it knows the models. `doorkeeper` knows their owners' keys.

        `cascades` are of these models.
        """
        self._models = by_any_name(models)
        self._cascades = {cascade.name: cascade for cascade in cascades}
        self._limits = limits
        self._metrics = metrics
        self._doorkeeper = doorkeeper or OpenDoor()
        self._unknown_fields = UnknownFields()

    async def check_shared(
        self, visit: Visit, endpoint: str, body: Mapping[str, Any], *, is_strict: bool
    ) -> GenerationRequest:
        """What many requests have in common, typed, found out with a prompt that stands for theirs.

        Raises InvalidRequest for what would be wrong with all of them, NotPermitted when the model is not for the key.
        """
        asked = _ENDPOINTS[endpoint]
        try:
            parsed = parse(body, asked.schema, self._unknown_fields, is_strict=is_strict)
            assert isinstance(parsed, GenerationRequest), "lists of prompts are for endpoints that generate"
            models = self._models_for(parsed, visit.account)
            visit.account.max_tokens(parsed.asked_tokens, parsed.length_param)
            for model in models:
                await asked.prepare(parsed, model, self._limits)
        except CarouselError as error:
            self._metrics.model(NO_MODEL).refused(error)
            raise
        return parsed

    async def answer(self, owner: str, endpoint: str, body: Mapping[str, Any]) -> Answered:
        """What an HTTP client would have got for this line at this endpoint, one of BATCH_ENDPOINTS.

        An owner with a name is the tenant, whatever the body says of its `user`, and what it uses counts for its key.

        Raises Overloaded (LimitReached when it is the key's), Unavailable or EngineStopped when nobody can serve it
        now.
        """
        request_id = uuid.uuid4().hex
        whose = {"user": owner} if owner else {}
        try:
            with self._doorkeeper.account_named(owner).line() as visit:
                asked = {**body, **_LOWEST_CLASS, **whose}
                return Answered(200, await self._response(endpoint, asked, request_id, _Asker(visit)))
        except Exception as error:
            if _may_pass(error):
                raise
            return _refusal(error, request_id)

    async def accepted(
        self, owner: str, endpoint: str, body: Mapping[str, Any], check: Callable[[QueuedRequest, ServedModel], None]
    ) -> Accepted | Answered:
        """A line that another will compute, or what an HTTP client would have got for one that cannot be.

        What its key may never have is refused here; its limits by the minute are not asked, as nobody's slot is used.
        `check` raises InvalidRequest for what that other cannot do.
        """
        request_id = uuid.uuid4().hex
        try:
            account = self._doorkeeper.account_named(owner)
            asked = _ENDPOINTS[endpoint]
            parsed = parse(body, asked.schema, self._unknown_fields)
            model, *larger = self._models_for(parsed, account)
            if larger:
                raise InvalidRequest(
                    f"{parsed.model} is a cascade, which this server's batches do not run; name {model.name} or "
                    f"{larger[0].name}",
                    param="model",
                )
            check(parsed, model)
            max_tokens = most_tokens(account, await asked.prepare(parsed, model, self._limits), parsed)
        except Exception as error:
            return _refusal(error, request_id)
        changes: Json = {"model": model.name}
        if max_tokens is not None and parsed.asked_tokens is None:
            changes["max_tokens"] = max_tokens
        return Accepted(model=model.name, body={**body, **changes})

    async def answer_at_once(
        self, visit: Visit, headers: Mapping[str, str], request_id: str, endpoint: str, bodies: Sequence[Json]
    ) -> list[Answered]:
        """What a client would have got for each of these bodies on this visit, in their order, computed side by side.

        Raises Overloaded, Unavailable or EngineStopped when none of them could be served now.
        """
        asker = _Asker(visit, headers)
        ids = [f"{request_id}-{index}" for index in range(len(bodies))]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._outcome(endpoint, body, each, asker))
                for body, each in zip(bodies, ids, strict=True)
            ]
        outcomes = [task.result() for task in tasks]
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if len(errors) == len(outcomes) and all(map(_may_pass, errors)):
            raise errors[0]
        return [
            _refusal(outcome, each) if isinstance(outcome, Exception) else Answered(200, outcome)
            for outcome, each in zip(outcomes, ids, strict=True)
        ]

    async def _outcome(self, endpoint: str, body: Json, request_id: str, asker: _Asker) -> Json | Exception:
        try:
            return await self._response(endpoint, body, request_id, asker)
        except Exception as error:
            return error

    async def _response(self, endpoint: str, body: Mapping[str, Any], request_id: str, asker: _Asker) -> Json:
        arrived_at = self._metrics.arrived()
        asked = _ENDPOINTS[endpoint]
        with self._counting_refusals(NO_MODEL):
            parsed = parse(body, asked.schema, self._unknown_fields)
            models = self._models_for(parsed, asker.visit.account)
        calls = [await self._call(asked, parsed, model, asker) for model in models]
        if len(calls) == 1:
            progress = Progress.measured(calls[0], request_id, self._metrics, arrived_at=arrived_at)
            pieces = generate_pieces(calls[0])
        else:
            verdict = await self._verdict(parsed, *calls, arrived_at=arrived_at)
            asker.num_tokens_in_vain += verdict.num_tokens_in_vain
            progress = verdict.progress(request_id, self._metrics, arrived_at=arrived_at)
            pieces = verdict.pieces
        asker.begun.append(progress)
        return await asked.writer(parsed).whole(progress, pieces)

    def _models_for(self, parsed: QueuedRequest, account: Account) -> tuple[ServedModel, ...]:
        """The one that answers, or the two of a cascade. Raises InvalidRequest, NotFound, NotPermitted."""
        cascade = self._cascades.get(parsed.model or "") if isinstance(parsed, GenerationRequest) else None
        if cascade is None:
            return (model_for(account, parsed.model, self._models),)
        cascade.check_account(account)
        return cascade.small, cascade.large

    async def _verdict(self, parsed: QueuedRequest, small: Call, large: Call, *, arrived_at: float) -> Verdict:
        prompt_tokens = [len(request.prompt_token_ids) for request in small.requests]
        metrics = self._metrics.model(small.model.name).call(prompt_tokens, arrived_at=arrived_at)
        return await judge(self._cascades[parsed.model or ""], small, large, metrics)

    async def _call(self, endpoint: _Endpoint, parsed: QueuedRequest, model: ServedModel, asker: _Asker) -> Call:
        with self._counting_refusals(model.name):
            call = with_hints(await endpoint.prepare(parsed, model, self._limits), asker.headers)
            return in_the_name_of(asker.visit, call, parsed, share_prefixes=self._limits.share_prefixes)

    @contextmanager
    def _counting_refusals(self, model_name: str) -> Iterator[None]:
        try:
            yield
        except CarouselError as error:
            self._metrics.model(model_name).refused(error)
            raise


def _may_pass(error: Exception) -> bool:
    """Whether the same request may be served at another time."""
    return isinstance(error, Overloaded | Unavailable | EngineStopped) and not isinstance(error, DeadlineMissed)


def _refusal(error: Exception, request_id: str) -> Answered:
    log_error(error, request_id)
    return Answered(error_status(error), error_body(error, request_id))
