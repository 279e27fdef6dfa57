"""The HTTP application. It routes requests, adds a request id to every response and converts errors to responses."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from app.api.auth.keys import Authenticator, NoAuthentication
from app.api.auth.limits import rate_limit_headers
from app.api.endpoints.adapters import AdapterFleet, AdapterRoutes
from app.api.endpoints.admin import AdminRoutes, Collect, only_this_process
from app.api.endpoints.batches import BatchRoutes
from app.api.endpoints.cancellation import Cancel, CancelRoutes, RunningCalls
from app.api.endpoints.endpoint import Endpoint
from app.api.endpoints.files import FileRoutes
from app.api.endpoints.live import LiveFeed, LiveRoutes, WatchedFleet
from app.api.endpoints.page import PageRoutes
from app.api.endpoints.scheduler import SchedulerRoutes, SchedulerSwitch
from app.api.endpoints.service import Expose, HealthRoutes, MetricsRoutes, ServiceRoutes, only_measured_here
from app.api.endpoints.short_batches import ShortBatchRoutes
from app.api.endpoints.stored_responses import LAST_EVENT_HEADER, StoredResponseRoutes
from app.api.endpoints.table import ENDPOINTS
from app.api.endpoints.tokenization import TokenizationRoutes
from app.api.endpoints.usage import UsageRoutes
from app.api.handler import RequestHandler
from app.api.http.answers import JsonAnswer
from app.api.http.body import read_json_object
from app.api.http.errors import ClientGone, error_response, from_http_exception, is_anthropic, log_error
from app.api.http.guard import Routes
from app.api.http.openapi import openapi_document
from app.api.http.operations import RouteGroup
from app.api.http.origins import OriginPolicy
from app.api.http.sse import EventStream, WhileConnected, connection_of
from app.api.request_context import EXPLAIN_HEADER, is_header_set, with_deadline
from app.api.request_trace import RequestTrace, Tracer
from app.api.schemas.parameters import STRICT_HEADER
from app.api.stored_answers import STORED_ID_PREFIXES
from app.batches import RESPONSES_PATH, BatchService
from app.errors import Failure
from app.json_pieces import Json
from app.usage import Owner


def build_app(
    handler: RequestHandler,
    is_ready: Callable[[], Awaitable[bool]],
    *,
    expose: Expose | None = None,
    batches: BatchService | None = None,
    collect: Collect | None = None,
    wanted_replicas: Callable[[], Awaitable[list[Json]]] | None = None,
    fleets: Mapping[str, WatchedFleet] = MappingProxyType({}),
    switches: Mapping[str, SchedulerSwitch] = MappingProxyType({}),
    adapters: Mapping[str, AdapterFleet] = MappingProxyType({}),
    running: RunningCalls | None = None,
    cancel: Cancel | None = None,
    ledger: Owner | None = None,
) -> Application:
    """Build the ASGI application for the models and API keys of `handler`.

    `is_ready` reports whether a request could be served now. `expose` returns the text of /metrics; the default covers
    only this process. `batches` stores files, batches and responses; without it, their routes are absent. `collect`
    gathers the reports of all processes for the admin routes; the default reports only this process. `wanted_replicas`
    returns the target number of replicas of each autoscaled model. `fleets` (for the live view and /load), `switches`
    (for strategies and policies) and `adapters` (for LoRA adapters) are mappings by model name. `cancel` cancels a
    request in any process; the default cancels only the requests in `running`, which belong to this process. `ledger`
    stores the usage of keys across restarts; the default is `batches`.
    """
    config, authenticator = handler.config, handler.authenticator
    collect = collect or only_this_process(authenticator)
    needs_key = not isinstance(authenticator, NoAuthentication)
    openapi = openapi_document(config, handler.limits, needs_key=needs_key, has_batches=batches is not None)
    running = running or RunningCalls(fleets)
    heartbeat_s = handler.limits.heartbeat_s
    stored: StoredResponseRoutes | None = None
    of_batches: list[RouteGroup] = []
    if batches is not None:
        stored = StoredResponseRoutes(batches, handler.turns, heartbeat_s=heartbeat_s)
        of_batches = [FileRoutes(batches), BatchRoutes(batches), ShortBatchRoutes(batches, handler), stored]
    for_keys = [
        *(
            Route(path, app if handler.tracer is None else TracedEndpoint(app, handler.tracer), methods=["POST"])
            for endpoint in ENDPOINTS.values()
            for app in [
                ReplicaEndpoint(endpoint, handler, running, stored if endpoint.path in STORED_ID_PREFIXES else None)
            ]
            for path in (endpoint.path, *endpoint.aliases)
        ),
        *_routes_of(TokenizationRoutes(handler), ServiceRoutes(handler, openapi)),
        *_routes_of(CancelRoutes(cancel or running.cancel), *of_batches),
    ]
    open_routes = _routes_of(HealthRoutes(is_ready), PageRoutes())
    for_admins = _routes_of(
        AdminRoutes(authenticator, collect, wanted_replicas),
        UsageRoutes(ledger or batches, collect),
        SchedulerRoutes(handler, switches),
        AdapterRoutes(handler, adapters),
        LiveRoutes(LiveFeed(fleets), heartbeat_s=heartbeat_s),
    )
    metrics = MetricsRoutes(expose or only_measured_here(handler.metrics), fleets).routes()
    {"public": open_routes, "keys": for_keys, "admins": for_admins}[config.metrics_for].extend(metrics)
    is_for_this_machine = not needs_key and not config.allow_unauthenticated
    origins = OriginPolicy(config.allowed_origins, loopback_only=is_for_this_machine)
    return Application(Routes(open_routes, for_keys, for_admins), authenticator, origins)


def _routes_of(*groups: RouteGroup) -> list[Route]:
    return [route for group in groups for route in group.routes()]


class ReplicaEndpoint:
    """The ASGI application of one endpoint whose requests run on replicas. Checks, runs and answers each request."""

    def __init__(
        self, endpoint: Endpoint, handler: RequestHandler, running: RunningCalls, stored: StoredResponseRoutes | None
    ) -> None:
        self.path = endpoint.path
        self._stored = stored
        self._endpoint = endpoint
        self._handler = handler
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send, trace: RequestTrace | None = None) -> None:
        handler, state, headers = self._handler, scope["state"], scope["state"]["headers"]
        context = handler.context(
            state["reservation"],
            state["request_id"],
            has_own_id="x-request-id" in headers,
            headers=headers,
            is_strict=is_header_set(headers, STRICT_HEADER),
            trace=trace,
            may_store=self._stored is not None,
        )
        with handler.counting_refusals():
            body = with_deadline(
                await read_json_object(Request(scope, receive), handler.limits, handler.threads), headers
            )
        if self._stored is not None:
            path = self.path
            if headers.get(LAST_EVENT_HEADER):
                await self._stored.resume(path, context, scope, receive, send)
                return
            if body.get("store", path == RESPONSES_PATH and handler.config.store_responses):
                await self._stored.answer(path, body, context, scope, receive, send)
                return
            if path == RESPONSES_PATH and body.get("previous_response_id") is not None:
                body = await self._stored.continued(body, context.reservation.account.name)
        self._running.contexts.add(context)
        try:
            async with WhileConnected(receive):
                try:
                    response = await handler.handle(self._endpoint, body, context)
                finally:
                    state["request_id"] = context.request_id
                del body  # otherwise the body would stay in memory until the last token
                context.reservation.release_body()
                response_headers = partial(response.headers, explain=is_header_set(headers, EXPLAIN_HEADER))
                if response.is_streamed:
                    connection = connection_of(scope)
                    events = EventStream(
                        response.events(connection),
                        headers=response_headers,
                        heartbeat_s=handler.limits.heartbeat_s,
                        may_begin=response.open_if_queued,
                        connection=connection,
                    )
                    await events.send_to(send)
                else:
                    content = await response.full_response()
                    answer = JsonAnswer(content, handler.turns, headers=response_headers())
                    await answer(scope, receive, send)
                if trace is not None:
                    trace.attributes |= response.trace_attributes()
        finally:
            self._running.contexts.remove(context)


class TracedEndpoint:
    """Records a trace of each request to an endpoint."""

    def __init__(self, app: ReplicaEndpoint, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace, error = RequestTrace(f"POST {self._app.path}", scope["state"]["headers"]), None
        try:
            await self._app(scope, receive, send, trace)
        except BaseException as raised:
            error = raised
            raise
        finally:
            trace.attributes["carousel.request_id"] = scope["state"]["request_id"]
            trace.end(error)
            self._tracer.record(trace)


class Application:
    """The outermost ASGI layer. It adds request ids and rate-limit headers, and converts errors to responses."""

    def __init__(self, routes: Routes, authenticator: Authenticator, origins: OriginPolicy) -> None:
        self.router = routes.guarded_by(authenticator)
        self._origins = origins
        methods: dict[str, set[str]] = {}
        for route in routes:
            methods.setdefault(route.path, set()).update(route.methods or ())
        self._allow = {route.endpoint: ", ".join(sorted(methods[route.path])) for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # otherwise Starlette's router would send its own 404 and 405 responses
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        # ASGI header names are in lower case. The reversed order lets the first of repeated headers win.
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        state["headers"] = headers
        # A printable id from the client becomes the request's id.
        given = headers.get("x-request-id", "")
        state["request_id"] = given if _PRINTABLE.fullmatch(given) else uuid.uuid4().hex
        if (task := asyncio.current_task()) is not None:  # warnings about a blocked event loop show the task's name
            max_path_length = 100  # clients may send paths of any length
            task.set_name(f"{scope['method']} {scope['path'][:max_path_length]}")
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                added = {"x-request-id": state["request_id"]} | rate_limit_headers(state)
                added |= self._origins.response_headers(headers)
                if is_anthropic(scope["path"]):
                    added["request-id"] = state["request_id"]  # the header that the anthropic package reads
                message["headers"] += [(name.encode(), value.encode()) for name, value in added.items()]
            await send(message)

        async def receive_to_end() -> Message:
            # When a client disconnects, Ray Serve's proxy cancels the call, and `receive` raises that call's error. Any
            # error here therefore means that the connection is closed.
            try:
                return await receive()
            except Exception:
                return {"type": "http.disconnect"}

        try:
            answer = self._origins.preflight(scope["method"], headers) or self.router
            await answer(scope, receive_to_end, send_with_id)
        except asyncio.CancelledError as error:
            # Ray Serve cancels the request of a client that has disconnected, and holds this error in a reference
            # cycle. Without its traceback and context, the error does not keep the request in memory.
            error.__context__ = None
            raise error.with_traceback(None) from None
        except HTTPException as error:
            await self._routing_error(error, scope)(scope, receive, send_with_id)
        except Exception as error:
            log_error(error, state["request_id"])
            if not has_started:
                await error_response(error, state["request_id"], scope["path"])(scope, receive, send_with_id)
            elif not isinstance(error, ClientGone):  # the HTTP server logs this error and closes the connection
                raise Failure("this response was interrupted; see the previous log lines for the reason") from None

    def _routing_error(self, error: HTTPException, scope: Scope) -> Response:
        """Convert the router's 404 or 405 to an error of this API, with all methods of the path in `Allow`."""
        response = error_response(from_http_exception(error), scope["state"]["request_id"], scope["path"])
        response.headers.update(error.headers or {})
        if error.status_code == 405:  # the router lists only the methods of the first route with that path
            response.headers["Allow"] = self._allow[scope["endpoint"]]
        return response


_PRINTABLE = re.compile(r"[\x21-\x7e]{1,256}")
