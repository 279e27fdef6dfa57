"""The routes, and the border around them: request ids, and an answer for every error."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.auth.callers import in_the_name_of, model_for
from app.api.auth.keys import Doorkeeper, KeyRing, open_door
from app.api.auth.limits import Account, rate_limit_headers
from app.api.cascades import Cascade, Verdict, judge
from app.api.endpoints.admin import AdminRoutes, Inquire, only_this_process
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
from app.api.endpoints.tokenization import detokenize, tokenize
from app.api.http.body import DEADLINE_HEADER, parse, read_json_object, with_deadline
from app.api.http.errors import ClientGone, error_response, from_http_exception, log_error
from app.api.http.guard import Routes, visit_of
from app.api.http.hints import is_strict, wants_explanation, with_hints
from app.api.http.openapi import openapi_document
from app.api.http.sse import begin_event_stream, unless_disconnected
from app.api.output.choices import generate_pieces
from app.api.output.completion_writers import ChatFormat, ChoiceWriter, CompletionFormat, Progress, Writer, model_entry
from app.api.schemas.parameters import UnknownFields
from app.api.schemas.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    GenerationRequest,
    ModelRequest,
    QueuedRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from app.api.schemas.responses import ResponsesRequest
from app.config import ApiConfig
from app.errors import CarouselError, Unavailable
from app.metrics import CONTENT_TYPE, NO_MODEL, CallMetrics, RequestMetrics, Scrape, exposition
from app.versions import versions

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=GenerationRequest)
QueuedT = TypeVar("QueuedT", bound=QueuedRequest)
ParsedT = TypeVar("ParsedT", bound=ModelRequest)
Prepare = Callable[[QueuedT, ServedModel, ApiConfig], Awaitable[Call]]


def build_app(
    models: Sequence[ServedModel],
    config: ApiConfig,
    is_ready: Callable[[], Awaitable[bool]],
    *,
    metrics: RequestMetrics | None = None,
    expose: Callable[[], Awaitable[bytes]] | None = None,
    cascades: Sequence[Cascade] = (),
    batch_routes: Sequence[Route] = (),
    doorkeeper: Doorkeeper | None = None,
    inquire: Inquire | None = None,
) -> Starlette:
    """The HTTP application over these models.

    `is_ready` answers whether a request could be served now. Requests are measured in `metrics`, and `expose` writes
    the text of /metrics; by default, what this process has measured. `cascades` are of these models. `batch_routes`
    are those of files and batches where they are served. The `doorkeeper` knows the API keys; by default, those of the
    config. `inquire` asks all processes for what admins want to know; by default, only this one.
    """
    metrics = metrics or RequestMetrics(model.name for model in models)
    if doorkeeper is None:
        doorkeeper = KeyRing(config.keys) if config.keys else open_door(config)
    admin = AdminRoutes(doorkeeper, inquire or only_this_process(doorkeeper))
    openapi = openapi_document(config, has_batches=bool(batch_routes))
    api = _Api(models, cascades, config, is_ready, metrics, expose or _of_this_process(metrics), openapi)
    for_keys = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.complete, methods=["POST"]),
        Route("/v1/responses", api.reply, methods=["POST"]),
        Route("/v1/embeddings", api.embed, methods=["POST"]),
        Route("/v1/models", api.list_models, methods=["GET"]),
        Route("/v1/models/{model_id:path}", api.retrieve_model, methods=["GET"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/tokenizer_info", api.tokenizer_info, methods=["GET"]),
        Route("/version", api.version, methods=["GET"]),
        Route("/openapi.json", api.openapi, methods=["GET"]),
        *batch_routes,
    ]
    metrics_route = Route("/metrics", api.expose_metrics, methods=["GET"])
    open_routes = [Route("/health", api.health, methods=["GET"]), Route("/ready", api.ready, methods=["GET"])]
    for_admins = admin.routes()
    {"everybody": open_routes, "keys": for_keys, "admins": for_admins}[config.metrics_for].append(metrics_route)
    routes = Routes(open_routes, for_keys, for_admins)
    app = Starlette(
        middleware=[Middleware(_Border)], exception_handlers={HTTPException: _on_http_exception_of(list(routes))}
    )
    app.router = routes.guarded_by(doorkeeper)
    return app


class _Api:
    """The endpoints."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        cascades: Sequence[Cascade],
        config: ApiConfig,
        is_ready: Callable[[], Awaitable[bool]],
        metrics: RequestMetrics,
        expose: Callable[[], Awaitable[bytes]],
        openapi: dict[str, Any],
    ) -> None:
        self._models = by_any_name(models)
        self._cascades = {cascade.name: cascade for cascade in cascades}
        self._config = config
        self._is_ready = is_ready
        self._metrics = metrics
        self._expose = expose
        self._unknown_fields = UnknownFields()
        self._openapi = openapi

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, prepare_chat, lambda _: ChoiceWriter(ChatFormat()))

    async def complete(self, request: Request) -> Response:
        return await self._generate(
            request, CompletionRequest, prepare_completion, lambda _: ChoiceWriter(CompletionFormat())
        )

    async def reply(self, request: Request) -> Response:
        return await self._generate(request, ResponsesRequest, prepare_reply, ReplyWriter)

    async def embed(self, request: Request) -> Response:
        arrived_at = self._metrics.arrived()
        parsed = await self._asked(request, EmbeddingsRequest)
        call = await self._call(request, parsed, prepare_embeddings, self._model_of(request, parsed))
        progress = self._progress(request, call, arrived_at)
        answer = EmbeddingsWriter(parsed).whole(progress, generate_pieces(call))
        body = to_json(await unless_disconnected(request.receive, answer))  # much faster with many numbers
        return Response(body, media_type="application/json", headers=self._placement(request, progress))

    async def list_models(self, request: Request) -> Response:
        account = visit_of(request).account
        entries = [model_entry(model, name) for name, model in self._models.items() if account.may_use(model.name)]
        entries += [cascade.entry() for cascade in self._cascades.values() if cascade.is_for(account)]
        return JSONResponse({"object": "list", "data": entries})

    async def retrieve_model(self, request: Request) -> Response:
        name, account = request.path_params["model_id"], visit_of(request).account
        cascade = self._cascades.get(name)
        if cascade is not None and cascade.is_for(account):
            return JSONResponse(cascade.entry())
        return JSONResponse(model_entry(self._model(name, account), name))

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        parsed: TokenizeTextRequest | TokenizeChatRequest
        if body.get("messages") is None:
            parsed = self._parsed(body, TokenizeTextRequest, request)
        else:
            parsed = self._parsed(body, TokenizeChatRequest, request)
        return JSONResponse(await tokenize(parsed, self._model(parsed.model, visit_of(request).account)))

    async def detokenize(self, request: Request) -> Response:
        parsed = self._parsed(await self._body(request), DetokenizeRequest, request)
        return JSONResponse(await detokenize(parsed, self._model(parsed.model, visit_of(request).account)))

    async def tokenizer_info(self, request: Request) -> Response:
        """For clients that apply the chat template themselves; `?model=` says whose where there are several."""
        model = self._model(request.query_params.get("model"), visit_of(request).account)
        return JSONResponse(model.tokenizer.description())

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": versions()["carousel"]})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._openapi)

    async def health(self, request: Request) -> Response:
        """The process lives and its loop turns."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A request sent now could be served."""
        try:
            is_ready = await self._is_ready()
        except Exception:
            logger.exception("the readiness check failed")
            is_ready = False
        if not is_ready:
            raise Unavailable("no replica is ready to serve; try again")
        return JSONResponse({"status": "ready"})

    async def expose_metrics(self, request: Request) -> Response:
        """What is measured, as Prometheus text."""
        return Response(await self._expose(), headers={"Content-Type": CONTENT_TYPE})

    async def _generate(
        self,
        request: Request,
        schema: type[RequestT],
        prepare: Prepare[RequestT],
        writer_for: Callable[[RequestT], Writer],
    ) -> Response:
        arrived_at = self._metrics.arrived()
        parsed = await self._asked(request, schema)
        headers: dict[str, str] = {}
        if parsed.model in self._cascades:
            verdict = await self._verdict(request, parsed, prepare, self._cascades[parsed.model], arrived_at)
            progress, pieces, headers = (
                self._progress_under(verdict, request, arrived_at),
                verdict.pieces,
                verdict.headers(),
            )
        else:
            call = await self._call(request, parsed, prepare, self._model_of(request, parsed))
            progress, pieces = self._progress(request, call, arrived_at), generate_pieces(call)
        writer = writer_for(parsed)
        response: Response
        if not parsed.stream:
            response = JSONResponse(await unless_disconnected(request.receive, writer.whole(progress, pieces)))
        else:  # no header goes out before the first text or a long wait: until then a refusal is a real status
            response = await begin_event_stream(
                request.receive,
                writer.events(progress, pieces),
                heartbeat_s=self._config.heartbeat_s,
                may_begin=progress.open_if_queued,
            )
        response.headers.update(self._placement(request, progress) | headers)
        return response

    async def _verdict(
        self, request: Request, parsed: RequestT, prepare: Prepare[RequestT], cascade: Cascade, arrived_at: float
    ) -> Verdict:
        """Whose answer it will be; the small model's call is over then."""
        cascade.check_account(visit_of(request).account)
        small = await self._call(request, parsed, prepare, cascade.small)
        large = await self._call(request, parsed, prepare, cascade.large)
        metrics = self._call_metrics(small, arrived_at)
        return await unless_disconnected(request.receive, judge(cascade, small, large, metrics))

    def _progress_under(self, verdict: Verdict, request: Request, arrived_at: float) -> Progress:
        """Of the answer to a call on a cascade, known to the caller's account."""
        progress = verdict.progress(request.state.request_id, self._metrics, arrived_at=arrived_at)
        visit_of(request).num_used = lambda: progress.num_tokens() + verdict.num_tokens_in_vain
        return progress

    def _progress(self, request: Request, call: Call, arrived_at: float) -> Progress:
        """Of a call that is about to begin; measured, and known to the caller's account."""
        progress = Progress.measured(call, request.state.request_id, self._metrics, arrived_at=arrived_at)
        visit_of(request).num_used = progress.num_tokens
        return progress

    def _call_metrics(self, call: Call, arrived_at: float) -> CallMetrics:
        prompt_tokens = [len(each.prompt_token_ids) for each in call.requests]
        return self._metrics.model(call.model.name).call(prompt_tokens, arrived_at=arrived_at)

    def _placement(self, request: Request, progress: Progress) -> dict[str, str]:
        return progress.placement_headers(explain=wants_explanation(request.headers))

    async def _asked(self, request: Request, schema: type[QueuedT]) -> QueuedT:
        """The typed body."""
        with self._counting_refusals(NO_MODEL):
            body = with_deadline(await self._body(request), request.headers.get(DEADLINE_HEADER))
            parsed = self._parsed(body, schema, request)
        if parsed.request_id is not None and "x-request-id" not in request.headers:
            request.state.request_id = parsed.request_id
        return parsed

    def _model_of(self, request: Request, parsed: ModelRequest) -> ServedModel:
        with self._counting_refusals(NO_MODEL):
            return self._model(parsed.model, visit_of(request).account)

    async def _call(self, request: Request, parsed: QueuedT, prepare: Prepare[QueuedT], model: ServedModel) -> Call:
        """What the body asks of a model, checked, and what it may need reserved."""
        with self._counting_refusals(model.name):
            call = with_hints(await prepare(parsed, model, self._config), request.headers)
            return in_the_name_of(visit_of(request), call, parsed, share_prefixes=self._config.share_prefixes)

    @contextmanager
    def _counting_refusals(self, model_name: str) -> Iterator[None]:
        try:
            yield
        except CarouselError as error:
            self._metrics.model(model_name).refused(error)
            raise

    async def _body(self, request: Request) -> dict[str, Any]:
        limits = self._config
        return await read_json_object(request, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s)

    def _parsed(self, body: dict[str, Any], schema: type[ParsedT], request: Request) -> ParsedT:
        return parse(body, schema, self._unknown_fields, is_strict=is_strict(request.headers))

    def _model(self, name: str | None, account: Account) -> ServedModel:
        return model_for(account, name, self._models)


def _of_this_process(metrics: RequestMetrics) -> Callable[[], Awaitable[bytes]]:
    """Where there are no other processes to ask."""

    async def expose() -> bytes:
        return exposition(Scrape(requests=[metrics.snapshot()], replicas={}))

    return expose


def _on_http_exception_of(routes: Sequence[Route]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Answers the router's own 404 and 405 in our words; `Allow` names the methods of all routes with that path."""
    methods: dict[str, set[str]] = {}
    for route in routes:
        methods.setdefault(route.path, set()).update(route.methods or ())
    allow = {route.endpoint: ", ".join(sorted(methods[route.path])) for route in routes}

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for HTTPException only"
        response = error_response(from_http_exception(error), request.state.request_id)
        response.headers.update(error.headers or {})
        if error.status_code == 405:  # the router itself names those of the first route with that path
            response.headers["Allow"] = allow[request.scope["endpoint"]]
        return response

    return answer


class _Border:
    """The outermost layer: a request id and rate limits on every response, a body and no stack trace on errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(scope)
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message).update({"x-request-id": state["request_id"]} | rate_limit_headers(state))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            log_error(error, state["request_id"])
            if not has_started:
                await error_response(error, state["request_id"])(scope, receive, send_with_id)
            elif not isinstance(error, ClientGone):
                raise


_PRINTABLE = re.compile(r"[\x21-\x7e]{1,256}")


def _request_id(scope: Scope) -> str:
    """The client's own id when it is a plain one, else a new one."""
    given = Request(scope).headers.get("x-request-id", "")
    return given if _PRINTABLE.fullmatch(given) else uuid.uuid4().hex
