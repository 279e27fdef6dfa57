"""What a replica keeps for an ingress that does not read."""

from __future__ import annotations

import tracemalloc
from typing import Any, cast

from app.engine.request import TokenDelta
from app.fleet import Frame, IngressSession
from app.fleet.prefix_feed import PrefixFeed
from app.fleet.uncomputed_prompts import UncomputedPrompts
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
