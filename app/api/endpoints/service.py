"""The routes that say how this server is: /health, /ready, /metrics, /version, /openapi.json."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.errors import Unavailable
from app.metrics import CONTENT_TYPE, RequestMetrics, Scrape, exposition
from app.versions import versions

logger = logging.getLogger(__name__)


class ServiceRoutes:
    """Routes that need no model."""

    def __init__(
        self,
        is_ready: Callable[[], Awaitable[bool]],
        metrics: RequestMetrics,
        expose: Callable[[], Awaitable[bytes]] | None,
        openapi: dict[str, Any],
    ) -> None:
        """`expose` writes the text of /metrics; by default, that of `metrics`."""
        self._is_ready = is_ready
        self._expose = expose or self._expose_this_process
        self._metrics = metrics
        self._openapi = openapi

    def open_routes(self) -> list[Route]:
        """Those that never need a key."""
        return [Route("/health", self.health, methods=["GET"]), Route("/ready", self.ready, methods=["GET"])]

    def metrics_route(self) -> Route:
        """The settings say which key it needs."""
        return Route("/metrics", self.metrics, methods=["GET"])

    def routes(self) -> list[Route]:
        """The others."""
        return [
            Route("/version", self.version, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """The process lives and its event loop runs."""
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
        return exposition(Scrape(requests=[self._metrics.snapshot()], replicas={}))
