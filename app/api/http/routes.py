"""The HTTP application: all routes, and around them a request id on every response and a response to every error."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.auth.limits import rate_limit_headers
from app.api.endpoints.admin import AdminRoutes, Collect, only_this_process
from app.api.endpoints.endpoint import Endpoint
from app.api.endpoints.models import ModelRoutes
from app.api.endpoints.service import ServiceRoutes
from app.api.endpoints.table import ENDPOINTS
from app.api.endpoints.tokenization import TokenizationRoutes
from app.api.handler import Client, RequestHandler
from app.api.http.body import read_json_object
from app.api.http.errors import ClientGone, error_response, from_http_exception, log_error
from app.api.http.guard import Routes, reservation_of
from app.api.http.headers import is_strict, wants_explanation, with_deadline
from app.api.http.openapi import openapi_document
from app.api.http.sse import begin_event_stream, unless_disconnected


def build_app(
    handler: RequestHandler,
    is_ready: Callable[[], Awaitable[bool]],
    *,
    expose: Callable[[], Awaitable[bytes]] | None = None,
    batch_routes: Sequence[Route] = (),
    collect: Collect | None = None,
) -> Starlette:
    """The HTTP application over the handler's models, for the keys that its authenticator knows.

    `is_ready` answers whether a request could be served now. `expose` writes the text of /metrics; by default, what
    this process has measured. `batch_routes` are those of files and batches where they are served. `collect` asks all
    processes for the reports that the admin routes show; by default, only this one.
    """
    config, authenticator = handler.config, handler.authenticator
    admin = AdminRoutes(authenticator, collect or only_this_process(authenticator))
    openapi = openapi_document(config, handler.limits, has_batches=bool(batch_routes))
    service = ServiceRoutes(is_ready, handler.metrics, expose, openapi)
    for_keys = [
        *(Route(endpoint.path, _computed(endpoint, handler), methods=["POST"]) for endpoint in ENDPOINTS.values()),
        *ModelRoutes(handler).routes(),
        *TokenizationRoutes(handler).routes(),
        *service.routes(),
        *batch_routes,
    ]
    open_routes, for_admins = service.open_routes(), admin.routes()
    {"everybody": open_routes, "keys": for_keys, "admins": for_admins}[config.metrics_for].append(
        service.metrics_route()
    )
    routes = Routes(open_routes, for_keys, for_admins)
    app = Starlette(
        middleware=[Middleware(_Border)], exception_handlers={HTTPException: _on_http_exception_of(list(routes))}
    )
    app.router = routes.guarded_by(authenticator)
    return app


def _computed(endpoint: Endpoint, handler: RequestHandler) -> Callable[[Request], Awaitable[Response]]:
    """The route of an endpoint that computes on replicas."""

    async def route(request: Request) -> Response:
        client = Client(
            reservation=reservation_of(request),
            request_id=request.state.request_id,
            has_own_id="x-request-id" in request.headers,
            headers=request.headers,
            is_strict=is_strict(request.headers),
            arrived_at=handler.metrics.arrived(),
            while_connected=partial(unless_disconnected, request.receive),
        )
        with handler.counting_refusals():
            body = with_deadline(await read_json_object(request, handler.limits), request.headers)
        try:
            pending = await handler.handle(endpoint, body, client)
        finally:
            request.state.request_id = client.request_id
        response: Response
        if not pending.is_streamed:
            whole = await unless_disconnected(request.receive, pending.whole())
            response = Response(to_json(whole), media_type="application/json")
        else:  # no header goes out before the first text or a long wait, so that a refusal still has a status
            response = await begin_event_stream(
                request.receive,
                pending.events(),
                heartbeat_s=handler.limits.heartbeat_s,
                may_begin=pending.progress.open_if_queued,
            )
        response.headers.update(pending.headers(explain=wants_explanation(request.headers)))
        return response

    return route


def _on_http_exception_of(routes: Sequence[Route]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Writes the router's own 404 and 405 as errors of this API; `Allow` names all methods of the path."""
    methods: dict[str, set[str]] = {}
    for route in routes:
        methods.setdefault(route.path, set()).update(route.methods or ())
    allow = {route.endpoint: ", ".join(sorted(methods[route.path])) for route in routes}

    async def respond(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for HTTPException only"
        response = error_response(from_http_exception(error), request.state.request_id)
        response.headers.update(error.headers or {})
        if error.status_code == 405:  # the router itself names those of the first route with that path
            response.headers["Allow"] = allow[request.scope["endpoint"]]
        return response

    return respond


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
    """The client's own id when it is printable, else a new one."""
    given = Request(scope).headers.get("x-request-id", "")
    return given if _PRINTABLE.fullmatch(given) else uuid.uuid4().hex
