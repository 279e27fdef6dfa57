"""Models that read whole prompts: each is computed in one step, and none holds a block."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from app.build import assemble
from app.config import CacheConfig, SchedulerConfig
from app.engine.batch import StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.request import FinishReason, ModelInfo, Pooling, Request
from tests.engine.test_combinations import STRATEGIES
from tests.kit.engine import FakeClock, make_request, run_to_end

FACTS = ModelInfo(max_model_len=500, vocab_size=1000, eos_token_ids=(), embedding_size=1, generates=False)


class WholeRunner(ModelRunner):
    """Gives each prompt its number of tokens. Sees that a step has whole prompts and no blocks."""

    def __init__(self, clock: FakeClock) -> None:
        self.lengths: list[list[int]] = []
        self._clock = clock

    def run(self, batch: StepBatch) -> StepResult:
        self._clock.advance(0.01)
        for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
            assert item.token_ids == sequence.request.prompt_token_ids
            assert item.block_ids == []
            assert not item.samples
        self.lengths.append([len(item.token_ids) for item in batch.scheduled])
        return StepResult([], pooled={item.request_id: [float(len(item.token_ids))] for item in batch.scheduled})


def build(clock: FakeClock, **scheduler: object) -> tuple[Engine, WholeRunner]:
    runner = WholeRunner(clock)
    config = SchedulerConfig.model_validate({"max_step_tokens": 64, "max_running": 8} | scheduler)
    cache = CacheConfig(block_size=4)
    return assemble(config, cache, num_blocks=0, runner=runner, model_info=FACTS, clock=clock), runner


def prompt(num_tokens: int, **fields: object) -> Request:
    request = make_request((7,) * num_tokens, pooling=Pooling.CLS, max_tokens=0)
    return replace(request, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["name"])
def test_under_every_strategy_all_prompts_are_computed_once(strategy: Any) -> None:
    clock = FakeClock()
    engine, runner = build(clock, strategy=strategy, prefill_chunk_tokens=5)
    rng = random.Random(3)
    requests = [prompt(rng.randrange(1, 150), is_background=rng.random() < 0.3) for _ in range(60)]
    for request in requests:
        engine.add(request)
    ended = {}
    while engine.has_work:
        clock.advance(0.05)
        ended |= {delta.request_id: delta for delta in engine.step()}
    assert sorted(length for step in runner.lengths for length in step) == sorted(
        len(each.prompt_token_ids) for each in requests
    )
    assert {delta.finish_reason for delta in ended.values()} == {FinishReason.STOP}
    for step in runner.lengths:
        assert sum(step) <= 64 or len(step) == 1
        assert len(step) <= 8
    assert engine.stats().total_preemptions == 0


def test_prompts_join_in_order_as_far_as_the_budget_goes() -> None:
    engine, runner = build(FakeClock())
    run_to_end(engine, *[prompt(length) for length in (30, 30, 10, 100, 60, 4)])
    assert runner.lengths == [[30, 30], [10], [100], [60, 4]]


def test_a_long_background_prompt_waits_for_a_step_without_others() -> None:
    engine, runner = build(FakeClock(), max_step_tokens=400)
    run_to_end(engine, prompt(200, is_background=True), prompt(20), prompt(30, is_background=True))
    assert runner.lengths == [[20], [200, 30]]


def test_a_smaller_budget_leaves_no_prompt_behind() -> None:
    engine, runner = build(FakeClock(), max_step_tokens=400)
    engine.add(prompt(300))
    engine.reconfigure(SchedulerConfig(max_step_tokens=64, max_running=8))
    run_to_end(engine)
    assert runner.lengths == [[300]]
