"""Requests for embeddings among those that generate."""

from __future__ import annotations

import pytest

from app.build import assemble
from app.config import CacheConfig, SchedulerConfig
from app.engine.request import FinishReason, ModelInfo, Pooling
from app.errors import InvalidRequest
from tests.kit.engine import (
    POOLINGS_OF_DECODERS,
    CountingRunner,
    build_fake_engine,
    expected_embedding,
    make_request,
    run_to_end,
)

PROMPT = tuple(range(5, 30))


@pytest.mark.parametrize("pooling", POOLINGS_OF_DECODERS)
def test_an_embedding_is_the_end_of_its_request(pooling: Pooling) -> None:
    engine = build_fake_engine()
    asking = make_request(PROMPT, pooling=pooling, max_tokens=0)
    others = [make_request((7, 8, 9), max_tokens=5), make_request(PROMPT[:12], max_tokens=5)]
    outcome = run_to_end(engine, others[0], asking, others[1])
    assert outcome.embeddings == {asking.request_id: expected_embedding(PROMPT, pooling)}
    assert outcome.token_ids[asking.request_id] == []
    assert outcome.reasons[asking.request_id] is FinishReason.STOP
    for other in others:
        outcome.check(other)


def test_a_mean_is_made_of_all_tokens_and_the_last_one_may_use_a_cached_prefix() -> None:
    engine = build_fake_engine()
    run_to_end(engine, make_request(PROMPT, max_tokens=1))
    for pooling, num_tokens in ((Pooling.MEAN, 25), (Pooling.LAST, 1)):
        runner = engine.runner
        assert isinstance(runner, CountingRunner)
        runner.batches.clear()
        request = make_request(PROMPT, pooling=pooling, max_tokens=0)
        outcome = run_to_end(engine, request)
        assert outcome.embeddings[request.request_id] == expected_embedding(PROMPT, pooling)
        assert sum(batch.num_tokens for batch in runner.batches) == num_tokens


def test_the_whole_context_can_be_embedded() -> None:
    engine = build_fake_engine(max_model_len=25)
    request = make_request(PROMPT, pooling=Pooling.LAST, max_tokens=0)
    assert run_to_end(engine, request).embeddings.keys() == {request.request_id}


def test_what_gives_no_embedding_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be 0"):
        build_fake_engine().add(make_request(pooling=Pooling.LAST, max_tokens=1))
    engine = assemble(
        SchedulerConfig(), CacheConfig(block_size=4), num_blocks=8, runner=CountingRunner(),
        model_info=ModelInfo(max_model_len=32, vocab_size=50, eos_token_ids=(1,)),
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="does not support embeddings"):
        engine.add(make_request(pooling=Pooling.LAST, max_tokens=0))
