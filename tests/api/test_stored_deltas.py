"""An answer that is read before it goes out: what is kept of it, and what is replayed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.api.output.choices import MAX_TOKENS_AT_ONCE, ChoiceDelta, DeltaBuffer, _in_parts, _parts
from app.api.output.token_details import TokenDetails, TokenLogprob
from app.api.output.tool_calls import ToolCallDelta
from app.engine.request import EngineTimes, FinishReason, MergedDelta, Queued, TokenDelta, TokenLogprobs
from tests.waiting import TimelessLoop


@pytest.fixture(autouse=True)
def loop_factory() -> Any:
    return TimelessLoop


def delta(text: str = "", index: int = 0, **fields: Any) -> ChoiceDelta:
    return ChoiceDelta(index, text, fields.pop("num_tokens", 1), fields.pop("num_cached_tokens", 0), **fields)


async def replayed(*deltas: ChoiceDelta) -> list[ChoiceDelta]:
    kept = DeltaBuffer()
    for each in deltas:
        kept.add(each)
    again = [each async for each in kept.replayed()]
    assert len(kept) == len(again)
    assert asyncio.get_running_loop().time() == 0, "others take their turns, and nothing waits"
    return again


async def test_few_deltas_are_kept_of_many_choices_that_come_in_turns() -> None:
    again = await replayed(*(delta(f"{number} ", index=index) for number in range(6400) for index in range(3)))
    assert len(again) == 3 * 6400 / MAX_TOKENS_AT_ONCE
    for index in range(3):
        mine = [each for each in again if each.index == index]
        assert "".join(each.text for each in mine) == "".join(f"{number} " for number in range(6400))
        assert {each.num_tokens for each in mine} == {MAX_TOKENS_AT_ONCE}


async def test_nothing_of_a_delta_is_lost() -> None:
    queued = Queued(position=3, estimated_wait_s=0.5)
    [one] = await replayed(
        delta(num_tokens=0, queued=queued),
        delta(reasoning="hm", num_reasoning_tokens=1, num_cached_tokens=4),
        delta("a"),
        delta("b", finish_reason="stop", stop_reason="x"),
    )
    assert one == delta(
        "ab",
        num_tokens=3,
        num_cached_tokens=4,
        queued=queued,
        reasoning="hm",
        num_reasoning_tokens=1,
        finish_reason="stop",
        stop_reason="x",
    )


async def test_reasoning_text_and_calls_stay_in_their_order() -> None:
    call, more = ToolCallDelta(0, "c", "f", "{"), ToolCallDelta(0, "c", None, "}")
    first, second, third = await replayed(
        delta("a"), delta(reasoning="b"), delta(calls=(call,)), delta(calls=(more,)), delta("c", finish_reason="stop")
    )
    assert (first.text, first.reasoning) == ("a", "")
    assert (second.reasoning, second.calls) == ("b", (ToolCallDelta(0, "c", "f", "{}"),))
    assert (third.text, third.finish_reason) == ("c", "stop")
    other = ToolCallDelta(1, "d", "g", "")
    [both] = await replayed(delta(calls=(call,)), delta(calls=(other, ToolCallDelta(1, "d", None, "1"))))
    assert both.calls == (call, other._replace(arguments="1"))


@pytest.mark.parametrize("num_tokens", [0, 1, MAX_TOKENS_AT_ONCE, 2 * MAX_TOKENS_AT_ONCE, 2 * MAX_TOKENS_AT_ONCE + 1])
def test_a_delta_in_parts_is_the_same_delta(num_tokens: int) -> None:
    scores = tuple(TokenLogprobs(-float(number), 1) for number in range(3 * MAX_TOKENS_AT_ONCE))
    whole = TokenDelta(
        "r", tuple(range(num_tokens)), FinishReason.STOP, stop_token_id=2, num_cached_tokens=3,
        queued=Queued(position=1, estimated_wait_s=0.5), logprobs=scores[:num_tokens],
        prompt_logprobs=scores[: MAX_TOKENS_AT_ONCE + 1], embedding=b"0000", times=EngineTimes(0.1, 0.2),
    )  # fmt: skip
    first, *others = _parts(whole)
    assert MergedDelta(first, *others).delta() == whole
    for part in (first, *others):
        assert len(part.token_ids) == len(part.logprobs) <= MAX_TOKENS_AT_ONCE >= len(part.prompt_logprobs)
        assert not (part.token_ids and part.prompt_logprobs)
        assert (part.request_id, part.queued, part.times) == ("r", whole.queued, whole.times)
        assert not part.token_ids or part.num_cached_tokens == 3
    assert [part.finish_reason for part in others] == [None] * (len(others) - 1) + [FinishReason.STOP]
    assert len(others) == 1 + max(1, -(-num_tokens // MAX_TOKENS_AT_ONCE))


def test_a_delta_with_several_texts_and_calls_is_one_delta_for_each_and_the_last_ends_it() -> None:
    call, end = ToolCallDelta(0, "c", "f", "{}"), {"finish_reason": "tool_calls", "stop_reason": 7}
    of: Any = {"index": 2, "num_cached_tokens": 3}
    read = delta("as it came", num_tokens=5, **of, **end)
    assert list(_in_parts(read, [("a", ()), ("", (call,)), ("b", ())])) == [
        delta("a", num_tokens=5, **of),
        delta(num_tokens=0, calls=(call,), **of),
        delta("b", num_tokens=0, **of, **end),
    ]
    assert list(_in_parts(delta("held back", **end), [])) == [delta(**end)]


async def test_details_follow_one_another_and_scores_of_prompts_do_not_pile_up() -> None:
    likely = TokenLogprobs(-0.5, 1)

    def of(token_id: int, num_scores: int = 0) -> TokenDetails:
        told = TokenLogprob(token_id, likely, token_id)
        return TokenDetails((token_id,), [told], (likely,), (told,) * num_scores)

    [one] = await replayed(delta("a", details=of(1)), delta("b", details=of(2)), delta(num_tokens=0))
    assert one.details == TokenDetails(
        (1, 2), [TokenLogprob(1, likely, 1), TokenLogprob(2, likely, 2)], (likely, likely), ()
    )
    scored = await replayed(*(delta(num_tokens=0, details=of(1, num_scores=MAX_TOKENS_AT_ONCE)) for _ in range(5)))
    assert len(scored) == 5
