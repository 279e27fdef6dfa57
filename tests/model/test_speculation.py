"""Tokens and log-probabilities with speculation are those without, to the last bit, whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.build import assemble, drafter_of
from app.config import CacheConfig, SchedulerConfig, SpeculationConfig
from app.engine.engine import Engine
from app.engine.request import Request
from app.engine.sequence import EngineSequence
from app.engine.speculation.drafter import Drafter
from tests.kit.engine import EagerModelDrafter, FakeClock, Outcome, SteadyDrafter, make_request, run_to_end
from tests.model.test_equivalence import build, random_requests
from tests.tiny_models import VOCAB_SIZE

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "seed": 5, "logprobs": 3},
    {"temperature": 0.7, "top_k": 20, "seed": 6},
    {"temperature": 1.0, "seed": 7, "logit_bias": ((9, 4.0),), "logprobs": 0},
    {"temperature": 1.0, "seed": 8, "presence_penalty": 0.5},
    {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "min_tokens": 12},
    {"temperature": 0.5, "seed": 10, "bad_words": ((7,), (8, 9)), "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 1, "stop_token_ids": (11, 12, 13, 14)},
]


class RecallingDrafter(SteadyDrafter):
    """Drafts what a run without speculation gave, and every seventh token wrong."""

    def __init__(self, token_ids: Mapping[str, list[int]]) -> None:
        self._token_ids = token_ids

    def draft_of(self, sequence: EngineSequence) -> list[int]:
        at = sequence.num_generated_tokens
        drafts = list(self._token_ids[sequence.request.request_id][at : at + 5])
        return [token if (at + place) % 7 else (token + 1) % VOCAB_SIZE for place, token in enumerate(drafts)]


def requests_of_all_kinds() -> tuple[Request, ...]:
    plain = random_requests(9, VOCAB_SIZE)
    return tuple(
        make_request(each.prompt_token_ids, request_id=f"{number}", max_tokens=20, **SAMPLINGS[number % len(SAMPLINGS)])
        for number, each in enumerate(plain)
    )


def speculating(engine: Engine, drafter: Drafter, *, num_slots: int, block_size: int, **parts: Any) -> Engine:
    """Another engine on the same model."""
    return assemble(
        SchedulerConfig(max_running=33, max_step_tokens=60, prefill_chunk_tokens=9),
        CacheConfig(block_size=block_size), num_blocks=num_slots // block_size, runner=engine.runner,
        model_info=engine.model_info, drafter=drafter, **parts,
    )  # fmt: skip


def heard(outcome: Outcome) -> tuple[object, ...]:
    return outcome.token_ids, outcome.logprobs, outcome.prompt_logprobs, dict(sorted(outcome.reasons.items()))


@pytest.mark.parametrize(
    ("architecture", "way"),
    [
        ("llama", "decoder"),
        ("qwen3_moe", "decoder"),
        ("gemma2", "decoder"),
        ("qwen3_5", "decoder"),
        ("phi3", "attention"),
        ("llama", "torch"),
        ("lfm2", "torch"),
    ],
)
def test_all_that_callers_hear_is_the_same(architecture: str, way: str, tiny_model_path: Callable[[str], Path]) -> None:
    requests = requests_of_all_kinds()
    engine = build(tiny_model_path(architecture), way=way, num_slots=1600)
    expected = run_to_end(engine, *requests)
    block_size = 4 if way == "torch" else 16
    for num_slots in (1600, 320):  # the smaller one preempts
        other = speculating(engine, RecallingDrafter(expected.token_ids), num_slots=num_slots, block_size=block_size)
        found = run_to_end(other, *requests)
        stats = other.stats()
        assert found.token_ids == expected.token_ids
        assert found.reasons == expected.reasons
        if way == "decoder":  # other ways round a row's sums by what shares its step
            assert heard(found) == heard(expected)
        assert stats.total_drafted_tokens > stats.total_accepted_tokens > 30
        assert (stats.total_preemptions > 0) == (num_slots == 320)


def test_all_that_callers_hear_is_the_same_with_predictions(tiny_model_path: Callable[[str], Path]) -> None:
    requests = requests_of_all_kinds()
    engine = build(tiny_model_path("llama"), way="decoder", num_slots=1600)
    expected = run_to_end(engine, *requests)
    for num_slots in (1600, 320):  # the smaller one preempts
        drafter = drafter_of(SpeculationConfig())
        other = speculating(engine, drafter, num_slots=num_slots, block_size=16, clock=FakeClock())
        found = run_to_end(other, *(predicting(each, expected.token_ids[each.request_id]) for each in requests))
        assert heard(found) == heard(expected)
        stats, counts = other.stats(), found.predicted.values()
        assert sum(accepted for accepted, _ in counts) > sum(map(len, expected.token_ids.values())) / 3
        assert sum(rejected for _, rejected in counts) > 5
        assert (stats.total_preemptions > 0) == (num_slots == 320)


def predicting(request: Request, token_ids: list[int]) -> Request:
    """A request that predicts an earlier version of its output: a token is another one, and one is not there."""
    return replace(request, prediction_token_ids=(*token_ids[:6], 5, *token_ids[7:14], *token_ids[15:]))


@pytest.mark.parametrize(
    ("architecture", "draft", "way"),
    [("llama", "llama", "decoder"), ("llama", "qwen3_moe", "decoder"), ("gemma2", "gpt2", "torch")],
)
def test_all_that_callers_hear_is_the_same_with_a_draft_model(
    architecture: str, draft: str, way: str, tiny_model_path: Callable[[str], Path]
) -> None:
    requests = requests_of_all_kinds()
    engine = build(tiny_model_path(architecture), way=way, num_slots=1600)
    expected = run_to_end(engine, *requests)
    block_size = 4 if way == "torch" else 16
    for num_slots in (1600, 320):  # the smaller one preempts
        drafting = build(tiny_model_path(draft), way=way, num_slots=num_slots)
        drafter = EagerModelDrafter(drafting.runner, max_drafts=4, max_model_len=256, model_info=engine.model_info)
        other = speculating(engine, drafter, num_slots=num_slots, block_size=block_size)
        found = run_to_end(other, *requests)
        stats = other.stats()
        assert found.token_ids == expected.token_ids
        assert found.reasons == expected.reasons
        if way == "decoder":
            assert heard(found) == heard(expected)
        assert (stats.total_preemptions > 0) == (num_slots == 320)
        kept = stats.total_accepted_tokens / stats.total_drafted_tokens
        assert kept > 0.95 if draft == architecture else kept < 0.3, "else some requests end among drafts"


def test_an_engine_of_the_settings_looks_drafts_up(tiny_model_path: Callable[[str], Path]) -> None:
    prompt = tuple(range(20, 60)) * 4
    plain = build(tiny_model_path("llama"), way="torch")
    engine = assemble(
        SchedulerConfig(), CacheConfig(block_size=4), num_blocks=100, runner=plain.runner, model_info=plain.model_info,
        drafter=drafter_of(SpeculationConfig(method="lookup")),
    )  # fmt: skip
    bias = tuple((token, 80.0) for token in (30, 31))  # so the output repeats
    outcome = run_to_end(engine, make_request(prompt, max_tokens=60, request_id="one", logit_bias=bias))
    assert len(outcome.token_ids["one"]) == 60
    assert engine.stats().total_accepted_tokens > 0
