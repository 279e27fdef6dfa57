"""The routes about the server itself: /v1/models, /health, /ready, /metrics, /version, /openapi.json."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.api.handler import RequestHandler
from app.api.http.guard import reservation_of
from app.errors import Unavailable, traceback_of
from app.metrics import CONTENT_TYPE, Scrape, exposition
from app.versions import versions

logger = logging.getLogger(__name__)


class ServiceRoutes:
    """Routes that compute nothing."""

    def __init__(
        self,
        handler: RequestHandler,
        is_ready: Callable[[], Awaitable[bool]],
        expose: Callable[[], Awaitable[bytes]] | None,
        openapi: dict[str, Any],
    ) -> None:
        """`expose` writes the text of /metrics; by default, that of the handler's metrics."""
        self._handler = handler
        self._is_ready = is_ready
        self._expose = expose or self._expose_this_process
        self._openapi = openapi

    def open_routes(self) -> list[Route]:
        """Those that never need a key."""
        return [Route("/health", self.health, methods=["GET"]), Route("/ready", self.ready, methods=["GET"])]

    def metrics_route(self) -> Route:
        """The settings say which key it needs."""
        return Route("/metrics", self.metrics, methods=["GET"])

    def routes(self) -> list[Route]:
        """The others. A model's id may have slashes."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", self.model, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        """All models and pipelines that the key may use."""
        entries = self._handler.names.entries(reservation_of(request).account)
        ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]} if entries else {}
        return JSONResponse({"object": "list", "data": entries, "has_more": False, **ends})

    async def model(self, request: Request) -> Response:
        """One of them, by its name or an alias."""
        name, account = request.path_params["model_id"], reservation_of(request).account
        return JSONResponse(self._handler.names.entry(name, account))

    async def health(self, request: Request) -> Response:
        """The process lives and its event loop runs."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A request sent now could be served."""
        try:
            is_ready = await self._is_ready()
        except Exception as error:
            logger.error("the readiness check failed: %s", traceback_of(error))
            is_ready = False
        if not is_ready:
            raise Unavailable("no replica is ready to serve; try again")
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """What is measured, as Prometheus text."""
        return Response(await self._expose(), headers={"Content-Type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        """The version of this server."""
        return JSONResponse({"version": versions()["carousel"]})

    async def openapi(self, request: Request) -> Response:
        """The description of the API."""
        return JSONResponse(self._openapi)

    async def _expose_this_process(self) -> bytes:
        return exposition(Scrape(requests=[self._handler.metrics.snapshot()], replicas={}))
