"""Packs the weights of a Llama-like transformers model for the C++ decoder."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import torch
from pydantic import PlainSerializer, PlainValidator, SerializationInfo, TypeAdapter, ValidationInfo

from app.model.architectures import Mixer
from app.model.cpu.library import DTYPES, LANES, ThreadPool, in_large_pages, log_use_of_amx
from app.model.cpu.stored_matrix import LINE, Layout, StoredMatrix, mark_plain, plain_lines
from app.model.llama import (
    EMBEDDING,
    HEAD,
    PER_LAYER_EMBEDDING,
    QUERIES_KEYS_VALUES,
    DecoderSettings,
    LayerSettings,
    Weights,
    experts_of,
    given,
    head_dims_of,
    intermediate_sizes_of,
    joined_bias,
    recurrent_of,
    why_not_llama_like,
)
from app.model.positions import ROTARY_BY_LENGTH

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PANEL = 2 * LANES  # columns of a packed matrix that are computed together; must match the C++ sources
BITS = {"none": 0, "int8": 8, "int4": 4}  # bits of a weight, by model.quantization; 0 for the model's type
_HEAD_BITS = 8  # for the head and tables if layers are quantised; must match the C++ sources
GROUPS = {8: 64, 4: 32}  # inputs that share a scale, by bits; must match the C++ sources
# Used in place of bits if matrices keep the types of a GGUF file. Also the lowest bit of `NativeWeights.weight_bits`.
STORED = 1

Packable = torch.Tensor | StoredMatrix
# Like `Weights`, but quantised matrices of a GGUF file may be returned in the file's types.
PackableWeights = Callable[[str], Packable | None]

# A tensor in JSON: its offset in the memory, its shape and its type.
_Placed = tuple[int, list[int], str]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_named(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _place_of(tensor: torch.Tensor, info: SerializationInfo[ctypes.Array[Any]]) -> _Placed:
    memory: ctypes.Array[Any] = info.context
    return tensor.data_ptr() - ctypes.addressof(memory), list(tensor.shape), _name_of(tensor.dtype)


def _tensor_at(placed: _Placed, info: ValidationInfo) -> torch.Tensor:
    offset, shape, name = placed
    return torch.frombuffer(info.context, dtype=_dtype_named(name), offset=offset, count=prod(shape)).view(shape)


PlacedTensor = Annotated[torch.Tensor, PlainValidator(_tensor_at), PlainSerializer(_place_of)]
PlacedDtype = Annotated[torch.dtype, PlainValidator(_dtype_named), PlainSerializer(_name_of)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeMlp:
    """The packed matrices of an MLP or of one expert."""

    gate_up: PlacedTensor
    down: PlacedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeAttentionPart:
    """The norms of attention's queries and keys. Each is [head_dim], or spans all heads."""

    query_norm: PlacedTensor | None
    key_norm: PlacedTensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConvolutionPart:
    """The weights of a short convolution, in the model's type."""

    taps: PlacedTensor  # [num_channels, kernel_size], ordered from the oldest input to the newest
    tap_biases: PlacedTensor | None  # [num_channels]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeDeltaRulePart:
    """The weights of a gated delta rule. All but `rates` are float32."""

    rates: PlacedTensor  # packed but never quantised; outputs all heads' beta, then the input of their decays
    decay: PlacedTensor  # [num_value_heads], negative
    decay_bias: PlacedTensor  # [num_value_heads]
    gate_norm: PlacedTensor  # [value_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePerLayerPart:
    """The weights that gate a layer's per-layer inputs by the residual and add them to the residual."""

    per_layer_gate: PlacedTensor
    per_layer_projection: PlacedTensor
    per_layer_norm: PlacedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePerLayerInputs:
    """The weights of Gemma's per-layer embeddings, which provide each layer with inputs in addition to the residual."""

    # [vocab_size, num_layers * per_layer_size] in the model's type, or packed in 8 bits if weights are quantised
    embedding: PlacedTensor
    projection: PlacedTensor  # packed; maps a token's embedding to num_layers * per_layer_size numbers
    norm: PlacedTensor  # [per_layer_size], applied to each layer's projected inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """The weights of a layer. Matrices are packed, and may be quantised; norms and biases are float32."""

    mixer_input_norm: PlacedTensor | None
    mixer_output_norm: PlacedTensor | None
    feed_forward_input_norm: PlacedTensor | None
    feed_forward_output_norm: PlacedTensor | None
    projection: PlacedTensor  # the mixer's input matrices, joined
    projection_bias: PlacedTensor | None
    output: PlacedTensor
    output_bias: PlacedTensor | None
    attention: NativeAttentionPart | None
    convolution: NativeConvolutionPart | None
    delta_rule: NativeDeltaRulePart | None
    per_layer: NativePerLayerPart | None
    output_scale: PlacedTensor | None  # [1]
    router: PlacedTensor | None  # packed but never quantised; None without experts
    mlps: tuple[NativeMlp, ...]  # one MLP, or one for each expert


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeights:
    """The packed weights of a model."""

    settings: DecoderSettings
    layers: tuple[NativeLayer, ...]
    embedding: PlacedTensor | None  # [vocab_size, hidden_size]; None if tied, so that rows are read from the head
    per_layer_inputs: NativePerLayerInputs | None
    final_norm: PlacedTensor  # float32
    head: PlacedTensor
    dtype: PlacedDtype  # the type of everything that is not quantised
    # Bits of the layers' matrices, or 0 if no matrix is quantised. Below 4, matrices keep the types of a GGUF file, and
    # the bits of this number encode how inputs are rounded, see `form_of`.
    weight_bits: int

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors. The experts of a layer are views of one tensor."""
        yield from _tensors_of(self)

    def layout(self, memory: ctypes.Array[Any]) -> bytes:
        """Return a description of where the tensors are in `memory`, which must contain them all, for `weights_at`."""
        return _NATIVE_WEIGHTS.dump_json(self, context=memory)


_NATIVE_WEIGHTS = TypeAdapter(NativeWeights)


def weights_at(layout: bytes, memory: ctypes.Array[Any]) -> NativeWeights:
    """Return views of the weights in `memory`, as described by `NativeWeights.layout`. They keep the memory alive."""
    return _NATIVE_WEIGHTS.validate_json(layout, context=memory)


def _tensors_of(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _tensors_of(each)
    elif is_dataclass(part):
        for each in fields(part):
            yield from _tensors_of(getattr(part, each.name))


def why_not_native(model: PreTrainedModel) -> str | None:
    """Return the reason why the C++ decoder does not support a model, or None if it does.

    Does not check the model's attention.
    """
    reason = why_not_llama_like(model, "cpu")
    if reason is not None:
        return reason
    config, recurrent = model.config, recurrent_of(model)
    rope = config.rope_parameters
    kinds = {each["rope_type"] for each in ([rope] if "rope_type" in rope else rope.values()) if each}
    if by_length := ", ".join(sorted(kinds & ROTARY_BY_LENGTH)):
        return f"its {by_length} rotary positions depend on the length of the longest sequence"
    sizes = (
        config.hidden_size, *sorted(intermediate_sizes_of(model) | head_dims_of(model)),
        experts_of(model).intermediate_size, recurrent.keys_size, recurrent.value_dim,
        getattr(config, "hidden_size_per_layer_input", None) or 0,
    )  # fmt: skip
    odd = [n for n in sizes if n % LANES]
    return f"sizes must be multiples of {LANES}, but {', '.join(map(str, odd))} are not" if odd else None


class Allocate(Protocol):
    """Allocates an uninitialised tensor, which may be on the meta device."""

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor: ...


@torch.inference_mode()
def pack_weights(
    weights: PackableWeights,
    settings: DecoderSettings,
    *,
    bits: int = 0,
    release: Callable[[], None] = lambda: None,
    allocate: Allocate = in_large_pages,
) -> NativeWeights:
    """Pack a model's weights, layer by layer. All must have one type. Weights on the meta device are packed there.

    An embedding that equals the head is not stored again. Any other embedding is copied without packing, because a step
    reads only the rows of its tokens.

    bits: 8 or 4 quantises the layers' matrices to these bits, and the head to 8. STORED keeps a file's quantisation.
    release: called after each layer, when all weights requested so far have been packed and may be freed.
    allocate: provides the memory of the result, which contains no views of `weights`.
    """
    embedding, head = _given(weights, EMBEDDING), _given(weights, HEAD)
    dtype, threads = embedding.dtype, None
    if not embedding.is_meta:
        threads = ThreadPool(torch.get_num_threads())
        _log_use_of_amx(settings, dtype, bits)
    pack = _Packing(threads, bits, allocate)
    # The largest matrices are packed first, while no other memory is in use, to keep the peak low.
    kept = None if _are_equal(embedding, head) else pack.table(embedding)
    del embedding
    packed_head = pack([head], bits=_HEAD_BITS if bits > STORED else bits)
    del head
    release()
    per_layer_inputs = _pack_per_layer_inputs(weights, pack, settings, bits) if settings.per_layer_size else None
    release()
    layers = []
    for index, layer in enumerate(settings.layers):
        own = partial(_named, weights, f"model.layers.{index}.")
        layers.append(_pack_layer(own, pack, settings, layer))
        release()
    tensor = partial(_tensor, partial(_named, weights, "model."))
    final_norm = _norm(tensor, pack, settings, settings.described.names.final_norm)
    assert final_norm is not None, "a model has a norm before its head"
    return NativeWeights(
        settings=settings,
        layers=tuple(layers),
        embedding=kept,
        per_layer_inputs=per_layer_inputs,
        final_norm=final_norm,
        head=packed_head,
        dtype=dtype,
        weight_bits=(pack.forms or STORED) if bits == STORED else bits,
    )


def _log_use_of_amx(settings: DecoderSettings, dtype: torch.dtype, bits: int) -> None:
    if dtype is torch.bfloat16:
        layers, experts = settings.layers, settings.experts.intermediate_size
        inner = {settings.hidden_size, *map(settings.mixed_size, layers), *(each.intermediate_size for each in layers)}
        inputs = (*inner, experts, settings.per_layer_size)
        log_use_of_amx("bfloat16", *(layer.head_dim for layer in layers), *(() if bits else inputs))
    if bits > STORED:
        log_use_of_amx(f"weights of {bits} bits")


def _tensor(weights: PackableWeights, name: str) -> torch.Tensor | None:
    """Return a weight in the model's type, dequantised if needed."""
    found = weights(name)
    return found.multiplied_out() if isinstance(found, StoredMatrix) else found


def _given(weights: PackableWeights, name: str) -> Packable:
    found = weights(name)
    assert found is not None, f"a Llama-like model has {name}"
    return found


def _named(weights: PackableWeights, prefix: str, name: str) -> Packable | None:
    return weights(prefix + name)


def _are_equal(embedding: Packable, head: Packable) -> bool:
    """Return whether two matrices are equal. Matrices without readable numbers are equal only if they are tied."""
    if isinstance(embedding, StoredMatrix) or isinstance(head, StoredMatrix):
        return embedding is head
    if embedding.is_meta:
        return bool(embedding.untyped_storage()._cdata == head.untyped_storage()._cdata)
    return torch.equal(embedding, head)


class _Packing:
    """Writes weights to memory in the layout that the C++ code reads."""

    def __init__(self, threads: ThreadPool | None, bits: int, allocate: Allocate) -> None:
        """threads: None for weights on the meta device. bits: the default for matrices, as in `pack_weights`."""
        self._threads, self._bits, self._allocate = threads, bits, allocate
        self.forms = 0  # how inputs of stored matrices are rounded, as a bit mask

    def copy(self, weight: torch.Tensor) -> torch.Tensor:
        return self._allocate(*weight.shape, dtype=weight.dtype, device=weight.device).copy_(weight)

    def table(self, weight: Packable) -> torch.Tensor:
        """Store an embedding: copied, or packed if matrices keep a file's types."""
        return self([weight]) if self._bits == STORED else self.copy(_whole(weight))

    def in_float32(self, weight: torch.Tensor) -> torch.Tensor:
        return self.copy(weight.float())

    def __call__(self, weights: Sequence[Packable], *, bits: int | None = None) -> torch.Tensor:
        """Pack matrices of [outputs, inputs] each as one joined matrix, in newly allocated memory."""
        return self.side_by_side(1, weights, bits=bits)[0]

    def side_by_side(self, count: int, weights: Sequence[Packable], *, bits: int | None = None) -> torch.Tensor:
        """Allocate `count` joined matrices at once, because one may be smaller than a large page. Pack the first."""
        bits = self._bits if bits is None else bits
        shape, device = self._shape(weights, bits), weights[0].device
        packed = self._allocate(count, *shape, dtype=torch.int32, device=device)
        self.into(packed[0], weights, bits=bits)
        return packed

    def into(self, packed: torch.Tensor, weights: Sequence[Packable], *, bits: int | None = None) -> None:
        """Pack joined matrices into memory of the shape that `_shape` returns."""
        bits = self._bits if bits is None else bits
        stored = _stored(weights) if bits == STORED else None
        if stored is not None:
            layout = Layout(stored)
            self.forms |= layout.forms
            if self._threads is not None:
                layout.pack(self._threads, packed)
        elif self._threads is not None:
            if bits == STORED:
                mark_plain(packed)
                packed, bits = packed[1:].view(_packed_shape(weights, 0)), 0
            _pack(self._threads, [_whole(each) for each in weights], packed, bits=bits)

    def in_turn(self, weights: PackableWeights, gate_name: str, up_name: str) -> list[Packable]:
        """Return a matrix that alternates `LANES` outputs of gate and up, so that a panel computes both factors."""
        gate, up = (_given(weights, f"{name}.weight") for name in (gate_name, up_name))
        if self._bits == STORED and isinstance(gate, StoredMatrix) and isinstance(up, StoredMatrix):
            return [gate.in_turn(up)]
        gate, up = _whole(gate), _whole(up)
        return [torch.stack([gate.view(-1, LANES, gate.shape[1]), up.view(-1, LANES, up.shape[1])], 1).flatten(0, 2)]

    def _shape(self, weights: Sequence[Packable], bits: int) -> tuple[int, ...]:
        if bits != STORED:
            return _packed_shape(weights, bits)
        stored = _stored(weights)
        return plain_lines(weights, PANEL) if stored is None else Layout(stored).num_lines, LINE


def _stored(weights: Sequence[Packable]) -> list[StoredMatrix] | None:
    """Return the matrices if all of them keep the file's types, or None otherwise."""
    stored = [each for each in weights if isinstance(each, StoredMatrix)]
    return stored if len(stored) == len(weights) else None


def _whole(weight: Packable) -> torch.Tensor:
    return weight.multiplied_out() if isinstance(weight, StoredMatrix) else weight


def _pack_layer(
    weights: PackableWeights, pack: _Packing, settings: DecoderSettings, layer: LayerSettings
) -> NativeLayer:
    tensor = partial(_tensor, weights)
    names, router, norm = settings.described.names, tensor("mlp.gate.weight"), partial(_norm, tensor, pack, settings)
    inputs, output = _MIXER_LINEARS.get(layer.mixer, (layer.attention_linears, names.attention_output))
    scale = tensor(names.output_scale) if names.output_scale else None
    return NativeLayer(
        mixer_input_norm=norm(names.mixer_input_norm),
        mixer_output_norm=norm(names.mixer_output_norm),
        feed_forward_input_norm=norm(names.feed_forward_input_norm),
        feed_forward_output_norm=norm(names.feed_forward_output_norm),
        projection=pack([_in_order(settings, name, _given(weights, f"{name}.weight")) for name in inputs]),
        projection_bias=_projection_bias(tensor, pack, settings, inputs),
        output=pack([_given(weights, f"{output}.weight")]),
        output_bias=_bias(tensor, pack, (output,)),
        attention=_pack_attention(norm, settings) if layer.mixer == "attention" else None,
        convolution=_pack_convolution(tensor, pack, layer.mixer) if layer.mixer != "attention" else None,
        delta_rule=_pack_delta_rule(tensor, pack) if layer.mixer == "gated_delta_rule" else None,
        per_layer=_pack_per_layer(weights, pack, norm) if settings.per_layer_size else None,
        output_scale=None if scale is None else pack.in_float32(scale),
        router=None if router is None else pack([router], bits=0),
        mlps=_pack_mlps(weights, pack, settings, router is not None),
    )


# Mixer → (linear layers of its inputs, linear layer of its outputs). Attention's depend on the model.
_MIXER_LINEARS: dict[Mixer, tuple[tuple[str, ...], str]] = {
    "short_convolution": (("conv.in_proj",), "conv.out_proj"),
    "gated_delta_rule": (("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"), "linear_attn.out_proj"),
}
_CONVOLUTIONS: dict[Mixer, str] = {"short_convolution": "conv.conv", "gated_delta_rule": "linear_attn.conv1d"}


def _norm(weights: Weights, pack: _Packing, settings: DecoderSettings, name: str) -> torch.Tensor | None:
    """Return a norm's weight as float32, including the architecture's offset, or None if the layer lacks the norm."""
    weight = weights(f"{name}.weight") if name else None
    return None if weight is None else pack.in_float32(weight.float() + settings.described.norm_offset)


def _bias(weights: Weights, pack: _Packing, linears: tuple[str, ...]) -> torch.Tensor | None:
    bias = joined_bias(weights, linears, torch.float32)
    return None if bias is None else pack.copy(bias)


def in_order(settings: DecoderSettings, linear: str, outputs: torch.Tensor) -> torch.Tensor:
    """Reorder a linear layer's outputs for the C++ code, which reads all queries before all gates in gated attention.

    Other layers are returned unchanged. outputs: [num_outputs, ...].
    """
    if not linear.endswith(QUERIES_KEYS_VALUES[0]) or not settings.described.gates_attention:
        return outputs
    by_head = outputs.view(settings.num_heads, 2, -1, *outputs.shape[1:])
    return by_head.transpose(0, 1).reshape(outputs.shape)


def _in_order(settings: DecoderSettings, linear: str, matrix: Packable) -> Packable:
    if isinstance(matrix, torch.Tensor):
        return in_order(settings, linear, matrix)
    if not linear.endswith(QUERIES_KEYS_VALUES[0]) or not settings.described.gates_attention:
        return matrix
    head_dim = matrix.shape[0] // (2 * settings.num_heads)
    return matrix.in_runs(head_dim, lambda count: (*range(0, count, 2), *range(1, count, 2)))


def _projection_bias(
    weights: Weights, pack: _Packing, settings: DecoderSettings, linears: tuple[str, ...]
) -> torch.Tensor | None:
    bias = joined_bias(weights, linears, torch.float32)
    if bias is None:
        return None
    first = len(given(weights, f"{linears[0]}.weight"))
    return pack.copy(torch.cat((in_order(settings, linears[0], bias[:first]), bias[first:])))


def _pack_attention(norm: Callable[[str], torch.Tensor | None], settings: DecoderSettings) -> NativeAttentionPart:
    names = settings.described.names
    return NativeAttentionPart(query_norm=norm(names.query_norm), key_norm=norm(names.key_norm))


def _pack_per_layer_inputs(
    weights: PackableWeights, pack: _Packing, settings: DecoderSettings, bits: int
) -> NativePerLayerInputs:
    table = _given(weights, PER_LAYER_EMBEDDING)
    norm = _norm(partial(_tensor, weights), pack, settings, "model.per_layer_projection_norm")
    assert norm is not None, "per-layer inputs are normalised"
    return NativePerLayerInputs(
        embedding=pack([table], bits=_HEAD_BITS) if bits > STORED else pack.table(table),
        projection=pack([_given(weights, "model.per_layer_model_projection.weight")]),
        norm=norm,
    )


def _pack_per_layer(
    weights: PackableWeights, pack: _Packing, norm: Callable[[str], torch.Tensor | None]
) -> NativePerLayerPart:
    own = norm("post_per_layer_input_norm")
    assert own is not None, "per-layer inputs are normalised"
    return NativePerLayerPart(
        per_layer_gate=pack([_given(weights, "per_layer_input_gate.weight")]),
        per_layer_projection=pack([_given(weights, "per_layer_projection.weight")]),
        per_layer_norm=own,
    )


def _pack_convolution(weights: Weights, pack: _Packing, mixer: Mixer) -> NativeConvolutionPart:
    name = _CONVOLUTIONS[mixer]
    bias = weights(f"{name}.bias")
    return NativeConvolutionPart(
        taps=pack.copy(given(weights, f"{name}.weight").squeeze(1)),
        tap_biases=None if bias is None else pack.copy(bias),
    )


def _pack_delta_rule(weights: Weights, pack: _Packing) -> NativeDeltaRulePart:
    rates = [given(weights, f"linear_attn.in_proj_{name}.weight") for name in ("b", "a")]
    return NativeDeltaRulePart(
        rates=pack(rates, bits=0),
        decay=pack.in_float32(-given(weights, "linear_attn.A_log").float().exp()),
        decay_bias=pack.in_float32(given(weights, "linear_attn.dt_bias")),
        gate_norm=pack.in_float32(given(weights, "linear_attn.norm.weight")),
    )


def _pack_mlps(
    weights: PackableWeights, pack: _Packing, settings: DecoderSettings, has_experts: bool
) -> tuple[NativeMlp, ...]:
    """Pack the MLP of a layer, or all of its experts in one allocation for each of the two matrices."""
    own = settings.described.names
    mlps = [(own.gate, own.up, own.down)]
    if has_experts:
        parts = ("gate", "up", "down")
        mlps = [
            tuple(f"mlp.experts.{n}.{part}_proj" for part in parts)  # type: ignore[misc]
            for n in range(settings.experts.num_experts)
        ]
    gate_up = pack.side_by_side(len(mlps), pack.in_turn(weights, *mlps[0][:2]))
    down = pack.side_by_side(len(mlps), [_given(weights, f"{mlps[0][2]}.weight")])
    for index, (gate_name, up_name, down_name) in enumerate(mlps[1:], 1):
        pack.into(gate_up[index], pack.in_turn(weights, gate_name, up_name))
        pack.into(down[index], [_given(weights, f"{down_name}.weight")])
    return tuple(NativeMlp(gate_up=gate_up[index], down=down[index]) for index in range(len(mlps)))


def _packed_shape(weights: Sequence[Packable], bits: int) -> tuple[int, int, int]:
    """Return the shape of packed matrices: [panels, units of inputs, PANEL outputs], in units of 32 bits.

    With 8 or 4 bits, the shape is [panels, groups of inputs × (1 + units), PANEL outputs]. A group's first unit stores
    the scale and the smallest weight, both in bfloat16. The other units store unsigned numbers: a weight is the
    smallest weight plus its number times the scale. Groups of 8 bits are rotated.
    """
    num_outputs, num_inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    num_units = num_inputs * weights[0].dtype.itemsize // 4
    if bits:
        num_units = -(-num_inputs // GROUPS[bits]) * (1 + GROUPS[bits] * bits // 32)
    return -(-num_outputs // PANEL), num_units, PANEL


def _pack(threads: ThreadPool, weights: Sequence[torch.Tensor], packed: torch.Tensor, *, bits: int) -> None:
    """Pack matrices of [outputs, inputs], joined and padded with zeros, into memory of the shape `_packed_shape`."""
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0].contiguous()
    if bits:
        pack = getattr(threads.code, f"carousel_pack_in_{bits}_bits_{DTYPES[weight.dtype]}")
        pack(threads.handle, weight.data_ptr(), *weight.shape, packed.data_ptr())
    else:
        threads.code.carousel_pack(threads.handle, weight.data_ptr(), len(weight), packed.shape[1], packed.data_ptr())
