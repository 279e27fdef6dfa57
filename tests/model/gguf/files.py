"""Small GGUF files, written with llama.cpp's own package as its converter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, TensorNameMap, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from app.config import ModelConfig
from app.model.gguf.checkpoint import checkpoint_of
from app.model.source import ModelSource
from tests.tiny_models import ALL, SHAPE, build_tiny_model

TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "he", "Ġt", "<|start|>", "<|end|>"]
_NORMAL, _CONTROL = 1, 3
START, END = TOKENS.index("<|start|>"), TOKENS.index("<|end|>")
_SHAPE = {
    "vocab_size": len(TOKENS), "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64,
    "initializer_range": 0.1, "eos_token_id": END, "bos_token_id": START, "pad_token_id": None, "sliding_window": None,
}  # fmt: skip
_OF_EXPERTS = {
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 256, "num_experts_per_tok": 3, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3},
}
# By transformers' type of a model; others have the same name.
_ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "qwen3_5_text": "qwen35"}
_TURNS_NEIGHBOURS = ("llama", "granite", "smollm3")
# Of tiny models: values that a default does not have.
_OF_KIND: dict[str, dict[str, Any]] = {
    "gemma2": {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3": {
        "num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        "sliding_window": 8, "query_pre_attn_scalar": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    },
    "granite": {
        "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
    },
    "lfm2": {"num_hidden_layers": 3},
    "qwen3_5": {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1], "layer_types": ["full_attention"] * 5},
}  # fmt: skip
F32 = GGMLQuantizationType.F32
Blocks = np.ndarray[Any, Any]


def tiny_model(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """Wide enough for every type's blocks."""
    settings = _SHAPE | _OF_EXPERTS.get(architecture, {}) | _OF_KIND.get(architecture, {}) | changes
    if architecture in ALL:
        model = build_tiny_model(architecture, **settings)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**SHAPE | settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or (parameter.dim() == 1 and architecture in _OF_KIND):
                parameter.normal_(std=0.1).add_(0.0 if name.endswith(".bias") else 1.0)
    return model


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType | str | Mapping[str, str] = F32,
    *,
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    without: str | None = None,
) -> Path:
    """Write a model; afterwards its weights are what the file's blocks stand for.

    kind: of all matrices, or by the ends of tensors' names.
    settings: of the metadata, in addition or instead; tensors: in addition, without: a tensor that is left out.
    """
    config = model.config
    name = _ARCHITECTURES.get(config.model_type, str(config.model_type))
    names = get_tensor_name_map(MODEL_ARCH[name.upper()], config.num_hidden_layers)
    writer = GGUFWriter(path, name)
    for key, value in (_settings(config) | dict(settings or {})).items():
        _add(writer, key, value)
    for source, weight in _weights(model):
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = _target(names, source)
        is_plain = weight.dim() == 1 or source.endswith(("conv1d.weight", "conv.conv.weight"))
        own = F32 if is_plain else _kind_of(target, kind)
        blocks, values = _blocks(weight, own)
        weight.copy_(values)
        blocks = _as_converted(blocks, name, source, config)
        heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
        for end, num_heads in heads.items():
            if name in _TURNS_NEIGHBOURS and target.endswith(end):
                blocks = blocks.reshape(num_heads, 2, -1, blocks.shape[-1]).swapaxes(1, 2).reshape(blocks.shape)
        if target != without:
            writer.add_tensor(
                target, np.ascontiguousarray(blocks), raw_dtype=None if blocks.dtype == np.float32 else own
            )
    for target, values in (tensors or {}).items():
        writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind_of(target: str, kind: GGMLQuantizationType | str | Mapping[str, str]) -> GGMLQuantizationType:
    if isinstance(kind, Mapping):
        kind = next(own for end, own in kind.items() if target.endswith(end))
    return GGMLQuantizationType[kind] if isinstance(kind, str) else kind


def read_gguf(path: Path, cache: Path) -> PreTrainedModel:
    """transformers' own model with the weights of a file, multiplied out."""
    folder = checkpoint_of(path, cache)
    source = ModelSource(
        config=ModelConfig(path=str(path)), location=str(folder), device=torch.device("cpu"), dtype=torch.float32
    )
    config, weights = AutoConfig.from_pretrained(folder), source.weights_of_gguf()
    return source.model_class.from_pretrained(None, config=config, state_dict=weights).float().eval()


def _as_converted(blocks: Blocks, architecture: str, source: str, config: PreTrainedConfig) -> Blocks:
    """What llama.cpp's converter makes of a weight, beside another order of rows for rotary positions."""
    is_offset = source.endswith("norm.weight") and "linear_attn.norm" not in source
    if architecture in ("gemma2", "gemma3", "qwen35") and is_offset:
        return blocks + np.float32(1)
    if source.endswith(("conv1d.weight", "conv.conv.weight")):
        blocks = blocks.squeeze(1)
    if source.endswith("A_log"):
        blocks = -np.exp(blocks)
    if architecture != "qwen35" or "linear_attn" not in source or source.endswith("norm.weight"):
        return blocks
    # Value heads of a key head stand apart, and not side by side.
    keys, of_key = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    own = len(blocks) - 2 * keys * config.linear_key_head_dim if "qkv" in source or "conv1d" in source else len(blocks)
    if source.endswith("out_proj.weight"):
        columns = blocks.reshape(len(blocks), keys, of_key, -1)
        return np.ascontiguousarray(columns.swapaxes(1, 2)).reshape(blocks.shape)
    before, values = blocks[: len(blocks) - own], blocks[len(blocks) - own :]
    tiled = values.reshape(keys, of_key, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    return np.concatenate([before, tiled])


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    kind = _ARCHITECTURES.get(config.model_type, config.model_type)
    rope = config.rope_parameters
    epsilon = float(getattr(config, "rms_norm_eps", 0.0) or config.norm_eps)
    types = [_CONTROL if token.startswith("<|") else _NORMAL for token in TOKENS]
    return (
        {
            f"{kind}.block_count": config.num_hidden_layers,
            f"{kind}.context_length": config.max_position_embeddings,
            f"{kind}.embedding_length": config.hidden_size,
            f"{kind}.feed_forward_length": config.intermediate_size,
            f"{kind}.attention.head_count": config.num_attention_heads,
            f"{kind}.attention.head_count_kv": config.num_key_value_heads,
            f"{kind}.attention.layer_norm_rms_epsilon": epsilon,
            f"{kind}.rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
            f"{kind}.vocab_size": config.vocab_size,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": ["h e", "Ġ t"],
            "tokenizer.ggml.bos_token_id": START,
            "tokenizer.ggml.eos_token_id": END,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": TEMPLATE,
        }
        | _expert_settings(config, kind)
        | _settings_of_kind(config, kind)
    )


def _settings_of_kind(config: PreTrainedConfig, kind: str) -> dict[str, Any]:
    if kind == "gemma2":
        return {
            "gemma2.attention.sliding_window": config.sliding_window,
            "gemma2.attention.key_length": config.head_dim,
            "gemma2.attn_logit_softcapping": config.attn_logit_softcapping,
            "gemma2.final_logit_softcapping": config.final_logit_softcapping,
        }
    if kind == "gemma3":
        rope = config.rope_parameters
        return {
            "gemma3.attention.sliding_window": config.sliding_window,
            "gemma3.attention.key_length": config.head_dim,
            "gemma3.rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": float(rope["full_attention"]["factor"]),
        }
    if kind == "lfm2":
        heads = [config.num_key_value_heads if each != "conv" else 0 for each in config.layer_types]
        return {"lfm2.attention.head_count_kv": heads, "lfm2.shortconv.l_cache": config.conv_L_cache}
    if kind == "qwen35":
        rotary = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        return {
            "qwen35.attention.key_length": config.head_dim,
            "qwen35.ssm.conv_kernel": config.linear_conv_kernel_dim,
            "qwen35.ssm.state_size": config.linear_key_head_dim,
            "qwen35.ssm.group_count": config.linear_num_key_heads,
            "qwen35.ssm.time_step_rank": config.linear_num_value_heads,
            "qwen35.ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            "qwen35.full_attention_interval": 4,
            "qwen35.rope.dimension_count": rotary,
            "qwen35.rope.dimension_sections": [rotary // 2 - 2, 1, 1, 0],
        }
    if kind == "granite":
        return {
            "granite.attention.scale": config.attention_multiplier,
            "granite.embedding_scale": config.embedding_multiplier,
            "granite.residual_scale": config.residual_multiplier,
            "granite.logit_scale": config.logits_scaling,
        }
    return {}


def _expert_settings(config: PreTrainedConfig, kind: str) -> dict[str, Any]:
    if not hasattr(config, "num_experts"):
        return {}
    settings = {f"{kind}.expert_count": config.num_experts, f"{kind}.expert_used_count": config.num_experts_per_tok}
    if kind == "qwen3moe":
        settings[f"{kind}.expert_feed_forward_length"] = config.moe_intermediate_size
    return settings


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's own weights; those that transformers joins for all experts are apart here."""
    for name, weight in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for part, own in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), own
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        else:
            yield name, weight


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _target(names: TensorNameMap, source: str) -> str:
    """llama.cpp's name of a weight: that of its converter."""
    converted = source.replace(".dt_bias", ".dt_proj.bias")
    found = names.get_name(converted, (".weight", ".bias"))
    assert found is not None, source
    return found


def _blocks(weight: torch.Tensor, kind: GGMLQuantizationType) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """A weight's blocks, and what they stand for. Blocks of k-quants are random: the package cannot make them."""
    values = weight.numpy().astype(np.float32)
    try:
        blocks = quantize(values, kind)
    except NotImplementedError:
        blocks = _random_blocks(values.shape, kind)
    return blocks, torch.from_numpy(np.array(dequantize(blocks, kind), np.float32))


def _random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // block, block_bytes), np.uint8)
    # For weights of much the same size.
    small = np.frombuffer(np.float16(0.00005 if kind.name in ("Q6_K", "IQ4_XS") else 0.0003).tobytes(), np.uint8)
    if kind == GGMLQuantizationType.Q6_K:
        blocks[..., -2:] = small  # d
    elif kind == GGMLQuantizationType.Q2_K:
        blocks[..., -4:] = np.tile(small, 2)  # d and dmin
    elif kind in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K):
        blocks[..., :4] = np.tile(small, 2)  # d and dmin
    else:
        blocks[..., :2] = small  # d
    return blocks.reshape(*shape[:-1], -1)
