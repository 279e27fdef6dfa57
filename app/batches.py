"""The interface between the API's routes and the process that stores files, batches and responses.

`app.api` and `app.jobs` import this module, to avoid importing one another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from app.errors import InvalidRequest
from app.json_pieces import Json
from app.usage import Owner
from app.webhooks.receiver import WebhookReceiver

# The service tier of all batch items. In OpenAI's API, requests with the tier "flex" may be delayed. In Carousel, they
# only use idle slots, are never queued, and are preempted first.
LOWEST_CLASS: Json = {"service_tier": "flex"}
RESPONSES_PATH = "/v1/responses"
CHATS_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
PIECE_BYTES = 1024 * 1024  # size of the pieces in which a file is read, sent and received
RESPONSE_RUNS = ("queued", "in_progress")  # statuses of a response that has not ended
# Limit for an HTTP body or a line of a batch file, enough for about a million tokens of text.
MAX_REQUEST_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ItemResponse:
    """The response to an item: the status and body that an HTTP client would have received."""

    status_code: int
    body: Mapping[str, Any]  # long lists in the body may be `Rows`
    is_large: bool = False  # whether the body is so large that it must be encoded in a thread
    latency_s: float | None = None  # None if it was not measured


@dataclass(frozen=True, slots=True)
class ItemOrigin:
    """Identifies the job and the item for which a request runs."""

    job_id: str
    number: int

    @property
    def request_id(self) -> str:
        """The id in the output line, the logs, the step log and traces. It is the same for all attempts."""
        return f"{self.job_id}-{self.number}"


# Answers an item, given (endpoint, owner, body, origin). Raises Overloaded, Unavailable or EngineStopped if no replica
# can serve the item now, in which case the caller retries it later. Cancelling the call aborts the request.
Answer = Callable[[str, str, Mapping[str, Any], ItemOrigin], Awaitable[ItemResponse]]


class JobState(StrEnum):
    """`validating` → `failed` | `in_progress` → `finalizing` → `completed`.

    A job that is cancelled becomes `cancelling` → `cancelled`. A job whose window ends becomes `expired`.
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
        return self in (JobState.FAILED, JobState.COMPLETED, JobState.EXPIRED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of a batch service. They are not settings, because only tests need other values."""

    max_file_bytes: int = 200 * 1024 * 1024  # as in OpenAI's batches
    max_lines: int = 50_000  # as in OpenAI's batches
    max_line_bytes: int = MAX_REQUEST_BYTES
    max_responses: int = 1024  # unfinished responses, each of which needs a task and an open file
    max_batches: int = 64  # unfinished batches, each of which needs a task, a journal and some items in memory
    window_s: int = 86_400  # time until a batch expires, the `24h` of OpenAI's API


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """The client's description of an uploaded file."""

    filename: str
    purpose: str
    expires_after_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """The client's request for a batch."""

    owner: str
    endpoint: str
    input_file_id: str
    metadata: Mapping[str, str] | None = None
    output_expires_after_s: int | None = None
    webhook: WebhookReceiver | None = None


class NewResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose answer is to be stored. It is also the first record in the answer's file."""

    owner: str
    path: str = RESPONSES_PATH  # path of the endpoint
    body: bytes  # JSON
    headers: dict[str, str] = {}  # headers that affect where and when the request runs
    request_id: str
    is_strict: bool = False
    response_id: str  # the id under which the answer is stored
    previous: str | None = None  # id of the response that this request continues
    is_streamed: bool = False
    may_wait: bool = False  # whether it may wait for a free replica, because the client does not wait for the answer
    created_at: int = 0  # seconds since 1970; 0 means now


class AnswerEnd(msgspec.Struct, frozen=True):
    """How a stored answer ended."""

    status: str  # "completed", "incomplete", "failed", "cancelled", or "refused"
    error: tuple[str, str, dict[str, Any]] | None = None  # `CarouselError.to_plain` if failed or refused
    more_usage: dict[str, Any] = {}  # fields of `usage` that the deltas do not contain


class AnswerPart(NamedTuple):
    """The next bytes of a stored answer's records, split at any position. Only the last part sets `end`."""

    data: bytes
    end: AnswerEnd | None = None


class AnswerRecorder(Protocol):
    """Generates an answer while it is being stored."""

    @property
    def info(self) -> bytes:
        """The second record in the answer's file, which readers need to interpret the following records."""

    def records(self, known: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Generate the answer. Yields the contents of its records after `known`, the records of an earlier attempt."""

    def end(self) -> AnswerEnd:
        """Return how the answer ended. Must be called after the last record."""


# Reads an owner's answer by its id, from the first byte to the end. The second argument is True if another answer
# continues it. In that case, even a deleted or expired answer can be read.
ReadAnswer = Callable[[str, bool], AsyncGenerator[AnswerPart, None]]
# Prepares an answer, and uses the reader for the responses that it continues. Raises the same errors as for a request
# whose answer is not stored.
PrepareStoredAnswer = Callable[[NewResponse, ReadAnswer], AbstractAsyncContextManager[AnswerRecorder]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOf:
    """The requested part of a list: up to `limit` entries after the entry with the id `after`."""

    owner: str
    limit: int
    after: str | None = None
    is_ascending: bool = False
    purpose: str | None = None  # only files with this purpose


def previous_not_found(response_id: str) -> InvalidRequest:
    """Return the error for a `previous_response_id` that this key cannot use, with OpenAI's error code."""
    return InvalidRequest(
        f"there is no response {response_id[:100]!r} to continue; it may have been deleted or was never stored",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def list_object(objects: Sequence[Json], page: PageOf) -> Json:
    """Return a page as a list object of OpenAI's API. If more pages follow, `objects` must have `limit + 1` entries."""
    shown = list(objects[: page.limit])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > page.limit,
    }


class BatchService(Owner, Protocol):
    """Stores files, batches and responses, returned as objects of OpenAI's API, and the ledger of usage.

    Only its owner can access an object. The owner is "" if the service does not distinguish owners. All methods raise
    NotFound if the owner has no object with the given id, and Unavailable if storage currently fails.
    """

    async def begin_upload(self, owner: str) -> str:
        """Return an upload id for a new file. Raises Overloaded if too many uploads are unfinished."""

    async def append(self, upload_id: str, data: bytes) -> None:
        """Add a piece. Raises BodyTooLarge if the file is too large, InvalidRequest if the owner's share is used up."""

    async def finish_upload(self, upload_id: str, new: NewFile) -> Json:
        """Store the uploaded pieces as a file, which then survives any crash, and return its object."""

    async def abandon_upload(self, upload_id: str) -> None:
        """Discard the uploaded pieces. Does nothing if the upload has ended."""

    async def file(self, owner: str, file_id: str) -> Json:
        """Return a file's object."""

    async def files(self, page: PageOf) -> Json:
        """Return a list of files."""

    async def read(self, owner: str, file_id: str, offset: int, max_bytes: int) -> bytes:
        """Return a piece of a file's content, or no bytes if `offset` is at or after the end."""

    async def delete_file(self, owner: str, file_id: str) -> Json:
        """Delete a file. Raises InvalidRequest while a batch is reading it."""

    async def create_batch(self, new: NewBatch) -> Json:
        """Start a batch. Raises Overloaded if too many are unfinished, and InvalidRequest for an invalid webhook."""

    async def batch(self, owner: str, batch_id: str) -> Json:
        """Return a batch's object."""

    async def batches(self, page: PageOf) -> Json:
        """Return a list of batches."""

    async def cancel_batch(self, owner: str, batch_id: str) -> Json:
        """Stop a batch. Raises InvalidRequest if all of its lines have ended."""

    async def create_response(self, new: NewResponse) -> None:
        """Start a response. Raises Overloaded, or the endpoint's error for an invalid body."""

    def follow_response(
        self, owner: str, response_id: str, offset: int = 0, *, waits: bool = True, is_continued: bool = False
    ) -> AsyncGenerator[AnswerPart, None]:
        """Yield a response's records from the byte `offset` on, and its end.

        waits: whether to wait for parts that were not written yet. Otherwise, the generator stops after the stored
        parts, without an end if the response is still running. is_continued: whether another response continues this
        one, which can then be read even if it was deleted or has expired.

        If a response is rejected before its first token, it ends with the status "refused" and is soon deleted.
        """

    async def cancel_response(self, owner: str, response_id: str) -> None:
        """Cancel a response. Raises InvalidRequest if it has already ended for another reason."""

    async def delete_response(self, owner: str, response_id: str) -> None:
        """Delete a response. If it is still running, it is aborted."""

    async def stats(self, owner: str) -> Json:
        """Return the number of batches and requests in each state, and the rate of generated tokens."""
