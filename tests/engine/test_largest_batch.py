from __future__ import annotations

import pytest

from app.config import SchedulerConfig
from app.engine.batch import MAX_SCORED_TOKENS
from app.engine.largest_batch import largest_batch, sequence_lengths
from app.engine.request import ModelInfo


@pytest.mark.parametrize(
    ("max_running", "max_step_tokens", "longest", "lengths"),
    [
        (4, 20, 100, [17, 1, 1, 1]),
        (4, 20, 10, [10, 8, 1, 1]),
        (4, 4, 100, [1, 1, 1, 1]),
        (1, 50, 100, [50]),
        (2, 5000, 100, [100, 100]),  # more tokens than the sequences can have
    ],
)
def test_all_sequences_and_tokens_of_a_step_with_as_many_single_ones_as_can_be(
    max_running: int, max_step_tokens: int, longest: int, lengths: list[int]
) -> None:
    limits = SchedulerConfig(max_running=max_running, max_step_tokens=max_step_tokens)
    assert sequence_lengths(limits, longest=longest) == lengths


def test_every_sequence_wants_what_costs_most() -> None:
    model_info = ModelInfo(max_model_len=4096, vocab_size=100, eos_token_ids=(), embedding_size=64)
    batch = largest_batch(SchedulerConfig(max_running=8, max_step_tokens=2048), model_info, block_size=16)
    assert batch.num_tokens == 2048
    assert len(batch.sampled) == len(batch.matchers) == 8
    assert all(item.sampling.top_p < 1 and item.wants_logprobs for item in batch.scheduled)
    assert all(item.adjustments is not None and len(item.adjustments.seen) > 0 for item in batch.scheduled)
    assert len(batch.scheduled[0].targets) == MAX_SCORED_TOKENS
    assert batch.has_pooling
    assert all(len(item.block_ids) * 16 >= item.end for item in batch.scheduled)
