"""The records of a stored answer: what an attempt repeats, and how others are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from app.api.output.choices import ChoiceDelta
from app.api.output.response_state import ResponseState
from app.api.prepared_request import AnswerInfo
from app.api.stored_answers import RecordedAnswer, Repetition
from app.errors import Failure

FACTS = AnswerInfo(response_id="resp_1", created=1, model="demo", num_requests=1, num_prompt_tokens=1)


def said(text: str, **fields: Any) -> ChoiceDelta:
    return ChoiceDelta(0, text, 1, 0, **fields)


async def test_other_tasks_take_their_turns_while_a_long_answer_is_read_again() -> None:
    deltas = [said("a") for _ in range(640)] + [said("b", finish_reason="stop")]

    async def known() -> AsyncIterator[bytes]:
        for delta in deltas:
            yield msgspec.msgpack.encode(delta)

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    num_turns = 0
    counting = asyncio.create_task(count())
    recorded = RecordedAnswer(cast(ResponseState, SimpleNamespace(outputs=[None])), FACTS, path="/v1/responses")
    assert [each async for each in recorded.records(known())] == [], "all of it is known"
    counting.cancel()
    assert num_turns >= 10


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (2, 3), (100, 7), (7, 100)])
def test_a_text_is_repeated_in_pieces_of_any_size(sizes: tuple[int, int]) -> None:
    text = "".join(f"{number} \r\n" for number in range(60))
    repetition, half = Repetition(), len(text) // 2
    for at in range(0, half, sizes[0]):
        repetition.add(said(text[at : min(half, at + sizes[0])]))
    rest = [repetition.rest(said(text[at : at + sizes[1]])) for at in range(0, len(text), sizes[1])]
    assert "".join(delta.text for delta in rest if delta is not None) == text[half:]


@pytest.mark.parametrize("text", ["3 4 6", "3 4"])
def test_an_attempt_that_says_another_text_or_less_fails(text: str) -> None:
    repetition = Repetition()
    repetition.add(said("3 4 5"))
    with pytest.raises(Failure, match="produced a different output"):
        repetition.rest(said(text, finish_reason="stop"))
