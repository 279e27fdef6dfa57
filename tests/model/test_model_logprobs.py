"""Log-probabilities are those of the model's own forward pass, alone, among others, in chunks and after preemption."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from app.engine.engine import Engine
from app.engine.request import Request, TokenLogprobs
from app.model.cpu.library import ThreadPool, library
from app.model.cpu.sampling import NativeSampler
from app.model.logprobs import compute_logprobs
from tests.kit.engine import Outcome, make_request, run_to_end
from tests.kit.models import own_model
from tests.model.test_equivalence import build, random_requests
from tests.tiny_models import VOCAB_SIZE

TOLERANCE = 1e-4  # of a natural logarithm, in float32
WAYS = [("llama", "torch"), ("llama", "attention"), ("llama", "decoder"), ("gemma2", "torch")]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.4, "logit_bias": ((7, 5.0),), "seed": 3}


def asking(request: Request, number: int) -> Request:
    """Each in its own way; some want nothing, some sample, some only score their prompt."""
    sampling = replace(
        request.sampling,
        logprobs=(None, 0, 1, 5, 20)[number % 5],
        prompt_logprobs=(None, 1, 0, 5)[number % 4],
        logprob_token_ids=((), (), (9, 3, 200, 4))[number % 3],
        **(SAMPLED if number % 6 == 5 else {}),
    )
    if number % 7 == 6:
        sampling = replace(sampling, max_tokens=0)
    return replace(request, sampling=sampling)


def some_requests(vocab_size: int) -> list[Request]:
    return [asking(request, number) for number, request in enumerate(random_requests(21, vocab_size, seed=5))]


def check(model: PreTrainedModel, request: Request, outcome: Outcome) -> None:
    """Against the log-softmax of the model's logits over the whole sequence, computed at once."""
    request_id, sampling = request.request_id, request.sampling
    tokens = [*request.prompt_token_ids, *outcome.token_ids[request_id]]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    num_prompt = len(request.prompt_token_ids)
    for given, num_top, places in (
        (outcome.prompt_logprobs, sampling.prompt_logprobs, range(1, num_prompt)),
        (outcome.logprobs, sampling.logprobs, range(num_prompt, len(tokens))),
    ):
        assert len(given[request_id]) == (0 if num_top is None else len(places))
        named = sampling.logprob_token_ids if given is outcome.logprobs else ()
        for at, found in zip(places, given[request_id], strict=False):
            check_place(found, tokens[at], expected[at - 1], num_top or 0, named)


def check_place(
    found: TokenLogprobs, token: int, expected: torch.Tensor, num_top: int, named: tuple[int, ...] = ()
) -> None:
    assert found.logprob == pytest.approx(float(expected[token]), abs=TOLERANCE)
    # Tokens that are nearly equally likely may change places.
    assert (
        (expected > expected[token] + TOLERANCE).sum() < found.rank <= (expected >= expected[token] - TOLERANCE).sum()
    )
    if named:
        assert found.top_token_ids == named
    else:
        assert len(found.top_token_ids) == len(set(found.top_token_ids)) == len(found.top_logprobs) == num_top
        assert list(found.top_logprobs) == pytest.approx(expected.topk(num_top).values.tolist(), abs=TOLERANCE)
    assert [float(expected[each]) for each in found.top_token_ids] == pytest.approx(found.top_logprobs, abs=TOLERANCE)
    if num_top and not named:
        assert (found.rank == 1) == (found.logprob == found.top_logprobs[0]), "equal to the last bit, or not at all"
    if token in found.top_token_ids:
        assert found.logprob == found.top_logprobs[found.top_token_ids.index(token)]


@pytest.mark.parametrize(("architecture", "way"), WAYS)
def test_values_are_the_models_own(
    architecture: str, way: str, tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, requests = tiny_model_path(architecture), some_requests(VOCAB_SIZE)
    model = own_model(path)
    roomy = build(path, way=way, num_slots=3200)
    cramped = build(path, way=way, num_slots=208, max_step_tokens=40, prefill_chunk_tokens=7)
    for engine in (roomy, cramped):
        monkeypatch.setattr("app.engine.batch.MAX_SCORED_TOKENS", 512 if engine is roomy else 11)
        outcome = run_to_end(engine, *requests)
        for request in requests:
            check(model, request, outcome)
    assert cramped.stats().total_preemptions > 0


@pytest.mark.parametrize("way", ["torch", "attention", "decoder"])
def test_log_likelihoods_of_the_bundled_model(demo_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an evaluation wants them: many ragged contexts, each with a continuation; each sum is within 1e-4."""
    monkeypatch.setattr("app.engine.batch.MAX_SCORED_TOKENS", 100)
    contexts = [
        replace(request, sampling=replace(request.sampling, temperature=1.0, seed=n, max_tokens=20))
        for n, request in enumerate(random_requests(12, 763, seed=9))
    ]
    engine = build(demo_path, way=way, num_slots=3200)
    continuations = run_to_end(engine, *contexts).token_ids
    model = own_model(demo_path)
    requests = {
        context.request_id: make_request(
            (*context.prompt_token_ids, *continuations[context.request_id]), max_tokens=0, prompt_logprobs=1
        )
        for context in contexts
    }
    outcome = run_to_end(engine, *requests.values())
    for context in contexts:
        request, num_context = requests[context.request_id], len(context.prompt_token_ids)
        tokens = torch.tensor([request.prompt_token_ids])
        with torch.inference_mode():
            expected = model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[num_context - 1 :]
        found = outcome.prompt_logprobs[request.request_id][num_context - 1 :]
        assert sum(each.logprob for each in found) == pytest.approx(float(expected.double().sum()), abs=TOLERANCE)


def values_of(engine: Engine, *requests: Request) -> dict[str, tuple[list[TokenLogprobs], list[TokenLogprobs]]]:
    outcome = run_to_end(engine, *requests)
    return {each: (outcome.logprobs[each], outcome.prompt_logprobs[each]) for each in outcome.reasons}


def test_in_the_decoder_no_bit_depends_on_the_others(tiny_model_path: Callable[[str], Path]) -> None:
    path, requests = tiny_model_path("llama"), some_requests(VOCAB_SIZE)
    alone = build(path, way="decoder", num_slots=3200)
    expected: dict[str, tuple[list[TokenLogprobs], list[TokenLogprobs]]] = {}
    for request in requests:
        expected |= values_of(alone, request)
    assert values_of(build(path, way="decoder", num_slots=3200), *requests) == expected
    cramped = build(path, way="decoder", num_slots=240, max_step_tokens=40, prefill_chunk_tokens=7)
    assert values_of(cramped, *requests) == expected


@pytest.mark.parametrize("vocab_size", [16, 1003, 49152])
@pytest.mark.parametrize("num_top", [0, 1, 16])
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_native_values_are_those_of_torch(vocab_size: int, num_top: int, spread: float) -> None:
    if library() is None:
        pytest.skip("no C++ compiler here")
    torch.manual_seed(0)
    logits = torch.randn(70, vocab_size) * spread
    rows, tokens = list(range(69, -1, -1)), torch.randint(vocab_size, (70,))
    native = NativeSampler(ThreadPool(2)).logprobs(logits, rows, tokens, num_top=num_top)
    plain = compute_logprobs(logits, rows, tokens, num_top=num_top)
    torch.testing.assert_close(native.logprobs, plain.logprobs, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(native.top_logprobs, plain.top_logprobs, atol=1e-5, rtol=1e-6)
    assert torch.equal(native.ranks, plain.ranks)
    assert torch.equal(native.top_token_ids, plain.top_token_ids)


def test_masked_and_equal_logits() -> None:
    if library() is None:
        pytest.skip("no C++ compiler here")
    logits = torch.full((1, 37), -math.inf)
    logits[0, [3, 9, 36]] = 2.0
    found = NativeSampler(ThreadPool(1)).logprobs(logits, [0], torch.tensor([9]), num_top=4)
    assert found.logprobs.tolist() == pytest.approx([-math.log(3)])
    assert found.ranks.tolist() == [1]
    assert found.top_token_ids[0, :3].tolist() == [3, 9, 36]
    assert found.top_logprobs[0].tolist() == [*[found.logprobs.item()] * 3, -math.inf]
