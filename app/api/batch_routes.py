"""The routes of files and batches, for `build_app`."""

from __future__ import annotations

from starlette.routing import Route

from app.api.batches import BatchRoutes
from app.api.files import FileRoutes
from app.batches import BatchService


def batch_routes(service: BatchService, *, max_file_bytes: int) -> list[Route]:
    """/v1/files and /v1/batches over whoever keeps them."""
    return [*FileRoutes(service, max_file_bytes=max_file_bytes).routes(), *BatchRoutes(service).routes()]
