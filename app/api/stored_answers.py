"""Writes the records of an answer while it is generated, and reads them back as events or as one object.

The first record of a stored answer is its request, and the second is the `AnswerInfo` for the answer's writer. Each
later record is one delta. The same writers also write answers that are not stored.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from io import SEEK_END
from typing import Any, cast

import msgspec
from pydantic_core import from_json

from app.api.endpoints.responses import ResponseBuilder
from app.api.http.errors import error_body, log_error
from app.api.output.answer import Answer, ChoiceOutput, GrowingText, MoreUsage
from app.api.output.choices import ChoiceDelta
from app.api.output.completion_writers import ChatFormat, ChoicesBuilder, ChunkWriter, CompletionFormat, Format
from app.api.output.response_state import ResponseState
from app.api.output.token_details import TokenDetails
from app.api.prepared_request import AnswerInfo
from app.api.schemas.fields import MAX_MESSAGES
from app.batches import (
    CHATS_PATH,
    COMPLETIONS_PATH,
    MAX_REQUEST_BYTES,
    RESPONSES_PATH,
    AnswerEnd,
    AnswerPart,
    NewResponse,
    ReadAnswer,
    previous_not_found,
)
from app.errors import CarouselError, ContextTooLong, Failure, InvalidRequest, NotFound, from_plain
from app.json_pieces import Json
from app.records import RecordReader

# The paths of the endpoints whose answers can be stored, and the prefixes of their ids.
STORED_ID_PREFIXES = {RESPONSES_PATH: "resp_", CHATS_PATH: "chatcmpl-", COMPLETIONS_PATH: "cmpl-"}
_FORMATS: dict[str, Format] = {CHATS_PATH: ChatFormat(), COMPLETIONS_PATH: CompletionFormat()}
_END_OF_EVENT = b"\n\n"
_encode = msgspec.msgpack.Encoder().encode
_decode_new = msgspec.msgpack.Decoder(NewResponse).decode
_decode_info = msgspec.msgpack.Decoder(AnswerInfo).decode
_decode_delta = msgspec.msgpack.Decoder(ChoiceDelta).decode


# Writing records


class RecordedAnswer:
    """An answer whose records are written to a file during its generation. Implements `AnswerRecorder`."""

    def __init__(self, state: ResponseState, info: AnswerInfo, *, path: str) -> None:
        """`path` is the path of the answer's endpoint."""
        self.info = _encode(info)
        self._state = state
        self._path = path
        self._is_cut = False  # an output ended at the length limit
        # Number of entries of the state's `ignored` that are stored. Later deltas store the rest.
        self._num_reported = len(info.ignored)

    async def records(self, known: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the records of this attempt that extend `known`, the records that earlier attempts have stored.

        The request has a fixed seed, so all attempts should generate the same output. Raises Failure if the outputs
        differ, and passes on any error of the generation.
        """
        state, repetition, named = self._state, Repetition(), set[int]()
        num_known = 0
        async for content in known:
            num_known += 1
            if num_known % 64 == 0:
                await asyncio.sleep(0)  # let other tasks run
            delta = _decode_delta(content)
            self._num_reported += len(delta.ignored)
            repetition.add(delta)
            named.update(() if delta.details is None else delta.details.token_bytes)
            self._note_finish(delta)
        if repetition.num_ended == len(state.outputs):
            return
        try:
            with state.metrics:
                async with aclosing(state.pieces(None)) as pieces:
                    async for piece in pieces:
                        state.add(piece, keep_text=False)
                        rest = repetition.rest(piece)
                        if rest is not None:
                            self._note_finish(rest)
                            ignored = state.ignored[self._num_reported :]
                            self._num_reported += len(ignored)
                            yield _encode(_as_stored(rest, named, state, ignored))
            state.log_end()
        except Exception as error:
            log_error(error, state.request_id)
            raise

    def _note_finish(self, delta: ChoiceDelta) -> None:
        self._is_cut = self._is_cut or delta.finish_reason == "length"

    def end(self) -> AnswerEnd:
        """Return the end of the answer. Only `/v1/responses` uses the status "incomplete" for a truncated output."""
        is_incomplete = self._is_cut and self._path == RESPONSES_PATH
        return AnswerEnd("incomplete" if is_incomplete else "completed", None, dict(self._state.more_usage()))


def _as_stored(delta: ChoiceDelta, named: set[int], state: ResponseState, ignored: tuple[str, ...]) -> ChoiceDelta:
    """Return the delta to store, with the new entries of `ignored` and without the data about this attempt.

    The delta also includes the bytes of tokens that no earlier delta has named. These tokens are added to `named`.
    """
    if delta.queued is not None or delta.times is not None or delta.ignored or ignored:
        delta = msgspec.structs.replace(delta, queued=None, times=None, ignored=ignored)
    if delta.details is not None:
        new = {each for each in delta.details.named_tokens() if each not in named}
        delta.details.token_bytes = {each: state.token_bytes(each) for each in new}
        named |= new
    return delta


@dataclass(slots=True)
class _Known:
    """The stored part of one choice that this attempt has not repeated yet."""

    texts: dict[str, GrowingText] = field(default_factory=lambda: defaultdict(GrowingText))  # by kind, read in parts
    counts: Counter[str] = field(default_factory=Counter)  # number of tokens, by kind
    has_ended: bool = False


class Repetition:
    """Removes the parts of an attempt's deltas that an earlier attempt has already stored."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by choice

    @property
    def num_ended(self) -> int:
        """The number of choices whose last delta is stored."""
        return sum(known.has_ended for known in self._known.values())

    def add(self, stored: ChoiceDelta) -> None:
        """Add a stored delta. All stored deltas must be added before the first call to `rest`."""
        known = self._known.setdefault(stored.index, _Known())
        for kind, text in _texts(stored):
            known.texts[kind].seek(0, SEEK_END)
            known.texts[kind].add(text)
            known.texts[kind].seek(0)
        known.counts.update(_counts(stored))
        known.has_ended = known.has_ended or stored.finish_reason is not None

    def rest(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """Return the part of a delta that is not stored yet, or None. Raises Failure if the outputs differ."""
        known = self._known.get(delta.index)
        if known is not None:
            delta = self._without(known, delta)
            if known.has_ended:
                if not _is_empty(delta):
                    raise _differs()
                return None
            if delta.finish_reason is not None and any(said.read(1) for said in known.texts.values()):
                raise _differs()
        return None if _is_empty(delta) and delta.finish_reason is None else delta

    @staticmethod
    def _without(known: _Known, delta: ChoiceDelta) -> ChoiceDelta:
        calls = []
        for call in delta.calls:
            arguments = _new(known, f"arguments {call.number}", call.arguments)
            name = call.name if call.name is not None and _new(known, f"name {call.number}", call.name) else None
            if name is not None or arguments:
                calls.append(call._replace(name=name, arguments=arguments))
        counts, details = _counts(delta), delta.details
        left = {kind: number - min(number, known.counts[kind]) for kind, number in counts.items()}
        known.counts -= Counter(counts)
        if details is not None:
            kinds = ("token_ids", "text_logprobs", "logprobs", "prompt_logprobs")
            values: list[Any] = [getattr(details, kind) for kind in kinds]
            details = TokenDetails(
                *(value[len(value) - left[kind] :] for kind, value in zip(kinds, values, strict=True))
            )
        return msgspec.structs.replace(
            delta,
            text=_new(known, "text", delta.text),
            reasoning=_new(known, "reasoning", delta.reasoning),
            calls=tuple(calls),
            num_tokens=left["tokens"],
            num_reasoning_tokens=left["reasoning_tokens"],
            num_accepted=left["accepted"],
            num_rejected=left["rejected"],
            details=details,
        )


def _texts(delta: ChoiceDelta) -> Iterator[tuple[str, str]]:
    yield "reasoning", delta.reasoning
    yield "text", delta.text
    for call in delta.calls:
        yield f"name {call.number}", call.name or ""
        yield f"arguments {call.number}", call.arguments


def _counts(delta: ChoiceDelta) -> dict[str, int]:
    counts = {
        "tokens": delta.num_tokens,
        "reasoning_tokens": delta.num_reasoning_tokens,
        "accepted": delta.num_accepted,
        "rejected": delta.num_rejected,
    }
    details = delta.details
    if details is not None:
        counts |= {
            "token_ids": len(details.token_ids),
            "text_logprobs": len(details.text_logprobs),
            "logprobs": len(details.logprobs),
            "prompt_logprobs": len(details.prompt_logprobs),
        }
    return counts


def _is_empty(delta: ChoiceDelta) -> bool:
    details = delta.details
    return not (
        delta.num_tokens
        or delta.text
        or delta.reasoning
        or delta.calls
        or (details is not None and details.prompt_logprobs)
    )


def _new(known: _Known, kind: str, text: str) -> str:
    """Return the part of a text that is not stored yet. Raises Failure if the text differs from the stored text."""
    said = known.texts.get(kind)
    repeated = "" if said is None else said.read(len(text))
    if not text.startswith(repeated):
        raise _differs()
    return text[len(repeated) :]


def _differs() -> Failure:
    return Failure(
        "this response was interrupted, and recomputing it produced a different output; send the request again"
    )


# Reading records


@dataclass(slots=True, kw_only=True)
class StoredAnswer(Answer):
    """An answer that is built from the records read so far."""

    new: NewResponse
    end: AnswerEnd | None = None

    def more_usage(self) -> MoreUsage:
        return MoreUsage() if self.end is None else cast(MoreUsage, self.end.more_usage)


class AnswerReader:
    """Reads the records of one stored answer, part by part."""

    def __init__(self, *, keep_text: bool = False) -> None:
        """With `keep_text`, `answer` stores the texts of the deltas."""
        self.answer: StoredAnswer | None = None  # set after the first two records are read
        self.num_bytes = 0  # number of bytes read so far
        self._keep_text = keep_text
        self._records = RecordReader()
        self._new: NewResponse | None = None
        self._token_bytes: dict[int, bytes] = {}
        self._num_open = 0  # number of choices whose last delta is not read yet
        self._last: ChoiceDelta | None = None  # the last delta of the whole answer

    def deltas(self, part: AnswerPart) -> Iterator[ChoiceDelta]:
        """Yield the deltas of the next part after adding them to `answer`. Read all of them before the next call.

        The last delta of the whole answer is yielded with the end, and only if the answer is completed or incomplete.
        Raises the error of an answer that was refused before its first token.
        """
        self.num_bytes += len(part.data)
        for content in self._records.feed(part.data):
            if self.answer is not None:
                delta = _decode_delta(content)
                if delta.finish_reason is not None:
                    self._num_open -= 1
                    if not self._num_open:
                        self._last = delta
                        continue
                yield self._added(self.answer, delta)
            elif self._new is None:
                self._new = _decode_new(content)
            else:
                self._begin(self._new, _decode_info(content))
        if part.end is not None:
            yield from self._end(part.end)

    def _begin(self, new: NewResponse, info: AnswerInfo) -> None:
        self._num_open = info.num_requests
        self.answer = StoredAnswer(
            info=info,
            request_id=new.request_id,
            outputs=[ChoiceOutput() for _ in range(info.num_requests)],
            token_bytes=self._token_bytes.__getitem__,
            new=new,
        )

    def _end(self, end: AnswerEnd) -> Iterator[ChoiceDelta]:
        if end.status == "refused":
            raise error_of(end)
        if self.answer is None:
            raise Failure("the server has lost this response; send the request again")
        if self._last is not None and end.status in ("completed", "incomplete"):
            yield self._added(self.answer, self._last)
        self.answer.end = end

    def _added(self, answer: StoredAnswer, delta: ChoiceDelta) -> ChoiceDelta:
        if delta.details is not None:
            self._token_bytes |= delta.details.token_bytes
        if delta.ignored:
            answer.info = msgspec.structs.replace(answer.info, ignored=answer.info.ignored + delta.ignored)
        answer.outputs[delta.index].add(delta, keep_text=self._keep_text)
        return delta


class StoredEvents:
    """The events of a stored answer, numbered from 0."""

    def __init__(self) -> None:
        self.number = 0  # the number of the next event
        self.reader = AnswerReader()
        self._writer: ResponseBuilder | ChunkWriter | None = None
        self._name = b""
        self._is_inside = False  # whether the last piece ended inside an event
        self._is_open = False  # whether the headers were sent before the first event

    def open(self) -> bool:
        """Record that the headers are being sent, after which an error can no longer set the status. Returns True."""
        self._is_open = True
        return True

    def of(self, part: AnswerPart, *, after: int) -> Iterator[bytes]:
        """Yield the events of this part with numbers above `after`, in pieces, some of them empty.

        Read all pieces before the next call. Raises the errors of `AnswerReader.deltas`, but turns a refusal after
        `open` into an event.
        """
        if self._is_open and part.end is not None and part.end.status == "refused":
            part = part._replace(end=msgspec.structs.replace(part.end, status="failed"))
        for delta in self.reader.deltas(part):
            yield b""
            for piece in self._made().write(delta):
                yield self._with_ids(piece, after)
        answer = self.reader.answer
        if answer is not None and answer.end is not None:
            for piece in self._last_events(self._made(), answer.end):
                yield self._with_ids(piece, after)

    def _made(self) -> ResponseBuilder | ChunkWriter:
        if self._writer is None:
            assert self.reader.answer is not None, "the first two records are read"
            self._name = self.reader.answer.info.response_id.encode()
            self._writer = _event_writer(self.reader.answer)
        return self._writer

    @staticmethod
    def _last_events(writer: ResponseBuilder | ChunkWriter, end: AnswerEnd) -> Iterable[bytes]:
        if end.error is not None:
            return writer.fail(error_of(end))
        if end.status == "cancelled" and isinstance(writer, ResponseBuilder):
            return writer.cancel()
        return writer.end()

    def _with_ids(self, piece: bytes, after: int) -> bytes:
        """Add ids to the events in a piece. An event may span pieces, but its final two line breaks may not."""
        num_before_end = len(piece) - len(_END_OF_EVENT)
        if not self._is_inside and 0 <= piece.find(_END_OF_EVENT) == num_before_end:  # one event, the usual case
            shown = self._id() + piece if self.number > after else b""
            self.number += 1
            return shown
        written = list[bytes]()
        *ended, begun = piece.split(_END_OF_EVENT)
        for text in ended:
            self._write(written, text + _END_OF_EVENT, after)
            self.number, self._is_inside = self.number + 1, False
        if begun:
            self._write(written, begun, after)
            self._is_inside = True
        return b"".join(written)

    def _write(self, written: list[bytes], text: bytes, after: int) -> None:
        if self.number > after:
            if not self._is_inside:
                written.append(self._id())
            written.append(text)

    def _id(self) -> bytes:
        return b"id: %b:%d\n" % (self._name, self.number)


def _event_writer(answer: StoredAnswer) -> ResponseBuilder | ChunkWriter:
    form = _FORMATS.get(answer.new.path)
    return _response_builder(answer) if form is None else ChunkWriter(answer, form)


def _response_builder(answer: StoredAnswer) -> ResponseBuilder:
    return ResponseBuilder(answer, from_json(answer.info.of_body))


class StoredObject:
    """Builds the JSON object of a stored answer."""

    def __init__(self) -> None:
        self.reader = AnswerReader(keep_text=True)
        self._builder: ResponseBuilder | ChoicesBuilder | None = None

    def add(self, part: AnswerPart) -> Iterator[None]:
        """Read a part, and yield after each delta so that other tasks can run. Raises as `AnswerReader.deltas` does."""
        for delta in self.reader.deltas(part):
            for _ in self._made(self.answer).add(delta) or ():
                pass
            yield

    @property
    def answer(self) -> StoredAnswer:
        """The answer so far. The first two records must have been read."""
        assert self.reader.answer is not None, "the first two records are read"
        return self.reader.answer

    def as_json(self) -> Mapping[str, Any]:
        """Return the object so far, with its `status`."""
        answer, end = self.answer, self.answer.end
        builder = self._made(answer)
        if isinstance(builder, ResponseBuilder):
            if end is not None and end.status in ("failed", "cancelled"):
                builder.stop(end.status, None if end.error is None else error_of(end))
            return builder.as_json()
        status: Json = {"status": "in_progress" if end is None else end.status}
        if end is not None and end.error is not None:
            status |= error_body(error_of(end), answer.request_id)
        return builder.as_json() | status

    def _made(self, answer: StoredAnswer) -> ResponseBuilder | ChoicesBuilder:
        if self._builder is None:
            form = _FORMATS.get(answer.new.path)
            self._builder = _response_builder(answer) if form is None else ChoicesBuilder(answer, form)
        return self._builder


def error_of(end: AnswerEnd) -> CarouselError:
    """Return the error that ended an answer. The answer must have failed."""
    assert end.error is not None, "the answer has failed"
    return from_plain(*end.error)


# Conversations


@dataclass(frozen=True, slots=True)
class Turn:
    """A stored response as a turn in the conversation of a later response."""

    response_id: str
    previous: str | None
    input: list[Json]
    output: list[Json]  # as input items for the next turn
    num_bytes: int  # approximate size of all items as JSON


async def read_turn(parts: AsyncIterator[AnswerPart], response_id: str) -> Turn:
    """Read a stored response. Raises InvalidRequest unless the response is completed or incomplete."""
    read = StoredObject()
    async for part in parts:
        for number, _ in enumerate(read.add(part)):
            if number % 64 == 0:
                await asyncio.sleep(0)  # let other tasks run
    new, response = read.answer.new, read.as_json()
    if response["status"] not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"the response {response_id!r} is {response['status']}; only a completed or incomplete response can be "
            f"continued",
            param="previous_response_id",
        )
    body: Json = await asyncio.to_thread(from_json, new.body)
    output = [_as_input(item) for item in response["output"]]
    num_bytes = len(new.body) + sum(len(str(item)) for item in output)
    return Turn(response_id, new.previous, own_items(body["input"]), output, num_bytes)


async def with_history(body: Json, read: ReadAnswer) -> Json:
    """Return the body with the items of the responses that it continues, followed by its own items.

    Raises InvalidRequest if a response does not exist, and ContextTooLong if the conversation exceeds
    `MAX_REQUEST_BYTES`. With `truncation: auto`, the oldest turns are left out instead.
    """
    previous, own = body.get("previous_response_id"), body.get("input")
    if not isinstance(previous, str) or not isinstance(own, str | list):
        return body  # the schema reports this mistake
    if not previous.startswith(STORED_ID_PREFIXES[RESPONSES_PATH]):
        raise previous_not_found(previous)
    own = own_items(own)
    turns: list[Turn] = []
    left, num_items = MAX_REQUEST_BYTES, len(own)
    may_leave_out = body.get("truncation") == "auto"
    response_id: str | None = previous
    while response_id is not None:
        turn = await _continued(read, response_id, is_first=not turns)
        left, num_items = left - turn.num_bytes, num_items + len(turn.input) + len(turn.output)
        if left < 0 or (may_leave_out and num_items > MAX_MESSAGES):
            if not may_leave_out:
                raise ContextTooLong(
                    f"the conversation before this response has more than {MAX_REQUEST_BYTES:,} bytes; continue a "
                    f'shorter one, or send truncation: "auto" to leave out the oldest turns',
                    param="previous_response_id",
                )
            break
        turns.append(turn)
        response_id = turn.previous
    history = [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]
    if response_id is not None:
        # Older turns were left out, so the history may start with results whose calls are missing. Start with the
        # user's first message instead.
        begin = next((at for at, item in enumerate(history) if item.get("role") == "user"), len(history))
        history = history[begin:]
    return body | {"input": [*history, *own]}


async def _continued(read: ReadAnswer, response_id: str, *, is_first: bool) -> Turn:
    try:
        return await read_turn(read(response_id, not is_first), response_id)
    except NotFound as error:
        raise previous_not_found(response_id) from error


def own_items(given: Any) -> list[Json]:
    """Return the input of a request as a list of items. A text becomes one user message."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    items: list[Json] = given
    return items


def _as_input(item: Json) -> Json:
    """Convert an output item to an input item of a later response."""
    fields = ("type", "role", "call_id", "name", "arguments", "input", "content")
    kept = {name: item[name] for name in fields if name in item}
    if isinstance(kept.get("content"), list):
        kept["content"] = [{"type": part["type"], "text": part.get("text", "")} for part in kept["content"]]
    return kept


def check_id(response_id: str, path: str) -> None:
    """Raise NotFound if the id does not belong to the endpoint at `path`."""
    if not response_id.startswith(STORED_ID_PREFIXES[path]):
        raise NotFound(
            f"there is no response {response_id[:100]!r}; ids of {path} begin with {STORED_ID_PREFIXES[path]}",
            code="response_not_found",
        )
