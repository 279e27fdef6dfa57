"""Tiny random models of many architectures, for equivalence tests. Weights are wide enough that tokens vary."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from app.model.architectures import computed_by

VOCAB_SIZE = 211
GEMMA4_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def _configs() -> dict[str, PreTrainedConfig]:
    shape = dict(SHAPE)
    without_kv_heads = {name: value for name, value in shape.items() if name != "num_key_value_heads"}
    gpt2 = {
        "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256,
        "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    return {
        "llama": LlamaConfig(**shape),
        "qwen2": Qwen2Config(**shape),
        "qwen3": Qwen3Config(**shape, head_dim=16),
        "mistral": MistralConfig(**shape, sliding_window=9),
        "gemma2": Gemma2Config(
            **shape, head_dim=16, query_pre_attn_scalar=16, sliding_window=9, attn_logit_softcapping=5.0,
            final_logit_softcapping=10.0,
        ),
        "gpt2": GPT2Config(**gpt2),
        "gpt_neox": GPTNeoXConfig(**without_kv_heads, rotary_pct=0.5),
        "phi3": Phi3Config(**shape),
        "mixtral": MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2, sliding_window=9),
        "qwen3_moe": Qwen3MoeConfig(
            **shape | {"num_hidden_layers": 3}, head_dim=16, moe_intermediate_size=48, num_experts=20,
            num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1],
        ),
        "qwen2_moe": Qwen2MoeConfig(
            **shape, moe_intermediate_size=48, shared_expert_intermediate_size=80, num_experts=6, num_experts_per_tok=2,
        ),
        "gemma3": Gemma3TextConfig(
            **shape, head_dim=16, query_pre_attn_scalar=16, sliding_window=9,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "olmo2": Olmo2Config(**shape),
        "olmo3": Olmo3Config(**shape, sliding_window=9, layer_types=["sliding_attention", "full_attention"]),
        "lfm2": Lfm2Config(
            **shape | {"num_hidden_layers": 3}, conv_L_cache=3, block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention", "conv"],
        ),
        "qwen3_5": Qwen3_5TextConfig(
            **shape | {"num_hidden_layers": 3}, head_dim=32, linear_conv_kernel_dim=4, linear_key_head_dim=16,
            linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "gemma4": Gemma4TextConfig(
            **shape | {"num_hidden_layers": 5}, head_dim=16, global_head_dim=32, sliding_window=9,
            layer_types=GEMMA4_LAYERS, num_kv_shared_layers=2, use_double_wide_mlp=True, final_logit_softcapping=30.0,
            hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB_SIZE,
            tie_word_embeddings=False,  # tied ones give the last token again
        ),
        "gemma4_large": Gemma4TextConfig(  # as the 31B: values are keys, and there are no per-layer inputs
            **shape | {"num_hidden_layers": 4, "num_key_value_heads": 4}, head_dim=16, global_head_dim=32,
            sliding_window=9, layer_types=["sliding_attention", "full_attention"] * 2, attention_k_eq_v=True,
            num_global_key_value_heads=1, final_logit_softcapping=30.0, hidden_size_per_layer_input=0,
            tie_word_embeddings=False,
        ),
    }  # fmt: skip


_CONFIGS = _configs()
ALL = tuple(_CONFIGS)
ARCHITECTURES = tuple(name for name in ALL if name != "qwen2_moe")  # that one is only for the decoder for CUDA
# Those that the C++ decoder computes.
NATIVE = tuple(
    name
    for name, config in _CONFIGS.items()
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] in computed_by("cpu")
)


def build_tiny_model(architecture: str, **changes: object) -> PreTrainedModel:
    """changes: of the configuration."""
    torch.manual_seed(ALL.index(architecture))
    config = deepcopy(_CONFIGS[architecture])
    for name, value in changes.items():
        setattr(config, name, value)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if architecture.startswith("gemma4"):  # its norms stand side by side, and would be the same
        with torch.no_grad():
            for vector in (
                *model.parameters(),
                *(own for name, own in model.named_buffers() if "layer_scalar" in name),
            ):
                if vector.dim() == 1:
                    vector.uniform_(0.5, 1.5)
    return model.eval()


def save_random_model(folder: Path, model_type: str, **settings: object) -> Path:
    """A model of any architecture of transformers, with two layers unless the settings say otherwise."""
    torch.manual_seed(5)
    config = CONFIG_MAPPING[model_type](**SHAPE | settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.25)
    model.save_pretrained(folder)
    return folder


def save_tiny_model(architecture: str, folder: Path) -> Path:
    build_tiny_model(architecture).save_pretrained(folder)
    return folder
