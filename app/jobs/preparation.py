"""One row of the input: its id, what it asks, and the request that it becomes. Nothing is started here.

A row is an OpenAI batch line (`custom_id`, `method`, `url`, `body`) or a plain one with a prompt or messages column.
Both pass the schemas and checks of the HTTP API, so that a row means what the same request would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from app.api.call import Call, ServedModel
from app.api.endpoints.chat import prepare_chat
from app.api.endpoints.completions import prepare_completion
from app.api.generation import SEED_MASK
from app.api.request_limits import RequestLimits
from app.api.schemas.parameters import refuse_unavailable
from app.api.schemas.requests import ChatRequest, CompletionRequest, GenerationRequest, from_validation_error
from app.engine.request import Request
from app.errors import CarouselError, InvalidRequest
from app.jobs.record import Record

MAX_ROW_ID_LENGTH = 512
CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"

# Columns of a plain row that mean what they mean in a body; any other column is the user's own and left alone.
SAMPLING_COLUMNS = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos",
    "response_format", "structured_outputs", "allowed_token_ids", "bad_words",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """How rows are read: the same for a whole run."""

    prompt_column: str | None = None
    messages_column: str | None = None
    max_tokens: int | None = None  # where a row does not say
    temperature: float | None = None  # where a row does not say

    @property
    def wanted_column(self) -> str:
        """In words, what a plain row must have."""
        if self.messages_column is not None:
            return f"a column {self.messages_column!r}"
        return f"a column {self.prompt_column!r}" if self.prompt_column is not None else "a prompt or messages column"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row as it was read. `fields` is None when it could not be, and `error` says why."""

    number: int  # in the whole input, from 0
    row_id: str
    place: str  # file and line
    fields: Mapping[str, Any] | None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRow:
    """A row that an engine can take."""

    number: int
    row_id: str
    request: Request
    stop: tuple[str, ...]
    skip_special_tokens: bool
    include_stop: bool = False

    def failed(self, reason: str) -> Record:
        """The record of this row when it has no answer."""
        num_prompt = len(self.request.prompt_token_ids)
        return Record(row=self.number, id=self.row_id, prompt_tokens=num_prompt, error=reason)


def row_from_line(line: bytes, *, number: int, place: str) -> Row:
    """The row in a line of JSON. `place` (file and line) is the id of a row that has none of its own."""
    try:
        fields = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        return _unreadable(number, place, f"{place}: the line is not valid JSON: {error}")
    if not isinstance(fields, dict):
        return _unreadable(number, place, f"{place}: the line should be a JSON object")
    return row_from_fields(fields, number=number, place=place)


def _unreadable(number: int, place: str, error: str) -> Row:
    return Row(number=number, row_id=place, place=place, fields=None, error=error)


def row_from_fields(fields: Mapping[str, Any], *, number: int, place: str) -> Row:
    """The row in a mapping of columns."""
    return Row(number=number, row_id=own_id(fields) or place, place=place, fields=fields)


def own_id(fields: Mapping[str, Any]) -> str | None:
    """The row's `custom_id` or `id` when it is a text or a whole number; else None."""
    for name in ("custom_id", "id"):
        value = fields.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and 0 < len(str(value)) <= MAX_ROW_ID_LENGTH:
            return str(value)
    return None


def has_question(row: Row, settings: RowSettings) -> bool:
    """Whether there is anything to answer in it; whether it can be answered is another question."""
    if row.fields is None:
        return False
    names = [name for name in (settings.messages_column, settings.prompt_column) if name] or ["prompt", "messages"]
    return _is_batch_line(row.fields) or any(row.fields.get(name) is not None for name in names)


async def prepare(row: Row, settings: RowSettings, model: ServedModel) -> PreparedRow | Record:
    """Check and tokenize a row; whatever is wrong with it becomes its record."""
    if row.fields is None:
        return Record(row=row.number, id=row.row_id, error=row.error)
    try:
        body = _typed(row.fields, settings, model)
        seeded = body if body.seed is not None else body.model_copy(update={"seed": seed_of(row.row_id)})
        if isinstance(seeded, ChatRequest):
            call = await prepare_chat(seeded, model, RequestLimits())
        else:
            assert isinstance(seeded, CompletionRequest), "there are two kinds of request"
            call = await prepare_completion(seeded, model, RequestLimits())
        return _prepared(row, call)
    except CarouselError as error:
        return Record(row=row.number, id=row.row_id, error=error.message)
    except Exception as error:  # whatever is in a row, it costs no other row anything
        return Record(row=row.number, id=row.row_id, error=f"the row cannot be prepared: {error!r:.500}")


def question_of(fields: Mapping[str, Any], settings: RowSettings) -> tuple[str, dict[str, Any]]:
    """The URL and the body of the HTTP request that means the same as a row; nothing in the body is checked.

    Raises InvalidRequest for a row that is neither a batch line nor has the column that it should have.
    """
    url, body = _batch_line(fields) if _is_batch_line(fields) else _plain_row(fields, settings)
    given = {name: value for name, value in body.items() if value is not None}
    if settings.max_tokens is not None and "max_completion_tokens" not in given:
        given.setdefault("max_tokens", settings.max_tokens)
    if settings.temperature is not None:
        given.setdefault("temperature", settings.temperature)
    return url, given


def seed_of(row_id: str) -> int:
    """A row without a seed has one that follows from its id: computed again after a crash, it says the same."""
    return int.from_bytes(hashlib.blake2b(row_id.encode("utf-8", "replace"), digest_size=8).digest(), "big") & SEED_MASK


def _typed(fields: Mapping[str, Any], settings: RowSettings, model: ServedModel) -> GenerationRequest:
    url, given = question_of(fields, settings)
    schema = _SCHEMAS[url]
    refuse_unavailable(given, schema)
    try:
        typed = schema.model_validate(given)
    except ValidationError as error:
        raise from_validation_error(error) from None
    check_fits_row(typed)
    if typed.model is not None and typed.model != model.name:
        raise InvalidRequest(f"there is no model {typed.model[:100]!r}; this run has {model.name!r}", param="model")
    return typed


def _is_batch_line(fields: Mapping[str, Any]) -> bool:
    return "custom_id" in fields and "body" in fields


_SCHEMAS: dict[str, type[GenerationRequest]] = {CHAT_URL: ChatRequest, COMPLETIONS_URL: CompletionRequest}


def _batch_line(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if own_id({"custom_id": fields["custom_id"]}) is None:
        raise InvalidRequest(f"custom_id should be a text of 1 to {MAX_ROW_ID_LENGTH} characters", param="custom_id")
    if fields.get("method", "POST") != "POST":
        raise InvalidRequest(f"method should be POST; got {str(fields['method'])[:40]!r}", param="method")
    url = str(fields.get("url"))
    if url not in _SCHEMAS:
        raise InvalidRequest(f"url should be one of {', '.join(_SCHEMAS)}; got {url[:100]!r}", param="url")
    body = fields["body"]
    if not isinstance(body, dict):
        raise InvalidRequest("body should be a JSON object", param="body")
    return url, body


def _plain_row(fields: Mapping[str, Any], settings: RowSettings) -> tuple[str, Mapping[str, Any]]:
    sampling = {name: fields[name] for name in SAMPLING_COLUMNS if name in fields}
    has_messages = settings.prompt_column is None and fields.get("messages") is not None
    if settings.messages_column is not None or has_messages:
        messages = _column(fields, settings.messages_column or "messages")
        if isinstance(messages, str):  # one turn of a user
            messages = [{"role": "user", "content": messages}]
        return CHAT_URL, sampling | {"messages": messages}
    prompt = _column(fields, settings.prompt_column or "prompt")
    return COMPLETIONS_URL, sampling | {"prompt": prompt}


def _column(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    if value is None:
        there = ", ".join(sorted(map(str, fields)))[:200] or "none"
        raise InvalidRequest(f"the row has no column {name!r}; it has {there}", param=name)
    return value


def check_fits_row(body: GenerationRequest) -> None:
    """Raise InvalidRequest for what the API can do and a row of a bulk run cannot: it has one text, and no reader."""
    if body.stream:
        raise InvalidRequest(
            "stream is true; a row of a bulk run has nobody to stream to: leave it out", param="stream"
        )
    if body.n != 1:
        raise InvalidRequest(f"n is {body.n:,}; a row has one answer: write a row for each", param="n")
    if body.num_samples != 1:
        raise InvalidRequest(f"best_of is {body.best_of}; a row has one answer: leave it out", param="best_of")
    for name, is_asked in (
        ("logprobs", body.asked_logprobs[1] is not None),
        ("prompt_logprobs", body.prompt_logprobs is not None),
        ("return_token_ids", body.return_token_ids),
        ("echo", body.asks_for_echo),
    ):
        if is_asked:
            raise InvalidRequest(
                f"{name} is not for bulk runs: a row's record holds its answer's text only", param=name
            )
    if isinstance(body, CompletionRequest) and len(body.prompt) != 1:
        raise InvalidRequest(
            f"prompt holds {len(body.prompt):,} prompts; a row has one: write a row for each", param="prompt"
        )
    if isinstance(body, ChatRequest) and body.tools and body.tool_choice != "none":
        raise InvalidRequest("a row of a bulk run has no tools; ask a service, through its fleet", param="tools")


def _prepared(row: Row, call: Call) -> PreparedRow:
    [request] = call.requests
    return PreparedRow(
        number=row.number,
        row_id=row.row_id,
        request=replace(request, request_id=f"row-{row.number}"),
        stop=call.stop,
        skip_special_tokens=call.skip_special_tokens,
        include_stop=call.include_stop,
    )
