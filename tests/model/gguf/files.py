"""Small GGUF files, written with llama.cpp's own package as its converter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, TensorNameMap, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from app.config import ModelConfig
from app.model.gguf.checkpoint import checkpoint_of
from app.model.source import ModelSource
from tests.tiny_models import ALL, GEMMA4_LAYERS, SHAPE, build_tiny_model

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
_ARCHITECTURES = {
    "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gemma4_text": "gemma4",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "granitemoehybrid": "granitehybrid",
    "ministral3": "mistral3",
}  # fmt: skip
_TURNS_NEIGHBOURS = ("llama", "granite", "granitehybrid", "mistral3", "smollm3")
# Ends of the names of weights for which the package has no name, and of llama.cpp's names.
_TARGETS = {
    ".layer_scalar": "layer_output_scale.weight",
    ".router.scale": "ffn_gate_inp.scale",
    ".router.per_expert_scale": "ffn_down_exps.scale",
    ".block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    ".experts.gate_proj.weight": "ffn_gate_exps.weight",
    ".experts.up_proj.weight": "ffn_up_exps.weight",
    ".experts.down_proj.weight": "ffn_down_exps.weight",
    ".shared_mlp.gate.weight": "ffn_gate_shexp.weight",
    ".shared_mlp.up.weight": "ffn_up_shexp.weight",
    ".shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
}
_GEMMA4 = {
    "sliding_window": 8, "final_logit_softcapping": 10.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    },
}  # fmt: skip
_GEMMA4_LARGE = {
    "layer_types": ["sliding_attention", "full_attention"],
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 128,
    "hidden_size_per_layer_input": 0,
} | _GEMMA4
_GRANITE = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
}  # fmt: skip
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
    "gemma4": {  # as E2B and E4B
        "num_hidden_layers": 5, "layer_types": GEMMA4_LAYERS, "global_head_dim": 128, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256,
    } | _GEMMA4,
    "gemma4_large": _GEMMA4_LARGE,
    "gemma4_experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256}
    | _GEMMA4_LARGE,
    "granite": _GRANITE,
    "granitemoehybrid": {
        "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 64,
        "mamba_n_groups": 2, "mamba_d_state": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 256,
    } | _GRANITE,
    "lfm2": {"num_hidden_layers": 3},
    "ministral3": {
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
            "max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
            "llama_4_scaling_beta": 0.125,
        },
    },
    "phi3": {
        "sliding_window": 9, "max_position_embeddings": 64, "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 16, "short_factor": [1.0 + 0.25 * place for place in range(24)],
            "long_factor": [1.0 + 0.5 * place for place in range(24)], "attention_factor": 1.25,
        },
    },
    "qwen3_5": {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "qwen3_5_moe_text": {
        "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    },
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1], "layer_types": ["full_attention"] * 5},
}  # fmt: skip
F32 = GGMLQuantizationType.F32
Blocks = np.ndarray[Any, Any]


def tiny_model(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """Wide enough for every type's blocks."""
    settings = _SHAPE | _OF_EXPERTS.get(architecture, {}) | _OF_KIND.get(architecture, {}) | changes
    settings["vocab_size_per_layer_input"] = settings["vocab_size"]  # of Gemma 4
    if architecture in ALL and not architecture.startswith("gemma4"):
        model = build_tiny_model(architecture, **settings)
    else:
        torch.manual_seed(0)
        kind = "gemma4_text" if architecture.startswith("gemma4") else architecture
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SHAPE | settings)).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.75)
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
    [number] = [each for each, known in MODEL_ARCH_NAMES.items() if known == name]
    names = get_tensor_name_map(number, config.num_hidden_layers)
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
        if name in _TURNS_NEIGHBOURS and target.endswith(("attn_q.weight", "attn_k.weight")):
            is_query = target.endswith("attn_q.weight")
            num_heads = config.num_attention_heads if is_query else config.num_key_value_heads
            blocks = blocks.reshape(num_heads, 2, -1, blocks.shape[-1]).swapaxes(1, 2).reshape(blocks.shape)
        if target != without:
            writer.add_tensor(
                target, np.ascontiguousarray(blocks), raw_dtype=None if blocks.dtype == np.float32 else own
            )
    for target, values in (_rotary_tensors(config) | dict(tensors or {})).items():
        if target != without:
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
    if architecture in ("gemma2", "gemma3", "qwen35", "qwen35moe") and is_offset:
        return blocks + np.float32(1)
    if source.endswith(("conv1d.weight", "conv.conv.weight")):
        blocks = blocks.squeeze(1)
    if source.endswith("A_log"):
        blocks = -np.exp(blocks)
    if architecture == "granitehybrid" and source.endswith((".A_log", ".D")):
        return blocks[:, None]
    if source.endswith("mamba.norm.weight"):
        return blocks.reshape(config.mamba_n_groups, -1)
    if source.endswith("shared_expert_gate.weight"):
        return blocks.reshape(-1)
    if not architecture.startswith("qwen35") or "linear_attn" not in source or source.endswith("norm.weight"):
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
            f"{kind}.feed_forward_length": getattr(config, "intermediate_size", None),
            f"{kind}.attention.head_count": config.num_attention_heads,
            f"{kind}.attention.head_count_kv": config.to_dict()["num_key_value_heads"],
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
    if kind == "gemma4":
        return _settings_of_gemma4(config)
    if kind == "mistral3":
        rope = config.rope_parameters
        return _yarn_settings(kind, rope) | {
            "mistral3.rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "mistral3.attention.temperature_scale": rope["llama_4_scaling_beta"],
            "mistral3.attention.key_length": config.head_dim,
        }
    if kind == "phi3":
        rope = config.rope_parameters
        return {
            "phi3.attention.key_length": config.head_dim,
            "phi3.attention.sliding_window": config.sliding_window,
            "phi3.rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
            "phi3.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "phi3.rope.scaling.attn_factor": rope["attention_factor"],
        }
    if kind == "lfm2":
        heads = [config.num_key_value_heads if each != "conv" else 0 for each in config.layer_types]
        return {"lfm2.attention.head_count_kv": heads, "lfm2.shortconv.l_cache": config.conv_L_cache}
    if kind in ("qwen35", "qwen35moe"):
        rotary = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        return {
            f"{kind}.attention.key_length": config.head_dim,
            f"{kind}.ssm.conv_kernel": config.linear_conv_kernel_dim,
            f"{kind}.ssm.state_size": config.linear_key_head_dim,
            f"{kind}.ssm.group_count": config.linear_num_key_heads,
            f"{kind}.ssm.time_step_rank": config.linear_num_value_heads,
            f"{kind}.ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            f"{kind}.full_attention_interval": 4,
            f"{kind}.attention.recurrent_layers": [each == "linear_attention" for each in config.layer_types],
            f"{kind}.rope.dimension_count": rotary,
            f"{kind}.rope.dimension_sections": [rotary // 2 - 2, 1, 1, 0],
        }
    if kind.startswith("granite"):
        return {
            f"{kind}.attention.scale": config.attention_multiplier,
            f"{kind}.embedding_scale": config.embedding_multiplier,
            f"{kind}.residual_scale": config.residual_multiplier,
            f"{kind}.logit_scale": config.logits_scaling,
        } | (_settings_of_mamba(config) if kind == "granitehybrid" else {})
    return {}


def _settings_of_gemma4(config: PreTrainedConfig) -> dict[str, Any]:
    windows = [each == "sliding_attention" for each in config.layer_types]
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    is_wide = [config.use_double_wide_mlp and layer >= first_shared for layer in range(config.num_hidden_layers)]
    own = config.to_dict()
    full = own | own["per_layer_config"][str(windows.index(False))]
    heads = (full["num_key_value_heads"], own["num_key_value_heads"])
    rope = config.rope_parameters
    return {
        "gemma4.attention.key_length": full["head_dim"],
        "gemma4.attention.value_length": full["head_dim"],
        "gemma4.attention.key_length_swa": own["head_dim"],
        "gemma4.attention.value_length_swa": own["head_dim"],
        "gemma4.attention.head_count_kv": [heads[is_window] for is_window in windows],
        "gemma4.attention.sliding_window": config.sliding_window,
        "gemma4.attention.sliding_window_pattern": windows,
        "gemma4.attention.shared_kv_layers": config.num_kv_shared_layers,
        "gemma4.embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "gemma4.feed_forward_length": [config.intermediate_size * (1 + each) for each in is_wide],
        "gemma4.final_logit_softcapping": config.final_logit_softcapping,
        "gemma4.rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "gemma4.rope.dimension_count": full["head_dim"],
        "gemma4.rope.dimension_count_swa": own["head_dim"],
    }


def _settings_of_mamba(config: PreTrainedConfig) -> dict[str, Any]:
    heads = [config.num_key_value_heads * (each == "full_attention") for each in config.layer_types]
    return {
        "granitehybrid.attention.head_count_kv": heads,
        "granitehybrid.attention.key_length": config.head_dim,
        "granitehybrid.expert_shared_feed_forward_length": config.shared_intermediate_size,
        "granitehybrid.rope.scaling.finetuned": False,
        "granitehybrid.ssm.conv_kernel": config.mamba_d_conv,
        "granitehybrid.ssm.state_size": config.mamba_d_state,
        "granitehybrid.ssm.group_count": config.mamba_n_groups,
        "granitehybrid.ssm.inner_size": config.mamba_d_head * config.mamba_n_heads,
        "granitehybrid.ssm.time_step_rank": config.mamba_n_heads,
    }


def _yarn_settings(kind: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{kind}.rope.scaling.type": "yarn",
        f"{kind}.rope.scaling.factor": rope["factor"],
        f"{kind}.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        f"{kind}.rope.scaling.yarn_beta_fast": rope["beta_fast"],
        f"{kind}.rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


def _rotary_tensors(config: PreTrainedConfig) -> dict[str, Blocks]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{each}.weight": np.array(rope[f"{each}_factor"], np.float32) for each in ("long", "short")
        }
    if rope.get("full_attention", {}).get("rope_type") != "proportional":
        return {}
    half = config.to_dict()["per_layer_config"][str(config.layer_types.index("full_attention"))]["head_dim"] // 2
    num_turned = int(half * rope["full_attention"]["partial_rotary_factor"])
    return {"rope_freqs.weight": np.array([1.0] * num_turned + [1e30] * (half - num_turned), np.float32)}


def _expert_settings(config: PreTrainedConfig, kind: str) -> dict[str, Any]:
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not num_experts:
        return {}
    used = config.top_k_experts if kind == "gemma4" else config.num_experts_per_tok
    settings = {f"{kind}.expert_count": num_experts, f"{kind}.expert_used_count": used}
    if hasattr(config, "moe_intermediate_size"):
        settings[f"{kind}.expert_feed_forward_length"] = config.moe_intermediate_size
    if kind == "qwen35moe":
        settings[f"{kind}.expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return settings


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's own weights; those that transformers joins for all experts are apart here."""
    for name, weight in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for part, own in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), own
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        elif name.endswith("shared_mlp.input_linear.weight"):
            for part, own in zip(("gate", "up"), weight.chunk(2, dim=0), strict=True):
                yield name.replace("input_linear", part), own
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
    layer = source.removeprefix("model.layers.").partition(".")[0]
    for end, own in _TARGETS.items():
        if source.endswith(end):
            return f"blk.{layer}.{own}"
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
