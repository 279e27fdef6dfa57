"""Reads a Llama-like transformers model into the packed weights of the C++ decoder.

Only the architectures named here are read. The loader compares the decoder's output with the model's own before use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from app.model.attention import AttentionRules
from app.model.cpu.library import LANES, in_large_pages

# Pre-norm decoders with RMSNorm, rotary positions on whole heads, grouped-query attention and a SiLU-gated MLP.
_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_ROTARY_BY_LENGTH = frozenset({"dynamic", "longrope"})
_PANEL = 2 * LANES  # columns of a packed matrix that are computed together, as in the sources


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """One layer; matrices packed, biases in float32, norms in the model's type."""

    input_norm: torch.Tensor
    query_key_value: torch.Tensor
    query_key_value_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    sliding_window: int  # 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeights:
    """A whole model."""

    layers: tuple[NativeLayer, ...]
    embedding: torch.Tensor  # [vocab_size, hidden_size]
    final_norm: torch.Tensor
    head: torch.Tensor
    rotary: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    dtype: torch.dtype
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    epsilon: float
    scaling: float


def why_not_native(model: PreTrainedModel, rules: dict[int, AttentionRules]) -> str | None:
    """Why the C++ decoder cannot compute a model; None when no reason is known."""
    if type(model).__name__ not in _ARCHITECTURES:
        return f"{type(model).__name__} is none of {', '.join(sorted(_ARCHITECTURES))}"
    config = model.config
    if config.hidden_act != "silu":
        return f"its MLP is activated by {config.hidden_act}, not silu"
    if model.model.rotary_emb.rope_type in _ROTARY_BY_LENGTH:
        return f"its {model.model.rotary_emb.rope_type} rotary positions follow the longest sequence of a step"
    odd = [n for n in (config.hidden_size, config.intermediate_size, _head_dim(model)) if n % LANES]
    if odd:
        return f"sizes must be multiples of {LANES}, {', '.join(map(str, odd))} are not"
    if any(layer.mlp.gate_proj.bias is not None or layer.mlp.down_proj.bias is not None for layer in _layers(model)):
        return "its MLP has biases"
    if sorted(rules) != list(range(len(_layers(model)))):
        return "its layers do not all attend once"
    if any(rule.softcap or rule.sinks is not None or rule.scaling != rules[0].scaling for rule in rules.values()):
        return "its attention has soft caps, sinks or different scalings"
    return None


@torch.inference_mode()
def read_weights(model: PreTrainedModel, rules: dict[int, AttentionRules]) -> NativeWeights:
    """Pack a model's weights. `why_not_native` must be None. Does not change the model."""
    config = model.config
    return NativeWeights(
        layers=tuple(_read_layer(layer, rules[index]) for index, layer in enumerate(_layers(model))),
        embedding=model.get_input_embeddings().weight.detach(),
        final_norm=model.model.norm.weight.detach(),
        head=_packed([model.lm_head.weight]),
        rotary=model.model.rotary_emb,
        dtype=model.dtype,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(model),
        intermediate_size=config.intermediate_size,
        vocab_size=model.lm_head.weight.shape[0],
        epsilon=config.rms_norm_eps,
        scaling=rules[0].scaling,
    )


def _read_layer(layer: Any, rules: AttentionRules) -> NativeLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    return NativeLayer(
        input_norm=layer.input_layernorm.weight.detach(),
        query_key_value=_packed([projection.weight for projection in projections]),
        query_key_value_bias=_bias(projections),
        query_norm=_optional_norm(attention, "q_norm"),
        key_norm=_optional_norm(attention, "k_norm"),
        output=_packed([attention.o_proj.weight]),
        output_bias=_bias([attention.o_proj]),
        post_attention_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_packed(_in_turn(mlp.gate_proj.weight, mlp.up_proj.weight)),
        down=_packed([mlp.down_proj.weight]),
        sliding_window=rules.sliding_window or 0,
    )


def _packed(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices side by side as [panels, units of inputs, _PANEL outputs] units of 32 bits, padded with zeros.

    weights: each [outputs, inputs].
    """
    weight = torch.cat([weight.detach() for weight in weights])
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // _PANEL)
    per_unit = 4 // weight.element_size()
    packed = in_large_pages(num_panels, num_inputs // per_unit, _PANEL, dtype=torch.int32)
    target = packed.view(weight.dtype).view(num_panels, num_inputs // per_unit, _PANEL, per_unit)
    whole = num_outputs // _PANEL
    source = weight.view(num_outputs, num_inputs // per_unit, per_unit)
    target[:whole].copy_(source[: whole * _PANEL].view(whole, _PANEL, -1, per_unit).transpose(1, 2))
    if whole < num_panels:
        target[whole:] = 0
        target[whole, :, : num_outputs % _PANEL].copy_(source[whole * _PANEL :].transpose(0, 1))
    return packed


def _in_turn(gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    """LANES outputs of one, the LANES of the other at the same place, and so on: a panel holds both factors."""
    return [torch.stack([gate.view(-1, LANES, gate.shape[1]), up.view(-1, LANES, up.shape[1])], 1).flatten(0, 2)]


def _bias(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    biases = [
        torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach().float() for linear in linears
    ]
    return torch.cat(biases)


def _optional_norm(attention: Any, name: str) -> torch.Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight.detach()


def _layers(model: PreTrainedModel) -> list[Any]:
    return list(model.model.layers)


def _head_dim(model: PreTrainedModel) -> int:
    return int(_layers(model)[0].self_attn.head_dim)
