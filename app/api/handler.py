"""The request handler: checks the body of a request and prepares its response.

HTTP routes, `/v1/batch`, batch items and rows of bulk runs all use this handler.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs
from pydantic_core import from_json

from app.api.auth.keys import Authenticator, without_keys
from app.api.auth.limits import Account, Reservation
from app.api.endpoints.endpoint import Endpoint
from app.api.endpoints.table import ENDPOINTS
from app.api.generation import shared_fields
from app.api.http.errors import error_body, error_status, log_error
from app.api.json_structure import size_of
from app.api.model_names import ModelNames
from app.api.output.response_state import ResponseState, Writer
from app.api.pipelines import Pipeline, PipelineRun
from app.api.prepared_request import PreparedRequest, RequestLimits, ServedModel, SharedFields
from app.api.request_context import RequestContext
from app.api.request_trace import RequestTrace, Tracer
from app.api.schemas.parameters import UnknownFields, ignored_fields, ignored_header, parse
from app.api.schemas.requests import ChatRequest, GenerationRequest, ModelRequest, QueuedRequest
from app.api.stored_answers import RecordedAnswer, with_history
from app.api.threads import MAX_SMALL_SIZE, BodyThreads
from app.batches import LOWEST_CLASS, ItemOrigin, ItemResponse, NewResponse, ReadAnswer
from app.config import ApiConfig
from app.engine.request import MAX_PRIORITY
from app.errors import CarouselError, may_be_served_later
from app.json_pieces import Json
from app.metrics import NO_MODEL, RequestMetrics, task_name

ParsedT = TypeVar("ParsedT", bound=ModelRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBody:
    """The checked body of many requests, without their prompts."""

    endpoint: Endpoint
    parsed: GenerationRequest
    target: ServedModel | Pipeline
    fields: Mapping[str, SharedFields]  # by the name of each model that may answer
    size: int  # `size_of` of the shared fields if each prompt repeats their tools or documents, otherwise 0
    ignored_header: Mapping[str, str]  # names the fields of the body that have no effect


def _ignored_by_models(fields: Mapping[str, SharedFields]) -> tuple[str, ...]:
    """Return the names of the fields that have no effect on any of the models that may answer."""
    first, *others = fields.values()
    return tuple(name for name in first.ignored if all(name in each.ignored for each in others))


class RequestHandler:
    """Handles requests on the served models."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: ApiConfig,
        metrics: RequestMetrics | None = None,
        authenticator: Authenticator | None = None,
        *,
        pipelines: Sequence[Pipeline] = (),
        limits: RequestLimits = RequestLimits(),  # noqa: B008 - frozen
        tracer: Tracer | None = None,
    ) -> None:
        """`authenticator` looks up API keys; by default, no keys are required. `pipelines` may use only these models.

        `tracer` receives a trace of each HTTP request and of each attempt to answer a batch item.
        """
        self.names = ModelNames(models, pipelines)
        self.config = config
        self.limits = limits
        self.tracer = tracer
        self.metrics = metrics or RequestMetrics(model.name for model in models)
        self.authenticator = authenticator or without_keys(config)
        self.threads = BodyThreads()
        self.turns = asyncio.Lock()  # large answers take turns on the event loop; see `JsonAnswer`
        self._unknown_fields = UnknownFields()

    def context(self, reservation: Reservation, request_id: str, **fields: Any) -> RequestContext:
        """Return the context of a request that has just arrived."""
        return RequestContext(
            reservation=reservation,
            request_id=request_id,
            limits=self.limits,
            shares_prefixes=self.config.share_prefixes,
            arrived_at=self.metrics.clock(),
            **fields,
        )

    async def handle(self, endpoint: Endpoint, body: Mapping[str, Any], context: RequestContext) -> ResponseState:
        """Check a body, reserve the tokens that it may need, and prepare its response.

        If the target is a pipeline, this method also runs the steps before the answering step.

        Raises InvalidRequest, NotFound, NotPermitted and LimitReached.
        """
        size, account = size_of(body, MAX_SMALL_SIZE), context.reservation.account
        with self.counting_refusals():
            parsed = await self.parse(body, size, endpoint.schema, account, is_strict=context.is_strict)
            if parsed.request_id is not None and not context.has_own_id:
                context.request_id = parsed.request_id
            target = self.names.answering(parsed, account)
        state = await self._respond(endpoint, parsed, target, context, size)
        state.ignored = ignored_fields(body, parsed) + state.prepared.ignored
        return state

    async def _respond(
        self,
        endpoint: Endpoint,
        parsed: QueuedRequest,
        target: ServedModel | Pipeline,
        context: RequestContext,
        size: int,
    ) -> ResponseState:
        if isinstance(target, ServedModel):
            prepared = await self._prepare(endpoint, parsed, target, context, size)
            state = ResponseState.begin(prepared, context, self.metrics)
        else:
            run = PipelineRun(
                endpoint=endpoint,
                body=parsed,
                context=context,
                prepare=self._prepare,
                metrics=self.metrics,
                size=size,
            )
            answer = await run.answer(target)
            state = answer.state
            state.pipeline_headers = answer.headers()
        state.writer = endpoint.writer(parsed)
        state.is_streamed = isinstance(parsed, GenerationRequest) and parsed.stream
        state.shows_loads = context.reservation.account.may_administer
        return state

    async def parse(
        self, body: Mapping[str, Any], size: int, schema: type[ParsedT], account: Account, *, is_strict: bool = False
    ) -> ParsedT:
        """Return the typed body. If its `size` (see `size_of`) is large, a thread checks it. Raises InvalidRequest."""
        work = partial(parse, body, schema, self._unknown_fields, is_strict=is_strict)
        return await self.threads.read(account.name, size, work)

    @contextmanager
    def counting_refusals(self, model_name: str = NO_MODEL) -> Iterator[None]:
        """Count an error that the checks in this block raise as a refusal."""
        try:
            yield
        except CarouselError as error:
            self.metrics.model(model_name).refused(error)
            raise

    async def _prepare(
        self,
        endpoint: Endpoint,
        parsed: QueuedRequest,
        model: ServedModel,
        context: RequestContext,
        size: int,
        *,
        reserves: bool = True,
        known: PreparedRequest | None = None,
    ) -> PreparedRequest:
        """Prepare a body of this size for a model. With `reserves`, also reserve the tokens that the request may need.

        `known` is the result of an earlier call with the same arguments but without `reserves`.
        """
        account, prepared = context.reservation.account, known
        with self.counting_refusals(model.base) if reserves else nullcontext():
            if model.parent:
                model = self.names.current(model)
            if prepared is None:
                work = partial(endpoint.prepare, parsed, model, context)
                prepared = await self.threads.encode(account.name, parsed.encoded_size(size), work)
            if reserves and (account.is_limited or prepared.num_logprobs):
                num_prompt = prepared.num_prompt_tokens
                num_output = sum(each.sampling.max_tokens for each in prepared.requests)
                context.reservation.reserve(
                    num_logprobs=prepared.num_logprobs,
                    num_tokens=num_prompt + num_output,
                    cost=model.prices.cost(num_prompt_tokens=num_prompt, num_output_tokens=num_output),
                )
        return prepared

    @asynccontextmanager
    async def keep(self, new: NewResponse, read: ReadAnswer) -> AsyncIterator[RecordedAnswer]:
        """Prepare an answer that will be stored. `read` reads the responses that the answer continues.

        Raises the errors of `handle`. LimitReached is raised immediately, because this method never waits for a slot.
        """
        with self.authenticator.account_named(new.owner).reserve_for_stored() as reservation:
            context = self.context(
                reservation,
                new.request_id,
                headers=new.headers,
                is_strict=new.is_strict,
                may_store=True,
                stored_as=(new.response_id, new.created_at),
            )
            body: Json = await self.threads.read(new.owner, len(new.body), partial(from_json, new.body))
            if new.previous is not None:
                body = await with_history(body, read)
            state = await self.handle(ENDPOINTS[new.path], body, context)
            assert state.writer is not None, "`handle` sets the writer"
            info = structs.replace(state.writer.info(state), ignored=state.ignored)
            yield RecordedAnswer(state, info, path=new.path)

    async def handle_item(
        self, owner: str, path: str, body: Mapping[str, Any], origin: ItemOrigin | None = None
    ) -> ItemResponse:
        """Return the response that an HTTP client would receive for this batch item from the endpoint at `path`.

        An owner with a name is the tenant, regardless of the body's `user`, and the usage is charged to the owner's
        key.

        Raises Overloaded (LimitReached for a limit of the key), Unavailable or EngineStopped if a retry may succeed.
        """
        request_id = uuid.uuid4().hex if origin is None else origin.request_id
        tenant = {"user": owner} if owner else {}
        with self._item_traced(path, origin) as trace:
            try:
                with self.authenticator.account_named(owner).reserve_item() as reservation:
                    context = self.context(reservation, request_id, trace=trace)
                    # A batch item cannot choose its priority or class.
                    fields = {**body, "priority": MAX_PRIORITY, **LOWEST_CLASS, **tenant}
                    state = await self.handle(ENDPOINTS[path], fields, context)
                    content = await state.full_response()
                    if trace is not None:
                        trace.attributes |= state.trace_attributes()
                    return ItemResponse(200, content, is_large=state.prepared.is_large)
            except Exception as error:
                if may_be_served_later(error):
                    raise
                if trace is not None:
                    trace.error = error
                return _refusal(error, request_id, path)

    @contextmanager
    def _item_traced(self, path: str, origin: ItemOrigin | None) -> Iterator[RequestTrace | None]:
        """Trace an item. Refusals by a full service are not recorded, because they may occur many times per item."""
        if self.tracer is None or origin is None:
            yield None
            return
        trace, error = RequestTrace.of_item(path, origin), None
        try:
            yield trace
        except BaseException as raised:
            error = raised
            raise
        finally:
            trace.end(error)
            if error is None or trace.has_replica:
                self.tracer.record(trace)

    async def outcomes(
        self, common: SharedBody, prompts: Sequence[Json], context: RequestContext
    ) -> AsyncGenerator[ItemOutcome, None]:
        """Answer several prompts of one client concurrently, and yield each outcome as soon as it is known.

        Each prompt is a body without the shared fields. The reservation for the client's body is released once all
        prompts are prepared. Closing this generator cancels the prompts that are still running.
        """
        limits, num_unprepared = context.limits.shared_by(len(prompts)), len(prompts)
        context = replace(context, is_strict=False, limits=limits, shared=common.fields)

        def note_prepared() -> None:
            nonlocal num_unprepared
            num_unprepared -= 1
            if not num_unprepared:
                context.reservation.release_body()

        # These tasks are not in a TaskGroup, because a TaskGroup must not span a `yield`.
        tasks = [
            asyncio.create_task(self._outcome(index, common, prompt, context, note_prepared), name=task_name())
            for index, prompt in enumerate(prompts)
        ]
        del common, prompts
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcome(
        self,
        index: int,
        common: SharedBody,
        prompt: Json,
        context: RequestContext,
        note_prepared: Callable[[], None],
    ) -> ItemOutcome:
        began_at = self.metrics.clock()
        context = replace(context, request_id=f"{context.request_id}-{index}", arrived_at=began_at, begun=[])
        outcome: Mapping[str, Any] | Exception
        try:
            try:
                state = await self._handle_shared(common, prompt, context)
            finally:
                del common, prompt
                note_prepared()
            outcome = await state.full_response()
        except Exception as error:
            outcome = error
        return ItemOutcome(index, context.request_id, outcome, self.metrics.clock() - began_at)

    async def _handle_shared(self, common: SharedBody, prompt: Json, context: RequestContext) -> ResponseState:
        """Do the work of `handle` for a body whose fields, except for its prompt, were already checked."""
        endpoint, size = common.endpoint, size_of(prompt, MAX_SMALL_SIZE)
        with self.counting_refusals():
            own = await self.parse(prompt, size, endpoint.schema, context.reservation.account)
        parsed = common.parsed.model_copy(update={name: getattr(own, name) for name in prompt})
        return await self._respond(endpoint, parsed, common.target, context, size + common.size)

    async def check_shared(
        self, context: RequestContext, path: str, body: Mapping[str, Any], *, num_bodies: int
    ) -> SharedBody:
        """Check the fields that many items share. `body` contains a placeholder instead of a prompt.

        `num_bodies` bodies are answered together and share the limits of one answer.

        Raises InvalidRequest for a mistake in the shared fields, and NotPermitted if the key may not use the model.
        """
        endpoint, size, account = ENDPOINTS[path], size_of(body, MAX_SMALL_SIZE), context.reservation.account
        with self.counting_refusals():
            parsed = await self.parse(body, size, endpoint.schema, account, is_strict=context.is_strict)
            assert isinstance(parsed, GenerationRequest), "lists of prompts are for endpoints that generate"
            target = self.names.answering(parsed, account)
            account.max_tokens(parsed.asked_tokens, parsed.length_param)
            account.check_priority(parsed.priority)
            context = replace(context, limits=context.limits.shared_by(num_bodies))
            # A pipeline may drop most of the documents, so their lengths are not checked here.
            written = parsed if isinstance(target, ServedModel) else parsed.model_copy(update={"documents": []})

            def check(model: ServedModel) -> SharedFields:
                shared = shared_fields(parsed, model, context)
                endpoint.prepare(written, model, replace(context, shared={model.name: shared}))
                return shared

            models = (target,) if isinstance(target, ServedModel) else target.answering_models
            fields = {each.name: await self.threads.encode(account.name, size, partial(check, each)) for each in models}
        # The tools and the documents still have to be written into each prompt.
        is_written = parsed.documents or (isinstance(parsed, ChatRequest) and parsed.tools)
        return SharedBody(
            endpoint=endpoint,
            parsed=parsed,
            target=target,
            fields=fields,
            size=size if is_written else 0,
            ignored_header=ignored_header(ignored_fields(body, parsed) + _ignored_by_models(fields)),
        )

    async def prepare_bulk_item(
        self, path: str, body: Mapping[str, Any]
    ) -> tuple[Writer, PreparedRequest] | ItemResponse:
        """Prepare an item of a bulk run, which uses its own engines and no keys. Returns a refusal if it cannot run.

        If the response consists of numbers, the returned writer writes the item's text.
        """
        request_id = uuid.uuid4().hex
        try:
            account = self.authenticator.account_named("")
            endpoint, size = ENDPOINTS[path], size_of(body, MAX_SMALL_SIZE)
            parsed = await self.parse(body, size, endpoint.schema, account)
            model = self.names.answering(parsed, account)
            assert isinstance(model, ServedModel), "a bulk run has one model, and no pipelines"
            assert endpoint.check_bulk is not None, "the paths of items were checked"
            endpoint.check_bulk(parsed)
            context = self.context(Reservation(account), request_id)
            return endpoint.writer(parsed), await self._prepare(endpoint, parsed, model, context, size, reserves=False)
        except Exception as error:
            return _refusal(error, request_id, path)


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """The outcome of one prompt of a list."""

    index: int
    request_id: str
    outcome: Mapping[str, Any] | Exception
    latency_s: float

    @property
    def refusal(self) -> Exception | None:
        """The error if the prompt may be served later (Overloaded, Unavailable or EngineStopped), otherwise None."""
        return self.outcome if isinstance(self.outcome, Exception) and may_be_served_later(self.outcome) else None

    def answered(self, path: str) -> ItemResponse:
        """Return the outcome as the response that an HTTP client would receive at this path."""
        if isinstance(self.outcome, Exception):
            return replace(_refusal(self.outcome, self.request_id, path), latency_s=self.latency_s)
        return ItemResponse(200, self.outcome, latency_s=self.latency_s)


def _refusal(error: Exception, request_id: str, path: str) -> ItemResponse:
    log_error(error, request_id)
    return ItemResponse(error_status(error), error_body(error, request_id, path))
