"""Describes Llama-like models in plain values, from which our decoders in `cpu/` and `cuda/` are built.

The description may be incomplete, so the loader compares a decoder's output with that of transformers' code before it
uses the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from app.model.abilities import Abilities
from app.model.architectures import ARCHITECTURES, MIXERS, Architecture, Backend, Mixer, computed_by
from app.model.attention import AttentionRules, StateShape
from app.model.kv_cache import LayerShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Returns the weight with this name in the model's checkpoint, or None if there is none.
Weights = Callable[[str], torch.Tensor | None]

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # as named in transformers
_EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
QUERIES_KEYS_VALUES = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    """A mixture of experts, or zeros if there is none. The fields must match those of `ExpertsShape`."""

    num_experts: int = 0
    per_token: int = 0
    intermediate_size: int = 0
    weights_sum_to_one: bool = False  # whether the chosen experts' weights are normalised
    # Whether routing weights, and expert outputs multiplied by them, are rounded to the model's dtype.
    rounds_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSettings:
    """The sizes of recurrent layers, or zeros if there are none.

    All fields except `kernel_size` are set only for the gated delta rule.
    """

    kernel_size: int = 0  # of the short convolution
    num_key_heads: int = 0
    num_value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @property
    def keys_size(self) -> int:
        """The number of values in one token's keys, which is also the number in its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryPositions:
    """Rotary positions (Su et al., 2021), which rotate the first 2 × len(frequencies) numbers of a head."""

    frequencies: tuple[float, ...]
    scaling: float = 1.0

    def table(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return cosines, then sines, [num_positions, 2, len(frequencies)] in `dtype`. positions: [num_positions]."""
        angles = positions[..., None].float() * torch.tensor(self.frequencies, device=positions.device)
        return (torch.stack((angles.cos(), angles.sin()), dim=1) * self.scaling).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings:
    """A layer in plain values. The attention fields keep their defaults if the layer has another mixer."""

    mixer: Mixer = "attention"
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0  # of the MLP; ignored in a layer with experts
    sliding_window: int = 0  # 0 if the layer has none
    rotary: int = 0  # index of the layer's rotary positions in the model's list
    stored_by: int | None = None  # the earlier layer whose keys and values this layer reads, if any
    values_are_keys: bool = False  # the values are the keys before norm and rotary positions

    @property
    def attention_linears(self) -> tuple[str, ...]:
        """The names of the query, key and value projections within the layer, without `.weight`.

        Omits projections that the layer lacks.
        """
        if self.stored_by is not None:
            return QUERIES_KEYS_VALUES[:1]
        return QUERIES_KEYS_VALUES[: 2 if self.values_are_keys else 3]

    @property
    def kv_shape(self) -> LayerShape:
        """The shape of the keys and values that the layer reads."""
        return LayerShape(num_kv_heads=self.num_kv_heads, key_dim=self.head_dim, value_dim=self.head_dim)

    @property
    def kv_size(self) -> int:
        """The number of values in one token's keys; its value vectors have the same size."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    """Everything about a Llama-like model except its weights, in plain values. May describe one rank's part."""

    architecture: str  # a key of `ARCHITECTURES`
    hidden_size: int
    num_heads: int
    experts: ExpertSettings
    vocab_size: int
    epsilon: float
    scaling: float
    layers: tuple[LayerSettings, ...]
    rotary: tuple[RotaryPositions, ...]
    recurrent: RecurrentSettings = RecurrentSettings()
    softcap: float = 0.0  # of attention scores; 0 for none
    logits_softcap: float = 0.0
    per_layer_size: int = 0  # size of a token's additional inputs for each layer; 0 for none

    @property
    def described(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            architecture=self.architecture,
            has_states=any(layer.mixer != "attention" for layer in self.layers),
            windows="kept" if any(layer.sliding_window for layer in self.layers) else "none",
        )

    def of_rank(self, size: int) -> DecoderSettings:
        """Return one rank's part: a share of the heads, and of the inner sizes of MLPs and experts.

        size: the number of ranks.
        """
        layers = tuple(
            replace(each, num_kv_heads=each.num_kv_heads // size, intermediate_size=each.intermediate_size // size)
            for each in self.layers
        )
        experts = replace(self.experts, intermediate_size=self.experts.intermediate_size // size)
        return replace(self, num_heads=self.num_heads // size, layers=layers, experts=experts)

    def query_outputs(self, layer: LayerSettings) -> int:
        """Return the number of outputs of the query projection, including the gates of gated attention."""
        return self.num_heads * layer.head_dim * (2 if self.described.gates_attention else 1)

    def projected_size(self, layer: LayerSettings) -> int:
        """Return the total number of values per token that a mixer's input projections output."""
        if layer.mixer == "short_convolution":
            return 3 * self.hidden_size
        if layer.mixer == "gated_delta_rule":
            return 2 * self.recurrent.keys_size + 2 * self.recurrent.values_size
        return self.query_outputs(layer) + (2 * layer.kv_size if layer.stored_by is None else 0)

    def mixed_size(self, layer: LayerSettings) -> int:
        """Return the number of values per token that a mixer passes to its output projection."""
        if layer.mixer == "short_convolution":
            return self.hidden_size
        return self.recurrent.values_size if layer.mixer == "gated_delta_rule" else self.num_heads * layer.head_dim

    @property
    def num_channels(self) -> int:
        """The number of channels of the short convolution."""
        if self.recurrent.num_value_heads:
            return 2 * self.recurrent.keys_size + self.recurrent.values_size
        return self.hidden_size

    def attention_layers(self) -> dict[int, LayerShape]:
        """Return the shapes of keys and values by layer, for the layers that store their own."""
        return {
            index: layer.kv_shape
            for index, layer in enumerate(self.layers)
            if layer.mixer == "attention" and layer.stored_by is None
        }

    @property
    def stored_by(self) -> dict[int, int]:
        """Maps a layer to the earlier layer whose keys and values it reads. Omits layers that store their own."""
        return {index: each.stored_by for index, each in enumerate(self.layers) if each.stored_by is not None}

    def states(self, dtype: torch.dtype) -> tuple[StateShape, ...]:
        """Return the shapes of a sequence's states in the order in which a step reads them. dtype: the model's type."""
        own = self.recurrent
        convolution = StateShape((own.kernel_size - 1, self.num_channels), dtype)
        heads = StateShape((own.num_value_heads, own.key_dim, own.value_dim), torch.float32)
        of_mixer = {"attention": (), "short_convolution": (convolution,), "gated_delta_rule": (convolution, heads)}
        return tuple(state for layer in self.layers for state in of_mixer[layer.mixer])


def why_not_llama_like(model: PreTrainedModel, backend: Backend) -> str | None:
    """Return the reason why our decoder for `backend` does not support the model, or None if it does.

    Does not check the model's attention.
    """
    name, config = type(model).__name__, model.config
    known = computed_by(backend)
    if name not in known:
        if backend == "cpu" and has_shared_expert(model):
            return "the C++ decoder does not support shared experts"
        return f"{name} is not one of {', '.join(sorted(known))}"
    if getattr(model, "is_quantized", False):
        return "its checkpoint is quantised, so only transformers' own modules can run it"
    described = ARCHITECTURES[name]
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
    if activation != _ACTIVATIONS[described.activation]:
        return f"its MLP uses the activation {activation}, not {_ACTIVATIONS[described.activation]}"
    if any(part.bias is not None for part in _parts(model, described.names.gate, described.names.down)):
        return "its MLP has biases"
    if getattr(config, "enable_moe_block", False):
        return "its layers have experts alongside an MLP"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention", *MIXERS}
    return f"it has unsupported kinds of layers: {', '.join(sorted(kinds))}" if kinds else None


def has_shared_expert(model: PreTrainedModel) -> bool:
    experts = described_as(model).experts
    return experts is not None and experts.has_shared


def described_as(model: PreTrainedModel) -> Architecture:
    """Return the description of a model's architecture, or Llama's if it is not described."""
    return ARCHITECTURES.get(type(model).__name__, Architecture())


def why_attention_is_not_llama_like(
    model: PreTrainedModel, rules: dict[int, AttentionRules], backend: Backend
) -> str | None:
    """Return the reason why our decoder for `backend` does not support the model's attention, or None if it does."""
    layers = layers_of(model)
    if sorted(rules) != [index for index, mixer in enumerate(layers) if mixer == "attention"]:
        return "not every attention layer computes attention exactly once"
    asked = {(rule.softcap, rule.scaling) for rule in rules.values()}
    if any(rule.sinks is not None for rule in rules.values()) or len(asked) != 1:
        return "its attention has sinks, or its layers differ in scaling or soft cap"
    if backend == "cuda" and any(softcap for softcap, _ in asked):
        return "its attention has soft caps"
    return None


def layers_of(model: PreTrainedModel) -> list[Mixer]:
    """Return the mixer of each layer."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(model.model.layers)
    return [MIXERS.get(kind, "attention") for kind in kinds]


def settings_of(model: PreTrainedModel, rules: dict[int, AttentionRules]) -> DecoderSettings:
    """Describe a model for which `why_not_llama_like` and `why_attention_is_not_llama_like` have returned None."""
    config, first = model.config, next(iter(rules.values()))
    rotary = _rotary_of(model)
    return DecoderSettings(
        architecture=type(model).__name__,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        experts=experts_of(model),
        vocab_size=model.lm_head.weight.shape[0],
        epsilon=config.norm_eps if hasattr(config, "norm_eps") else config.rms_norm_eps,
        scaling=first.scaling,
        layers=tuple(_layers_of(model, rules, list(rotary))),
        rotary=tuple(rotary.values()),
        recurrent=recurrent_of(model),
        softcap=first.softcap or 0.0,
        logits_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        per_layer_size=getattr(config, "hidden_size_per_layer_input", None) or 0,
    )


def _layers_of(model: PreTrainedModel, rules: dict[int, AttentionRules], kinds: list[str]) -> Iterator[LayerSettings]:
    """kinds: the layer types that define their own rotary positions."""
    config, described = model.config, described_as(model)
    # A rank's module contains only a part of each weight, so for CUDA the MLP's size is read from the configuration
    # instead of from the weights.
    gate = "" if "cuda" in described.backends else described.names.gate
    for index, (mixer, layer) in enumerate(zip(layers_of(model), model.model.layers, strict=True)):
        mlp = _part(layer, gate) if gate else None
        general = LayerSettings(
            mixer=mixer,
            intermediate_size=config.intermediate_size if mlp is None else mlp.weight.shape[0],
            rotary=kinds.index(config.layer_types[index]) if len(kinds) > 1 else 0,
        )
        if mixer != "attention":
            yield general
            continue
        attention, own = layer.self_attn, rules[index]
        yield replace(
            general,
            num_kv_heads=config.num_attention_heads // attention.num_key_value_groups,
            head_dim=attention.head_dim,
            sliding_window=own.sliding_window or 0,
            stored_by=own.stored_by,
            values_are_keys=getattr(attention, "v_proj", attention) is None,
        )


def head_dims_of(model: PreTrainedModel) -> set[int]:
    """Return the different head sizes of the model's attention layers."""
    return {int(part.head_dim) for part in _parts(model, "self_attn")}


def intermediate_sizes_of(model: PreTrainedModel) -> set[int]:
    """Return the different inner sizes of the model's MLPs, apart from experts."""
    return {int(part.weight.shape[0]) for part in _parts(model, described_as(model).names.gate)}


def experts_of(model: PreTrainedModel) -> ExpertSettings:
    config, described = model.config, described_as(model).experts
    if described is None or not config.num_experts:
        return ExpertSettings()
    sums = described.weights_sum_to_one
    return ExpertSettings(
        num_experts=config.num_experts,
        per_token=config.num_experts_per_tok,
        intermediate_size=getattr(config, described.size),
        weights_sum_to_one=config.norm_topk_prob if sums is None else sums,
        rounds_weights=described.rounds_weights,
    )


def recurrent_of(model: PreTrainedModel) -> RecurrentSettings:
    config, mixers = model.config, layers_of(model)
    if "gated_delta_rule" in mixers:
        return RecurrentSettings(
            kernel_size=config.linear_conv_kernel_dim,
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
        )
    return RecurrentSettings(kernel_size=config.conv_L_cache if "short_convolution" in mixers else 0)


def _rotary_of(model: PreTrainedModel) -> dict[str, RotaryPositions]:
    """Return rotary positions by layer type. If all types share them, return one entry with an empty key."""
    rotary = model.model.rotary_emb
    prefixes = [f"{kind}_" for kind in getattr(rotary, "layer_types", ())] or [""]
    return {
        prefix.removesuffix("_"): RotaryPositions(
            frequencies=tuple(getattr(rotary, f"{prefix}inv_freq").tolist()),
            scaling=getattr(rotary, f"{prefix}attention_scaling"),
        )
        for prefix in prefixes
    }


def _parts(model: PreTrainedModel, *names: str) -> list[Any]:
    """Return all submodules with these names in the model's layers."""
    found = (_part(layer, name) for layer in model.model.layers for name in names)
    return [part for part in found if part is not None]


def _part(layer: Any, name: str) -> Any:
    """Return a submodule, or None if the layer lacks it."""
    try:
        return layer.get_submodule(name)
    except AttributeError:
        return None


def by_expert(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's weights by their names in the checkpoint. Splits experts, which transformers joins in memory."""
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
    """Return the weight called `prefix + name`. `partial(named, weights, prefix)` provides the weights of one layer."""
    return weights(prefix + name)


def given(weights: Weights, name: str) -> torch.Tensor:
    """Return a weight that every Llama-like model must have."""
    weight = weights(name)
    assert weight is not None, f"a Llama-like model has {name}"
    return weight


def joined_bias(weights: Weights, linears: tuple[str, ...], dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Join the biases of linear layers, with zeros for layers without a bias. Returns None if no layer has a bias.

    dtype: the result's type, or None for the type of the weights.
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
