"""Files, batches and responses that are kept: between the API's routes and the process that has them.

Neither room imports the other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from app.json_pieces import Json
from app.usage import Owner
from app.webhooks.receiver import WebhookReceiver

# The class of every item. In OpenAI's API it is the tier of requests that can wait. Here: idle slots only, never
# queued, preempted first.
LOWEST_CLASS: Json = {"service_tier": "flex"}
RESPONSES_PATH = "/v1/responses"
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
    max_responses: int = 1024  # that have not ended: each has a task, and its events in memory
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NewResponse:
    """A response, a chat or a completion that is kept."""

    owner: str
    path: str = RESPONSES_PATH  # of its endpoint
    body: Json
    headers: Mapping[str, str] = field(default_factory=dict)  # those that say where and when it runs
    request_id: str
    is_strict: bool = False
    response_id: str  # it is kept under this id
    created_at: int = 0  # seconds since 1970; 0: now

    @property
    def may_wait(self) -> bool:
        """Whether it may wait for room: its client has its answer before."""
        return self.path == RESPONSES_PATH and bool(self.body.get("background"))


@dataclass(frozen=True, slots=True)
class EventsAfter:
    """Which events of a response are wanted: those behind `number`, the first being 0."""

    owner: str
    response_id: str
    number: int


class Events(NamedTuple):
    """Events of a response."""

    written: list[bytes]
    are_last: bool


class KeptAnswer(Protocol):
    """A response that is kept, prepared and on the way."""

    def as_json(self) -> Json:
        """The response by now, with its `status`."""

    def events(self, known: Sequence[bytes]) -> AsyncGenerator[list[bytes], None]:
        """Its events behind those that are `known` from an earlier attempt, those of each delta together."""


# Prepares a response. Raises what the same request would be refused with.
AnswerKept = Callable[[NewResponse], AbstractAsyncContextManager[KeptAnswer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOf:
    """Which part of a list is wanted: `limit` entries behind the one with the id `after`."""

    owner: str
    limit: int
    after: str | None = None
    is_ascending: bool = False
    purpose: str | None = None  # of files


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

    async def create_response(self, new: NewResponse) -> Json:
        """Begin a response; its object. Raises what its body would be refused with, and Overloaded."""

    async def response(self, owner: str, response_id: str, wait_s: float = 0.0) -> Json:
        """One response's object, once it has ended or after `wait_s`.

        Raises what has kept it from beginning, where its client waits for it.
        """

    async def response_events(self, asked: Sequence[EventsAfter], wait_s: float) -> list[Events | Exception]:
        """Events of several responses, at least of one unless that takes longer than `wait_s`.

        For each what `response` would raise, or InvalidRequest for a number that there is not.
        """

    async def conversation(self, owner: str, response_id: str) -> list[Json]:
        """The items that a response was generated from, and its own. Raises InvalidRequest before it has ended."""

    async def response_items(self, page: PageOf, response_id: str) -> Json:
        """A list of the items that a response was generated from."""

    async def cancel_response(self, owner: str, response_id: str) -> Json:
        """End a response. Raises InvalidRequest when it has ended otherwise."""

    async def delete_response(self, owner: str, response_id: str) -> Json:
        """Forget a response, which ends where it runs."""

    async def stats(self, owner: str) -> Json:
        """How many batches and requests there are in which state, and how fast tokens come."""
