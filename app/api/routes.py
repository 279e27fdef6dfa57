"""The routes, and the border around them: request ids, and an answer for every error."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.body import DEADLINE_HEADER, parse, read_json_object, with_deadline
from app.api.callers import in_the_name_of, model_for
from app.api.choices import generate_pieces
from app.api.completions import Call, ServedModel, by_any_name, prepare_chat, prepare_completion
from app.api.errors import ClientGone, error_response, from_http_exception, log_error
from app.api.guard import guarded, visit_of
from app.api.hints import is_strict, wants_explanation, with_hints
from app.api.keys import Doorkeeper, KeyRing, OpenDoor
from app.api.limits import Account, rate_limit_headers
from app.api.openapi import openapi_document
from app.api.parameters import UnknownFields
from app.api.responses import (
    ChatFormat,
    CompletionFormat,
    Format,
    Progress,
    events,
    model_entry,
    whole_response,
)
from app.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    ModelRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from app.api.sse import begin_event_stream, unless_disconnected
from app.api.tokenization import detokenize, tokenize
from app.config import ApiConfig
from app.errors import CarouselError, Unavailable
from app.metrics import CONTENT_TYPE, NO_MODEL, RequestMetrics, Scrape, exposition
from app.versions import versions

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=GenerationRequest)
ParsedT = TypeVar("ParsedT", bound=ModelRequest)
Prepare = Callable[[RequestT, ServedModel, ApiConfig], Awaitable[Call]]


def build_app(
    models: Sequence[ServedModel],
    config: ApiConfig,
    is_ready: Callable[[], Awaitable[bool]],
    *,
    metrics: RequestMetrics | None = None,
    expose: Callable[[], Awaitable[bytes]] | None = None,
    batch_routes: Sequence[Route] = (),
    doorkeeper: Doorkeeper | None = None,
) -> Starlette:
    """The HTTP application over these models.

    `is_ready` answers whether a request could be served now. Requests are measured in `metrics`, and `expose` writes
    the text of /metrics; by default, what this process has measured. `batch_routes` are those of files and batches
    where they are served. The `doorkeeper` knows the API keys; by default, those of the config.
    """
    metrics = metrics or RequestMetrics(model.name for model in models)
    openapi = openapi_document(config, has_batches=bool(batch_routes))
    api = _Api(models, config, is_ready, metrics, expose or _of_this_process(metrics), openapi)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.complete, methods=["POST"]),
        Route("/v1/models", api.list_models, methods=["GET"]),
        Route("/v1/models/{model_id:path}", api.retrieve_model, methods=["GET"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/tokenizer_info", api.tokenizer_info, methods=["GET"]),
        Route("/version", api.version, methods=["GET"]),
        Route("/openapi.json", api.openapi, methods=["GET"]),
        *batch_routes,
    ]
    open_routes = [Route("/health", api.health, methods=["GET"]), Route("/ready", api.ready, methods=["GET"])]
    (open_routes if config.open_metrics else routes).append(Route("/metrics", api.expose_metrics, methods=["GET"]))
    if doorkeeper is None:
        doorkeeper = KeyRing(config.keys) if config.keys else OpenDoor()
    app = Starlette(middleware=[Middleware(_Border)], exception_handlers={HTTPException: _on_http_exception})
    app.router = guarded(open_routes, routes, doorkeeper)
    return app


class _Api:
    """The endpoints."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: ApiConfig,
        is_ready: Callable[[], Awaitable[bool]],
        metrics: RequestMetrics,
        expose: Callable[[], Awaitable[bytes]],
        openapi: dict[str, Any],
    ) -> None:
        self._models = by_any_name(models)
        self._config = config
        self._is_ready = is_ready
        self._metrics = metrics
        self._expose = expose
        self._unknown_fields = UnknownFields()
        self._openapi = openapi

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, prepare_chat, ChatFormat())

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, prepare_completion, CompletionFormat())

    async def list_models(self, request: Request) -> Response:
        account = visit_of(request).account
        served = {name: model for name, model in self._models.items() if account.may_use(model.name)}
        return JSONResponse({"object": "list", "data": [model_entry(model, name) for name, model in served.items()]})

    async def retrieve_model(self, request: Request) -> Response:
        name = request.path_params["model_id"]
        return JSONResponse(model_entry(self._model(name, visit_of(request).account), name))

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
        self, request: Request, schema: type[RequestT], prepare: Prepare[RequestT], form: Format
    ) -> Response:
        arrived_at = self._metrics.arrived()
        call, is_streamed = await self._call(request, schema, prepare)
        progress = Progress.measured(call, request.state.request_id, self._metrics, arrived_at=arrived_at)
        visit_of(request).num_used = progress.num_tokens
        pieces = generate_pieces(call)
        response: Response
        if not is_streamed:
            response = JSONResponse(await unless_disconnected(request.receive, whole_response(progress, pieces, form)))
        else:  # no header goes out before the first text or a long wait: until then a refusal is a real status
            response = await begin_event_stream(
                request.receive,
                events(progress, pieces, form),
                heartbeat_s=self._config.heartbeat_s,
                may_begin=progress.open_if_queued,
            )
        response.headers.update(progress.placement_headers(explain=wants_explanation(request.headers)))
        return response

    async def _call(self, request: Request, schema: type[RequestT], prepare: Prepare[RequestT]) -> tuple[Call, bool]:
        """What the body asks for, checked, and whether it wants it as a stream."""
        model_name = NO_MODEL
        try:
            config, visit = self._config, visit_of(request)
            body = with_deadline(await self._body(request), request.headers.get(DEADLINE_HEADER))
            parsed = self._parsed(body, schema, request)
            if parsed.request_id is not None and "x-request-id" not in request.headers:
                request.state.request_id = parsed.request_id
            model = self._model(parsed.model, visit.account)
            model_name = model.name
            call = with_hints(await prepare(parsed, model, config), request.headers)
            return in_the_name_of(visit, call, parsed, share_prefixes=config.share_prefixes), parsed.stream
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


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own 404 and 405, in our words and with its headers (Allow)."""
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    response = error_response(from_http_exception(error), request.state.request_id)
    response.headers.update(error.headers or {})
    return response


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
