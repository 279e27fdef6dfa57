"""Models with recurrent layers: the tokens are those of `generate`, whatever happens around a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.build import build_sync_engine
from app.config import ModelConfig
from app.engine.engine import Engine
from app.errors import InvalidSetup, UnsupportedModel
from app.model.implementations.transformers_code import TransformersModel
from app.model.kv_cache import BOOKKEEPING_BYTES
from app.model.loader import load_runner
from app.model.source import ModelSource
from tests.kit.engine import run_to_end
from tests.kit.models import CPU, config_of, generate_plainly, load
from tests.model.test_equivalence import random_requests
from tests.tiny_models import VOCAB_SIZE, save_random_model

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},  # attention and Mamba 2 side by side in each layer
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0,
        "mamba_d_state": 16, "mamba_dt_rank": 4, "num_experts": 4,
    },
    "zamba2": {  # attention blocks that several layers share; while it generates, transformers has no least time step
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "mamba_d_state": 16,
        "num_mem_blocks": 1, "use_mem_rope": True, "chunk_size": 16, "time_step_min": 1e-9,
    },
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},  # recurrent layers alone
}  # fmt: skip


def build(path: Path, *, num_blocks: int) -> Engine:
    return build_sync_engine(
        config_of(
            path, cache={"num_blocks": num_blocks}, num_threads=1, dtype="float32", max_model_len=256,
            scheduler={"max_running": 33, "max_step_tokens": 40, "prefill_chunk_tokens": 7},
        )
    )  # fmt: skip


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_tokens_are_those_of_generate_with_chunks_preemption_and_prefix_hits(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_random_model(tmp_path, model_type, **HYBRIDS[model_type])
    requests = random_requests(12, VOCAB_SIZE)
    expected = generate_plainly(path, requests)
    assert len({token for tokens in expected.values() for token in tokens}) > 20, "tokens vary"
    monkeypatch.setattr("app.model.kv_cache.num_state_slots", lambda *_, **__: 14)
    engine = build(path, num_blocks=15)
    assert run_to_end(engine, *requests).token_ids == expected
    assert run_to_end(engine, *requests[::-1]).token_ids == expected
    assert engine.stats().total_preemptions > 0
    assert engine.stats().total_cached_tokens > 0


def test_a_draft_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    path = save_random_model(tmp_path / "model", "llama")
    draft = save_random_model(tmp_path / "draft", "lfm2", **HYBRIDS["lfm2"])
    speculation = {"method": "draft_model", "model": str(draft)}
    with pytest.raises(InvalidSetup, match=r"method is draft_model, but the draft model .*/draft has recurrent layers"):
        build_sync_engine(config_of(path, speculation=speculation))


def test_recurrent_layers_are_not_divided_among_ranks(tmp_path: Path) -> None:
    path = str(save_random_model(tmp_path, "qwen3_5_text", **DELTA))
    source = ModelSource(config=ModelConfig(path=path), location=path, device=CPU, dtype=torch.float32)
    with pytest.raises(InvalidSetup, match=r"got 2; .* has recurrent layers \(linear_attention\)"):
        source.check_ranks(2)


def test_a_state_that_is_not_computed_here_is_refused_by_name(tmp_path: Path) -> None:
    path = save_random_model(
        tmp_path, "minimax", layer_types=DELTA["layer_types"], head_dim=16, num_local_experts=4, block_size=16
    )
    with pytest.raises(UnsupportedModel, match=r"has recurrent layers that are not supported: lightning attention"):
        load(path)


def test_blocks_of_a_model_without_attention_layers_count_as_their_bookkeeping(tmp_path: Path) -> None:
    path = save_random_model(tmp_path, "lfm2", layer_types=["conv", "conv"])
    loaded = load_runner(config_of(path, cache={"memory_gib": 0.01}))
    of_states = loaded.model.model_info.num_state_slots * sum(shape.num_bytes for shape in loaded.model.states)
    assert loaded.num_blocks == (int(0.01 * 2**30) - of_states) // BOOKKEEPING_BYTES


def test_states_that_do_not_fit_are_refused_with_the_numbers(tmp_path: Path) -> None:
    path = save_random_model(tmp_path, "qwen3_5_text", **DELTA)
    with pytest.raises(InvalidSetup, match=r"memory_gib=1e-05: 8 slots of 0\.0 MiB .* need"):
        load_runner(config_of(path, cache={"memory_gib": 1e-5}))


def test_the_memory_settings_hold_states_and_keys_and_values_together(tmp_path: Path) -> None:
    path = save_random_model(tmp_path, "qwen3_5_text", **DELTA)
    loaded = load_runner(config_of(path, cache={"memory_gib": 0.001}, scheduler={"max_running": 2}))
    assert loaded.model.model_info.num_state_slots == 8
    of_states = 8 * sum(shape.num_bytes for shape in loaded.model.states)
    of_token = sum(layer.bytes_per_token(loaded.model.dtype) for layer in loaded.model.layers.values())
    assert 0.95 * 2**20 * 1.024 < of_states + loaded.num_blocks * 16 * of_token <= 0.001 * 2**30


def test_states_that_do_not_fit_are_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_random_model(tmp_path, "lfm2", layer_types=["conv", "full_attention"])
    monkeypatch.setattr(TransformersModel, "load", None)
    with pytest.raises(InvalidSetup, match=r"memory_gib=1e-06: 8 slots of 0\.0 MiB for the states of recurrent layers"):
        load_runner(config_of(path, cache={"memory_gib": 1e-6}, num_threads=1, dtype="float32"))
