"""Packs the weights of a Llama-like transformers model for the C++ decoder.

Only the architectures named here are packed. The loader compares the decoder's output with the model's own before use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from app.model.attention import AttentionRules
from app.model.cpu.library import LANES, in_large_pages, log_use_of_amx

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The weight of a name in the model's checkpoint; None where the model has none.
Weights = Callable[[str], torch.Tensor | None]
_Pack = Callable[[Sequence[torch.Tensor]], torch.Tensor]

# Pre-norm decoders with RMSNorm, rotary positions on whole heads, grouped-query attention and a SiLU-gated MLP, or a
# mixture of such MLPs.
_MIXTURES = frozenset({"MixtralForCausalLM", "Qwen3MoeForCausalLM"})
_ARCHITECTURES = _MIXTURES | {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_ROTARY_BY_LENGTH = frozenset({"dynamic", "longrope"})
_EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PANEL = 2 * LANES  # columns of a packed matrix that are computed together, as in the sources
_GROUP = 64  # inputs that share a scale, as in the sources
_PANELS_AT_ONCE = 64  # of a matrix that is being quantised: its numbers are in float32 meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeMlp:
    """The matrices of an MLP, or of one expert."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """One layer; matrices packed, as they are or quantised, biases in float32, norms in the model's type."""

    input_norm: torch.Tensor
    query_key_value: torch.Tensor
    query_key_value_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor
    router: torch.Tensor | None  # packed, never quantised; None where there are no experts
    mlps: tuple[NativeMlp, ...]  # one, or one for each expert
    sliding_window: int  # 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    """A mixture of experts; all 0 without one. The fields are those of `ExpertsShape`, in its order."""

    num_experts: int = 0
    per_token: int = 0
    intermediate_size: int = 0
    weights_sum_to_one: bool = False  # those of a token's chosen experts; else they are parts of the sum of all
    rounds_weights: bool = False  # whether weights, and outputs times weights, are rounded to the model's type


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    """A Llama-like model without its weights, in plain values."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeights:
    """A whole model."""

    settings: DecoderSettings
    layers: tuple[NativeLayer, ...]
    embedding: torch.Tensor  # [vocab_size, hidden_size]
    final_norm: torch.Tensor
    head: torch.Tensor
    rotary_frequencies: torch.Tensor  # [head_dim / 2]
    dtype: torch.dtype  # of everything that is not quantised
    is_int8: bool  # the matrices, the head among them

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines by which heads are turned, each [1, num_tokens, head_dim]. positions: [1, num_tokens]."""
        angles = positions[..., None].float() * self.rotary_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        scaling = self.settings.rotary_scaling
        return (angles.cos() * scaling).to(self.dtype), (angles.sin() * scaling).to(self.dtype)


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why the C++ decoder cannot compute a model, by all but its attention; None when no reason is known."""
    if type(model).__name__ not in _ARCHITECTURES:
        return f"{type(model).__name__} is none of {', '.join(sorted(_ARCHITECTURES))}"
    config = model.config
    if config.hidden_act != "silu":
        return f"its MLP is activated by {config.hidden_act}, not silu"
    if model.model.rotary_emb.rope_type in _ROTARY_BY_LENGTH:
        return f"its {model.model.rotary_emb.rope_type} rotary positions follow the longest sequence of a step"
    sizes = (config.hidden_size, config.intermediate_size, _head_dim(model), _experts(model).intermediate_size)
    odd = [n for n in sizes if n % LANES]
    if odd:
        return f"sizes must be multiples of {LANES}, {', '.join(map(str, odd))} are not"
    mlps = [layer.mlp for layer in _layers(model) if not hasattr(layer.mlp, "experts")]
    if any(mlp.gate_proj.bias is not None or mlp.down_proj.bias is not None for mlp in mlps):
        return "its MLP has biases"
    return None


def why_attention_is_not_native(model: PreTrainedModel, rules: dict[int, AttentionRules]) -> str | None:
    """The same for what its layers have asked of their attention."""
    if sorted(rules) != list(range(len(_layers(model)))):
        return "its layers do not all attend once"
    if any(rule.softcap or rule.sinks is not None or rule.scaling != rules[0].scaling for rule in rules.values()):
        return "its attention has soft caps, sinks or different scalings"
    return None


def settings_of(model: PreTrainedModel, rules: dict[int, AttentionRules]) -> DecoderSettings:
    """`why_not_native` and `why_attention_is_not_native` must be None."""
    config, rotary = model.config, model.model.rotary_emb
    return DecoderSettings(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(model),
        intermediate_size=config.intermediate_size,
        experts=_experts(model),
        vocab_size=model.lm_head.weight.shape[0],
        epsilon=config.rms_norm_eps,
        scaling=rules[0].scaling,
        sliding_windows=tuple(rules[index].sliding_window or 0 for index in range(len(_layers(model)))),
        rotary_frequencies=tuple(rotary.inv_freq.tolist()),
        rotary_scaling=rotary.attention_scaling,
    )


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


@torch.inference_mode()
def pack_weights(
    weights: Weights, settings: DecoderSettings, *, int8: bool = False, release: Callable[[], None] = lambda: None
) -> NativeWeights:
    """Pack weights that are all of one type, one layer after the other. Does not change them.

    int8: quantise the matrices. The embedding stays as it is: a step reads only its tokens' rows.
    release: called after each layer, when what was asked of `weights` so far has been packed.
    """
    pack = _packed_int8 if int8 else _packed
    embedding = _given(weights, EMBEDDING)
    if embedding.dtype is torch.bfloat16:
        inner = (settings.intermediate_size, settings.experts.intermediate_size)
        inputs = (settings.hidden_size, settings.num_heads * settings.head_dim, *inner)
        log_use_of_amx(settings.head_dim, *(() if int8 else inputs))
    head = pack([_given(weights, HEAD)])  # first: the largest matrix, while nothing else is there
    release()
    layers = []
    for index, window in enumerate(settings.sliding_windows):
        layers.append(
            _pack_layer(partial(_named, weights, f"model.layers.{index}."), pack, window, settings.experts.num_experts)
        )
        release()
    return NativeWeights(
        settings=settings,
        layers=tuple(layers),
        embedding=embedding,
        final_norm=_given(weights, "model.norm.weight"),
        head=head,
        rotary_frequencies=torch.tensor(settings.rotary_frequencies),
        dtype=embedding.dtype,
        is_int8=int8,
    )


def _named(weights: Weights, prefix: str, name: str) -> torch.Tensor | None:
    return weights(prefix + name)


def _given(weights: Weights, name: str) -> torch.Tensor:
    weight = weights(name)
    assert weight is not None, f"a Llama-like model has {name}"
    return weight


def _pack_layer(weights: Weights, pack: _Pack, sliding_window: int, num_experts: int) -> NativeLayer:
    queries_keys_values = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    router = weights("mlp.gate.weight")
    mlps = ["mlp."] if router is None else [f"mlp.experts.{expert}." for expert in range(num_experts)]
    return NativeLayer(
        input_norm=_given(weights, "input_layernorm.weight"),
        query_key_value=pack([_given(weights, f"{name}.weight") for name in queries_keys_values]),
        query_key_value_bias=_bias(weights, queries_keys_values),
        query_norm=weights("self_attn.q_norm.weight"),
        key_norm=weights("self_attn.k_norm.weight"),
        output=pack([_given(weights, "self_attn.o_proj.weight")]),
        output_bias=_bias(weights, ["self_attn.o_proj"]),
        post_attention_norm=_given(weights, "post_attention_layernorm.weight"),
        router=None if router is None else _packed([router]),
        mlps=tuple(_pack_mlp(partial(_named, weights, mlp), pack) for mlp in mlps),
        sliding_window=sliding_window,
    )


def _pack_mlp(weights: Weights, pack: _Pack) -> NativeMlp:
    gate, up = _given(weights, "gate_proj.weight"), _given(weights, "up_proj.weight")
    return NativeMlp(gate_up=pack(_in_turn(gate, up)), down=pack([_given(weights, "down_proj.weight")]))


def _packed(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices side by side as [panels, units of inputs, _PANEL outputs] units of 32 bits, padded with zeros.

    weights: each [outputs, inputs].
    """
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    num_outputs, num_inputs = weight.shape
    per_unit = 4 // weight.element_size()
    packed = in_large_pages(-(-num_outputs // _PANEL), num_inputs // per_unit, _PANEL, dtype=torch.int32)
    _fill_panels(packed, weight)
    return packed


def _packed_int8(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `_packed`, in int8 with a scale in bfloat16 for each _GROUP of inputs of an output.

    The greatest weight of a group is 127 steps of its scale. The numbers are shifted by 128. The scales of each two
    groups stand before their units.
    """
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    num_outputs, num_inputs = weight.shape
    num_panels, num_scales = -(-num_outputs // _PANEL), -(-num_inputs // (2 * _GROUP))
    packed = in_large_pages(num_panels, num_scales + num_inputs // 4, _PANEL, dtype=torch.int32)
    for first in range(0, num_panels, _PANELS_AT_ONCE):
        panels = packed[first : first + _PANELS_AT_ONCE]
        rows = weight[first * _PANEL : (first + _PANELS_AT_ONCE) * _PANEL].float()
        begin = 0
        for groups in torch.split(rows, 2 * _GROUP, dim=1):
            scales, numbers = _in_steps(groups)
            end = begin + 1 + groups.shape[1] // 4
            _fill_panels(panels[:, begin : begin + 1], scales)
            _fill_panels(panels[:, begin + 1 : end], (numbers + 128).to(torch.uint8))
            begin = end
    return packed


def _in_steps(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One or two groups of inputs as their scales in bfloat16, [outputs, 2], and numbers from -127 to 127."""
    parts = torch.split(groups, _GROUP, dim=1)
    scales = torch.zeros(len(groups), 2, dtype=torch.bfloat16)
    for at, part in enumerate(parts):
        scales[:, at] = part.abs().amax(dim=1) / 127
    steps = scales.float().clamp_min(torch.finfo(torch.float32).tiny)
    return scales, torch.cat([(part / steps[:, at, None]).round() for at, part in enumerate(parts)], dim=1)


def _fill_panels(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """Write [outputs, inputs] into [panels, units of inputs, _PANEL outputs] units, padded with zeros."""
    num_outputs, num_inputs = weight.shape
    per_unit = 4 // weight.element_size()
    target = panels.view(weight.dtype).view(len(panels), -1, _PANEL, per_unit)
    source = weight.reshape(num_outputs, num_inputs // per_unit, per_unit)
    whole = num_outputs // _PANEL
    target[:whole].copy_(source[: whole * _PANEL].view(whole, _PANEL, *source.shape[1:]).transpose(1, 2))
    if whole < len(panels):
        target[whole:] = 0
        target[whole, :, : num_outputs % _PANEL].copy_(source[whole * _PANEL :].transpose(0, 1))


def _in_turn(gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    """LANES outputs of one, the LANES of the other at the same place, and so on: a panel holds both factors."""
    return [torch.stack([gate.view(-1, LANES, gate.shape[1]), up.view(-1, LANES, up.shape[1])], 1).flatten(0, 2)]


def _bias(weights: Weights, linears: Sequence[str]) -> torch.Tensor | None:
    biases = [weights(f"{linear}.bias") for linear in linears]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(_given(weights, f"{linear}.weight").shape[0]) if bias is None else bias.float()
            for linear, bias in zip(linears, biases, strict=True)
        ]
    )


def _layers(model: PreTrainedModel) -> list[Any]:
    return list(model.model.layers)


def _head_dim(model: PreTrainedModel) -> int:
    return int(_layers(model)[0].self_attn.head_dim)


def _experts(model: PreTrainedModel) -> ExpertSettings:
    config, name = model.config, type(model).__name__
    if name not in _MIXTURES or not config.num_experts:
        return ExpertSettings()
    is_mixtral = name == "MixtralForCausalLM"
    return ExpertSettings(
        num_experts=config.num_experts,
        per_token=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size if is_mixtral else config.moe_intermediate_size,
        weights_sum_to_one=is_mixtral or config.norm_topk_prob,
        rounds_weights=not is_mixtral,
    )
