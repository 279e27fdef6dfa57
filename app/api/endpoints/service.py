"""The routes about the server itself, which run nothing on replicas."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.endpoints.live import WatchedFleet
from app.api.handler import RequestHandler
from app.api.http.answers import FileAnswer
from app.api.http.guard import reservation_of
from app.api.http.operations import MODEL_REFUSALS, Operation, RouteGroup
from app.errors import Unavailable, traceback_of
from app.json_pieces import Json
from app.metrics import CONTENT_TYPE, RequestMetrics, Scrape, exposition
from app.versions import versions

logger = logging.getLogger(__name__)

Expose = Callable[[], Awaitable[Sequence[bytes]]]  # returns the text of /metrics in pieces


class ServiceRoutes(RouteGroup):
    """The routes about models, the version and the API description."""

    def __init__(self, handler: RequestHandler, openapi: Json) -> None:
        self._handler = handler
        self._openapi = openapi

    @Operation("get", "/v1/models", "The models", "ModelList")
    async def models(self, request: Request) -> Response:
        """List all models and pipelines that the key may use."""
        entries = self._handler.names.entries(reservation_of(request).account)
        ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]} if entries else {}
        return JSONResponse({"object": "list", "data": entries, "has_more": False, **ends})

    @Operation("get", "/v1/models/{model_id:path}", "One model", "Model", MODEL_REFUSALS)
    async def model(self, request: Request) -> Response:
        """Return one model or pipeline by its name or alias. The name may contain slashes."""
        name, account = request.path_params["model_id"], reservation_of(request).account
        return JSONResponse(self._handler.names.entry(name, account))

    @Operation("get", "/version", "The version of the server", "Version")
    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": versions()["carousel"]})

    @Operation("get", "/openapi.json", "This description", "Anything")
    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._openapi)


class HealthRoutes(RouteGroup):
    """The health routes, which need no key."""

    def __init__(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        self._is_ready = is_ready

    @Operation("get", "/health", "The process is alive", "Anything")
    async def health(self, request: Request) -> Response:
        """Report that the process is alive and its event loop is running."""
        return JSONResponse({"status": "ok"})

    @Operation("get", "/ready", "Whether a request could be served", "Anything", ("503",))
    async def ready(self, request: Request) -> Response:
        """Report whether a request sent now could be served. Raises Unavailable if not."""
        try:
            is_ready = await self._is_ready()
        except Exception as error:
            logger.error("the readiness check failed: %s", traceback_of(error))
            is_ready = False
        if not is_ready:
            raise Unavailable("no replica is ready to serve requests; try again")
        return JSONResponse({"status": "ready"})


class MetricsRoutes(RouteGroup):
    """The routes of metrics and load. The setting `api.metrics_for` decides which key they require."""

    def __init__(self, expose: Expose, fleets: Mapping[str, WatchedFleet]) -> None:
        self._expose = expose
        self._fleets = fleets.values()

    @Operation("get", "/metrics", "The metrics, for Prometheus", media=("text/plain",))
    async def metrics(self, request: Request) -> Response:
        text = await self._expose()
        headers = {"Content-Type": CONTENT_TYPE, "Content-Length": str(sum(map(len, text)))}
        return FileAnswer(_each(text), headers=headers)

    @Operation("get", "/load", "The number of requests on all replicas", "Load")
    async def load(self, request: Request) -> Response:
        """Return the running and waiting requests, as vLLM does. Other ingresses' counts are as last reported."""
        replicas = [replica for fleet in self._fleets for replica in fleet.describe()]
        return JSONResponse({"server_load": sum(replica.get("requests", 0) for replica in replicas)})


async def _each(text: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in text:
        yield piece


def only_measured_here(metrics: RequestMetrics) -> Expose:
    """Return an `Expose` that includes only the metrics of this process."""

    async def expose() -> list[bytes]:
        return [exposition(Scrape(requests=[metrics.snapshot()], replicas={}))]

    return expose
