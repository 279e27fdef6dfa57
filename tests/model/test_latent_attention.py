"""Latent attention: a token stores its latent, and the tokens are those of `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.errors import InvalidSetup
from app.model.attention import AttentionRules, TorchAttention
from app.model.cpu.attention import NativeAttention
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool, is_fast
from app.model.implementations.transformers_code import TransformersModel
from app.model.kv_cache import KVCache, LayerShape
from app.model.latent_attention import LatentHeads
from app.model.loader import load_runner
from tests.kit.engine import run_to_end
from tests.kit.models import CPU, attend, config_of, generate_plainly, load, poison, scheduled
from tests.model.test_equivalence import build, random_requests
from tests.tiny_models import VOCAB_SIZE, save_random_model

LATENT, ROPE = 32, 8
SIZES: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": LATENT, "q_lora_rank": 32, "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": ROPE,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": SIZES | EXPERTS | {"q_lora_rank": None},
    "deepseek_v3": SIZES | EXPERTS,
    "minicpm3": SIZES | {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1},
}


@pytest.mark.parametrize("way", ["attention", "torch"])
@pytest.mark.parametrize("model_type", MODELS)
def test_tokens_are_those_of_generate(model_type: str, way: str, tmp_path: Path) -> None:
    path, requests = save_random_model(tmp_path, model_type, **MODELS[model_type]), random_requests(8, VOCAB_SIZE)
    expected = generate_plainly(path, requests)
    assert len({token for tokens in expected.values() for token in tokens}) > 20, "tokens vary"
    engine = build(path, way=way, num_slots=320, max_step_tokens=40, prefill_chunk_tokens=7)  # type: ignore[arg-type]
    assert run_to_end(engine, *requests).token_ids == expected
    assert run_to_end(engine, *requests[::-1]).token_ids == expected
    assert engine.stats().total_cached_tokens > 0


def test_a_token_stores_its_latent_and_one_rotated_key(tmp_path: Path) -> None:
    model = load(save_random_model(tmp_path, "deepseek_v3", **MODELS["deepseek_v3"]))
    assert isinstance(model, TransformersModel)
    assert all(layer.bytes_per_token(torch.float32) == 4 * (LATENT + ROPE) for layer in model.layers.values())


def test_where_latents_give_other_results_keys_of_all_heads_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = LatentHeads.values
    monkeypatch.setattr(LatentHeads, "values", lambda self, latents: 2 * right(self, latents))
    model = load(save_random_model(tmp_path, "deepseek_v3", **MODELS["deepseek_v3"]))
    assert "keys and values of all heads are stored" in caplog.text
    assert {layer.num_kv_heads for layer in model.layers.values()} == {4}


def test_latents_in_int8_are_refused(tmp_path: Path) -> None:
    path = save_random_model(tmp_path, "deepseek_v3", **MODELS["deepseek_v3"])
    with pytest.raises(InvalidSetup, match="its layers store latents"):
        load_runner(config_of(path, cache={"dtype": "int8", "num_blocks": 8}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_heads", "latent", "rope"), [(1, 16, 2), (5, 48, 8), (16, 64, 32), (128, 32, 32)])
def test_the_native_attention_gives_what_plain_torch_gives(
    num_heads: int, latent: int, rope: int, dtype: torch.dtype
) -> None:
    """Chunks, single tokens, sequences that share blocks, and a sequence of more than one piece of keys."""
    if not is_fast(dtype):
        pytest.skip(f"this CPU has no vector instructions for {dtype}, or there is no C++ compiler")
    torch.manual_seed(num_heads)
    layers, num_blocks = {0: LayerShape(num_kv_heads=1, key_dim=rope, value_dim=latent)}, 160
    pages = NativeKVCache(layers, num_blocks=num_blocks, block_size=16, dtype=dtype)
    poison(pages)
    native = NativeAttention(pages, ThreadPool(2))
    plain = TorchAttention(KVCache(layers, num_blocks=num_blocks, block_size=16, dtype=dtype, device=CPU), CPU)
    rules = AttentionRules(scaling=0.2, is_latent=True)
    long = list(range(10, 150))
    steps = [
        [scheduled(19, 0, [3, 4]), scheduled(5, 0, [5])],
        [scheduled(1, 19, [3, 4]), scheduled(9, 5, [5])],
        [scheduled(1, 20, [3, 4]), scheduled(1, 16, [3, 6]), scheduled(1, 16, [3, 7]), scheduled(2, 14, [5])],
        [scheduled(2200, 0, long)],
        [scheduled(1, 2200, long), scheduled(1, 21, [3, 4])],
    ]
    for step in steps:
        num_tokens = sum(len(item.token_ids) for item in step)
        value = torch.randn(num_tokens, 1, latent, dtype=dtype)
        key = torch.cat((value, torch.randn(num_tokens, 1, rope, dtype=dtype)), dim=-1)
        heads = num_heads if num_tokens < 100 else 2  # plain torch takes half a minute for a long prompt of 128 heads
        query = torch.randn(num_tokens, heads, latent + rope, dtype=dtype)
        got, expected = (attend(each, step, (query, key, value), rules) for each in (native, plain))
        assert torch.allclose(got.float(), expected.float(), atol=1e-4 if dtype is torch.float32 else 0.05)
