"""Stored answers on their way to an ingress: one stream, in which each answer fails and waits alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any, cast

import pytest

from app.batches import AnswerEnd, AnswerPart
from app.errors import NotFound, Unavailable
from app.jobs.local_service import LocalBatchService
from deployments.serve.following import (
    MAX_MESSAGE_BYTES,
    WINDOW_BYTES,
    Feed,
    FeedChange,
    FeedItem,
    Following,
    WantedAnswer,
)
from tests.waiting import until

END = AnswerEnd("completed")
caller: ContextVar[str] = ContextVar("caller", default="nobody")


class Answers:
    """The service: the content of each answer by its id, in pieces of 100 bytes or of `piece_bytes`.

    It has every second piece taken, where it is; the others come as parts.
    """

    def __init__(self, **contents: bytes | Exception) -> None:
        self.contents = contents
        self.piece_bytes = 100
        self.num_given: dict[str, int] = {}
        self.open: set[str] = set()

    async def follow_response(
        self,
        owner: str,
        response_id: str,
        offset: int,
        *,
        waits: bool,
        is_continued: bool,
        take: Callable[[bytes], bool],
    ) -> AsyncIterator[AnswerPart]:
        content = self.contents[response_id]
        self.open.add(response_id)
        try:
            if isinstance(content, Exception):
                raise content
            for number, at in enumerate(range(offset, len(content), self.piece_bytes)):
                await asyncio.sleep(0)
                self.num_given[response_id] = self.num_given.get(response_id, 0) + self.piece_bytes
                piece = content[at : at + self.piece_bytes]
                if number % 2 == 0 or not take(piece):
                    yield AnswerPart(piece)
            if response_id == "endless":
                await asyncio.Event().wait()
            yield AnswerPart(b"", END)
        finally:
            self.open.discard(response_id)


class Line:
    """Both ends of a stream, without Serve between them."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.is_broken = False
        self.contexts: set[str] = set()
        self.largest = 0
        self.num_failed = 0  # changes
        self.fails: Callable[[FeedChange], bool] = lambda change: False
        self._feed: Feed | None = None
        self._broken = asyncio.Event()
        self.following = Following(self._open, self._change)

    async def _open(self, stream_id: str) -> AsyncIterator[list[FeedItem]]:
        self.contexts.add(caller.get())
        if self.is_broken:
            raise Unavailable("the process is gone")
        self._feed = Feed(cast(LocalBatchService, self.answers))
        async with aclosing(self._feed.messages()) as messages:
            while not self._broken.is_set():
                message = asyncio.ensure_future(anext(messages))
                broken = asyncio.ensure_future(self._broken.wait())
                await asyncio.wait({message, broken}, return_when=asyncio.FIRST_COMPLETED)
                broken.cancel()
                if not message.done():
                    message.cancel()
                    with suppress(asyncio.CancelledError):
                        await message
                    break
                self.largest = max(
                    self.largest, sum(len(each) for _, each in message.result() if isinstance(each, bytes))
                )
                yield message.result()
        raise Unavailable("the process is gone")

    async def _change(self, stream_id: str, change: FeedChange) -> None:
        self.contexts.add(caller.get())
        assert self._feed is not None
        if self.fails(change):
            self.num_failed += 1
            raise Unavailable("the call was lost")
        self._feed.change(change)

    def break_off(self) -> None:
        self.is_broken = True
        self._broken.set()

    def parts(self, response_id: str, offset: int = 0) -> Any:
        return self.following.follow(WantedAnswer("ann", response_id, offset, waits=True, is_continued=False))

    async def read(self, response_id: str, offset: int = 0) -> bytes:
        data, end = b"", None
        async for part in self.parts(response_id, offset):
            data, end = data + part.data, part.end
        assert end == END
        return data


async def test_every_reader_gets_its_answer_from_where_it_begins() -> None:
    source = random.Random(1)
    contents: dict[str, Any] = {f"a{number}": source.randbytes(source.randrange(5000)) for number in range(20)}
    line = Line(Answers(**contents))
    asked = [(name, source.randrange(len(content) + 1)) for name, content in contents.items() for _ in range(3)]
    read = await asyncio.gather(*(line.read(*each) for each in asked))
    assert read == [contents[name][offset:] for name, offset in asked]


async def test_an_answer_that_cannot_be_read_fails_alone() -> None:
    line = Line(Answers(good=bytes(3000), bad=NotFound("there is no such response"), broken=ValueError("a secret")))
    good = asyncio.create_task(line.read("good"))
    with pytest.raises(NotFound, match="no such response"):
        await line.read("bad")
    with pytest.raises(Exception, match="could not be read") as failed:
        await line.read("broken")
    assert "secret" not in str(failed.value)
    assert await good == bytes(3000)


async def test_a_reader_that_leaves_disturbs_no_other_and_ends_its_own_reading() -> None:
    answers = Answers(endless=bytes(500), good=bytes(50_000))
    line = Line(answers)
    good = asyncio.create_task(line.read("good"))
    for _ in range(10):
        parts = line.parts("endless")
        await anext(parts)
        await parts.aclose()
    assert await good == bytes(50_000)
    await until(lambda: not answers.open)


async def test_a_reader_that_is_cancelled_before_it_is_known_is_not_opened() -> None:
    answers = Answers(endless=b"")
    line = Line(answers)
    reading = asyncio.create_task(line.read("endless"))
    await asyncio.sleep(0)
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    assert await Line(Answers(good=b"x")).read("good") == b"x"
    assert not answers.open


async def test_a_reader_that_does_not_take_its_parts_holds_up_no_other() -> None:
    answers = Answers(large=bytes(8 * WINDOW_BYTES), good=bytes(50_000))
    answers.piece_bytes = 50_000
    line = Line(answers)
    slow = line.parts("large")
    first = await anext(slow)
    assert await line.read("good") == bytes(50_000)
    await until(lambda: answers.num_given["large"] > WINDOW_BYTES)
    for _ in range(200):
        await asyncio.sleep(0)
    assert answers.num_given["large"] <= WINDOW_BYTES + 2 * 50_000, "no more waits for it than its window"
    rest = b"".join([part.data async for part in slow])
    assert first.data + rest == bytes(8 * WINDOW_BYTES), "it gets the rest once it takes them"


async def test_no_message_is_larger_than_a_call_carries() -> None:
    contents: dict[str, Any] = {f"a{number}": bytes(2 * WINDOW_BYTES) for number in range(12)}
    answers = Answers(**contents)
    answers.piece_bytes = WINDOW_BYTES // 2
    line = Line(answers)
    assert all(await asyncio.gather(*map(line.read, contents)))
    assert MAX_MESSAGE_BYTES // 2 <= line.largest <= MAX_MESSAGE_BYTES


async def test_when_the_process_dies_readers_hear_of_it_and_the_next_stream_serves_them() -> None:
    answers = Answers(endless=bytes(300), good=b"x")
    line = Line(answers)
    readers = [line.parts("endless") for _ in range(3)]
    for parts in readers:
        await anext(parts)
    line.break_off()
    for parts in readers:
        with pytest.raises(Unavailable):
            [part async for part in parts]
    await until(lambda: not answers.open)
    with pytest.raises(Unavailable):
        await line.read("good")
    line.is_broken = False
    line._broken.clear()
    assert await line.read("good") == b"x"


async def test_a_change_that_is_lost_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.serve.following.RETRY_S", 0.0)
    answers = Answers(large=bytes(4 * WINDOW_BYTES), endless=bytes(300), other=bytes(300))
    answers.piece_bytes = 50_000
    line = Line(answers)
    line.fails = lambda change: not change.opened and line.num_failed < 3
    assert await line.read("large") == bytes(4 * WINDOW_BYTES), "all that it takes is reported"
    assert line.num_failed == 3
    parts = line.parts("endless")
    await anext(parts)
    line.num_failed = 0
    await parts.aclose()
    await until(lambda: not answers.open)
    assert line.num_failed == 3
    line.fails, line.num_failed = (lambda change: bool(change.opened)), 0
    with pytest.raises(Unavailable, match="the call was lost"):
        await line.read("other")
    assert line.num_failed == 1, "a reader is opened again by the one who reads"


async def test_nothing_of_the_stream_belongs_to_the_request_that_came_first() -> None:
    caller.set("a client that may hang up")
    line = Line(Answers(good=bytes(1000)))
    await line.read("good")
    assert line.contexts == {"nobody"}
