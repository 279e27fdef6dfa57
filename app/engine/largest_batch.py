"""The step that needs the most memory within the scheduler's limits. `app/model` sizes memory for this step."""

from __future__ import annotations

from app.config import SchedulerConfig
from app.engine.batch import MAX_SCORED_TOKENS, ScheduledSequence, StepBatch
from app.engine.logit_adjustments import LogitAdjustments
from app.engine.matcher import TokenSet
from app.engine.request import FILTERS, ModelInfo, Pooling, SamplingParams
from app.engine.state_pool import NO_STATE, StatePath


def largest_batch(limits: SchedulerConfig, model_info: ModelInfo, *, block_size: int) -> StepBatch:
    """Return a batch with as many sequences and tokens as a step may have, and with the most expensive options.

    All sequences use block 0 and state slot 0. Each draws a token with all filters, a penalty, a grammar and
    log-probabilities. The longest one also scores its prompt, and requests an embedding if the model supports it.
    """
    max_logprobs = 20  # the maximum that the API accepts
    sampling = SamplingParams(
        max_tokens=1, repetition_penalty=1.1, logprobs=max_logprobs, prompt_logprobs=max_logprobs, **FILTERS
    )
    matcher = TokenSet(range(0, model_info.vocab_size, 8), vocab_size=model_info.vocab_size)
    lengths = sequence_lengths(limits, longest=model_info.max_model_len)
    return StepBatch(
        tuple(
            ScheduledSequence(
                f"largest-{index}",
                (0,) * length,
                0,
                [0] * -(-length // block_size),
                True,
                sampling,
                adjustments=LogitAdjustments(sampling, range(min(length, model_info.vocab_size))),
                matcher=matcher,
                targets=(0,) * min(length - 1, MAX_SCORED_TOKENS) if index == 0 else (),
                first_target=1,
                pooling=Pooling.MEAN if index == 0 and model_info.embedding_size is not None else None,
                states=StatePath(NO_STATE, ((length, 0),)),
                window_ids=([0] * -(-length // block_size),) * model_info.num_window_groups,
            )
            for index, length in enumerate(lengths)
        ),
        (),
        num_scheduled_tokens=sum(lengths),
        has_logprobs=True,
        has_pooling=model_info.embedding_size is not None,
    )


def sequence_lengths(limits: SchedulerConfig, *, longest: int) -> list[int]:
    """Return the lengths of a few long sequences, followed by sequences with a single token.

    Single tokens matter because attention stores partial results for them. The prefill chunk does not limit the
    lengths, because it may be raised while a replica is running.
    """
    spare = limits.max_step_tokens - limits.max_running
    num_long, rest = divmod(spare, longest - 1)
    lengths = ([longest] * num_long + [1 + rest] * (rest > 0))[: limits.max_running]
    return lengths + [1] * (limits.max_running - len(lengths))
