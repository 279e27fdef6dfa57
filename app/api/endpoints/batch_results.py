"""The results of a batch in the order of its input, from the batch's files."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pydantic_core import from_json

from app.errors import NotFound
from app.jobs import Answered, BatchService, Json
from app.jobs.items import BYTE_ORDER_MARK

MAX_SHOWN_BYTES = 16 * 1024 * 1024  # of all files of a batch: more can be had as files
_READ_BYTES = 1024 * 1024


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encoded_json(value: Json) -> bytes:
    """As answers and lines of files have it."""
    return _encode(value).encode()


def result(index: int, custom_id: str, answered: Answered | None, error: Json | None = None) -> Json:
    """One entry: a response, or an error with the status that HTTP would have had, if it came so far."""
    body = None if answered is None else answered.body
    is_fine = answered is not None and answered.status_code == 200
    return {
        "index": index,
        "custom_id": custom_id,
        "status_code": None if answered is None else answered.status_code,
        "response": body if is_fine else None,
        "error": error if body is None else None if is_fine else body["error"],
    }


async def results_of(service: BatchService, owner: str, batch: Json) -> bytes | None:
    """The results of a batch that has ended, as a JSON array.

    None where its files are gone or too large, or nothing of it ran.
    """
    file_ids = [batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]]
    if not any(file_ids[1:]):
        return None
    try:
        sizes = [(await service.file(owner, file_id))["bytes"] for file_id in file_ids if file_id]
        if sum(sizes) > MAX_SHOWN_BYTES:
            return None
        contents = [await _content(service, owner, file_id) if file_id else b"" for file_id in file_ids]
    except NotFound:
        return None
    return await asyncio.to_thread(_merged, *contents)


async def _content(service: BatchService, owner: str, file_id: str) -> bytes:
    content = bytearray()
    while piece := await service.read(owner, file_id, len(content), _READ_BYTES):
        content += piece
    return bytes(content)


def _merged(sent: bytes, output: bytes, errors: bytes) -> bytes:
    # Encoded one by one: a single call for all of them would let no other thread run meanwhile.
    ends = {line["custom_id"]: line for line in (*_lines(output), *_lines(errors))}
    custom_ids = [line["custom_id"] for line in _lines(sent)]
    results = (_result(index, ends[custom_id]) for index, custom_id in enumerate(custom_ids) if custom_id in ends)
    return b"[" + b",".join(map(encoded_json, results)) + b"]"


def _result(index: int, line: Json) -> Json:
    response = line["response"]
    answered = None if response is None else Answered(response["status_code"], response["body"])
    return result(index, line["custom_id"], answered, line["error"])


def _lines(content: bytes) -> list[Any]:
    # Lines end with line feeds only, as where they are read to be computed.
    return [from_json(line) for line in content.removeprefix(BYTE_ORDER_MARK).split(b"\n") if line.strip()]
