"""Packs the weights of a Llama-like transformers model for the C++ decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

import torch

from app.model.cpu.library import DTYPES, LANES, Team, in_large_pages, log_use_of_amx
from app.model.llama import (
    EMBEDDING,
    HEAD,
    QUERIES_KEYS_VALUES,
    DecoderSettings,
    Weights,
    experts_of,
    given,
    has_shared_expert,
    head_dim_of,
    joined_bias,
    named,
    why_not_llama_like,
)
from app.model.positions import ROTARY_BY_LENGTH

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Pack = Callable[..., torch.Tensor]  # `_packed` with a team and bits

PANEL = 2 * LANES  # columns of a packed matrix that are computed together, as in the sources
BITS = {"none": 0, "int8": 8, "int4": 4}  # of a weight, by model.quantization; 0: the model's type
GROUPS = {8: 64, 4: 32}  # inputs that share a scale, as in the sources
_HEAD_BITS = 8  # where the layers are quantised, as in the sources


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
class NativeWeights:
    """A whole model."""

    settings: DecoderSettings
    layers: tuple[NativeLayer, ...]
    embedding: torch.Tensor | None  # [rank_tokens, hidden_size]; None: its rows are read from the quantised head
    final_norm: torch.Tensor
    head: torch.Tensor
    dtype: torch.dtype  # of everything that is not quantised
    weight_bits: int  # of the layers' matrices; 0: they and the head are not quantised

    def tensors(self) -> Iterator[torch.Tensor]:
        """All of them; experts side by side are views of the same memory."""
        mlps = (mlp for layer in self.layers for mlp in layer.mlps)
        parts: tuple[NativeWeights | NativeLayer | NativeMlp, ...] = (self, *self.layers, *mlps)
        for part in parts:
            for value in (getattr(part, each.name) for each in fields(part)):
                if isinstance(value, torch.Tensor):
                    yield value


def input_unit(quantization: str) -> int:
    """Inputs of a matrix that are packed together: ranks do not divide them. quantization: as in the settings."""
    return GROUPS.get(BITS[quantization], LANES)


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why the C++ decoder cannot compute a model, by all but its attention; None when no reason is known."""
    reason = why_not_llama_like(model)
    if reason is not None:
        return reason
    if has_shared_expert(model):
        return "the C++ decoder has no shared expert"
    config = model.config
    kind = config.rope_parameters["rope_type"]
    if kind in ROTARY_BY_LENGTH:
        return f"its {kind} rotary positions follow the longest sequence there may be"
    sizes = (config.hidden_size, config.intermediate_size, head_dim_of(model), experts_of(model).intermediate_size)
    odd = [n for n in sizes if n % LANES]
    return f"sizes must be multiples of {LANES}, {', '.join(map(str, odd))} are not" if odd else None


@torch.inference_mode()
def pack_weights(
    weights: Weights, settings: DecoderSettings, *, bits: int = 0, release: Callable[[], None] = lambda: None
) -> NativeWeights:
    """Pack weights that are all of one type, one layer after the other. Does not change them.

    Of weights on the meta device the packed ones are there too: they have sizes and no numbers.

    bits: 8 or 4 quantise the matrices of the layers so, and the head to 8 bits. An embedding that is tied to the head
    is not kept then; another one stays as it is: a step reads only its tokens' rows.
    release: called after each layer, when what was asked of `weights` so far has been packed.
    """
    embedding: torch.Tensor | None = given(weights, EMBEDDING)
    assert embedding is not None
    dtype, unpacked_head = embedding.dtype, given(weights, HEAD)
    team = None
    if not embedding.is_meta:
        team = Team(torch.get_num_threads())
        _log_use_of_amx(settings, dtype, bits)
    if bits and _are_equal(embedding, unpacked_head):
        embedding = None
    # First: the largest matrix, while nothing else is there.
    head = _packed(team, [unpacked_head], bits=_HEAD_BITS if bits else 0)
    del unpacked_head
    release()
    layers, pack = [], partial(_packed, team, bits=bits)
    for index, window in enumerate(settings.sliding_windows):
        own = partial(named, weights, f"model.layers.{index}.")
        layers.append(_pack_layer(own, pack, window, settings.experts.num_experts))
        release()
    return NativeWeights(
        settings=settings,
        layers=tuple(layers),
        embedding=embedding,
        final_norm=given(weights, "model.norm.weight"),
        head=head,
        dtype=dtype,
        weight_bits=bits,
    )


def _log_use_of_amx(settings: DecoderSettings, dtype: torch.dtype, bits: int) -> None:
    if dtype is torch.bfloat16:
        inner = (settings.intermediate_size, settings.experts.intermediate_size)
        inputs = (settings.hidden_size, settings.num_heads * settings.head_dim, *inner)
        log_use_of_amx("bfloat16", settings.head_dim, *(() if bits else inputs))
    if bits:
        log_use_of_amx(f"weights of {bits} bits")


def _are_equal(embedding: torch.Tensor, head: torch.Tensor) -> bool:
    """Without numbers, whether they are tied."""
    if embedding.is_meta:
        return bool(embedding.untyped_storage()._cdata == head.untyped_storage()._cdata)
    return torch.equal(embedding, head)


def _pack_layer(weights: Weights, pack: _Pack, sliding_window: int, num_experts: int) -> NativeLayer:
    router = weights("mlp.gate.weight")
    return NativeLayer(
        input_norm=given(weights, "input_layernorm.weight"),
        query_key_value=pack([given(weights, f"{name}.weight") for name in QUERIES_KEYS_VALUES]),
        query_key_value_bias=joined_bias(weights, QUERIES_KEYS_VALUES, torch.float32),
        query_norm=weights("self_attn.q_norm.weight"),
        key_norm=weights("self_attn.k_norm.weight"),
        output=pack([given(weights, "self_attn.o_proj.weight")]),
        output_bias=joined_bias(weights, ("self_attn.o_proj",), torch.float32),
        post_attention_norm=given(weights, "post_attention_layernorm.weight"),
        router=None if router is None else pack([router], bits=0),
        mlps=(_pack_mlp(weights, "mlp.", pack),) if router is None else _pack_experts(weights, num_experts, pack),
        sliding_window=sliding_window,
    )


def _pack_mlp(weights: Weights, prefix: str, pack: _Pack) -> NativeMlp:
    gate, up, down = (given(weights, f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down"))
    return NativeMlp(gate_up=pack(_in_turn(gate, up)), down=pack([down]))


def _pack_experts(weights: Weights, num_experts: int, pack: _Pack) -> tuple[NativeMlp, ...]:
    """All experts of a layer side by side: one alone may be smaller than a large page."""
    first = _pack_mlp(weights, "mlp.experts.0.", pack)
    gate_up, down = (
        in_large_pages(num_experts, *each.shape, dtype=each.dtype, device=each.device)
        for each in (first.gate_up, first.down)
    )
    for expert in range(num_experts):
        packed = _pack_mlp(weights, f"mlp.experts.{expert}.", pack) if expert else first
        gate_up[expert], down[expert] = packed.gate_up, packed.down
    return tuple(NativeMlp(gate_up=gate_up[expert], down=down[expert]) for expert in range(num_experts))


def _packed(team: Team | None, weights: Sequence[torch.Tensor], *, bits: int = 0) -> torch.Tensor:
    """Matrices side by side as [panels, units of inputs, PANEL outputs] units of 32 bits, padded with zeros.

    Of 8 or 4 bits, [panels, groups of inputs × (1 + units), PANEL outputs]: the first unit of a group has its scale
    and its least weight, both in bfloat16; the others hold unsigned numbers: a weight is the least one and so many
    times the scale. Groups of 8 bits are rotated.

    weights: each [outputs, inputs]. team: None where they have sizes and no numbers.
    """
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0].contiguous()
    num_outputs, num_inputs = weight.shape
    num_units = num_inputs * weight.element_size() // 4
    if bits:
        num_units = -(-num_inputs // GROUPS[bits]) * (1 + GROUPS[bits] * bits // 32)
    packed = in_large_pages(-(-num_outputs // PANEL), num_units, PANEL, dtype=torch.int32, device=weight.device)
    if team is None:
        return packed
    if bits:
        pack = getattr(team.code, f"carousel_pack_in_{bits}_bits_{DTYPES[weight.dtype]}")
        pack(team.handle, weight.data_ptr(), num_outputs, num_inputs, packed.data_ptr())
    else:
        team.code.carousel_pack(team.handle, weight.data_ptr(), num_outputs, num_units, packed.data_ptr())
    return packed


def _in_turn(gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    """LANES outputs of one, the LANES of the other at the same place, and so on: a panel holds both factors."""
    return [torch.stack([gate.view(-1, LANES, gate.shape[1]), up.view(-1, LANES, up.shape[1])], 1).flatten(0, 2)]
