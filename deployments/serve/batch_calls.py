"""`BatchService` over a handle: each method is one call to the batches deployment."""

from __future__ import annotations

from typing import Any

from ray.serve.handle import DeploymentHandle

from app.jobs import Json, NewBatch, NewFile, PageOf
from deployments.serve.errors import to_carousel_error


class RemoteBatchService:
    """Files and batches as an ingress sees them. Every method does as `BatchService` says."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def begin_upload(self) -> str:
        return str(await self._call("begin_upload"))

    async def append(self, upload_id: str, data: bytes) -> None:
        await self._call("append", upload_id, data)

    async def finish_upload(self, upload_id: str, new: NewFile) -> Json:
        return await self._object("finish_upload", upload_id, new)

    async def abandon_upload(self, upload_id: str) -> None:
        await self._call("abandon_upload", upload_id)

    async def file(self, owner: str, file_id: str) -> Json:
        return await self._object("file", owner, file_id)

    async def files(self, page: PageOf) -> Json:
        return await self._object("files", page)

    async def read(self, owner: str, file_id: str, offset: int, max_bytes: int) -> bytes:
        data: bytes = await self._call("read", owner, file_id, offset, max_bytes)
        return data

    async def delete_file(self, owner: str, file_id: str) -> Json:
        return await self._object("delete_file", owner, file_id)

    async def create_batch(self, new: NewBatch) -> Json:
        return await self._object("create_batch", new)

    async def batch(self, owner: str, batch_id: str) -> Json:
        return await self._object("batch", owner, batch_id)

    async def batches(self, page: PageOf) -> Json:
        return await self._object("batches", page)

    async def cancel_batch(self, owner: str, batch_id: str) -> Json:
        return await self._object("cancel_batch", owner, batch_id)

    async def stats(self, owner: str) -> Json:
        return await self._object("stats", owner)

    async def _object(self, method: str, *arguments: object) -> Json:
        answer: Json = await self._call(method, *arguments)
        return answer

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await self._handle.call.remote(method, *arguments)
        except Exception as error:
            raise to_carousel_error(error) from error
