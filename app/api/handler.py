"""The one use case for every request: a body at an endpoint becomes a response, wherever the body came from.

HTTP routes, `/v1/batch`, items of batches and rows of bulk runs all come here.
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
from app.api.endpoints.table import ENDPOINTS, Endpoint
from app.api.generation import shared_fields
from app.api.http.errors import error_body, error_status, log_error
from app.api.json_structure import size_of
from app.api.model_names import ModelNames
from app.api.output.response_state import ResponseState
from app.api.pipelines import Pipeline, PipelineRun
from app.api.prepared_request import PreparedRequest, RequestLimits, ServedModel, SharedFields
from app.api.request_context import RequestContext
from app.api.request_trace import RequestTrace, Tracer
from app.api.schemas.parameters import UnknownFields, ignored_fields, ignored_header, parse
from app.api.schemas.requests import ChatRequest, GenerationRequest, ModelRequest, QueuedRequest
from app.api.stored_answers import RecordedAnswer, with_history
from app.api.threads import MAX_SMALL_SIZE, BodyThreads
from app.batches import LOWEST_CLASS, Answered, ItemOrigin, NewResponse, ReadAnswer
from app.config import ApiConfig
from app.engine.request import MAX_PRIORITY
from app.errors import CarouselError, may_be_served_later
from app.json_pieces import Json
from app.metrics import NO_MODEL, RequestMetrics, task_name

ParsedT = TypeVar("ParsedT", bound=ModelRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBody:
    """The body of many requests without their prompts, checked."""

    endpoint: Endpoint
    parsed: GenerationRequest
    target: ServedModel | Pipeline
    fields: Mapping[str, SharedFields]  # by the name of each model that may answer
    size: int  # of what the encoding of each prompt writes into it
    ignored_header: Mapping[str, str]  # it names fields of the body that have no effect


def _ignored_by_models(fields: Mapping[str, SharedFields]) -> tuple[str, ...]:
    """What has no effect on any of the models that may answer."""
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
        """`authenticator` knows the keys; by default there are none. `pipelines` are of these models.

        `tracer` gets a trace of each HTTP request and of each attempt at an item.
        """
        self.names = ModelNames(models, pipelines)
        self.config = config
        self.limits = limits
        self.tracer = tracer
        self.metrics = metrics or RequestMetrics(model.name for model in models)
        self.authenticator = authenticator or without_keys(config)
        self.threads = BodyThreads()
        self.turns = asyncio.Lock()  # of large answers at the event loop, see `JsonAnswer`
        self._unknown_fields = UnknownFields()

    def context(self, reservation: Reservation, request_id: str, **fields: Any) -> RequestContext:
        """The context of a request that arrives now."""
        return RequestContext(
            reservation=reservation,
            request_id=request_id,
            limits=self.limits,
            shares_prefixes=self.config.share_prefixes,
            arrived_at=self.metrics.clock(),
            **fields,
        )

    async def handle(self, endpoint: Endpoint, body: Mapping[str, Any], context: RequestContext) -> ResponseState:
        """Check a body, reserve what it may need, and prepare its response.

        Of a pipeline, all that comes before the first token of the answer has run then.

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
        *,
        reserves: bool = True,
        known: PreparedRequest | None = None,
    ) -> PreparedRequest:
        """What a body of this size asks of a model, checked; `reserves`: and what it may need reserved.

        known: what an earlier call with these arguments gave, which reserved nothing.
        """
        reservation = context.reservation
        with self.counting_refusals(model.base) if reserves else nullcontext():
            if model.parent:
                model = self.names.current(model)
            prepared = known
            if prepared is None:
                work = partial(endpoint.prepare, parsed, model, context)
                prepared = await self.threads.encode(reservation.account.name, parsed.encoded_size(size), work)
            if reserves:
                num_prompt = prepared.num_prompt_tokens
                num_output = sum(each.sampling.max_tokens for each in prepared.requests)
                reservation.reserve(
                    num_logprobs=prepared.num_logprobs,
                    num_tokens=num_prompt + num_output,
                    cost=model.prices.cost(num_prompt_tokens=num_prompt, num_output_tokens=num_output),
                )
        return prepared

    @asynccontextmanager
    async def keep(self, new: NewResponse, read: ReadAnswer) -> AsyncIterator[RecordedAnswer]:
        """An answer that is stored; `read` gives the responses that it continues.

        Raises what `handle` raises, and Overloaded at once where its key has no room.
        """
        with self.authenticator.account_named(new.owner).reserve_kept() as reservation:
            context = self.context(
                reservation,
                new.request_id,
                headers=new.headers,
                is_strict=new.is_strict,
                may_keep=True,
                kept_as=(new.response_id, new.created_at),
            )
            body: Json = await self.threads.read(new.owner, len(new.body), lambda: from_json(new.body))
            if new.previous is not None:
                body = await with_history(body, read)
            state = await self.handle(ENDPOINTS[new.path], body, context)
            assert state.writer is not None, "a client sees it"
            facts = structs.replace(state.writer.facts(state), ignored=state.ignored)
            yield RecordedAnswer(state, facts, path=new.path)

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
                    context = self.context(reservation, request_id, trace=trace)
                    # A batch item cannot choose its priority or class.
                    fields = {**body, "priority": MAX_PRIORITY, **LOWEST_CLASS, **tenant}
                    state = await self.handle(ENDPOINTS[path], fields, context)
                    content = await state.full_response()
                    if trace is not None:
                        trace.attributes |= state.trace_attributes()
                    return Answered(200, content, is_large=state.prepared.is_large)
            except Exception as error:
                if may_be_served_later(error):
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

    async def outcomes(
        self, common: SharedBody, prompts: Sequence[Json], context: RequestContext
    ) -> AsyncGenerator[ItemOutcome, None]:
        """What comes of several prompts of one client, computed side by side, each as soon as it is there.

        Each prompt is a body with no other fields. The body of the client is not held any more once all are prepared.
        Closing it ends those that still run.
        """
        limits, num_unprepared = context.limits.shared_by(len(prompts)), len(prompts)
        context = replace(context, is_strict=False, limits=limits, shared=common.fields)

        def note_prepared() -> None:
            nonlocal num_unprepared
            num_unprepared -= 1
            if not num_unprepared:
                context.reservation.release_body()

        # Not a TaskGroup, which must not span a `yield`.
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
        outcome: Json | Exception
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
        """As `handle`, for a body of which all but the prompt is checked."""
        endpoint, size = common.endpoint, size_of(prompt, MAX_SMALL_SIZE)
        with self.counting_refusals():
            own = await self.parse(prompt, size, endpoint.schema, context.reservation.account)
        parsed = common.parsed.model_copy(update={name: getattr(own, name) for name in prompt})
        return await self._respond(endpoint, parsed, common.target, context, size + common.size)

    async def check_shared(
        self, context: RequestContext, path: str, body: Mapping[str, Any], *, num_bodies: int
    ) -> SharedBody:
        """The fields that many items have in common, checked; a prompt in `body` stands for theirs.

        `num_bodies` of them are answered together.

        Raises InvalidRequest for what would be wrong with all of them, NotPermitted when the model is not for the key.
        """
        endpoint, size, account = ENDPOINTS[path], size_of(body, MAX_SMALL_SIZE), context.reservation.account
        with self.counting_refusals():
            parsed = await self.parse(body, size, endpoint.schema, account, is_strict=context.is_strict)
            assert isinstance(parsed, GenerationRequest), "lists of prompts are for endpoints that generate"
            target = self.names.answering(parsed, account)
            account.max_tokens(parsed.asked_tokens, parsed.length_param)
            account.check_priority(parsed.priority)
            context = replace(context, limits=context.limits.shared_by(num_bodies))
            # A pipeline may leave most documents out.
            written = parsed if isinstance(target, ServedModel) else parsed.model_copy(update={"documents": []})

            def check(model: ServedModel) -> SharedFields:
                shared = shared_fields(parsed, model, context)
                endpoint.prepare(written, model, replace(context, shared={model.name: shared}))
                return shared

            models = (target,) if isinstance(target, ServedModel) else target.answering_models
            fields = {each.name: await self.threads.encode(account.name, size, partial(check, each)) for each in models}
        # What is left to do with them for each prompt is to write the tools and the documents into it.
        is_written = parsed.documents or (isinstance(parsed, ChatRequest) and parsed.tools)
        return SharedBody(
            endpoint=endpoint,
            parsed=parsed,
            target=target,
            fields=fields,
            size=size if is_written else 0,
            ignored_header=ignored_header(ignored_fields(body, parsed) + _ignored_by_models(fields)),
        )

    async def prepare_item(
        self, path: str, body: Mapping[str, Any], check: Callable[[QueuedRequest], None]
    ) -> tuple[QueuedRequest, PreparedRequest] | Answered:
        """What an item asks of engines of its own, where there are no keys, or the response to one that cannot run.

        `check` raises InvalidRequest for what those engines cannot do.
        """
        request_id = uuid.uuid4().hex
        try:
            account = self.authenticator.account_named("")
            endpoint, size = ENDPOINTS[path], size_of(body, MAX_SMALL_SIZE)
            parsed = await self.parse(body, size, endpoint.schema, account)
            model = self.names.answering(parsed, account)
            assert isinstance(model, ServedModel), "a bulk run has one model, and no pipelines"
            check(parsed)
            context = self.context(Reservation(account), request_id)
            work = partial(endpoint.prepare, parsed, model, context)
            return parsed, await self.threads.encode("", parsed.encoded_size(size), work)
        except Exception as error:
            return _refusal(error, request_id, path)


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """What came of one prompt of a list."""

    index: int
    request_id: str
    outcome: Json | Exception
    latency_s: float

    @property
    def refusal(self) -> Exception | None:
        """Overloaded, Unavailable or EngineStopped, where it could not be served now."""
        return self.outcome if isinstance(self.outcome, Exception) and may_be_served_later(self.outcome) else None

    def answered(self, path: str) -> Answered:
        """As an HTTP client would have got it at this path."""
        if isinstance(self.outcome, Exception):
            return replace(_refusal(self.outcome, self.request_id, path), latency_s=self.latency_s)
        return Answered(200, self.outcome, latency_s=self.latency_s)


def _refusal(error: Exception, request_id: str, path: str) -> Answered:
    log_error(error, request_id)
    return Answered(error_status(error), error_body(error, request_id, path))
