"""Converts the token deltas of a call's requests into text, and merges them into one stream of choice deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from msgspec import Struct, structs

from app.api.http.sse import Connection
from app.api.output.token_details import LogprobsCollector, TokenDetails
from app.api.output.tool_calls import ToolCallDelta, ToolUse
from app.api.prepared_request import PreparedRequest
from app.engine.request import EngineTimes, FinishReason, Queued, Request, TokenDelta
from app.errors import Failure, Unavailable
from app.metrics import task_name
from app.text import GeneratedText, TextDelta

MAX_TOKENS_AT_ONCE = 64  # in one delta, which takes 0.3 ms with log-probabilities


# Every token creates a delta. A `Struct` is created faster than a dataclass, and deltas are never part of a cycle.
class ChoiceDelta(Struct, gc=False, omit_defaults=True):
    """The part that one token delta adds to a choice. The last delta of a choice carries the finish reason."""

    index: int
    text: str
    num_tokens: int
    num_cached_tokens: int
    finish_reason: str | None = None  # "stop", "length" or "tool_calls"
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the choice; None at end of text
    queued: Queued | None = None  # on the first delta, if the replica reports it
    calls: tuple[ToolCallDelta, ...] = ()  # the new parts of tool calls
    embedding: bytes | None = None  # on the last delta of a request for an embedding
    times: EngineTimes | None = None  # with the first token
    details: TokenDetails | None = None  # if the call asks for details
    reasoning: str = ""  # comes before `text`, and `text` comes before `calls`
    num_reasoning_tokens: int = 0  # part of `num_tokens`
    num_accepted: int = 0  # part of `num_tokens`: accepted drafts from the request's prediction
    num_rejected: int = 0  # rejected drafts from the request's prediction
    ignored: tuple[str, ...] = ()  # on the first delta: paths of schema keywords that the grammar does not enforce

    @property
    def is_empty(self) -> bool:
        """Whether this delta has no content, because the request is still queued."""
        return not (self.num_tokens or self.text or self.calls) and self.finish_reason is None


class DeltaBuffer:
    """Stores the deltas of an answer that is read completely before it is sent, and joins deltas of the same choice.

    A joined delta contains up to `MAX_TOKENS_AT_ONCE` tokens, so a token takes little more memory than its text.
    """

    def __init__(self) -> None:
        self._deltas: list[ChoiceDelta] = []
        self._last: dict[int, ChoiceDelta] = {}  # by choice

    def __len__(self) -> int:
        return len(self._deltas)

    def add(self, delta: ChoiceDelta) -> None:
        """Add the next delta of a choice. The caller must not use the delta afterwards."""
        last = self._last.get(delta.index)
        if last is not None and _may_join(last, delta):
            _join(last, delta)
        else:
            self._deltas.append(delta)
            self._last[delta.index] = delta

    async def replayed(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield all stored deltas. Other tasks may run after each delta."""
        for delta in self._deltas:
            yield delta
            await asyncio.sleep(0)


def _may_join(last: ChoiceDelta, delta: ChoiceDelta) -> bool:
    """Return whether the joined delta would be short, and would preserve the order of reasoning, text and calls."""
    is_in_order = not (last.calls and (delta.text or delta.reasoning)) and not (last.text and delta.reasoning)
    return is_in_order and _size(last) + _size(delta) <= MAX_TOKENS_AT_ONCE


def _size(delta: ChoiceDelta) -> int:
    """Return the number of tokens in a delta, including prompt tokens with log-probabilities."""
    return delta.num_tokens + (0 if delta.details is None else len(delta.details.prompt_logprobs))


def _join(last: ChoiceDelta, delta: ChoiceDelta) -> None:
    """Append `delta` to `last`, which belongs to the same choice."""
    last.text += delta.text
    last.reasoning += delta.reasoning
    last.num_tokens += delta.num_tokens
    last.num_reasoning_tokens += delta.num_reasoning_tokens
    last.num_accepted += delta.num_accepted
    last.num_rejected += delta.num_rejected
    last.num_cached_tokens = max(last.num_cached_tokens, delta.num_cached_tokens)
    last.finish_reason, last.stop_reason = delta.finish_reason, delta.stop_reason
    last.queued, last.times = last.queued or delta.queued, last.times or delta.times
    last.ignored = last.ignored or delta.ignored
    for call in delta.calls:
        if last.calls and call.name is None and call.number == last.calls[-1].number:
            *others, begun = last.calls
            last.calls = (*others, begun._replace(arguments=begun.arguments + call.arguments))
        else:
            last.calls += (call,)
    last.details = delta.details if last.details is None else last.details.joined(delta.details)


@dataclass(slots=True, eq=False)
class DirectPath:
    """Sends the middle of an answer from a replica's frame to the client's connection in one call.

    Waking the stream's task for each token and passing the delta through its generators would take twice as long. The
    stream's task sends only the first and last events, and the events for which the client's connection is not ready.
    """

    connection: Connection | None  # None once the path is closed
    add: Callable[[ChoiceDelta], object]
    write: Callable[[ChoiceDelta], Iterable[bytes]]

    def close(self) -> None:
        """Accept no more deltas, and drop all references to the answer."""
        self.connection = None
        del self.add, self.write

    def may_take(self) -> bool:
        """Return whether the client's connection accepts an event now."""
        return self.connection is not None and self.connection.may_send()

    def take(self, piece: ChoiceDelta) -> None:
        """Send the events of a delta. `may_take()` must be true."""
        assert self.connection is not None
        self.add(piece)
        for written in self.write(piece):
            self.connection.send(written)


def generate_choices(prepared: PreparedRequest, direct: DirectPath | None = None) -> AsyncGenerator[ChoiceDelta, None]:
    """Run all requests of a call and yield their deltas as soon as they arrive.

    Closing the generator aborts the requests that are still running. The first error in any choice stops all choices
    and is raised here. `direct` receives deltas from the middle of the answer, which are then not yielded. It is used
    only if the call has a single choice without tools, and only the engine can end this choice.
    """
    if prepared.tools is None and len(prepared.requests) == 1:
        return _choice_pieces(prepared, 0, direct)
    choices = [_choice_pieces(prepared, index) for index in range(len(prepared.requests))]
    if prepared.tools is not None:
        choices = [_with_calls(choice, prepared.tools) for choice in choices]
    if len(choices) == 1:
        return choices[0]
    at_once = prepared.max_at_once or len(choices)
    return _merge(choices, at_once=at_once, first_runs_alone=prepared.first_runs_alone)


async def _choice_pieces(
    prepared: PreparedRequest, index: int, direct: DirectPath | None = None
) -> AsyncGenerator[ChoiceDelta, None]:
    choice = _Choice(prepared, index)
    deltas = prepared.model.generate(choice.request)
    try:
        # Only a fleet's streams can deliver deltas directly. The loop below reads all deltas of other iterators.
        deliver_to = getattr(deltas, "deliver_to", None)
        if direct is not None and deliver_to is not None and not choice.text.may_end_itself:
            deliver_to(partial(choice.pass_on, direct))
        async for whole in deltas:
            for delta in (whole,) if _is_short(whole) else _parts(whole):
                if delta is not whole:
                    await asyncio.sleep(0)  # the accumulated tokens may fill a whole context: let other tasks run
                if delta.finish_reason is FinishReason.ABORT:
                    raise Unavailable("the server stopped this generation before its end; try again")
                piece = choice.piece_of(delta)
                is_last = piece.finish_reason is not None  # read before `yield`, as the receiver may change the piece
                yield piece
                if is_last:
                    return
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Only the generation was cancelled, not this task. The client must see a failure.
        raise Unavailable("this generation was cancelled by the server; try again") from None
    finally:
        await close(deltas)
    raise Failure(f"the token stream of request {choice.request.request_id} ended without a finish reason")


class _Choice:
    """Converts the token deltas of one request into text."""

    __slots__ = ("_collector", "_index", "request", "text")

    def __init__(self, prepared: PreparedRequest, index: int) -> None:
        self._index = index
        self.request = prepared.requests[index]
        self.text = GeneratedText(
            prepared.model.tokenizer,
            stop=prepared.stop,
            stop_tokens=prepared.stop_tokens,
            min_tokens=self.request.sampling.min_tokens,
            skip_special_tokens=prepared.skip_special_tokens,
            shown_token_ids=prepared.tools.token_ids if prepared.tools else frozenset(),
            include_stop=prepared.include_stop,
            reasoning=prepared.reasoning,
        )
        options = prepared.detail_options
        self._collector = None if options is None else LogprobsCollector(prepared, options, index)

    def pass_on(self, direct: DirectPath, delta: TokenDelta) -> bool:
        """Send a delta over the direct path. Returns False if the stream's task must send the delta instead."""
        if not direct.may_take() or not _is_short(delta):
            return False
        direct.take(self.piece_of(delta))
        return True

    def piece_of(self, delta: TokenDelta) -> ChoiceDelta:
        """Return the part that a delta adds to the choice."""
        added = self.text.push(delta)
        piece = ChoiceDelta(self._index, added.text, added.num_tokens, delta.num_cached_tokens)
        if added.num_reasoning_tokens or added.reasoning:
            piece.reasoning, piece.num_reasoning_tokens = added.reasoning, added.num_reasoning_tokens
        if delta.num_accepted or delta.num_rejected:
            piece.num_accepted, piece.num_rejected = delta.num_accepted, delta.num_rejected
        if delta.queued is not None or delta.times is not None:
            piece.queued, piece.times, piece.ignored = delta.queued, delta.times, delta.ignored
        if added.finish_reason is not None:
            _end(piece, delta, added, self.request)
        return piece if self._collector is None else _with_details(piece, self._collector, delta)


def _is_short(delta: TokenDelta) -> bool:
    return len(delta.token_ids) <= MAX_TOKENS_AT_ONCE and not delta.prompt_logprobs


def _parts(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Split a long delta: log-probabilities of prompt tokens first, then tokens. The last part may end the choice."""
    for at in range(0, len(delta.prompt_logprobs), MAX_TOKENS_AT_ONCE):
        scores = delta.prompt_logprobs[at : at + MAX_TOKENS_AT_ONCE]
        yield TokenDelta(
            delta.request_id, (), queued=delta.queued, prompt_logprobs=scores, times=delta.times, ignored=delta.ignored
        )
    last = max(0, len(delta.token_ids) - 1) // MAX_TOKENS_AT_ONCE * MAX_TOKENS_AT_ONCE
    for at in range(0, last, MAX_TOKENS_AT_ONCE):
        some = slice(at, at + MAX_TOKENS_AT_ONCE)
        yield TokenDelta(
            delta.request_id,
            delta.token_ids[some],
            num_cached_tokens=delta.num_cached_tokens,
            queued=delta.queued,
            logprobs=delta.logprobs[some],
            times=delta.times,
            ignored=delta.ignored,
        )
    yield structs.replace(delta, token_ids=delta.token_ids[last:], logprobs=delta.logprobs[last:], prompt_logprobs=())


def _with_details(piece: ChoiceDelta, collector: LogprobsCollector, delta: TokenDelta) -> ChoiceDelta:
    found = collector.push(delta, num_tokens=piece.num_tokens, has_ended=piece.finish_reason is not None)
    if found is not None:
        echoed, piece.details = found
        piece.text = echoed + piece.text
    return piece


def _end(piece: ChoiceDelta, delta: TokenDelta, added: TextDelta, request: Request) -> None:
    """Set the fields that only the last delta of a choice carries."""
    stop_token_id = delta.stop_token_id if delta.stop_token_id in request.sampling.stop_token_ids else None
    piece.finish_reason = None if added.finish_reason is None else added.finish_reason.value
    piece.stop_reason = stop_token_id if added.stop_string is None else added.stop_string
    piece.embedding = delta.embedding
    piece.num_accepted = min(delta.num_accepted, added.num_tokens)  # a stop string may have removed tokens


async def _with_calls(pieces: AsyncGenerator[ChoiceDelta, None], tools: ToolUse) -> AsyncGenerator[ChoiceDelta, None]:
    """Move tool calls from the deltas' text to `calls`. Stops after the first call if only one is allowed."""
    parser = tools.make_parser()
    async with aclosing(pieces):
        async for piece in pieces:
            parts = tools.read(parser, piece.text, is_last=piece.finish_reason is not None)
            if parser.is_done or (parser.has_calls and piece.finish_reason == "stop"):
                piece.finish_reason = "tool_calls"
            for each in _in_parts(piece, parts):
                yield each
            if parser.is_done:
                return


def _in_parts(piece: ChoiceDelta, parts: Sequence[tuple[str, tuple[ToolCallDelta, ...]]]) -> Iterator[ChoiceDelta]:
    """Yield a delta for each part. The first delta carries the token count, and the last one the finish reason."""
    piece.text, piece.calls = parts[0] if parts else ("", ())
    finish_reason, stop_reason, others = piece.finish_reason, piece.stop_reason, parts[1:]
    if others:
        piece.finish_reason = piece.stop_reason = None
    yield piece
    for number, (text, calls) in enumerate(others, start=1):
        piece = ChoiceDelta(piece.index, text, 0, piece.num_cached_tokens, calls=calls)
        if number == len(others):
            piece.finish_reason, piece.stop_reason = finish_reason, stop_reason
        yield piece


async def close(deltas: AsyncIterator[TokenDelta]) -> None:
    """Close the deltas of a request. Iterators without `aclose` need not be closed."""
    aclose = getattr(deltas, "aclose", None)
    if aclose is not None:
        await aclose()


async def _merge(
    sources: Sequence[AsyncGenerator[ChoiceDelta, None]], *, at_once: int, first_runs_alone: bool
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield the deltas of all sources as soon as they arrive. Close all sources at the end, with or without an error.

    This is not a TaskGroup, because a TaskGroup must not span a `yield`.
    """
    queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(maxsize=len(sources))
    slots, num_left = asyncio.Semaphore(at_once), len(sources)
    pumps: list[asyncio.Task[None]] = []

    def begin(some: Sequence[AsyncGenerator[ChoiceDelta, None]]) -> None:
        pumps.extend([asyncio.create_task(_pump(source, queue, slots), name=task_name()) for source in some])

    begin(sources[:1] if first_runs_alone else sources)
    try:
        while num_left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
                begin(sources[len(pumps) :])
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    source: AsyncGenerator[ChoiceDelta, None],
    queue: asyncio.Queue[ChoiceDelta | Exception | None],
    slots: asyncio.Semaphore,
) -> None:
    try:
        async with slots, aclosing(source):
            async for piece in source:
                await queue.put(piece)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
