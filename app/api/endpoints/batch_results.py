"""Reads the results of a batch from its files, in the order of its input."""

from __future__ import annotations

import asyncio
import json
from codecs import BOM_UTF8
from collections.abc import Callable

from pydantic_core import from_json

from app.api.endpoints.files import content_of
from app.batches import BatchService, ItemResponse
from app.errors import NotFound
from app.json_pieces import Json

MAX_SHOWN_BYTES = 16 * 1024 * 1024  # of all files of a batch; clients download larger results as files
_BODY_MARK, _AFTER_BODY = b',"body":', b'},"error":null}'  # the text around the body in a line of output


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encoded_json(value: Json) -> bytes:
    """Encode a value as compact JSON, the form of responses and of the lines of files."""
    return _encode(value).encode()


def result(index: int, custom_id: str, answered: ItemResponse | None, error: Json | None = None) -> Json:
    """Return an item's entry with its response or error. The HTTP status is null if the item reached no endpoint."""
    body = None if answered is None else answered.body
    latency_s = None if answered is None else answered.latency_s
    num_tokens = (body or {}).get("usage", {}).get("completion_tokens", 0)
    is_fine = answered is not None and answered.status_code == 200
    return {
        "index": index,
        "custom_id": custom_id,
        "status_code": None if answered is None else answered.status_code,
        "response": body if is_fine else None,
        "error": error if body is None else None if is_fine else body["error"],
        **speed(latency_s, num_tokens),
    }


def speed(latency_s: float | None, num_tokens: int) -> Json:
    """Return the latency and the output tokens per second, both null if the latency was not measured."""
    if latency_s is None:
        return {"latency_ms": None, "tokens_per_second": None}
    return {
        "latency_ms": round(1000 * latency_s, 1),
        "tokens_per_second": round(num_tokens / latency_s, 2) if latency_s > 0 else 0.0,
    }


async def results_of(service: BatchService, owner: str, batch: Json) -> bytes | None:
    """Return the results of a finished batch as a JSON array.

    Returns None if the batch's files are gone or too large, or if no item of the batch was finished.
    """
    file_ids = [batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]]
    if not any(file_ids[1:]):
        return None
    try:
        sizes = [(await service.file(owner, file_id))["bytes"] if file_id else 0 for file_id in file_ids]
        if sum(sizes) > MAX_SHOWN_BYTES:
            return None
        pieces = [content_of(service, owner, *file) for file in zip(file_ids, sizes, strict=True)]
        contents = [b"".join([piece async for piece in each]) for each in pieces]
    except NotFound:
        return None
    return await asyncio.to_thread(_merged, *contents)


def _merged(sent: bytes, output: bytes, errors: bytes) -> bytes:
    ends = dict(map(_end, (*_lines(output), *_lines(errors))))
    custom_ids = [from_json(line)["custom_id"] for line in _lines(sent)]
    results = (ends[custom_id](index) for index, custom_id in enumerate(custom_ids) if custom_id in ends)
    return b"[" + b",".join(results) + b"]"


def _end(line: bytes) -> tuple[str, Callable[[int], bytes]]:
    """Return the custom id in a line of output, and a function that writes the item's result for an input index.

    The body of a response is copied unparsed, because parsing and writing megabytes would block all other threads.
    """
    before, body_mark, rest = line.partition(_BODY_MARK)  # no text contains the mark, because quotes are escaped there
    if body_mark and rest.endswith(_AFTER_BODY):
        parsed = from_json(before + b"}}")
        if parsed["response"]["status_code"] == 200:
            custom_id, body = parsed["custom_id"], rest.removesuffix(_AFTER_BODY)
            return custom_id, lambda index: _with_body(result(index, custom_id, ItemResponse(200, {})), body)
    parsed = from_json(line)
    response = parsed["response"]
    answered = None if response is None else ItemResponse(response["status_code"], response["body"])
    return parsed["custom_id"], lambda index: encoded_json(
        result(index, parsed["custom_id"], answered, parsed["error"])
    )


def _with_body(entry: Json, body: bytes) -> bytes:
    """Return the entry as JSON, with `body`, which is already encoded, as its response."""
    fields = (f'"{name}":'.encode() + (body if name == "response" else _encode(entry[name]).encode()) for name in entry)
    return b"{" + b",".join(fields) + b"}"


def _lines(content: bytes) -> list[bytes]:
    # Only line feeds end a line, as in the code that reads the input of a batch.
    return [line for line in content.removeprefix(BOM_UTF8).split(b"\n") if line.strip()]
