"""Output files for users, with one line for each result.

`BatchFormat` formats the lines of a batch's output and error files, as in OpenAI's API. `RecordFormat` formats the
records of a bulk run. Lone surrogates, which UTF-8 cannot encode, become question marks, so that one bad text does not
fail the whole file. `write_batch_files` and `write_records` block, so call them in a thread.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.batches import ItemOrigin, ItemResponse, JobState
from app.disk import replaced
from app.jobs.files import FileStore
from app.jobs.job import OUTPUT_PURPOSE, InvalidItem, Item, ItemOutput, ItemResult, Job, StoredFile
from app.jobs.results import ResultStore
from app.json_pieces import Json, json_pieces, one_line

# The columns of a record, in order. `row` is the item's number.
COLUMNS = ("row", "id", "text", "finish_reason", "prompt_tokens", "completion_tokens", "error")


def _encode(value: Any, fallback: Callable[[Any], Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=fallback)
    return one_line(text.encode("utf-8", errors="replace"))


_WHY_UNFINISHED = {
    JobState.CANCELLED: ("batch_cancelled", "the batch was cancelled before this line was done"),
    JobState.EXPIRED: ("batch_expired", "the batch expired before this line was done"),
}


# Batches


class BatchFormat:
    """Formats the result lines of batches, as in OpenAI's API. A status other than 200 is for the error file."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id

    def answered(self, item: Item, answered: ItemResponse) -> ItemResult:
        """Return the result of an item that was computed. A status other than 200 makes it an error."""
        request_id = ItemOrigin(self._job_id, item.number).request_id
        response = {"status_code": answered.status_code, "request_id": request_id, "body": answered.body}
        try:
            line = _batch_line(item.id, response, None)
        except (ValueError, RecursionError) as error:  # NaN or very deep nesting fails only this item
            line = _batch_line(
                item.id, None, {"code": "server_error", "message": f"the answer is not valid JSON: {error}"}
            )
            return ItemResult(number=item.number, is_error=True, line=line)
        usage = answered.body.get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        num_read_from_cache = usage.get("cache_read_input_tokens", 0)
        return ItemResult(
            number=item.number,
            is_error=answered.status_code != 200,
            line=line,
            # /v1/responses names the counts differently, and /v1/messages excludes cached tokens from the input tokens.
            num_input_tokens=usage.get("prompt_tokens", usage.get("input_tokens", 0)) + num_read_from_cache,
            num_cached_tokens=details.get("cached_tokens", num_read_from_cache),
            num_output_tokens=usage.get("completion_tokens", usage.get("output_tokens", 0)),
        )

    def invalid(self, item: InvalidItem) -> ItemResult:
        """Return the result of an item that cannot run or will not be retried."""
        line = _batch_line(item.id, None, {"code": item.code, "message": item.reason})
        return ItemResult(number=item.number, is_error=True, line=line)


def _batch_line(custom_id: str, response: Json | None, error: Json | None) -> bytes:
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return b"".join(json_pieces(line, _encode))


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The two files of a batch, not yet added to the catalog. A file without lines is None."""

    output: StoredFile | None
    errors: StoredFile | None


def write_batch_files(
    job: Job,
    end: JobState,
    results: ResultStore,
    items: Iterable[Item],
    files: FileStore,
    *,
    now: int,
    keep_s: int | None,
) -> BatchFiles:
    """Write every item of a batch to either the output file or the error file. Raises OSError.

    `end` is the batch's final state. If the batch was cancelled or has expired, each item without a result gets an
    error line that says so. The files expire `keep_s` seconds after `now` (None for never).
    """
    with ExitStack() as stack:
        output, errors = (stack.enter_context(files.draft()) for _ in range(2))
        for result in results.results():
            (errors if result.is_error else output).write(result.line + b"\n")
        if end in _WHY_UNFINISHED and not results.is_complete:
            code, message = _WHY_UNFINISHED[end]
            for item in items:
                if item.number not in results.ended:
                    errors.write(_batch_line(item.id, None, {"code": code, "message": message}) + b"\n")
        kept: list[StoredFile | None] = [None, None]
        for place, (draft, kind) in enumerate(((output, "output"), (errors, "error"))):
            if draft.num_bytes:
                draft.keep()
                kept[place] = draft.described(job.owner, f"{job.id}_{kind}.jsonl", OUTPUT_PURPOSE, now, keep_s)
        return BatchFiles(*kept)


# Bulk runs


class RecordFormat:
    """Formats the records of bulk runs. Each record contains one text. `COLUMNS` lists the fields of a record."""

    def generated(self, output: ItemOutput) -> ItemResult:
        """Return an engine's output as the result of its item."""
        columns = {"row": output.number} | asdict(output)
        record = {name: columns[name] for name in COLUMNS}
        return ItemResult(
            number=output.number,
            is_error=output.error is not None,
            line=one_line(json.dumps(record, ensure_ascii=False).encode("utf-8", errors="replace")),
            num_input_tokens=output.prompt_tokens,
            num_output_tokens=output.completion_tokens,
        )

    def invalid(self, item: InvalidItem) -> ItemResult:
        """Return the result of an item that cannot run or will not be retried."""
        return self.generated(ItemOutput(number=item.number, id=item.id, error=item.reason))


def write_records(results: ResultStore, path: Path, output_format: str) -> None:
    """Write all records to `path`, as Parquet or JSONL. If writing fails, `path` is unchanged. Raises OSError."""
    with replaced(path) as temporary:
        if output_format == "parquet":
            _write_parquet(results, temporary)
        else:
            with temporary.open("wb") as file:
                file.writelines(result.line + b"\n" for result in results.results())


def _write_parquet(results: ResultStore, path: Path) -> None:
    import pyarrow  # imported here, because the processes of a service do not use it
    from pyarrow import parquet

    counting_columns = ("row", "prompt_tokens", "completion_tokens")  # integers; the other columns hold text or null
    schema = pyarrow.schema(
        [pyarrow.field(name, pyarrow.int64() if name in counting_columns else pyarrow.string()) for name in COLUMNS]
    )
    with parquet.ParquetWriter(path, schema) as writer:
        records: list[dict[str, Any]] = []
        for result in results.results():
            records.append(json.loads(result.line))
            if len(records) == 10_000:  # the size of a row group
                writer.write_table(pyarrow.Table.from_pylist(records, schema=schema))
                records = []
        writer.write_table(pyarrow.Table.from_pylist(records, schema=schema))
