"""The routes of files and batches, for `build_app`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.routing import Route

from app.api.endpoints.batches import BatchRoutes
from app.api.endpoints.files import FileRoutes
from app.api.endpoints.short_batches import ShortBatchRoutes
from app.api.handler import RequestHandler
from app.jobs import BatchLimits, BatchService


def batch_routes(
    service: BatchService,
    handler: RequestHandler,
    *,
    max_file_bytes: int = BatchLimits().max_file_bytes,
    owner_of: Callable[[Request], str] = lambda request: "",
) -> list[Route]:
    """/v1/files, /v1/batches and /v1/batch over the service that keeps them.

    `handler` handles the prompts of /v1/batch that are computed at once. `owner_of` gives the owner of a request, which
    sees only its own files and batches. By default all requests have one owner.
    """
    files = FileRoutes(service, owner_of, max_file_bytes=max_file_bytes)
    short = ShortBatchRoutes(service, handler, owner_of)
    return [*files.routes(), *BatchRoutes(service, owner_of).routes(), *short.routes()]
