"""What is kept of files and batches, and how OpenAI's clients read them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from app.jobs.line import Json

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"
COMPLETION_WINDOW = "24h"


class Status(StrEnum):
    """`validating` → `failed` | `in_progress` → `finalizing` → `completed`; by request `cancelling` → `cancelled`; by
    time `expired`.
    """

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self in (Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED)


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
class LineError:
    """What is wrong with an input file, and in which line if in one."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as far as it has come. A time is None until it has come."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    status: Status
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
    model: str | None = None  # when all lines name the same
    errors: Sequence[LineError] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def new_batch_id() -> str:
    return f"batch_{uuid.uuid4().hex}"


def file_object(file: StoredFile) -> Json:
    """The `file` of OpenAI's API."""
    shown = {name: value for name, value in asdict(file).items() if name != "owner"}
    return shown | {"object": "file", "status": "processed", "status_details": None}


def batch_object(batch: Batch) -> Json:
    """The `batch` of OpenAI's API."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": [asdict(error) for error in batch.errors]} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": COMPLETION_WINDOW,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "usage": {
            "input_tokens": batch.num_input_tokens,
            "input_tokens_details": {"cached_tokens": batch.num_cached_tokens},
            "output_tokens": batch.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.num_input_tokens + batch.num_output_tokens,
        },
        "metadata": None if batch.metadata is None else dict(batch.metadata),
    }
