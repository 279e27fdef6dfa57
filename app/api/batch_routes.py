"""The routes of files and batches, for `build_app`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.routing import Route

from app.api.batches import BatchRoutes
from app.api.files import FileRoutes
from app.batches import BatchService


def batch_routes(
    service: BatchService, *, max_file_bytes: int, owner_of: Callable[[Request], str] = lambda request: ""
) -> list[Route]:
    """/v1/files and /v1/batches over whoever keeps them.

    `owner_of` says whose a request is: nobody sees what another owns. By default nobody is told from anybody.
    """
    files = FileRoutes(service, owner_of, max_file_bytes=max_file_bytes)
    return [*files.routes(), *BatchRoutes(service, owner_of).routes()]
