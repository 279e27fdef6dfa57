"""Files, batches and responses that are kept: between the API's routes and the process that has them.

Neither room imports the other.
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

# The class of every item. In OpenAI's API it is the tier of requests that can wait. Here: idle slots only, never
# queued, preempted first.
LOWEST_CLASS: Json = {"service_tier": "flex"}
RESPONSES_PATH = "/v1/responses"
CHATS_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
PIECE_BYTES = 1024 * 1024  # of a file, read, sent or taken at once
RESPONSE_RUNS = ("queued", "in_progress")  # statuses of a response that has not ended
# Of one request: a body over HTTP, or a line of a file. Some million tokens of text, which is what one call may have.
MAX_REQUEST_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answered:
    """The response to an item: what an HTTP client would have got."""

    status_code: int
    body: Json  # its long lists may be `Rows`
    is_large: bool = False  # it is written in a thread
    latency_s: float | None = None  # how long it took, where that is measured


@dataclass(frozen=True, slots=True)
class ItemOrigin:
    """Which item of which job a request is."""

    job_id: str
    number: int

    @property
    def request_id(self) -> str:
        """By which the output line, the logs, the step log and traces name it; the same for each attempt."""
        return f"{self.job_id}-{self.number}"


# Answers one body of an owner at an endpoint. Raises Overloaded, Unavailable or EngineStopped when no replica can serve
# it now: the item is tried again later. Cancelling it aborts the request.
Answer = Callable[[str, str, Mapping[str, Any], ItemOrigin], Awaitable[Answered]]


class JobState(StrEnum):
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
        return self in (JobState.FAILED, JobState.COMPLETED, JobState.EXPIRED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What a service accepts. No operator has a reason for other values; tests have smaller ones."""

    max_file_bytes: int = 200 * 1024 * 1024  # as OpenAI's batches, as the next one
    max_lines: int = 50_000
    max_line_bytes: int = MAX_REQUEST_BYTES
    max_responses: int = 1024  # that have not ended: each has a task and an open file
    max_batches: int = 64  # that have not ended: each has a task, a journal and some items in memory
    window_s: int = 86_400  # until a batch expires: the `24h` of OpenAI's API


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """What a client says about a file that it has sent."""

    filename: str
    purpose: str
    expires_after_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a client asks for."""

    owner: str
    endpoint: str
    input_file_id: str
    metadata: Mapping[str, str] | None = None
    output_expires_after_s: int | None = None
    webhook: WebhookReceiver | None = None


class NewResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A request for an answer that is stored. It is the first record of the answer's file."""

    owner: str
    path: str = RESPONSES_PATH  # of its endpoint
    body: bytes  # JSON
    headers: dict[str, str] = {}  # those that say where and when it runs
    request_id: str
    is_strict: bool = False
    response_id: str  # its id from now on
    previous: str | None = None  # the id of the response that it continues
    is_streamed: bool = False
    may_wait: bool = False  # until a replica has room, because its client does not wait for the answer
    created_at: int = 0  # seconds since 1970; 0: now


class AnswerEnd(msgspec.Struct, frozen=True):
    """How a stored answer has ended."""

    status: str  # "completed", "incomplete", "failed", "cancelled", or "refused"
    error: tuple[str, str, dict[str, Any]] | None = None  # of one that failed or was refused: `CarouselError.to_plain`
    more_usage: dict[str, Any] = {}  # fields of `usage` that the deltas do not tell


class AnswerPart(NamedTuple):
    """The next bytes of a stored answer: records, which may be cut anywhere. The last part has the end."""

    data: bytes
    end: AnswerEnd | None = None


class KeptAnswer(Protocol):
    """An answer that is stored while it is generated."""

    @property
    def facts(self) -> bytes:
        """Everything that is needed to read its records: the second record of its file."""

    def records(self, known: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Generate the answer; yields the contents of its records after the `known` records of an earlier attempt."""

    def end(self) -> AnswerEnd:
        """How the answer has ended. Call it after the last record."""


# Reads the answers of one owner by their ids, each from its first byte to its end. The second argument: another answer
# continues it, so it may be deleted or expired.
ReadAnswer = Callable[[str, bool], AsyncGenerator[AnswerPart, None]]
# Prepares an answer; the reader gives the responses that it continues. Raises what the same request would be refused
# with.
AnswerKept = Callable[[NewResponse, ReadAnswer], AbstractAsyncContextManager[KeptAnswer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOf:
    """Which part of a list is wanted: `limit` entries behind the one with the id `after`."""

    owner: str
    limit: int
    after: str | None = None
    is_ascending: bool = False
    purpose: str | None = None  # of files


def previous_not_found(response_id: str) -> InvalidRequest:
    """The error for a `previous_response_id` that the key does not have, with the code that OpenAI uses."""
    return InvalidRequest(
        f"there is no response {response_id[:100]!r} to continue; it may have been deleted, or not been stored",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def list_object(objects: Sequence[Json], page: PageOf) -> Json:
    """A page of OpenAI's lists; `objects` has one more than was asked for when there are more."""
    shown = list(objects[: page.limit])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > page.limit,
    }


class BatchService(Owner, Protocol):
    """Files, batches and responses, by their ids, and the ledger of usage. All objects are those of OpenAI's API.

    Each belongs to an owner, "" where owners are not told apart, and is there for no other. Every method raises
    NotFound for an id that its owner does not have, and Unavailable when nothing can be kept now.
    """

    async def begin_upload(self, owner: str) -> str:
        """An id under which the pieces of a new file are sent. Raises Overloaded when too many are on their way."""

    async def append(self, upload_id: str, data: bytes) -> None:
        """Add a piece. Raises BodyTooLarge beyond the limit of one file, InvalidRequest beyond that of all."""

    async def finish_upload(self, upload_id: str, new: NewFile) -> Json:
        """Keep what was sent as a file, from here on over any crash."""

    async def abandon_upload(self, upload_id: str) -> None:
        """Forget what was sent, if it is still there."""

    async def file(self, owner: str, file_id: str) -> Json:
        """One file's object."""

    async def files(self, page: PageOf) -> Json:
        """A list of files."""

    async def read(self, owner: str, file_id: str, offset: int, max_bytes: int) -> bytes:
        """A piece of a file's content; empty behind its end."""

    async def delete_file(self, owner: str, file_id: str) -> Json:
        """Delete a file. Raises InvalidRequest while a batch reads it."""

    async def create_batch(self, new: NewBatch) -> Json:
        """Begin a batch. Raises Overloaded when too many have not ended, InvalidRequest for a webhook that is none."""

    async def batch(self, owner: str, batch_id: str) -> Json:
        """One batch's object."""

    async def batches(self, page: PageOf) -> Json:
        """A list of batches."""

    async def cancel_batch(self, owner: str, batch_id: str) -> Json:
        """Stop a batch. Raises InvalidRequest when all its lines have ended."""

    async def create_response(self, new: NewResponse) -> None:
        """Begin a response. Raises what its body would be refused with, and Overloaded."""

    def follow_response(
        self, owner: str, response_id: str, offset: int = 0, *, waits: bool = True, is_continued: bool = False
    ) -> AsyncGenerator[AnswerPart, None]:
        """The records of one response from a byte on, and its end.

        `waits`: as they come. Otherwise only the parts that are there, and no end where there is none yet.
        `is_continued`: another response continues it, so it may be deleted or expired.

        The end of one that was refused before its first token has the status "refused". Then the response is forgotten.
        """

    async def cancel_response(self, owner: str, response_id: str) -> None:
        """End a response. Raises InvalidRequest when it has ended otherwise."""

    async def delete_response(self, owner: str, response_id: str) -> None:
        """Forget a response, which ends where it runs."""

    async def stats(self, owner: str) -> Json:
        """How many batches and requests there are in which state, and how fast tokens come."""
