"""The architectures of llama.cpp that are supported, and how each is described in transformers' terms.

Files of other architectures are rejected by name, because guessing could miss a tensor or a setting and produce wrong
outputs. Qwen3.5 and LFM2 use the tables of transformers' own reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.errors import UnsupportedModel
from app.model.gguf.reader import READ_INSTEAD, GgufFile, Values
from app.model.gguf.settings import FileSettings

_FACTORS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROTARY_TENSORS = frozenset((_FACTORS, _LONG, _SHORT))  # scales of rotary positions, not weights
# The parameters of `rope_type: llama3` that all Llama 3.1 to 3.3 share. Only the factor differs: 8 or 32.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MOST_FACTOR = 1e20  # a larger divisor marks dimensions that are not rotated; Gemma 4 files use 1e30


def _rotary(settings: FileSettings, head_dim: int) -> dict[str, Any]:
    theta = settings.number("rope.freq_base", 10_000.0)
    factors = settings.factors(_FACTORS, head_dim // 2)
    if factors is not None:
        factor = float(factors.max(initial=1.0))
        if not np.allclose(factors, _llama3_factors(theta, head_dim, factor), rtol=1e-3):
            raise UnsupportedModel(
                f"{settings.file.path}: tensor {_FACTORS} scales positions in an unknown way; {READ_INSTEAD}"
            )
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    settings.require_scaling("none", "linear", "yarn")
    kind = settings.text("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": settings.number("rope.scaling.factor")}
    if kind == "yarn":
        betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": settings.number("rope.scaling.factor"),
            "original_max_position_embeddings": settings.count("rope.scaling.original_context_length"),
            **settings.given(betas),
        }
    return {"rope_type": "default", "rope_theta": theta}


def _with_windows(settings: FileSettings, rope: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters for layers without a window and for layers with one, which have a different base."""
    theta = settings.number("rope.freq_base_swa", 10_000.0)
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def _llama3_factors(theta: float, head_dim: int, factor: float) -> Values:
    """Return the numbers by which llama.cpp divides the frequencies for `rope_type: llama3`, [head_dim / 2]."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, length = _LLAMA3.values()
    smooth = (length / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < length / high, 1.0, np.where(wavelengths > length / low, factor, between))


def _proportional(settings: FileSettings, head_dim: int) -> dict[str, Any]:
    """Return Gemma 4's rotary parameters. Gemma 4 rotates a part of each head, with the frequencies of a whole head."""
    settings.require_scaling("none")
    factors = settings.factors(_FACTORS, head_dim // 2)
    num_turned = 0 if factors is None else int((factors == 1.0).sum())
    if (
        factors is None
        or not num_turned
        or not np.all(factors[:num_turned] == 1.0)
        or not np.all(factors[num_turned:] > _MOST_FACTOR)
    ):
        raise UnsupportedModel(
            f"{settings.file.path}: tensor {_FACTORS} does not show which part of a head is rotated; {READ_INSTEAD}"
        )
    part = num_turned / len(factors)
    theta = settings.number("rope.freq_base", 10_000.0)
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": part}


def _long_rope(settings: FileSettings, head_dim: int) -> dict[str, Any]:
    """Return Phi-3's rotary parameters: factors for short and long texts, and the rotated part of each head."""
    settings.require_scaling("none", "longrope")
    size = settings.count("rope.dimension_count", head_dim)
    if size > head_dim or size % 2:
        raise settings.refusal("rope.dimension_count", size)
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": settings.number("rope.freq_base", 10_000.0),
        "partial_rotary_factor": size / head_dim,
    }
    long, short = settings.factors(_LONG, size // 2), settings.factors(_SHORT, size // 2)
    if (long is None) != (short is None) or (long is None and settings.text("rope.scaling.type", "none") == "longrope"):
        raise UnsupportedModel(f"{settings.file.path} does not have both {_LONG} and {_SHORT}; {READ_INSTEAD}")
    if long is None or short is None:
        return rope
    return rope | {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "original_max_position_embeddings": settings.count("rope.scaling.original_context_length"),
        "attention_factor": settings.number("rope.scaling.attn_factor", 1.0),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How an architecture of llama.cpp is described in transformers' terms."""

    model_type: str
    class_name: str
    rotates_adjacent_pairs: bool = False  # llama.cpp rotates the pairs (0, 1), (2, 3) of a head instead of its halves
    rotates_partially: bool = False  # whether only a part of each head may be rotated
    known: frozenset[str] = frozenset()  # settings that `more` and `rotary` read, beyond the common ones
    by_layer: frozenset[str] = frozenset()  # settings that may be lists with one number per layer
    rotary: Callable[[FileSettings, int], dict[str, Any]] = _rotary  # receives the head size
    # Returns further fields of config.json, which replace common ones. Receives the rotary parameters.
    more: Callable[[FileSettings, dict[str, Any]], dict[str, Any]] = lambda settings, rope: {}
    # Tensors that llama.cpp's package does not name, by the end of the weight's name in transformers. A weight may have
    # several alternatives: the first that the file contains is used. The rows of an alternative's tensors are joined.
    tensors: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    reshaped: tuple[str, ...] = ()  # ends of names of weights whose shape in the file differs
    # Functions that compute a weight from a tensor's values, by the end of the weight's name.
    changes: Mapping[str, Callable[[Values], Values]] = field(default_factory=dict)


def _gemma2(settings: FileSettings, _rope: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Gemma 2: every second layer uses a window, and scores and logits are soft-capped."""
    num_layers, num_heads = settings.count("block_count"), settings.count("attention.head_count")
    hidden_size = settings.count("embedding_length")
    layers_of_27b = 46  # only this size scales scores by a number other than the head size
    head_size = settings.count("attention.key_length", hidden_size // num_heads)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": settings.count("attention.sliding_window", 4096),
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)],
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == layers_of_27b else head_size,
    }


def _gemma3(settings: FileSettings, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Gemma 3: every sixth layer has no window, and scales positions."""
    num_layers, num_heads = settings.count("block_count"), settings.count("attention.head_count")
    hidden_size = settings.count("embedding_length")
    every = settings.count("attention.sliding_window_pattern", 6)
    layers_of_27b = 62  # only this size scales scores by a number other than the head size
    head_size = settings.count("attention.key_length", hidden_size // num_heads)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": settings.count("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)
        ],
        "rope_parameters": _with_windows(settings, rope),
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == layers_of_27b else head_size,
    }  # fmt: skip


def _gemma4(settings: FileSettings, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Gemma 4: head sizes depend on the window, and the last layers reuse keys and values."""
    full, window = settings.count("attention.key_length"), settings.count("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if settings.count(key, window) != window:
            raise settings.refusal(key, settings.count(key))
    windows = [int(each) for each in settings.flags("attention.sliding_window_pattern")]
    if not windows:
        raise settings.refusal("attention.sliding_window_pattern", None)
    heads, inner = settings.counts("attention.head_count_kv"), settings.counts("feed_forward_length")
    in_full = [own for own, is_window in zip(heads, windows, strict=True) if not is_window]
    first_full = windows.index(0) if in_full else 0
    tensors = settings.file.tensors
    per_layer = tensors.get("per_layer_token_embd.weight")
    has_experts = settings.has("expert_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": window,
        "global_head_dim": full,
        "num_key_value_heads": heads[windows.index(1)] if any(windows) else heads[0],
        "num_global_key_value_heads": in_full[0] if in_full else None,
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": settings.count_if_any("attention.shared_kv_layers") or 0,
        "sliding_window": settings.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windows],
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": settings.count("embedding_length_per_layer_input") if per_layer else 0,
        "vocab_size_per_layer_input": per_layer.shape[0] if per_layer else 1,
        "rope_parameters": _with_windows(settings, rope),
        "enable_moe_block": has_experts,
        "num_experts": settings.count("expert_count") if has_experts else None,
        "top_k_experts": settings.count("expert_used_count") if has_experts else None,
        "moe_intermediate_size": settings.count("expert_feed_forward_length") if has_experts else None,
        **settings.given({"final_logit_softcapping": "final_logit_softcapping"}),
    }  # fmt: skip


def _granite(settings: FileSettings, _rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": settings.number("attention.scale"),
        "embedding_multiplier": settings.number("embedding_scale"),
        "residual_multiplier": settings.number("residual_scale"),
        "logits_scaling": settings.number("logit_scale"),
    }


def _granite_hybrid(settings: FileSettings, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Granite 4: most layers are Mamba 2, which a file marks with 0 key heads."""
    num_heads, inner = settings.count("ssm.time_step_rank"), settings.count("ssm.inner_size")
    hidden_size, has_experts = settings.count("embedding_length"), settings.has("expert_count")
    if inner % num_heads or inner % hidden_size:
        raise settings.refusal("ssm.inner_size", inner)
    shared = "expert_shared_feed_forward_length" if has_experts else "feed_forward_length"
    kinds = ["attention" if heads else "mamba" for heads in settings.counts("attention.head_count_kv")]
    return {
        **_granite(settings, rope),
        "layer_types": kinds,
        # llama.cpp's switch for rotary positions. Its converter disables them for all models with Mamba layers.
        "position_embedding_type": "rope" if settings.text("rope.scaling.finetuned", "True") == "True" else None,
        "num_local_experts": settings.count("expert_count") if has_experts else 0,
        "num_experts_per_tok": settings.count("expert_used_count") if has_experts else 0,
        "shared_intermediate_size": settings.count(shared),
        "mamba_n_heads": num_heads,
        "mamba_n_groups": settings.count("ssm.group_count"),
        "mamba_d_state": settings.count("ssm.state_size"),
        "mamba_d_head": inner // num_heads,
        "mamba_d_conv": settings.count("ssm.conv_kernel"),
        "mamba_expand": inner // hidden_size,
        "mamba_conv_bias": f"blk.{kinds.index('mamba')}.ssm_conv1d.bias" in settings.file.tensors
        if "mamba" in kinds
        else True,
    }


def _ministral3(settings: FileSettings, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Ministral 3 or, if the file does not scale queries by position, Mistral Small 3.1 or 3.2."""
    scales: dict[str, Any] = {}
    if settings.has("rope.scaling.yarn_log_multiplier"):
        scales = {"mscale": 1.0, "mscale_all_dim": settings.number("rope.scaling.yarn_log_multiplier")}
    if not settings.has("attention.temperature_scale"):
        own = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
        return own | {"rope_parameters": rope | scales}
    if rope["rope_type"] != "yarn":
        raise settings.refusal("rope.scaling.type", rope["rope_type"])
    scales["llama_4_scaling_beta"] = settings.number("attention.temperature_scale")
    length = settings.count("context_length")
    return {"rope_parameters": rope | scales | {"max_position_embeddings": length}}


def _phi3(settings: FileSettings, rope: dict[str, Any]) -> dict[str, Any]:
    length = rope.get("original_max_position_embeddings", settings.count("context_length"))
    window = settings.count_if_any("attention.sliding_window")
    return {"sliding_window": window, "original_max_position_embeddings": length}


def _smollm3(settings: FileSettings, _rope: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of SmolLM3: every fourth layer has no rotary positions."""
    every = 4
    has_rope = [int((layer + 1) % every != 0) for layer in range(settings.count("block_count"))]
    return {"no_rope_layer_interval": every, "no_rope_layers": has_rope, "use_sliding_window": False}


_EXPERTS = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))
_MAMBA = frozenset(
    (
        "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size",
        "expert_shared_feed_forward_length",
    )
)  # fmt: skip
_MULTIPLIERS = frozenset(("attention.scale", "embedding_scale", "residual_scale", "logit_scale"))
FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(
        model_type="llama", class_name="LlamaForCausalLM", rotates_adjacent_pairs=True, known=_EXPERTS
    ),
    "qwen2": ModelFamily(model_type="qwen2", class_name="Qwen2ForCausalLM"),
    "qwen3": ModelFamily(model_type="qwen3", class_name="Qwen3ForCausalLM"),
    "qwen3moe": ModelFamily(model_type="qwen3_moe", class_name="Qwen3MoeForCausalLM", known=_EXPERTS),
    "olmo2": ModelFamily(model_type="olmo2", class_name="Olmo2ForCausalLM"),
    "gemma2": ModelFamily(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        known=frozenset(("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")),
        more=_gemma2,
    ),
    "gemma3": ModelFamily(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        known=frozenset(("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")),
        more=_gemma3,
    ),
    "gemma4": ModelFamily(
        model_type="gemma4_text",
        class_name="Gemma4ForCausalLM",
        known=_EXPERTS
        | {
            "attention.sliding_window", "attention.shared_kv_layers", "attention.key_length_swa",
            "attention.value_length_swa", "rope.freq_base_swa", "rope.dimension_count_swa",
            "embedding_length_per_layer_input", "final_logit_softcapping",
        },
        by_layer=frozenset(("attention.sliding_window_pattern", "attention.head_count_kv", "feed_forward_length")),
        rotary=_proportional,
        more=_gemma4,
        tensors={
            ".layer_scalar": (("layer_output_scale.weight",),),
            ".router.scale": (("ffn_gate_inp.scale",),),
            ".router.per_expert_scale": (("ffn_down_exps.scale",),),
            ".experts.gate_up_proj": (
                ("ffn_gate_up_exps.weight",), ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            ),
            ".experts.down_proj": (("ffn_down_exps.weight",),),
        },
    ),
    "granite": ModelFamily(  # also Granite 4 without Mamba layers, whose files still contain Mamba settings
        model_type="granite",
        class_name="GraniteForCausalLM",
        rotates_adjacent_pairs=True,
        known=_MULTIPLIERS | _MAMBA,
        by_layer=frozenset(("attention.head_count_kv",)),
        more=_granite,
    ),
    "granitehybrid": ModelFamily(
        model_type="granitemoehybrid",
        class_name="GraniteMoeHybridForCausalLM",
        rotates_adjacent_pairs=True,
        known=_EXPERTS | _MULTIPLIERS | _MAMBA,
        by_layer=frozenset(("attention.head_count_kv",)),
        more=_granite_hybrid,
        tensors={
            ".block_sparse_moe.router.weight": (("ffn_gate_inp.weight",),),
            ".experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"),),
            ".experts.down_proj": (("ffn_down_exps.weight",),),
            ".shared_mlp.input_linear.weight": (
                ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), ("ffn_gate.weight", "ffn_up.weight"),
            ),
            ".shared_mlp.output_linear.weight": (("ffn_down_shexp.weight",), ("ffn_down.weight",)),
            ".mamba.dt_bias": (("ssm_dt.bias",),),
        },
        reshaped=(".mamba.A_log", ".mamba.D", ".mamba.norm.weight", ".mamba.conv1d.weight"),
        changes={".mamba.A_log": lambda values: np.log(-values)},
    ),
    "mistral3": ModelFamily(
        model_type="ministral3",
        class_name="Ministral3ForCausalLM",
        rotates_adjacent_pairs=True,
        known=frozenset(("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")),
        more=_ministral3,
    ),
    "phi3": ModelFamily(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        rotates_partially=True,
        known=frozenset(("attention.sliding_window", "rope.scaling.attn_factor")),
        rotary=_long_rope,
        more=_phi3,
    ),
    "smollm3": ModelFamily(
        model_type="smollm3", class_name="SmolLM3ForCausalLM", rotates_adjacent_pairs=True, more=_smollm3
    ),
}  # fmt: skip
_QWEN35 = frozenset(
    (
        "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size",
        "full_attention_interval", "rope.dimension_sections", "nextn_predict_layers", "attention.recurrent_layers",
    )
)  # fmt: skip
# Architectures that are described with transformers' own tables, and the settings that these tables read.
BY_TRANSFORMERS: Mapping[str, frozenset[str]] = {
    "lfm2": frozenset(("shortconv.l_cache",)),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35 | _EXPERTS | {"expert_shared_feed_forward_length"},
}


def check_architecture(file: GgufFile) -> str:
    """Return the architecture of a file. Raises UnsupportedModel if it is not supported."""
    architecture = str(file.metadata.get("general.architecture"))
    known = [*FAMILIES, *BY_TRANSFORMERS]
    if architecture == "clip":
        raise UnsupportedModel(
            f"{file.path} contains only a model's image encoder (mmproj); set model.path to the GGUF file of the "
            f"model itself"
        )
    if architecture not in known:
        raise UnsupportedModel(
            f"{file.path} has architecture {architecture[:60]!r}; only GGUF files of {', '.join(known)} can be read. "
            f"For this one, {READ_INSTEAD}"
        )
    return architecture
