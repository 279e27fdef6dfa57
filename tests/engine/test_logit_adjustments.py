from __future__ import annotations

from typing import Any

from app.engine.logit_adjustments import LogitAdjustments
from app.engine.request import SamplingParams
from app.engine.sequence import EngineSequence
from tests.kit.engine import make_request


class Tokens(list[int]):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found


def test_each_generated_token_is_read_once() -> None:
    sampling = SamplingParams(max_tokens=9, frequency_penalty=0.5, presence_penalty=1.0, repetition_penalty=1.5)
    adjustments, generated = LogitAdjustments(sampling, (7, 7, 8)), Tokens()
    for token in (8, 9, 8):
        generated.append(token)
        adjustments.follow(generated)
    assert generated.num_read == 3
    assert adjustments.seen.tolist() == [7, 7, 8, 8, 9, 8]
    assert dict(zip(adjustments.deducted, adjustments.deductions, strict=True)) == {8: -2.0, 9: -1.5}


def test_a_sequence_that_is_preempted_holds_none_and_gets_the_same_again() -> None:
    sequence = EngineSequence(request=make_request((5, 6), max_tokens=9, frequency_penalty=0.5), arrival=0)
    sequence.generated_token_ids += [7, 7, 8]
    before = sequence.current_adjustments()
    sequence.take_blocks()
    assert sequence.adjustments is None
    after = sequence.current_adjustments()
    assert before is not None
    assert after is not None
    assert before is not after
    assert (after.deducted, after.deductions) == (before.deducted, before.deductions)


def test_a_bias_alone_needs_no_known_tokens() -> None:
    """So that a step may be prepared while the one before it runs."""
    sequence = EngineSequence(request=make_request(max_tokens=9, logit_bias=((3, 1.0),)), arrival=0)
    sequence.generated_token_ids += [7, -1]
    adjustments = sequence.current_adjustments()
    assert adjustments is not None
    assert adjustments.biased.tolist() == [3]
