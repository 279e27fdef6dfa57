"""An engine with several ranks gives the tokens of one process, whatever happens around a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from app.build import ONE_DEVICE, assemble, build_sync_engine
from app.config import CacheConfig, EngineConfig, ReplicasConfig
from app.engine.engine import Engine
from app.engine.request import Pooling, Request
from app.errors import InvalidSetup
from app.model.forward import TransformersForward
from app.model.parallel.ranks import Ranks
from app.model.runner import TorchModelRunner
from tests.engine.test_combinations import STRATEGIES
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of
from tests.model.parallel.fake_rank import ForkedRank
from tests.model.test_equivalence import random_requests
from tests.tiny_models import VOCAB_SIZE


def cramped(path: Path, **scheduler: Any) -> EngineConfig:
    """Few blocks, so that sequences are preempted."""
    settings = {"max_running": 33, "max_step_tokens": 40, "prefill_chunk_tokens": 7} | scheduler
    cache = {"block_size": 16, "num_blocks": 15}
    return config_of(path, cache=cache, scheduler=settings, dtype="float32", num_threads=1)


def engine_on(size: int, config: EngineConfig) -> Engine:
    return build_sync_engine(
        config, ReplicasConfig(tensor_parallel=size, step_timeout_s=60) if size > 1 else ONE_DEVICE
    )


def requests() -> tuple[Request, ...]:
    greedy = random_requests(10, VOCAB_SIZE)
    sampled = [make_request(r.prompt_token_ids, max_tokens=12, ignore_eos=True, seed=5, temperature=0.8, top_p=0.9,
                            presence_penalty=0.3) for r in random_requests(2, VOCAB_SIZE, seed=2)]  # fmt: skip
    return (*greedy, *sampled)


@pytest.fixture(scope="module")
def pair(tiny_model_path: Callable[[str], Path]) -> Iterator[tuple[Engine, Engine]]:
    """One process, and two ranks."""
    config = cramped(tiny_model_path("llama"))
    with closing(engine_on(1, config)) as alone, closing(engine_on(2, config)) as ranks:
        assert isinstance(ranks.runner, TorchModelRunner)
        assert isinstance(ranks.runner.forward, TransformersForward)
        yield alone, ranks


def test_two_ranks_give_the_tokens_of_one_process_with_preemption_and_prefix_hits(pair: tuple[Engine, Engine]) -> None:
    alone, ranks = pair
    asked = requests()
    assert run_to_end(ranks, *asked).token_ids == run_to_end(alone, *asked).token_ids
    assert ranks.stats().total_preemptions > 0
    assert ranks.stats().total_cached_tokens > 0


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["name"])
def test_two_ranks_give_the_same_tokens_under_every_strategy(pair: tuple[Engine, Engine], strategy: Any) -> None:
    alone, ranks = pair
    asked = random_requests(6, VOCAB_SIZE, seed=3)
    settings = strategy | {"max_wait_ms": 1} if "max_wait_ms" in strategy else strategy
    for engine in pair:
        engine.clear_prefix_cache()
    config = cramped(Path("unused"), strategy=settings).scheduler
    before = cramped(Path("unused")).scheduler
    ranks.reconfigure(config)
    found: dict[str, list[int]] = {}
    for each in asked:
        ranks.add(each)
    while ranks.has_work:
        for delta in ranks.step():
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    ranks.reconfigure(before)
    assert found == run_to_end(alone, *asked).token_ids


def test_two_ranks_score_and_embed_prompts_as_one_process_does(pair: tuple[Engine, Engine]) -> None:
    alone, ranks = pair
    prompt = tuple(range(5, 25))
    scored = make_request(prompt, request_id="scored", max_tokens=3, logprobs=2, prompt_logprobs=1)
    embedded = make_request(prompt, request_id="embedded", max_tokens=0, pooling=Pooling.MEAN)
    mine, theirs = run_to_end(ranks, scored, embedded), run_to_end(alone, scored, embedded)
    for found, expected in zip(mine.logprobs["scored"], theirs.logprobs["scored"], strict=True):
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-3)
    for found, expected in zip(mine.prompt_logprobs["scored"], theirs.prompt_logprobs["scored"], strict=True):
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert len(mine.embeddings["embedded"]) == len(theirs.embeddings["embedded"])


def test_overlapped_steps_of_two_ranks_give_the_tokens_of_one_process(tiny_model_path: Callable[[str], Path]) -> None:
    pytest.importorskip("triton")
    from tests.model.cuda.test_graph_runner import LIMITS, plain_engine, some_requests
    from tests.model.parallel.graph_rank import main, model_and_runner

    path = tiny_model_path("llama")
    ranks = Ranks(
        size=2, device=torch.device("cpu"), settings={}, step_timeout_s=60,
        start=partial(ForkedRank, partial(main, path, None, None)),
    )  # fmt: skip
    with ranks.loading():
        model, runner = model_and_runner(path, ranks.group)
    runner.lead(ranks)
    engine = assemble(LIMITS, CacheConfig(block_size=4), num_blocks=8, runner=runner, model_info=model.model_info)
    asked = some_requests()
    with closing(engine):
        found = run_to_end(engine, *asked).token_ids
    assert engine.runner.launches
    assert engine.stats().total_preemptions > 0
    assert found == run_to_end(plain_engine(path), *asked).token_ids


def test_where_memory_ends_on_one_rank_no_rank_has_that_graph(tiny_model_path: Callable[[str], Path]) -> None:
    """A rank that goes on without would leave the others waiting in its exchanges."""
    pytest.importorskip("triton")
    from tests.model.parallel.graph_rank import main, model_and_runner

    path, of_decode = tiny_model_path("llama"), 2
    ranks = Ranks(
        size=2, device=torch.device("cpu"), settings={}, step_timeout_s=60,
        start=partial(ForkedRank, partial(main, path, of_decode, None)),
    )  # fmt: skip
    with ranks.loading():
        _, runner = model_and_runner(path, ranks.group, of_decode)
    runner.lead(ranks)
    with closing(runner):
        runner.prepare()
        assert len(runner._graphs) == of_decode
        assert runner._mixed_sizes == ()


def test_what_the_ranks_cannot_share_is_refused_at_the_start(tiny_model_path: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidSetup, match="tensor_parallel: got 3, which does not divide num_attention_heads 4 of"):
        engine_on(3, cramped(tiny_model_path("llama")))
