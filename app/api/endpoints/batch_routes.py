"""The routes of files and batches, for `build_app`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.routing import Route

from app.api.endpoints.batches import BatchRoutes
from app.api.endpoints.files import FileRoutes
from app.api.endpoints.short_batches import ShortBatchRoutes
from app.api.handler import Answering
from app.config import ApiConfig
from app.jobs import BatchService


def batch_routes(
    service: BatchService,
    answering: Answering,
    config: ApiConfig,
    *,
    max_file_bytes: int,
    owner_of: Callable[[Request], str] = lambda request: "",
) -> list[Route]:
    """/v1/files, /v1/batches and /v1/batch over whoever keeps them.

    `answering` has the short form's prompts answered that are to be answered at once. `owner_of` says whose a request
    is: nobody sees what another owns. By default nobody is told from anybody.
    """
    files = FileRoutes(service, owner_of, max_file_bytes=max_file_bytes)
    short = ShortBatchRoutes(service, answering, config, owner_of)
    return [*files.routes(), *BatchRoutes(service, owner_of).routes(), *short.routes()]
