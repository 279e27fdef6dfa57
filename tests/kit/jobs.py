"""Builders for tests of the room: input files, scripted answers, and services in a folder that outlives them."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from app.batches import ItemOrigin, ItemResponse, NewBatch, NewFile, PageOf
from app.config import BatchesConfig
from app.jobs.executors import FleetExecution
from app.jobs.local_service import LocalBatchService
from tests import waiting
from tests.waiting import PATIENCE_S

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
READ_BYTES = 1000
OWNER = "ann"


def input_line(name: str, /, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "name": name}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body} | fields


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Echo:
    """Answers every line with its own name, or as `answers` says, and counts how often it was asked."""

    def __init__(self, answers: Mapping[str, Callable[[int], ItemResponse]] | None = None) -> None:
        self.answers = answers or {}
        self.asked: Counter[str] = Counter()
        self.num_open = 0
        self.max_open = 0
        self.hold: asyncio.Event | None = None  # answers wait for it where there is one

    async def __call__(self, owner: str, endpoint: str, body: Mapping[str, Any], origin: ItemOrigin) -> ItemResponse:
        name = body["name"]
        self.asked[name] += 1
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            await asyncio.sleep(0)
            if self.hold is not None:
                await self.hold.wait()
            if name in self.answers:
                return self.answers[name](self.asked[name])
            return ok(name)
        finally:
            self.num_open -= 1

    async def has_open(self, number: int) -> None:
        """Returns when so many lines wait for their answers."""
        await waiting.until(lambda: self.num_open >= number)


def ok(name: str) -> ItemResponse:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    return ItemResponse(200, {"echo": name, "usage": usage})


def refused(status: int = 400) -> ItemResponse:
    return ItemResponse(
        status, {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}
    )


def service_in(folder: Path, answer: Any, **given: Any) -> LocalBatchService:
    """`given` are arguments of the service, and settings."""
    arguments = {name: given.pop(name) for name in ("clock", "limits", "client", "retries") if name in given}
    keep = given.pop("keep", None)  # by default, tests keep no responses
    execution = FleetExecution(answer, max_in_flight=given.pop("max_in_flight", 32))
    return LocalBatchService(folder, BatchesConfig(**given), execution, keep, **arguments)


async def upload(
    service: LocalBatchService, content: bytes, expires_after_s: int | None = None, owner: str = OWNER
) -> str:
    upload_id = await service.begin_upload(owner)
    await service.append(upload_id, content)
    new = NewFile(filename="in.jsonl", purpose="batch", expires_after_s=expires_after_s)
    return str((await service.finish_upload(upload_id, new))["id"])


async def begin(service: LocalBatchService, content: bytes, owner: str = OWNER) -> str:
    """Send a file and begin a batch over it."""
    file_id = await upload(service, content, owner=owner)
    return str((await service.create_batch(NewBatch(owner=owner, endpoint=CHAT, input_file_id=file_id)))["id"])


async def until(
    service: LocalBatchService, batch_id: str, *statuses: str, timeout_s: float = PATIENCE_S, owner: str = OWNER
) -> dict[str, Any]:
    """The batch once it has one of these statuses, or has ended."""
    return await waiting.until(
        lambda: service.batch(owner, batch_id), lambda batch: batch["status"] in (statuses or ENDED), timeout_s
    )


async def content(service: LocalBatchService, file_id: str | None, owner: str = OWNER) -> bytes:
    data = b""
    while file_id is not None and (piece := await service.read(owner, file_id, len(data), READ_BYTES)):
        data += piece
    return data


async def ends(
    service: LocalBatchService, batch: dict[str, Any], owner: str = OWNER
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The lines of the output file and of the error file by custom id; checks that each id is there once."""
    files = [await content(service, batch[key], owner) for key in ("output_file_id", "error_file_id")]
    lines = [[json.loads(line) for line in each.splitlines()] for each in files]
    custom_ids = [line["custom_id"] for each in lines for line in each]
    assert len(custom_ids) == len(set(custom_ids)), "a line has ended twice"
    output, errors = ({line["custom_id"]: line for line in each} for each in lines)
    return output, errors


async def all_files(service: LocalBatchService, owner: str = OWNER) -> list[dict[str, Any]]:
    return list((await service.files(PageOf(owner=owner, limit=100)))["data"])


class Crash(BaseException):
    """The process dies here."""


class Writes:
    """Every write that reaches the disk passes by here: the n-th fails, and with it all that come after."""

    def __init__(self, error: Callable[[], BaseException] = Crash) -> None:
        self.error = error
        self.left: int | None = None  # writes that still succeed; None: all
        self.failures_left: int | None = None  # failures until all is well again; None: never
        self.only = ""  # what a write must contain to fail

    @property
    def is_dead(self) -> bool:
        return self.left == 0

    def __call__(self, what: str) -> None:
        if self.only not in what:
            return
        if self.left == 0 and self.failures_left != 0:
            if self.failures_left is not None:
                self.failures_left -= 1
            raise self.error()
        if self.left:
            self.left -= 1

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> Writes:
        """Be asked before and after every statement that changes the database, every write, fsync and rename."""
        writes = self

        class Watched(sqlite3.Connection):
            def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
                if sql.split()[0] not in ("BEGIN", "INSERT", "UPDATE", "DELETE", "COMMIT"):
                    return super().execute(sql, *parameters)
                writes(sql)
                cursor = super().execute(sql, *parameters)
                if sql == "COMMIT":
                    writes("committed")  # on disk, but the caller was not told
                return cursor

        connect, replace, fsync, write, rename = sqlite3.connect, Path.replace, os.fsync, os.write, os.rename

        def watched_replace(path: Path, target: Path) -> Path:
            writes("rename")
            moved = replace(path, target)
            writes("renamed")
            return moved

        def watched_fsync(descriptor: int) -> None:
            writes("fsync")
            fsync(descriptor)

        def watched_rename(source: Path, target: Path) -> None:
            writes("rename")
            rename(source, target)
            writes("renamed")

        def watched_write(descriptor: int, content: bytes) -> int:
            try:
                writes("write")
            except BaseException:
                write(descriptor, content[: len(content) // 2])  # torn
                raise
            num_bytes = write(descriptor, content)
            writes("written")  # by this process; it was not reported
            return num_bytes

        monkeypatch.setattr("app.jobs.results.os.write", watched_write)
        monkeypatch.setattr("os.rename", watched_rename)
        monkeypatch.setattr("sqlite3.connect", lambda *args, **named: connect(*args, **named, factory=Watched))
        monkeypatch.setattr("pathlib.Path.replace", watched_replace)
        monkeypatch.setattr("os.fsync", watched_fsync)
        return self
