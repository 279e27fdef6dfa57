from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from app.engine.batch import StepBatch
from app.errors import InvalidSetup, UnsupportedModel
from app.model import attention, source
from app.model.cpu import decoder
from app.model.implementations import transformers_code
from app.model.implementations.native_decoder import NativeModel
from app.model.implementations.transformers_code import eos_token_ids
from app.model.inputs import Segments
from app.model.source import unsupported_if_fails
from tests.kit.models import load, load_native
from tests.tiny_models import save_random_model

LINEAR = ["linear_attention", "full_attention"]
HEADS: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
WITH_A_STATE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {"layer_types": LINEAR, "head_dim": 16, **HEADS},
    "granitemoehybrid": {
        "layer_types": LINEAR, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
        **MAMBA,
    },
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention"], "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16, "head_dim": 16,
    },
    "minimax": {"layer_types": LINEAR, "head_dim": 16, "num_local_experts": 4, "block_size": 16},
    "zaya": {
        "layer_types": ["hybrid", "hybrid"], "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", WITH_A_STATE)
def test_layers_that_keep_a_state_are_refused_by_what_they_compute_whatever_their_names(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_random_model(tmp_path, model_type, **WITH_A_STATE[model_type])
    monkeypatch.setattr(source, "LAYERS_WITH_STATES", frozenset())
    monkeypatch.setattr(source, "UNSUPPORTED_RECURRENCES", {})
    monkeypatch.setattr(source, "_SERVABLE_LAYERS", frozenset({*LINEAR, "conv", "hybrid", "mlp", "moe"}))
    monkeypatch.delattr(attention.ProbeStep, "next_slots")  # nothing computes with states then
    monkeypatch.setattr(NativeModel, "why_not_here", staticmethod(lambda _: "a test"))
    for backend, name in (("auto", "NativeAttention|TorchAttention"), ("torch", "TorchAttention")):
        with pytest.raises(UnsupportedModel, match=rf"with ({name}), of a later piece of a prompt, .* differs by"):
            load(path, backend=backend)


LLAMA_4 = {
    "layer_types": ["full_attention", "full_attention"], "head_dim": 16, "no_rope_layers": [1, 0], "moe_layers": [],
    "intermediate_size_mlp": 64, "num_local_experts": 2, "attn_scale": 0.1, "rope_parameters": None,
}  # fmt: skip


def test_queries_that_are_scaled_by_their_place_in_a_step_are_refused_at_any_length(tmp_path: Path) -> None:
    path = save_random_model(tmp_path, "llama4_text", floor_scale=100, **LLAMA_4)
    with pytest.raises(UnsupportedModel, match=r"from token 100 on, .* set model\.max_model_len below 100"):
        load(path)
    assert load(path, max_model_len=99).model_info.max_model_len == 99


def test_queries_that_are_scaled_by_their_place_in_a_step_are_found_by_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_random_model(tmp_path, "llama4_text", floor_scale=4, **LLAMA_4)
    monkeypatch.setattr(transformers_code, "why_indices_matter", lambda *_: None)
    with pytest.raises(UnsupportedModel, match=r"of a later piece of a prompt, .* the output differs by"):
        load(path)


def test_a_sequence_beside_another_is_compared_in_the_native_decoder(
    tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The decoder is made to take the blocks of the first sequence of a step for every sequence."""
    right = decoder.build_segments

    def wrong(batch: StepBatch, **sizes: int) -> Segments:
        first = batch.scheduled[0]
        items = tuple(structs.replace(item, block_ids=first.block_ids * 9) for item in batch.scheduled)
        return right(replace(batch, scheduled=items), **sizes)

    assert isinstance(load_native(tiny_model_path("llama")), NativeModel)
    monkeypatch.setattr(decoder, "build_segments", wrong)
    assert not isinstance(load(tiny_model_path("llama")), NativeModel)
    assert "is allowed, for tokens alongside another sequence" in caplog.text


def test_any_error_of_transformers_code_refuses_the_model_with_the_reason(tmp_path: Path) -> None:
    """DBRX without a limit of its queries, keys and values: its code limits them anyway."""
    attention = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": None}
    experts = {"ffn_hidden_size": 64, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}
    path = save_random_model(
        tmp_path, "dbrx", d_model=64, n_heads=4, n_layers=2, attn_config=attention, ffn_config=experts
    )
    with pytest.raises(
        UnsupportedModel, match=r"cannot be loaded: RuntimeError at modeling_dbrx\.py:\d+: torch\.clamp"
    ):
        load(path)


def test_an_error_with_words_of_its_own_is_told_with_its_place(
    tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("sizes do not match\nand more")

    monkeypatch.setattr(attention, "_causal", fails)
    with pytest.raises(UnsupportedModel, match=r"cannot be loaded: RuntimeError at .*\.py:\d+: sizes do not match$"):
        load(tiny_model_path("gemma2"))


def test_errors_of_the_machine_refuse_no_model() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("CUDA error: unspecified")):
        with pytest.raises(type(error)), unsupported_if_fails("some/model"):
            raise error
    with pytest.raises(InvalidSetup, match="as it is"), unsupported_if_fails("some/model"):
        raise InvalidSetup("as it is")


def test_a_configuration_without_end_tokens_has_none() -> None:
    module = SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace), generation_config=None)
    assert eos_token_ids(module) == ()  # type: ignore[arg-type]
