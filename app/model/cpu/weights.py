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
from app.model.cpu.library import DTYPES, LANES, Team, in_large_pages, log_use_of_amx
from app.model.positions import ROTARY_BY_LENGTH

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The weight of a name in the model's checkpoint; None where the model has none.
Weights = Callable[[str], torch.Tensor | None]
_Pack = Callable[..., torch.Tensor]  # `_packed` with a team and bits

# Pre-norm decoders with RMSNorm, rotary positions on whole heads, grouped-query attention and a SiLU-gated MLP, or a
# mixture of such MLPs.
_MIXTURES = frozenset({"MixtralForCausalLM", "Qwen3MoeForCausalLM"})
ARCHITECTURES = _MIXTURES | {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PANEL = 2 * LANES  # columns of a packed matrix that are computed together, as in the sources
BITS = {"none": 0, "int8": 8, "int4": 4}  # of a weight, by model.quantization; 0: the model's type
_GROUPS = {8: 64, 4: 32}  # inputs that share a scale, as in the sources
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
    embedding: torch.Tensor | None  # [vocab_size, hidden_size]; None: its rows are read from the quantised head
    final_norm: torch.Tensor
    head: torch.Tensor
    rotary_frequencies: torch.Tensor  # [head_dim / 2]
    dtype: torch.dtype  # of everything that is not quantised
    weight_bits: int  # of the layers' matrices; 0: they and the head are not quantised

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines by which heads are turned, each [num_positions, head_dim]. positions: [num_positions]."""
        angles = positions[..., None].float() * self.rotary_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        scaling = self.settings.rotary_scaling
        return (angles.cos() * scaling).to(self.dtype), (angles.sin() * scaling).to(self.dtype)


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why the C++ decoder cannot compute a model, by all but its attention; None when no reason is known."""
    if type(model).__name__ not in ARCHITECTURES:
        return f"{type(model).__name__} is none of {', '.join(sorted(ARCHITECTURES))}"
    config = model.config
    if getattr(model, "is_quantized", False):
        return "its checkpoint is quantised, and transformers' own modules compute it"
    if config.hidden_act != "silu":
        return f"its MLP is activated by {config.hidden_act}, not silu"
    kind = config.rope_parameters["rope_type"]
    if kind in ROTARY_BY_LENGTH:
        return f"its {kind} rotary positions follow the longest sequence there may be"
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
    weights: Weights, settings: DecoderSettings, *, bits: int = 0, release: Callable[[], None] = lambda: None
) -> NativeWeights:
    """Pack weights that are all of one type, one layer after the other. Does not change them.

    bits: 8 or 4 quantise the matrices of the layers so, and the head to 8 bits. An embedding that is tied to the head
    is not kept then; another one stays as it is: a step reads only its tokens' rows.
    release: called after each layer, when what was asked of `weights` so far has been packed.
    """
    team = Team(torch.get_num_threads())
    embedding: torch.Tensor | None = _given(weights, EMBEDDING)
    assert embedding is not None
    dtype, unpacked_head = embedding.dtype, _given(weights, HEAD)
    if dtype is torch.bfloat16:
        inner = (settings.intermediate_size, settings.experts.intermediate_size)
        inputs = (settings.hidden_size, settings.num_heads * settings.head_dim, *inner)
        log_use_of_amx("bfloat16", settings.head_dim, *(() if bits else inputs))
    if bits:
        log_use_of_amx(f"weights of {bits} bits")
    if bits and torch.equal(embedding, unpacked_head):
        embedding = None
    # First: the largest matrix, while nothing else is there.
    head = _packed(team, [unpacked_head], bits=_HEAD_BITS if bits else 0)
    del unpacked_head
    release()
    layers, pack = [], partial(_packed, team, bits=bits)
    for index, window in enumerate(settings.sliding_windows):
        named = partial(_named, weights, f"model.layers.{index}.")
        layers.append(_pack_layer(named, pack, window, settings.experts.num_experts))
        release()
    return NativeWeights(
        settings=settings,
        layers=tuple(layers),
        embedding=embedding,
        final_norm=_given(weights, "model.norm.weight"),
        head=head,
        rotary_frequencies=torch.tensor(settings.rotary_frequencies),
        dtype=dtype,
        weight_bits=bits,
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
    return NativeLayer(
        input_norm=_given(weights, "input_layernorm.weight"),
        query_key_value=pack([_given(weights, f"{name}.weight") for name in queries_keys_values]),
        query_key_value_bias=_bias(weights, queries_keys_values),
        query_norm=weights("self_attn.q_norm.weight"),
        key_norm=weights("self_attn.k_norm.weight"),
        output=pack([_given(weights, "self_attn.o_proj.weight")]),
        output_bias=_bias(weights, ["self_attn.o_proj"]),
        post_attention_norm=_given(weights, "post_attention_layernorm.weight"),
        router=None if router is None else pack([router], bits=0),
        mlps=(_pack_mlp(weights, "mlp.", pack),) if router is None else _pack_experts(weights, num_experts, pack),
        sliding_window=sliding_window,
    )


def _pack_mlp(weights: Weights, prefix: str, pack: _Pack) -> NativeMlp:
    gate, up, down = (_given(weights, f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down"))
    return NativeMlp(gate_up=pack(_in_turn(gate, up)), down=pack([down]))


def _pack_experts(weights: Weights, num_experts: int, pack: _Pack) -> tuple[NativeMlp, ...]:
    """All experts of a layer side by side: one alone may be smaller than a large page."""
    first = _pack_mlp(weights, "mlp.experts.0.", pack)
    gate_up = in_large_pages(num_experts, *first.gate_up.shape, dtype=first.gate_up.dtype)
    down = in_large_pages(num_experts, *first.down.shape, dtype=first.down.dtype)
    for expert in range(num_experts):
        packed = _pack_mlp(weights, f"mlp.experts.{expert}.", pack) if expert else first
        gate_up[expert], down[expert] = packed.gate_up, packed.down
    return tuple(NativeMlp(gate_up=gate_up[expert], down=down[expert]) for expert in range(num_experts))


def _packed(team: Team, weights: Sequence[torch.Tensor], *, bits: int = 0) -> torch.Tensor:
    """Matrices side by side as [panels, units of inputs, _PANEL outputs] units of 32 bits, padded with zeros.

    Of 8 or 4 bits, [panels, groups of inputs × (1 + units), _PANEL outputs]: the first unit of a group has its scale
    and its least weight, both in bfloat16; the others hold unsigned numbers: a weight is the least one and so many
    times the scale. Groups of 8 bits are rotated.

    weights: each [outputs, inputs].
    """
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0].contiguous()
    num_outputs, num_inputs = weight.shape
    num_units = num_inputs * weight.element_size() // 4
    if bits:
        num_units = -(-num_inputs // _GROUPS[bits]) * (1 + _GROUPS[bits] * bits // 32)
    packed = in_large_pages(-(-num_outputs // _PANEL), num_units, _PANEL, dtype=torch.int32)
    if bits:
        pack = getattr(team.code, f"carousel_pack_in_{bits}_bits_{DTYPES[weight.dtype]}")
        pack(team.handle, weight.data_ptr(), num_outputs, num_inputs, packed.data_ptr())
    else:
        team.code.carousel_pack(team.handle, weight.data_ptr(), num_outputs, num_units, packed.data_ptr())
    return packed


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
