"""The Llama-like architectures as both decoders know them: the C++ one (`cpu/`) and the one for CUDA (`cuda/`).

Only the architectures named here are computed by them. The loader compares their output with the model's own before
use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from app.model.attention import AttentionRules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The weight of a name in the model's checkpoint; None where the model has none.
Weights = Callable[[str], torch.Tensor | None]

# Pre-norm decoders with RMSNorm, rotary positions on whole heads, grouped-query attention and a SiLU-gated MLP, or a
# mixture of such MLPs.
_MIXTURES = frozenset({"MixtralForCausalLM", "Qwen3MoeForCausalLM"})
_MIXTURES_WITH_SHARED_EXPERT = frozenset({"Qwen2MoeForCausalLM"})  # the C++ decoder has none
ARCHITECTURES = _MIXTURES | {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


class TextModel(NamedTuple):
    """What the language model of a multimodal checkpoint is, if it stands alone."""

    model_type: str
    architecture: str
    settings: Mapping[str, Any] = MappingProxyType({})  # that its own class has no name for


# By the type that a multimodal checkpoint gives to its language model. With text alone, positions in three dimensions
# are ordinary positions.
TEXT_MODELS = {
    "llama": TextModel("llama", "LlamaForCausalLM"),
    "mistral": TextModel("mistral", "MistralForCausalLM"),
    "qwen2": TextModel("qwen2", "Qwen2ForCausalLM"),
    "qwen2_vl_text": TextModel("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl_text": TextModel("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_omni_text": TextModel("qwen2", "Qwen2ForCausalLM"),
    "qwen3": TextModel("qwen3", "Qwen3ForCausalLM"),
    "qwen3_vl_text": TextModel("qwen3", "Qwen3ForCausalLM"),
    "qwen3_vl_moe_text": TextModel("qwen3_moe", "Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_omni_moe_text": TextModel("qwen3_moe", "Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
}
_EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERIES_KEYS_VALUES = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    """A mixture of experts; all 0 without one. The fields are those of `ExpertsShape`."""

    num_experts: int = 0
    per_token: int = 0
    intermediate_size: int = 0
    weights_sum_to_one: bool = False  # those of a token's chosen experts; else they are parts of the sum of all
    rounds_weights: bool = False  # whether weights, and outputs times weights, are rounded to the model's type


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    """A Llama-like model without its weights, in plain values; or the part of it that one of several ranks has."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of layers without experts
    experts: ExpertSettings
    vocab_size: int
    epsilon: float
    scaling: float
    sliding_windows: tuple[int, ...]  # by layer; 0: none
    rotary_frequencies: tuple[float, ...]  # [head_dim / 2]
    rotary_scaling: float

    def of_rank(self, size: int) -> DecoderSettings:
        """The part that each of `size` ranks has: some heads, and some inner numbers of each MLP and each expert."""
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=self.num_kv_heads // size,
            intermediate_size=self.intermediate_size // size,
            experts=replace(self.experts, intermediate_size=self.experts.intermediate_size // size),
        )

    def rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines by which heads are turned, each [num_positions, head_dim]. positions: [num_positions]."""
        angles = positions[..., None].float() * torch.tensor(self.rotary_frequencies, device=positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.rotary_scaling).to(dtype), (angles.sin() * self.rotary_scaling).to(dtype)


def architectures_of(described: Mapping[str, Any]) -> list[str]:
    """What a config.json says of the language model's class. described: the file."""
    kind = (described.get("text_config") or {}).get("model_type")
    return [TEXT_MODELS[kind].architecture] if kind in TEXT_MODELS else list(described.get("architectures") or ())


def why_not_llama_like(model: PreTrainedModel) -> str | None:
    """Why a model is none that is described here, by all but its attention; None when no reason is known."""
    known = ARCHITECTURES | _MIXTURES_WITH_SHARED_EXPERT
    if type(model).__name__ not in known:
        return f"{type(model).__name__} is none of {', '.join(sorted(known))}"
    if getattr(model, "is_quantized", False):
        return "its checkpoint is quantised, and transformers' own modules compute it"
    if model.config.hidden_act != "silu":
        return f"its MLP is activated by {model.config.hidden_act}, not silu"
    mlps = [layer.mlp for layer in _layers(model) if not hasattr(layer.mlp, "experts")]
    if any(mlp.gate_proj.bias is not None or mlp.down_proj.bias is not None for mlp in mlps):
        return "its MLP has biases"
    return None


def has_shared_expert(model: PreTrainedModel) -> bool:
    return type(model).__name__ in _MIXTURES_WITH_SHARED_EXPERT


def why_attention_is_not_llama_like(model: PreTrainedModel, rules: dict[int, AttentionRules]) -> str | None:
    """The same for what its layers have asked of their attention."""
    if sorted(rules) != list(range(len(_layers(model)))):
        return "its layers do not all attend once"
    if any(rule.softcap or rule.sinks is not None or rule.scaling != rules[0].scaling for rule in rules.values()):
        return "its attention has soft caps, sinks or different scalings"
    return None


def settings_of(model: PreTrainedModel, rules: dict[int, AttentionRules]) -> DecoderSettings:
    """`why_not_llama_like` and `why_attention_is_not_llama_like` must be None."""
    config, rotary = model.config, model.model.rotary_emb
    return DecoderSettings(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim_of(model),
        intermediate_size=config.intermediate_size,
        experts=experts_of(model),
        vocab_size=model.lm_head.weight.shape[0],
        epsilon=config.rms_norm_eps,
        scaling=rules[0].scaling,
        sliding_windows=tuple(rules[index].sliding_window or 0 for index in range(len(_layers(model)))),
        rotary_frequencies=tuple(rotary.inv_freq.tolist()),
        rotary_scaling=rotary.attention_scaling,
    )


def head_dim_of(model: PreTrainedModel) -> int:
    return int(_layers(model)[0].self_attn.head_dim)


def experts_of(model: PreTrainedModel) -> ExpertSettings:
    config, name = model.config, type(model).__name__
    if name not in _MIXTURES | _MIXTURES_WITH_SHARED_EXPERT or not config.num_experts:
        return ExpertSettings()
    is_mixtral = name == "MixtralForCausalLM"
    return ExpertSettings(
        num_experts=config.num_experts,
        per_token=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size if is_mixtral else config.moe_intermediate_size,
        weights_sum_to_one=is_mixtral or config.norm_topk_prob,
        rounds_weights=not is_mixtral,
    )


def _layers(model: PreTrainedModel) -> list[Any]:
    return list(model.model.layers)


def by_expert(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's weights under the names in its checkpoint: transformers joins those of a layer's experts in memory."""
    found = {}
    for name, weight in weights.items():
        prefix, is_joined, joined = name.partition(".mlp.experts.")
        if not is_joined:
            found[name] = weight
            continue
        for expert, own in enumerate(weight):
            parts = own.chunk(2) if joined == "gate_up_proj" else (own,)
            for part, matrix in zip(_EXPERT_MATRICES[joined], parts, strict=True):
                found[f"{prefix}.mlp.experts.{expert}.{part}.weight"] = matrix
    return found


def named(weights: Weights, prefix: str, name: str) -> torch.Tensor | None:
    """The weight of a part's own name: `partial(named, weights, prefix)` has the weights of one layer."""
    return weights(prefix + name)


def given(weights: Weights, name: str) -> torch.Tensor:
    """The weight of a name that every such model has."""
    weight = weights(name)
    assert weight is not None, f"a Llama-like model has {name}"
    return weight


def joined_bias(weights: Weights, linears: tuple[str, ...], dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """The biases of linear layers side by side, zeros for those without; None if none has one.

    dtype: None for that of the weights.
    """
    if all(weights(f"{linear}.bias") is None for linear in linears):
        return None
    return torch.cat([_bias_or_zeros(weights, linear, dtype) for linear in linears])


def _bias_or_zeros(weights: Weights, linear: str, dtype: torch.dtype | None) -> torch.Tensor:
    bias = weights(f"{linear}.bias")
    if bias is not None:
        return bias.to(dtype or bias.dtype)
    weight = given(weights, f"{linear}.weight")
    return weight.new_zeros(weight.shape[0], dtype=dtype)
