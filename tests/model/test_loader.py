from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, MambaConfig, T5Config, ViTConfig

from app.config import ModelConfig
from app.errors import InvalidSetup, UnsupportedModel
from app.model import attention, loader
from app.model.attention import AttentionRules
from app.model.loader import load_model
from tests.tiny_models import VOCAB_SIZE


def load(path: Path, **settings: object):  # type: ignore[no-untyped-def]
    config = ModelConfig(path=str(path), device="cpu", **settings)  # type: ignore[arg-type]
    return load_model(config, str(path))


def test_facts_come_from_the_model(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    model = load(tiny_model_path("gemma2"))
    assert model.facts.max_model_len == 256
    assert model.facts.vocab_size == VOCAB_SIZE
    assert model.facts.eos_token_ids == (1,)
    assert {shape.key_dim for shape in model.layers.values()} == {16}
    assert len(model.layers) == 2


def test_bfloat16_is_loaded_as_asked(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    assert load(tiny_model_path("llama"), dtype="bfloat16").dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("described", "settings", "is_fast", "chosen", "reason"),
    [
        ({"dtype": "bfloat16"}, {}, True, "bfloat16", "the checkpoint's own, in which the native code is fast"),
        ({"torch_dtype": "bfloat16"}, {}, True, "bfloat16", "the checkpoint's own"),
        ({"dtype": "bfloat16"}, {}, False, "float32", "in bfloat16, but the native code is not fast in it"),
        ({"dtype": "bfloat16"}, {"backend": "torch"}, True, "float32", r"model\.backend is torch"),
        ({"dtype": "bfloat16", "architectures": ["GPT2LMHeadModel"]}, {}, True, "float32", "computes GPT2LMHeadModel"),
        ({"dtype": "float16"}, {}, True, "float32", "float16, which bfloat16 would round"),
        ({"dtype": "float32"}, {}, True, "float32", "the checkpoint's own"),
        ({}, {}, True, "float32", "names no other"),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, True, "bfloat16", r"model\.dtype says so"),
    ],
)
def test_the_type_follows_from_checkpoint_and_machine(  # type: ignore[no-untyped-def]
    described, settings, is_fast, chosen, reason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "is_fast", lambda dtype: is_fast)
    whole = {"architectures": ["LlamaForCausalLM"], **described}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = loader.dtype_of(ModelConfig(path=str(tmp_path), device="cpu", **settings), str(tmp_path))
    assert found.dtype is getattr(torch, chosen)
    assert re.search(reason, found.reason)


def test_the_log_says_which_type_and_why(tiny_model_path, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level("INFO")
    load(tiny_model_path("llama"))
    assert "the type is float32: the checkpoint's own" in caplog.text


def test_a_longer_context_than_the_model_has_is_refused_with_both_numbers(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    assert load(tiny_model_path("llama"), max_model_len=100).facts.max_model_len == 100
    with pytest.raises(InvalidSetup, match=r"max_model_len is 300; .* at most 256"):
        load(tiny_model_path("llama"), max_model_len=300)


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup, match=r"model.path .*nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=50), "encoder-decoder"),
        (ViTConfig(hidden_size=16), "generates text"),
        (MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50, state_size=4), "paged"),
        (BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=50), "paged|loaded"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(config, reason, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config.save_pretrained(tmp_path)
    if type(config) in AutoModelForCausalLM._model_mapping:
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path)


def test_weights_that_are_not_safetensors_are_never_read(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="safetensors"):
        load(tmp_path)


def test_code_in_a_model_folder_never_runs(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    (tmp_path / "configuration_trap.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    (tmp_path / "modeling_trap.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "configuration_trap.Trap", "AutoModelForCausalLM": "modeling_trap.Trap"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "trap", "auto_map": auto_map}))
    with pytest.raises(InvalidSetup):
        load(tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_attention_would_serve_wrongly_is_refused(tiny_model_path, monkeypatch, dtype) -> None:  # type: ignore[no-untyped-def]
    right = attention._causal

    def wrong(query, keys, values, *, start, rules):  # type: ignore[no-untyped-def]
        rules = AttentionRules(scaling=rules.scaling * 1.2, sliding_window=rules.sliding_window)
        return right(query, keys, values, start=start, rules=rules)

    load(tiny_model_path("qwen2"), dtype=dtype)
    monkeypatch.setattr(attention, "_causal", wrong)
    with pytest.raises(UnsupportedModel, match="the first layer's output differs by"):
        load(tiny_model_path("qwen2"), dtype=dtype)
