"""Which of a step's draws are tokens of their sequences: those behind drafts that equal the draws before them.

A draw is a function of the request, its position and the tokens before it, so these are the tokens that steps without
drafts would have drawn, whether they are the likeliest or sampled. (Leviathan et al., 2023, accept by a ratio of
probabilities instead, as their draws are random.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from app.engine.batch import ScheduledSequence, StepBatch, StepResult


def kept_tokens(batch: StepBatch, result: StepResult) -> StepResult:
    """The result of a batch with drafts, without the draws that come to nothing."""
    token_ids: list[int] = []
    num_kept: list[int] = []
    logprobs = dict(result.logprobs)
    start = 0
    for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
        draws = result.token_ids[start : start + len(item.token_ids)]
        number = _num_kept(draws, item, sequence.end_token_ids)
        if item.request_id in logprobs:
            logprobs[item.request_id] = logprobs[item.request_id][:number]
        token_ids += draws[:number]
        num_kept.append(number)
        start += len(draws)
    return result._replace(token_ids=token_ids, logprobs=logprobs, num_kept=num_kept)


def _num_kept(draws: Sequence[int], item: ScheduledSequence, end_token_ids: Collection[int]) -> int:
    """The first draw is always kept, each further one if the draft before it is what was drawn there, and no end.

    None is kept where a matcher cannot say what may be drawn: if it is the first of a step, its request ends.
    """
    number = 1
    for drawn, draft in zip(draws, item.token_ids[1:], strict=False):
        matcher = item.draws[number].matcher if item.draws else None
        if drawn != draft or drawn in end_token_ids or (matcher is not None and matcher.failure is not None):
            break
        number += 1
    return number
