"""The one use case for every request: a body at an endpoint becomes a response, wherever the body came from.

HTTP routes, `/v1/batch`, items of batches and rows of bulk runs all come here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from app.api.auth.keys import Authenticator, authenticator_of
from app.api.auth.limits import Account, apply_key, bounded_call
from app.api.endpoints.table import ENDPOINTS, Endpoint
from app.api.generation import SharedFields, shared_fields
from app.api.http.errors import error_body, error_status, log_error
from app.api.http.headers import with_headers
from app.api.json_structure import size_of
from app.api.model_names import ModelNames
from app.api.output.choices import ChoiceDelta
from app.api.output.completion_writers import Writer
from app.api.output.response_state import ResponseState
from app.api.pipelines import Pipeline, PipelineRun
from app.api.prepared_request import PreparedRequest, RequestLimits, ServedModel
from app.api.request_context import RequestContext
from app.api.request_trace import RequestTrace, Tracer
from app.api.schemas.parameters import UnknownFields, parse
from app.api.schemas.requests import ChatRequest, GenerationRequest, ModelRequest, QueuedRequest
from app.api.threads import MAX_SMALL_SIZE, BodyThreads
from app.config import ApiConfig
from app.engine.request import MAX_PRIORITY
from app.errors import CarouselError, DeadlineMissed, EngineStopped, InvalidRequest, Overloaded, Unavailable
from app.jobs import LOWEST_CLASS, Answered, ItemOrigin, Json
from app.metrics import NO_MODEL, RequestMetrics, task_name

ParsedT = TypeVar("ParsedT", bound=ModelRequest)

# What a batch item cannot choose.
_ITEM_FIELDS: Json = {"priority": MAX_PRIORITY, **LOWEST_CLASS}


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingResponse:
    """A request that is checked and has its tokens reserved. Its generation begins when the response is read."""

    state: ResponseState
    is_streamed: bool  # as the body asks
    _pieces: AsyncGenerator[ChoiceDelta, None]
    _writer: Writer
    _headers: Mapping[str, str] = field(default_factory=dict)
    _shows_loads: bool = False  # to an admin only

    async def full_response(self) -> Json:
        """The response as one object."""
        return await self._writer.full_response(self.state, self._pieces)

    def events(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events."""
        return self._writer.events(self.state, self._pieces)

    def headers(self, *, explain: bool) -> dict[str, str]:
        """Where the request went and how long that took, as far as it is known by now; `explain`: and why there."""
        state = self.state
        placement = state.placement_headers(explain=explain, with_loads=self._shows_loads)
        return {**placement, **state.timing_headers(), **self._headers}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBody:
    """The body of many requests without their prompts, checked."""

    endpoint: Endpoint
    parsed: GenerationRequest
    target: ServedModel | Pipeline
    fields: Mapping[str, SharedFields]  # by the name of each model that may answer
    size: int  # of what the encoding of each prompt writes into it


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
        """`authenticator` knows the keys; by default, those of the config. `pipelines` are of these models.

        `tracer` gets a trace of each HTTP request and of each attempt at an item.
        """
        self.names = ModelNames(models, pipelines)
        self.config = config
        self.limits = limits
        self.tracer = tracer
        self.metrics = metrics or RequestMetrics(model.name for model in models)
        self.authenticator = authenticator or authenticator_of(config)
        self.threads = BodyThreads()
        self.turns = asyncio.Lock()  # of large answers at the event loop, see `JsonAnswer`
        self._unknown_fields = UnknownFields()

    async def handle(self, endpoint: Endpoint, body: Mapping[str, Any], context: RequestContext) -> PendingResponse:
        """Check a body, reserve what it may need, and prepare its response.

        Of a pipeline, all that comes before the first token of the answer has run then.

        Raises InvalidRequest, NotFound, NotPermitted and LimitReached.
        """
        arrived_at = self.metrics.arrived() if context.arrived_at is None else context.arrived_at
        size = size_of(body, MAX_SMALL_SIZE)
        with self.counting_refusals():
            account = context.reservation.account
            parsed = await self.parse(body, size, endpoint.schema, account, is_strict=context.is_strict)
            if parsed.request_id is not None and not context.has_own_id:
                context.request_id = parsed.request_id
            target = self.names.answering(parsed, account)
        return await self._response(self._run(endpoint, parsed, context, arrived_at, size), target)

    def _run(
        self, endpoint: Endpoint, parsed: QueuedRequest, context: RequestContext, arrived_at: float, size: int
    ) -> PipelineRun:
        return PipelineRun(
            endpoint=endpoint,
            body=parsed,
            context=context,
            prepare=self._prepare,
            metrics=self.metrics,
            arrived_at=arrived_at,
            size=size,
        )

    async def _response(self, run: PipelineRun, target: ServedModel | Pipeline) -> PendingResponse:
        answer = await run.answer(target)
        return PendingResponse(
            state=answer.state,
            is_streamed=run.body.wants_stream,
            _pieces=answer.pieces,
            _writer=run.endpoint.writer(run.body),
            _headers=run.headers(answer),
            _shows_loads=run.context.reservation.account.may_administer,
        )

    async def parse(
        self, body: Mapping[str, Any], size: int, schema: type[ParsedT], account: Account, *, is_strict: bool = False
    ) -> ParsedT:
        """The typed body; `size` is its `size_of`. Raises InvalidRequest."""
        return await self.threads.read(
            account.name, size, lambda: parse(body, schema, self._unknown_fields, is_strict=is_strict)
        )

    @contextmanager
    def counting_refusals(self, model_name: str = NO_MODEL) -> Iterator[None]:
        """Around the checks of a request: an error in them counts as a refusal."""
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
        shared: SharedFields | None = None,
        *,
        reserves: bool = True,
    ) -> PreparedRequest:
        """What a body of this size asks of a model, checked; `reserves`: and what it may need reserved."""
        reservation, limits = context.reservation, self.limits.shared_by(context.num_bodies)

        async def encoded() -> PreparedRequest:
            current = self.names.current(model)
            return await self.threads.encode(
                reservation.account.name,
                parsed.encoded_size(size),
                lambda: endpoint.prepare(parsed, current, limits, shared),
            )

        if not reserves:
            return await encoded()
        with self.counting_refusals(model.base):
            call = with_headers((await encoded()).for_request(context.request_id).with_adapter(), context.headers)
            return apply_key(reservation, call, parsed, share_prefixes=self.config.share_prefixes)

    async def handle_item(
        self, owner: str, path: str, body: Mapping[str, Any], origin: ItemOrigin | None = None
    ) -> Answered:
        """The response that an HTTP client would have got for this batch item at the endpoint with this path.

        An owner with a name is the tenant, whatever the body says of its `user`, and what it uses counts for its key.

        Raises Overloaded (LimitReached when it is the key's), Unavailable or EngineStopped when the item may be served
        at another time.
        """
        request_id = uuid.uuid4().hex if origin is None else origin.request_id
        tenant = {"user": owner} if owner else {}
        with self._item_traced(path, origin) as trace:
            try:
                with self.authenticator.account_named(owner).reserve_item() as reservation:
                    context = RequestContext(reservation=reservation, request_id=request_id, trace=trace)
                    pending = await self.handle(ENDPOINTS[path], {**body, **_ITEM_FIELDS, **tenant}, context)
                    content = await pending.full_response()
                    if trace is not None:
                        trace.attributes |= pending.state.trace_attributes()
                    return Answered(200, content, is_large=pending.state.call.is_large)
            except Exception as error:
                if _may_pass(error):
                    raise
                if trace is not None:
                    trace.error = error
                return _refusal(error, request_id, path)

    @contextmanager
    def _item_traced(self, path: str, origin: ItemOrigin | None) -> Iterator[RequestTrace | None]:
        """An item that found no room has no trace: a full service is asked again and again."""
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

    async def handle_items(
        self, common: SharedBody, prompts: Sequence[Json], context: RequestContext
    ) -> list[Answered]:
        """The responses to several prompts of one client, in their order, computed side by side.

        Each prompt is a body with no other fields. Raises Overloaded, Unavailable or EngineStopped when none of them
        could be served now.
        """
        async with aclosing(self._outcomes(common, prompts, context)) as ended:
            outcomes = sorted([outcome async for outcome in ended], key=lambda each: each.index)
        errors = [each.outcome for each in outcomes if isinstance(each.outcome, Exception)]
        if len(errors) == len(outcomes) and all(map(_may_pass, errors)):
            raise errors[0]
        return [each.answered(common.endpoint.path) for each in outcomes]

    async def items_as_they_end(
        self, common: SharedBody, prompts: Sequence[Json], context: RequestContext
    ) -> AsyncGenerator[tuple[int, Answered], None]:
        """The same responses, each with its index, as soon as it is there. Closing it ends those that still run."""
        async with aclosing(self._outcomes(common, prompts, context)) as ended:
            async for outcome in ended:
                yield outcome.index, outcome.answered(common.endpoint.path)

    async def _outcomes(
        self, common: SharedBody, prompts: Sequence[Json], context: RequestContext
    ) -> AsyncGenerator[_ItemOutcome, None]:
        """What comes of each prompt, as they end. Not a TaskGroup, which must not span a `yield`."""
        tasks = [
            asyncio.create_task(
                self._outcome(
                    index,
                    common,
                    prompt,
                    replace(context, request_id=f"{context.request_id}-{index}", num_bodies=len(prompts)),
                ),
                name=task_name(),
            )
            for index, prompt in enumerate(prompts)
        ]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcome(self, index: int, common: SharedBody, prompt: Json, context: RequestContext) -> _ItemOutcome:
        began_at = self.metrics.arrived()
        outcome: Json | Exception
        try:
            pending = await self._handle_shared(common, prompt, context)
            outcome = await pending.full_response()
        except Exception as error:
            outcome = error
        return _ItemOutcome(index, context.request_id, outcome, self.metrics.arrived() - began_at)

    async def _handle_shared(self, common: SharedBody, prompt: Json, context: RequestContext) -> PendingResponse:
        """As `handle`, for a body of which all but the prompt is checked."""
        arrived_at, endpoint, size = self.metrics.arrived(), common.endpoint, size_of(prompt, MAX_SMALL_SIZE)
        with self.counting_refusals():
            account = context.reservation.account
            own = await self.parse(prompt, size, endpoint.schema, account, is_strict=context.is_strict)
        parsed = common.parsed.model_copy(update={name: getattr(own, name) for name in prompt})
        run = self._run(endpoint, parsed, context, arrived_at, size + common.size)
        return await self._response(replace(run, shared=common.fields), common.target)

    async def check_shared(
        self, account: Account, path: str, body: Mapping[str, Any], *, is_strict: bool, num_bodies: int
    ) -> SharedBody:
        """The fields that many items have in common, checked; a prompt in `body` stands for theirs.

        `num_bodies` of them are answered together.

        Raises InvalidRequest for what would be wrong with all of them, NotPermitted when the model is not for the key.
        """
        endpoint, size = ENDPOINTS[path], size_of(body, MAX_SMALL_SIZE)
        with self.counting_refusals():
            parsed = await self.parse(body, size, endpoint.schema, account, is_strict=is_strict)
            assert isinstance(parsed, GenerationRequest), "lists of prompts are for endpoints that generate"
            target = self.names.answering(parsed, account)
            account.max_tokens(parsed.asked_tokens, parsed.length_param)
            account.check_priority(parsed.priority)
            limits = self.limits.shared_by(num_bodies)
            # A pipeline may leave most documents out.
            written = parsed if isinstance(target, ServedModel) else parsed.model_copy(update={"documents": []})

            def check(model: ServedModel) -> SharedFields:
                shared = shared_fields(parsed, model, limits)
                endpoint.prepare(written, model, limits, shared)
                return shared

            models = (target,) if isinstance(target, ServedModel) else target.answering_models
            fields = {each.name: await self.threads.encode(account.name, size, partial(check, each)) for each in models}
        # What is left to do with them for each prompt is to write the tools and the documents into it.
        is_written = parsed.documents or (isinstance(parsed, ChatRequest) and parsed.tools)
        return SharedBody(
            endpoint=endpoint, parsed=parsed, target=target, fields=fields, size=size if is_written else 0
        )

    async def prepare_item(
        self, owner: str, path: str, body: Mapping[str, Any], check: Callable[[QueuedRequest], None]
    ) -> PreparedRequest | Answered:
        """The call of an item that engines of its own compute, or the response to an item that cannot run.

        What its key may never have is refused here. The key's limits by the minute do not count, as the item uses no
        slot of this service. `check` raises InvalidRequest for what those engines cannot do.
        """
        request_id = uuid.uuid4().hex
        try:
            account = self.authenticator.account_named(owner)
            endpoint, size = ENDPOINTS[path], size_of(body, MAX_SMALL_SIZE)
            parsed = await self.parse(body, size, endpoint.schema, account)
            model = self.names.answering(parsed, account)
            if isinstance(model, Pipeline):
                names = [each.name for each in model.answering_models]
                raise InvalidRequest(
                    f"{parsed.model} is a pipeline, which this server's batches do not run; name {' or '.join(names)}",
                    param="model",
                )
            if model.adapter is not None:
                raise InvalidRequest(
                    f"{model.name} is an adapter, which a batch's own engines do not compute; name {model.base}, or "
                    f"leave out batches.engines",
                    param="model",
                )
            check(parsed)
            call = await self.threads.encode(
                owner, parsed.encoded_size(size), lambda: endpoint.prepare(parsed, model, self.limits, None)
            )
            return bounded_call(account, call, parsed)
        except Exception as error:
            return _refusal(error, request_id, path)


@dataclass(frozen=True, slots=True)
class _ItemOutcome:
    """What came of one prompt of a list."""

    index: int
    request_id: str
    outcome: Json | Exception
    latency_s: float

    def answered(self, path: str) -> Answered:
        """As an HTTP client would have got it at this path."""
        if isinstance(self.outcome, Exception):
            return replace(_refusal(self.outcome, self.request_id, path), latency_s=self.latency_s)
        return Answered(200, self.outcome, latency_s=self.latency_s)


def _may_pass(error: Exception) -> bool:
    """Whether the same request may be served at another time."""
    return isinstance(error, Overloaded | Unavailable | EngineStopped) and not isinstance(error, DeadlineMissed)


def _refusal(error: Exception, request_id: str, path: str) -> Answered:
    log_error(error, request_id)
    return Answered(error_status(error), error_body(error, request_id, path))
