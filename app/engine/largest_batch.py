"""The step that takes the most memory within the limits of a scheduler. Memory is sized by it, see `app/model`."""

from __future__ import annotations

from app.config import SchedulerConfig
from app.engine.batch import MAX_SCORED_TOKENS, ScheduledSequence, StepBatch
from app.engine.logit_adjustments import LogitAdjustments
from app.engine.matcher import TokenSet
from app.engine.request import ModelInfo, Pooling, SamplingParams
from app.engine.state_pool import NO_STATE, StatePath


def largest_batch(limits: SchedulerConfig, facts: ModelInfo, *, block_size: int) -> StepBatch:
    """Return the most sequences and tokens that a step may have, each with the dearest options.

    All sequences are in block 0, and their states in slot 0.
    Every sequence draws a token with top-p, a penalty, a grammar and log-probabilities. The longest scores its prompt
    and wants an embedding, too, where the model gives any.
    """
    max_logprobs = 20  # what the API allows
    sampling = SamplingParams(
        max_tokens=1, top_p=0.9, repetition_penalty=1.1, logprobs=max_logprobs, prompt_logprobs=max_logprobs
    )
    matcher = TokenSet(range(0, facts.vocab_size, 8), vocab_size=facts.vocab_size)
    lengths = sequence_lengths(limits, longest=facts.max_model_len)
    return StepBatch(
        tuple(
            ScheduledSequence(
                f"largest-{index}",
                (0,) * length,
                0,
                [0] * -(-length // block_size),
                True,
                sampling,
                adjustments=LogitAdjustments(sampling, range(min(length, facts.vocab_size))),
                matcher=matcher,
                targets=(0,) * min(length - 1, MAX_SCORED_TOKENS) if index == 0 else (),
                first_target=1,
                pooling=Pooling.MEAN if index == 0 and facts.embedding_size is not None else None,
                states=StatePath(NO_STATE, ((length, 0),)),
                window_ids=([0] * -(-length // block_size),) * facts.num_window_groups,
            )
            for index, length in enumerate(lengths)
        ),
        (),
        num_scheduled_tokens=sum(lengths),
        has_logprobs=True,
        has_pooling=facts.embedding_size is not None,
    )


def sequence_lengths(limits: SchedulerConfig, *, longest: int) -> list[int]:
    """Tokens of each sequence: single ones, of which attention keeps partial results, and few long ones for the rest.

    The chunk of a prompt may be raised while a replica runs, so it is no limit here.
    """
    spare = limits.max_step_tokens - limits.max_running
    num_long, rest = divmod(spare, longest - 1)
    lengths = ([longest] * num_long + [1 + rest] * (rest > 0))[: limits.max_running]
    return lengths + [1] * (limits.max_running - len(lengths))
