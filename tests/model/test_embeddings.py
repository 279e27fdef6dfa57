"""Embeddings are the model's own hidden states behind its final norm: alone, batched, in chunks, after preemption."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from app.engine.request import Pooling, Request
from tests.kit.engine import Outcome, run_to_end
from tests.kit.models import generate_plainly, own_model, relative_error
from tests.model.test_equivalence import build, random_requests
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE

TOLERANCE = 1e-4
WAYS = [(architecture, "torch") for architecture in ARCHITECTURES]
WAYS += [("llama", "attention"), ("llama", "decoder"), ("qwen3_moe", "decoder")]


def some_requests(vocab_size: int, num_requests: int = 9) -> list[Request]:
    """Every third generates, the others want an embedding."""
    requests = []
    for number, request in enumerate(random_requests(num_requests, vocab_size, seed=3)):
        pooling = (None, Pooling.LAST, Pooling.MEAN)[number % 3]
        asked = request if pooling is None else replace(request, sampling=replace(request.sampling, max_tokens=0))
        requests.append(replace(asked, pooling=pooling))
    return requests


def check(model: PreTrainedModel, requests: list[Request], outcome: Outcome) -> None:
    pooling = [request for request in requests if request.pooling is not None]
    assert outcome.embeddings.keys() == {request.request_id for request in pooling}
    for request in pooling:
        with torch.inference_mode():
            states = model.base_model(torch.tensor([request.prompt_token_ids])).last_hidden_state[0]
        expected = states[-1] if request.pooling is Pooling.LAST else states.mean(dim=0)
        given = torch.tensor(array("f", outcome.embeddings[request.request_id]))
        assert relative_error(given, expected) <= TOLERANCE, request


@pytest.mark.parametrize(("architecture", "way"), WAYS)
def test_hidden_states_are_the_models_own(architecture: str, way: str, tiny_model_path: Callable[[str], Path]) -> None:
    path = tiny_model_path(architecture)
    model, requests = own_model(path), some_requests(VOCAB_SIZE)
    engine = build(path, way=way)
    assert engine.model_info.embedding_size == 64
    first = run_to_end(engine, *requests)
    check(model, requests, first)
    again = [replace(request, request_id=f"{request.request_id}-again") for request in requests]
    check(model, again, run_to_end(engine, *again))
    generating = [request for request in requests if request.pooling is None]
    for request_id, token_ids in generate_plainly(path, generating).items():
        assert first.token_ids[request_id] == token_ids


@pytest.mark.parametrize(("architecture", "way"), [("llama", "torch"), ("llama", "decoder"), ("gemma2", "torch")])
def test_in_chunks_and_after_preemption(architecture: str, way: str, tiny_model_path: Callable[[str], Path]) -> None:
    path = tiny_model_path(architecture)
    requests = some_requests(VOCAB_SIZE, 18)
    engine = build(path, way=way, num_slots=192, max_running=12, prefill_chunk_tokens=7, max_step_tokens=40)
    outcome = run_to_end(engine, *requests)
    assert engine.stats().total_preemptions
    check(own_model(path), requests, outcome)


@pytest.mark.parametrize("way", ["decoder", "torch"])
def test_of_the_bundled_model(demo_path: Path, way: str) -> None:
    requests = some_requests(763, 6)
    check(own_model(demo_path), requests, run_to_end(build(demo_path, way=way, prefill_chunk_tokens=16), *requests))
