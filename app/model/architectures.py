"""Describes the architectures that our own decoders support. transformers' code runs all other models.

Each architecture is declared here once. The choice of a number type, the checks before a load, the packing of weights
and the lists in tests follow from its description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Mixer = Literal["attention", "short_convolution", "gated_delta_rule"]
Activation = Literal["silu", "gelu_tanh"]
Backend = Literal["cpu", "cuda"]  # our C++ decoder, and our CUDA decoder
# The values of `layer_types` in config.json that stand for mixers other than attention.
MIXERS: Mapping[str, Mixer] = {"conv": "short_convolution", "linear_attention": "gated_delta_rule"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a layer's parts in a checkpoint. An empty name means that the architecture lacks the part."""

    mixer_input_norm: str = "input_layernorm"
    mixer_output_norm: str = ""
    feed_forward_input_norm: str = "post_attention_layernorm"
    feed_forward_output_norm: str = ""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_output: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    output_scale: str = ""  # one factor by which a layer multiplies its outputs
    final_norm: str = "norm"  # the norm of the whole model's output


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How a mixture of experts weighs the experts of a token (Shazeer et al., 2017)."""

    weights_sum_to_one: bool | None = None  # if None, `norm_topk_prob` in config.json decides
    # Whether routing weights, and expert outputs multiplied by them, are rounded to the model's dtype.
    rounds_weights: bool = True
    size: str = "moe_intermediate_size"  # the name of an expert's inner size in config.json
    has_shared: bool = False  # whether an additional expert processes every token


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The differences between an architecture and Llama. `Architecture()` is Llama itself.

    Llama normalises the inputs of attention and of the MLP (RMSNorm), rotates whole heads by their positions, shares
    keys and values among query heads, and gates its MLP with SiLU.
    """

    names: Names = field(default_factory=Names)
    norm_offset: float = 0.0  # added to the weights of norms
    rounds_in_norms: bool = True  # round to the model's type before the multiplication by the norm's weight
    norms_all_heads: bool = False  # normalise the queries of all heads together, and likewise the keys
    norms_values: bool = False  # normalise each head's values, without weights
    rounds_rotary: bool = True  # whether cosines, sines and the numbers they multiply are rounded to the model's type
    activation: Activation = "silu"
    scales_embedding: bool = False  # multiply embeddings by the square root of the hidden size
    gates_attention: bool = False  # the query projection has extra outputs that gate attention's output
    experts: Experts | None = None
    backends: frozenset[Backend] = frozenset({"cpu", "cuda"})


_ON_A_CPU: frozenset[Backend] = frozenset({"cpu"})
_NORMS_ON_BOTH_SIDES = Names(
    mixer_output_norm="post_attention_layernorm",
    feed_forward_input_norm="pre_feedforward_layernorm",
    feed_forward_output_norm="post_feedforward_layernorm",
)
_GEMMA = Architecture(
    names=_NORMS_ON_BOTH_SIDES, norm_offset=1.0, rounds_in_norms=False, activation="gelu_tanh", scales_embedding=True,
    backends=_ON_A_CPU,
)  # fmt: skip
_OLMO = Architecture(
    names=Names(
        mixer_input_norm="", mixer_output_norm="post_attention_layernorm", feed_forward_input_norm="",
        feed_forward_output_norm="post_feedforward_layernorm",
    ),
    rounds_in_norms=False, norms_all_heads=True, rounds_rotary=False, backends=_ON_A_CPU,
)  # fmt: skip

# The keys are class names of transformers.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(),
        "MistralForCausalLM": Architecture(),
        "Qwen2ForCausalLM": Architecture(),
        "Qwen3ForCausalLM": Architecture(),
        "MixtralForCausalLM": Architecture(
            experts=Experts(weights_sum_to_one=True, rounds_weights=False, size="intermediate_size")
        ),
        "Qwen3MoeForCausalLM": Architecture(experts=Experts()),
        "Qwen2MoeForCausalLM": Architecture(experts=Experts(has_shared=True), backends=frozenset({"cuda"})),
        "Olmo2ForCausalLM": _OLMO,
        "Olmo3ForCausalLM": _OLMO,
        "Gemma2ForCausalLM": _GEMMA,
        "Gemma3ForCausalLM": _GEMMA,
        "Gemma4ForCausalLM": replace(
            _GEMMA, names=replace(_NORMS_ON_BOTH_SIDES, output_scale="layer_scalar"), norm_offset=0.0, norms_values=True
        ),
        "Lfm2ForCausalLM": Architecture(
            names=Names(
                mixer_input_norm="operator_norm", feed_forward_input_norm="ffn_norm",
                query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm",
                attention_output="self_attn.out_proj", gate="feed_forward.w1", up="feed_forward.w3",
                down="feed_forward.w2", final_norm="embedding_norm",
            ),
            backends=_ON_A_CPU,
        ),
        "Qwen3_5ForCausalLM": Architecture(
            norm_offset=1.0, rounds_in_norms=False, gates_attention=True, backends=_ON_A_CPU
        ),
    }
)  # fmt: skip


class TextModel(NamedTuple):
    """The class that serves a multimodal checkpoint's language model alone."""

    model_type: str
    architecture: str
    settings: Mapping[str, Any] = MappingProxyType({})  # settings that its config.json omits, but the class needs


# The keys are the `model_type` of `text_config` in multimodal checkpoints. Without images, the three-dimensional
# positions of some of these models equal ordinary positions.
TEXT_MODELS = {
    "gemma3_text": TextModel("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4_text": TextModel("gemma4_text", "Gemma4ForCausalLM"),
    "lfm2": TextModel("lfm2", "Lfm2ForCausalLM"),
    "llama": TextModel("llama", "LlamaForCausalLM"),
    "mistral": TextModel("mistral", "MistralForCausalLM"),
    "qwen2": TextModel("qwen2", "Qwen2ForCausalLM"),
    "qwen2_vl_text": TextModel("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl_text": TextModel("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_omni_text": TextModel("qwen2", "Qwen2ForCausalLM"),
    "qwen3": TextModel("qwen3", "Qwen3ForCausalLM"),
    "qwen3_5_text": TextModel("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_vl_text": TextModel("qwen3", "Qwen3ForCausalLM"),
    "qwen3_vl_moe_text": TextModel("qwen3_moe", "Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_omni_moe_text": TextModel("qwen3_moe", "Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
}


def architectures_of(described: Mapping[str, Any]) -> list[str]:
    """Return the architectures of a model's language part. described: the content of config.json."""
    kind = (described.get("text_config") or {}).get("model_type")
    return [TEXT_MODELS[kind].architecture] if kind in TEXT_MODELS else list(described.get("architectures") or ())


def computed_by(backend: Backend) -> frozenset[str]:
    """Return the class names of the architectures that our decoder for `backend` supports."""
    return frozenset(name for name, each in ARCHITECTURES.items() if backend in each.backends)
