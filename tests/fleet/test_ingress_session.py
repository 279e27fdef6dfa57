"""What a replica keeps for an ingress that does not read."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any, cast

import pytest

from app.engine.request import TokenDelta
from app.fleet import Frame, FrameReader, IngressSession
from app.fleet.frames import encode
from app.fleet.prefix_feed import PrefixFeed
from app.fleet.uncomputed_prompts import UncomputedPrompts
from tests.fleet.test_connection import Ingress
from tests.kit.fleet import make_report


class Stream:
    """To an ingress that may be slow."""

    def __init__(self) -> None:
        self.is_writable = True
        self.frames: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)


async def test_an_ingress_that_does_not_read_costs_little_more_than_its_tokens_numbers_and_gets_one_frame() -> None:
    stream, num_tokens = Stream(), 20_000
    session = IngressSession(
        stream, cast(Any, None), make_report, prefixes=PrefixFeed().open(), prompts=UncomputedPrompts(), heartbeat_s=1e6
    )
    stream.is_writable = False
    stream.frames.clear()
    tracemalloc.start()
    try:
        for number in range(num_tokens):
            session.put_all([TokenDelta("long", (1000 + number,))])
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 8 * num_tokens
    session.put_all([TokenDelta("short", (5,))])
    stream.is_writable = True
    session.flush()
    [frame] = stream.frames
    assert [(delta.request_id, len(delta.token_ids)) for delta in frame.deltas] == [("long", num_tokens), ("short", 1)]
    assert frame.deltas[0].token_ids == tuple(range(1000, 1000 + num_tokens))
    session.close()


class FakeTime(asyncio.SelectorEventLoop):
    """Time passes only while nothing is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def advance(timeout: float | None = None) -> Any:
            self._now += timeout or 0.0
            return select(0)

        self._selector.select = advance  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


class ToReader(Stream):
    """To an ingress that reads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.reader: FrameReader | None = None

    def send(self, frame: Frame) -> None:
        if self.reader is not None:
            self.reader.data_received(encode(frame))


@pytest.mark.parametrize("num_adapters", [0, 128, 1024])
def test_a_replica_with_many_short_requests_of_one_ingress_is_not_taken_for_broken_by_another(
    num_adapters: int,
) -> None:
    async def two_minutes() -> bool:
        report = make_report(adapters=tuple(f"{number:016x}" for number in range(num_adapters)))
        prompts, feed, stream = UncomputedPrompts(), PrefixFeed(), ToReader()
        reader = stream.reader = Ingress().reader()
        busy, _ = (
            IngressSession(
                each, cast(Any, None), lambda: report, prefixes=feed.open(), prompts=prompts, heartbeat_s=5
            )
            for each in (Stream(), stream)
        )  # fmt: skip
        for number in range(120 * 100):
            busy._prompts.add(str(number), 300)
            busy.put_all([TokenDelta(str(number - 5), (5,))])
            await asyncio.sleep(0.01)
        return reader.is_open

    with asyncio.Runner(loop_factory=FakeTime) as runner:
        assert runner.run(two_minutes())
