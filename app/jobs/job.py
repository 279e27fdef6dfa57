"""The nouns of offline work: an item, its result; the batch and the files as clients read them."""

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
    """One request of a job, as its body would be sent over HTTP."""

    number: int  # in the whole input, from 0; blank lines have no number
    id: str
    url: str
    body: Mapping[str, Any]
    num_bytes: int = 0  # of its line


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemError:
    """Why an item, or a whole input file, cannot run. Clients read all of it but `number` and `id`."""

    code: str
    message: str
    line: int | None = None  # of its file, from 1
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidItem:
    """An item of a job that is not run: it ends with this reason."""

    number: int
    id: str
    reason: str
    code: str = "line_failed"  # as clients of batches read it


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOutput:
    """What an engine has made of an item. With an `error` there is no text and no finish reason."""

    number: int
    id: str
    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What has come of an engine's items since it was last asked. Crosses processes."""

    outputs: tuple[ItemOutput, ...]  # of items that have ended
    begun: tuple[int, ...]  # items that have their first token
    token_ids: Mapping[int, tuple[int, ...]]  # by item, of those that have not ended
    num_tokens: int  # generated, of items that have not ended too


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """How an item has ended: one line of an output file."""

    number: int
    is_error: bool
    line: bytes  # JSON in UTF-8 without a line end
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(slots=True)
class Counts:
    """Sums over results."""

    num_items: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def add(self, result: ItemResult) -> None:
        """Count one more."""
        self.num_items += 1
        self.num_failed += result.is_error
        self.num_input_tokens += result.num_input_tokens
        self.num_cached_tokens += result.num_cached_tokens
        self.num_output_tokens += result.num_output_tokens


# Files and batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A stored response, as the catalog knows it. Its request and its deltas are in a file with its id as name."""

    id: str
    owner: str
    created_at: int
    expires_at: int | None  # None: never
    status: str
    previous: str | None = None  # the id of the response that it continues
    end: str = ""  # an `AnswerEnd` as JSON; "": it has not ended
    num_attempts: int = 0  # in processes that did not end cleanly, and in the one that runs it
    num_bytes: int = 0  # of its file
    is_deleted: int = 0  # its owner has deleted it; a response that continues it still needs its text


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file as it is listed. Its name on disk is its id; the client's name for it is never part of a path."""

    id: str
    owner: str
    bytes: int
    created_at: int  # seconds since 1970, as all times here
    expires_at: int | None
    filename: str
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A batch: the items of one uploaded file. A time is None until it has come.

    The counts are those at the job's end; until then the store of its results has them.
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
    model: str | None = None  # when all items name the same
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
    """The counting fields of a `Job`."""
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
    """The `file` of OpenAI's API."""
    shown = {name: getattr(file, name) for name in _SHOWN_OF_FILE}
    return shown | {"object": "file", "status": "processed", "status_details": None}


def batch_object(job: Job) -> Json:
    """The `batch` of OpenAI's API."""
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
    """What an owner's batches have to do and have done: batches by status, requests by what became of them, tokens.

    `jobs` are sums over batches of the same status, with how many they are. A batch that is still validated has no
    requests.
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
