"""/v1/files: upload, list, get, content, delete."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.http.answers import FileAnswer
from app.api.http.guard import owner_of
from app.api.http.multipart import Form, read_form
from app.api.http.operations import LIST_REFUSALS, TEXT, Operation, RouteGroup, page_query
from app.api.request_context import is_header_set
from app.api.schemas.fields import Schema
from app.api.schemas.parameters import STRICT_HEADER, refuse_names
from app.batches import PIECE_BYTES, BatchLimits, BatchService, NewFile, PageOf
from app.errors import InvalidRequest

MAX_FILE_BYTES = BatchLimits().max_file_bytes
MAX_LIMIT = 10_000  # OpenAI's limit
MAX_FILES_OF_PAGE = 1000  # a larger page would block the event loops of the processes that pass it on
_FIELDS = frozenset(("purpose", "expires_after[anchor]", "expires_after[seconds]"))  # form fields besides the file


class ExpiresAfter(Schema):
    """The time after which a file is deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class FileRoutes(RouteGroup):
    """The routes of `/v1/files`, which call the service that stores files."""

    def __init__(self, service: BatchService) -> None:
        self._service = service

    @Operation("post", "/v1/files", "Upload a file", "File", (*LIST_REFUSALS, "413"))
    async def create(self, request: Request) -> Response:
        service = self._service
        async with upload(service, owner_of(request)) as upload_id:
            form = await read_form(
                request, max_file_bytes=MAX_FILE_BYTES, sink=lambda data: service.append(upload_id, data)
            )
            if is_header_set(request.headers, STRICT_HEADER):
                refuse_names(sorted(form.fields.keys() - _FIELDS))
            return JSONResponse(await service.finish_upload(upload_id, _new_file(form)))

    @Operation(
        "get", "/v1/files", "The files", "FileList", LIST_REFUSALS,
        query=page_query(MAX_LIMIT) | {"purpose": {"schema": TEXT}},
    )  # fmt: skip
    async def list(self, request: Request) -> Response:
        """List a page of files, by default the newest first. `has_more` shows whether more files follow."""
        page = page_of(owner_of(request), request.query_params, max_limit=MAX_LIMIT, default_limit=MAX_LIMIT)
        return JSONResponse(await self._service.files(replace(page, limit=min(page.limit, MAX_FILES_OF_PAGE))))

    @Operation("get", "/v1/files/{file_id}", "One file", "File", LIST_REFUSALS)
    async def retrieve(self, request: Request) -> Response:
        return JSONResponse(await self._service.file(owner_of(request), request.path_params["file_id"]))

    @Operation("delete", "/v1/files/{file_id}", "Delete a file", "Anything", LIST_REFUSALS)
    async def delete(self, request: Request) -> Response:
        return JSONResponse(await self._service.delete_file(owner_of(request), request.path_params["file_id"]))

    @Operation(
        "get", "/v1/files/{file_id}/content", "A file's content", None, LIST_REFUSALS, media=("application/jsonl",)
    )
    async def content(self, request: Request) -> Response:
        file = await self._service.file(owner_of(request), request.path_params["file_id"])
        num_bytes = file["bytes"]
        headers = {"Content-Length": str(num_bytes), "X-Content-Type-Options": "nosniff"}
        return FileAnswer(
            content_of(self._service, owner_of(request), file["id"], num_bytes),
            media_type="application/jsonl",
            headers=headers,
        )


async def content_of(service: BatchService, owner: str, file_id: str, num_bytes: int) -> AsyncIterator[bytes]:
    """Yield the content of a file of this size in pieces. Raises NotFound."""
    offset = 0
    while offset < num_bytes:
        data = await service.read(owner, file_id, offset, PIECE_BYTES)
        assert data, "a stored file has the number of bytes that its object reports"
        offset += len(data)
        yield data


@asynccontextmanager
async def upload(service: BatchService, owner: str) -> AsyncIterator[str]:
    """Begin an upload and yield its id. The upload is abandoned if the block raises."""
    upload_id = await service.begin_upload(owner)
    try:
        yield upload_id
    except BaseException:
        with suppress(Exception):  # the service deletes an unfinished upload some minutes later anyway
            await service.abandon_upload(upload_id)
        raise


def _new_file(form: Form) -> NewFile:
    fields = form.fields
    purpose = fields.get("purpose")
    if purpose != "batch":
        raise InvalidRequest(f"`purpose` should be 'batch'; got {(purpose or '')[:40]!r}", param="purpose")
    return NewFile(filename=_filename(form.filename), purpose=purpose, expires_after_s=_expires_after_s(fields))


def _filename(given: str) -> str:
    """Return the last part of the name that a browser sends. The name is only displayed, never used as a path."""
    name = given.replace("\\", "/").rpartition("/")[2]
    max_filename_length = 255
    if not 0 < len(name) <= max_filename_length or not name.isprintable() or name in (".", ".."):
        raise InvalidRequest(f"the filename should have 1 to {max_filename_length} printable characters", param="file")
    return name


def _expires_after_s(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) <= 10):
        raise InvalidRequest("expires_after[seconds] should be a number of seconds", param="expires_after[seconds]")
    return ExpiresAfter.checked({"anchor": anchor, "seconds": int(seconds)}).seconds


def page_of(owner: str, query: Mapping[str, str], *, max_limit: int, default_limit: int) -> PageOf:
    """Return the page requested by `after`, `limit`, `order` and `purpose`. Raises InvalidRequest."""
    limit, order = query.get("limit", str(default_limit)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= max_limit):
        raise InvalidRequest(f"`limit` should be from 1 to {max_limit:,}; got {limit[:40]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"`order` should be 'asc' or 'desc'; got {order[:40]!r}", param="order")
    return PageOf(
        owner=owner,
        limit=int(limit),
        after=query.get("after"),
        is_ascending=order == "asc",
        purpose=query.get("purpose"),
    )
