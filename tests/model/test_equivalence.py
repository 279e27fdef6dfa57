"""The engine's tokens are those of the model's own `generate`, whatever happens around a request."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from app.build import build_sync_engine
from app.engine.engine import Engine
from app.engine.request import FILTERS, Request
from app.model.attention import TorchAttention
from app.model.cpu.attention import NativeAttention
from app.model.cpu.decoder import NativeDecoder
from app.model.cpu.library import is_fast
from app.model.recurrent_layers import StatefulAttention
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of, generate_plainly
from tests.model.transformers_code import transformers_code
from tests.tiny_models import ARCHITECTURES, NATIVE, VOCAB_SIZE, save_random_model


@dataclass(frozen=True)
class Reference:
    """Requests and the tokens that plain greedy `generate` gives for each alone."""

    requests: tuple[Request, ...]
    token_ids: dict[str, list[int]]


def random_requests(num_requests: int, vocab_size: int, *, seed: int = 1) -> tuple[Request, ...]:
    """Ragged lengths; every third prompt begins with a piece of the same text."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab_size) for _ in range(40)]
    requests = []
    for n in range(num_requests):
        prefix = shared[: rng.randrange(40)] if n % 3 == 0 else []
        prompt = (*prefix, *(rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 40))))
        requests.append(make_request(prompt, max_tokens=rng.randrange(1, 24), ignore_eos=True))
    return tuple(requests)


@pytest.fixture(scope="module")
def reference_of_the_bundled_model(demo_path: Path) -> Reference:
    requests = random_requests(11, 763, seed=2)
    return Reference(requests, generate_plainly(demo_path, requests))


def build(
    path: Path,
    *,
    way: str = "torch",
    num_slots: int = 800,
    kv_dtype: Literal["auto", "int8"] = "auto",
    **scheduler: int,
) -> Engine:
    """Ways of computing: `decoder` wholly in C++; `attention` with the rest that makes a CPU fast; `torch`, plainly."""
    settings = {"max_running": 33, "max_step_tokens": 400, "prefill_chunk_tokens": 400} | scheduler
    block_size = 4 if way == "torch" else 16
    if way != "torch" and not is_fast(torch.float32):
        pytest.skip("no C++ compiler here, or a CPU without wide vectors")
    config = config_of(
        path, cache={"block_size": block_size, "num_blocks": num_slots // block_size, "dtype": kv_dtype},
        scheduler=settings, dtype="float32", num_threads=2 if way == "decoder" else 1,
        backend="torch" if way == "torch" else "auto",
    )  # fmt: skip
    with transformers_code() if way == "attention" else nullcontext():
        engine = build_sync_engine(config)
    forward = engine.runner.forward  # type: ignore[attr-defined]
    attention = getattr(forward, "attention", forward)
    computes = type(attention.attention if isinstance(attention, StatefulAttention) else attention)
    assert computes is {"decoder": NativeDecoder, "attention": NativeAttention, "torch": TorchAttention}[way]
    return engine


@pytest.fixture(scope="module")
def reference(tiny_model_path: Callable[[str], Path]) -> Callable[[str], Reference]:
    known: dict[str, Reference] = {}

    def find(architecture: str) -> Reference:
        if architecture not in known:
            requests = random_requests(33, VOCAB_SIZE)
            known[architecture] = Reference(requests, generate_plainly(tiny_model_path(architecture), requests))
        return known[architecture]

    return find


# Each architecture as a CPU computes it; on plain torch those that a CPU does not, and each rule of attention.
WAYS = [(architecture, "decoder") for architecture in NATIVE]
WAYS += [(architecture, "attention") for architecture in ARCHITECTURES if architecture not in NATIVE]
WAYS += [(architecture, "torch") for architecture in NATIVE]


def too_few_slots(architecture: str) -> int:
    """In which sequences are preempted, and find what others had. Some layers with windows take blocks of their own."""
    return 480 if architecture in ("gemma2", "gemma3", "gemma4", "gemma4_large", "olmo3") else 240


@pytest.mark.parametrize(("architecture", "way"), WAYS)
class TestArchitecture:
    def test_alone_and_among_32_others(self, architecture, way, tiny_model_path, reference) -> None:  # type: ignore[no-untyped-def]
        expected = reference(architecture)
        engine = build(tiny_model_path(architecture), way=way, num_slots=3200)
        for request in expected.requests[:3]:
            outcome = run_to_end(engine, request)
            assert outcome.token_ids[request.request_id] == expected.token_ids[request.request_id]
            engine.clear_prefix_cache()
        assert run_to_end(engine, *expected.requests).token_ids == expected.token_ids
        assert engine.stats().total_preemptions == 0

    def test_with_chunks_preemption_and_prefix_hits(self, architecture, way, tiny_model_path, reference) -> None:  # type: ignore[no-untyped-def]
        expected = reference(architecture)
        engine = build(
            tiny_model_path(architecture),
            way=way,
            num_slots=too_few_slots(architecture),
            max_step_tokens=40,
            prefill_chunk_tokens=7,
        )
        assert run_to_end(engine, *expected.requests).token_ids == expected.token_ids
        assert engine.stats().total_preemptions > 0
        assert engine.stats().total_cached_tokens > 0


@pytest.mark.parametrize(
    ("architecture", "way"),
    [("llama", "decoder"), ("mistral", "decoder"), ("mistral", "attention"), ("gemma4", "decoder"),
     ("gemma4_large", "decoder"), ("gemma4_large", "attention")],
)  # fmt: skip
def test_with_kv_memory_in_int8_tokens_are_the_same_whatever_happens(
    architecture, way, tiny_model_path, reference
) -> None:  # type: ignore[no-untyped-def]
    path, requests = tiny_model_path(architecture), reference(architecture).requests
    expected = run_to_end(build(path, way=way, num_slots=3200, kv_dtype="int8"), *requests).token_ids
    num_slots = too_few_slots(architecture)
    engine = build(path, way=way, num_slots=num_slots, kv_dtype="int8", max_step_tokens=40, prefill_chunk_tokens=7)
    assert run_to_end(engine, *requests).token_ids == expected
    assert engine.stats().total_preemptions > 0
    assert engine.stats().total_cached_tokens > 0
    assert expected != reference(architecture).token_ids, "no number was rounded"


def test_the_references_tell_tokens_apart(reference) -> None:  # type: ignore[no-untyped-def]
    """An equality of constant outputs would prove nothing."""
    for architecture in ARCHITECTURES:
        tokens = {t for output in reference(architecture).token_ids.values() for t in output}
        assert len(tokens) > 20, architecture


ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "head_dim": 16}
UNUSUAL: dict[str, dict[str, Any]] = {
    "gemma3n_text": {  # hidden states in several streams
        **ALTERNATING, "altup_num_inputs": 3, "laurel_rank": 8, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16, "tie_word_embeddings": False,
    },
    "afmoe": {  # takes a view of what attention gives
        **ALTERNATING, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1,
    },
    "longcat_flash": {  # reads the weights of a linear layer
        "num_layers": 2, "num_key_value_heads": 4, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", UNUSUAL)
def test_models_with_unusual_code(model_type: str, tmp_path: Path) -> None:
    path, requests = save_random_model(tmp_path, model_type, **UNUSUAL[model_type]), random_requests(3, VOCAB_SIZE)
    expected = generate_plainly(path, requests)
    assert len({token for tokens in expected.values() for token in tokens}) > 20, "tokens vary"
    engine = build(path, way="attention", max_step_tokens=40, prefill_chunk_tokens=7)
    assert run_to_end(engine, *requests).token_ids == expected
    assert engine.model_info.embedding_size == 64


@pytest.mark.parametrize("way", ["torch", "attention", "decoder"])
def test_the_bundled_model(demo_path: Path, way: str, reference_of_the_bundled_model: Reference) -> None:
    requests, expected = reference_of_the_bundled_model.requests, reference_of_the_bundled_model.token_ids
    for settings in ({"num_slots": 3200}, {"num_slots": 240, "max_step_tokens": 40, "prefill_chunk_tokens": 7}):
        assert run_to_end(build(demo_path, way=way, **settings), *requests).token_ids == expected


SAMPLED = {
    **FILTERS,
    "temperature": 0.9,
    "top_k": 50,
    "min_p": 0.01,
    "presence_penalty": 0.4,
    "repetition_penalty": 1.2,
}


@pytest.mark.parametrize("way", ["torch", "attention", "decoder"])
def test_seeded_sampling_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(demo_path: Path, way: str) -> None:
    requests = tuple(
        make_request(r.prompt_token_ids, max_tokens=10, ignore_eos=True, seed=n, **SAMPLED)
        for n, r in enumerate(random_requests(10, 763, seed=3))
    )
    alone: dict[str, list[int]] = {}
    engine = build(demo_path, way=way)
    for request in requests:
        engine.clear_prefix_cache()
        alone |= run_to_end(engine, request).token_ids
    together = build(demo_path, way=way, num_slots=3200)
    assert run_to_end(together, *requests).token_ids == alone
    cramped = build(demo_path, way=way, num_slots=240, max_step_tokens=40, prefill_chunk_tokens=7)
    assert run_to_end(cramped, *reversed(requests)).token_ids == alone
    assert cramped.stats().total_preemptions > 0
