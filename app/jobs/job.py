"""The data types of offline work: items, results, batches, files and responses, and the API objects made from them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from app.batches import JobState
from app.json_pieces import Json

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"
# Items


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request of a job. `body` is the JSON body that a client would send to `url` over HTTP."""

    number: int  # the position in the whole input, from 0; blank lines do not count
    id: str
    url: str
    body: Mapping[str, Any]
    num_bytes: int = 0  # the size of its line in the input
    num_requests: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemError:
    """The reason why an item, an input file or a batch cannot run. All fields are shown to clients."""

    code: str
    message: str
    line: int | None = None  # the line of the input file, from 1
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidItem:
    """An item that will not be computed, for this reason."""

    number: int
    id: str
    reason: str
    code: str = "line_failed"  # the error code for clients of batches


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOutput:
    """An engine's output for an item. If `error` is set, the text and the finish reason are None."""

    number: int
    id: str
    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """The progress of an engine's items since its previous report. Sent between processes."""

    outputs: tuple[ItemOutput, ...]  # the outputs of items that have ended
    begun: tuple[int, ...]  # the numbers of items whose first token was generated
    token_ids: Mapping[int, tuple[int, ...]]  # the new tokens of items that have not ended, by item number
    num_tokens: int  # tokens generated since the previous report, including those of unfinished items


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """The result of an item that has ended, as one line of an output file."""

    number: int
    is_error: bool
    line: bytes  # JSON in UTF-8 without a line end
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(slots=True)
class Counts:
    """Sums over the results of a job's items."""

    num_items: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def add(self, result: ItemResult) -> None:
        self.num_items += 1
        self.num_failed += result.is_error
        self.num_input_tokens += result.num_input_tokens
        self.num_cached_tokens += result.num_cached_tokens
        self.num_output_tokens += result.num_output_tokens


# Files and batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """The catalog's row for a stored response. The request and the deltas are in a file with the id as its name."""

    id: str
    owner: str
    created_at: int
    expires_at: int | None  # None for never
    status: str
    previous: str | None = None  # the id of the response that this one continues
    end: str = ""  # an `AnswerEnd` as JSON; "" if the response has not ended
    num_attempts: int = 0  # attempts in processes that crashed, plus the current attempt
    num_bytes: int = 0  # the size of its file
    is_deleted: int = 0  # 1 if the owner deleted the response, but another one that continues it still needs its text


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """The catalog's row for a file. Its name on disk is the id, so the client's file name is never part of a path."""

    id: str
    owner: str
    bytes: int
    created_at: int  # seconds since 1970, like all times in this module
    expires_at: int | None  # None for never
    filename: str
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A batch of the items in one uploaded file. The time of a state is None until the batch reaches it.

    The counts are filled in when the job ends. Until then, its `ResultStore` maintains them.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    status: JobState
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    output_expires_after_s: int | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    model: str | None = None  # the model, if all items name the same one
    errors: Sequence[ItemError] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_items: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


def counted(counts: Counts) -> dict[str, Any]:
    """Return the counts as fields of a `Job`."""
    return {
        "num_completed": counts.num_items - counts.num_failed,
        "num_failed": counts.num_failed,
        "num_input_tokens": counts.num_input_tokens,
        "num_cached_tokens": counts.num_cached_tokens,
        "num_output_tokens": counts.num_output_tokens,
    }


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def new_job_id() -> str:
    return f"batch_{uuid.uuid4().hex}"


_SHOWN_OF_FILE = [each.name for each in fields(StoredFile) if each.name != "owner"]


def file_object(file: StoredFile) -> Json:
    """Return the `file` object of OpenAI's API."""
    shown = {name: getattr(file, name) for name in _SHOWN_OF_FILE}
    return shown | {"object": "file", "status": "processed", "status_details": None}


def batch_object(job: Job) -> Json:
    """Return the `batch` object of OpenAI's API."""
    completion_window = "24h"
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model,
        "errors": {"object": "list", "data": [asdict(error) for error in job.errors]} if job.errors else None,
        "input_file_id": job.input_file_id,
        "completion_window": completion_window,
        "status": job.status.value,
        "output_file_id": job.output_file_id,
        "error_file_id": job.error_file_id,
        "created_at": job.created_at,
        "in_progress_at": job.in_progress_at,
        "expires_at": job.expires_at,
        "finalizing_at": job.finalizing_at,
        "completed_at": job.completed_at,
        "failed_at": job.failed_at,
        "expired_at": job.expired_at,
        "cancelling_at": job.cancelling_at,
        "cancelled_at": job.cancelled_at,
        "request_counts": {"total": job.num_items, "completed": job.num_completed, "failed": job.num_failed},
        "usage": {
            "input_tokens": job.num_input_tokens,
            "input_tokens_details": {"cached_tokens": job.num_cached_tokens},
            "output_tokens": job.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": job.num_input_tokens + job.num_output_tokens,
        },
        "metadata": None if job.metadata is None else dict(job.metadata),
    }


def stats_object(jobs: Sequence[tuple[Job, int]], num_running: int, tokens_per_second: float) -> Json:
    """Return the statistics of an owner's batches: batches by status, requests by state, tokens.

    Each entry of `jobs` holds the sums over some batches with one status, and the number of those batches. A batch's
    requests count only once it is validated, because its items are unknown before that.
    """
    unfinished = sum(job.num_items - job.num_completed - job.num_failed for job, _ in jobs if not job.status.has_ended)
    return {
        "object": "batch.stats",
        "batches": {status.value: sum(number for job, number in jobs if job.status is status) for status in JobState},
        "requests": {
            "queued": max(0, unfinished - num_running),
            "running": num_running,
            "completed": sum(job.num_completed for job, _ in jobs),
            "failed": sum(job.num_failed for job, _ in jobs),
        },
        "tokens": {
            "input": sum(job.num_input_tokens for job, _ in jobs),
            "output": sum(job.num_output_tokens for job, _ in jobs),
        },
        "output_tokens_per_second": round(tokens_per_second, 3),
    }
