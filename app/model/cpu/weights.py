"""Packs the weights of a Llama-like transformers model for the C++ decoder."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import torch
from pydantic import PlainSerializer, PlainValidator, SerializationInfo, TypeAdapter, ValidationInfo

from app.model.cpu.library import DTYPES, LANES, ThreadPool, in_large_pages, log_use_of_amx
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

PANEL = 2 * LANES  # columns of a packed matrix that are computed together, as in the sources
BITS = {"none": 0, "int8": 8, "int4": 4}  # of a weight, by model.quantization; 0: the model's type
GROUPS = {8: 64, 4: 32}  # inputs that share a scale, as in the sources

# In JSON a tensor is its place in a memory, its shape and its type.
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
    """The matrices of an MLP, or of one expert."""

    gate_up: PlacedTensor
    down: PlacedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """One layer; matrices packed, as they are or quantised, biases in float32, norms in the model's type."""

    input_norm: PlacedTensor
    query_key_value: PlacedTensor
    query_key_value_bias: PlacedTensor | None
    query_norm: PlacedTensor | None
    key_norm: PlacedTensor | None
    output: PlacedTensor
    output_bias: PlacedTensor | None
    post_attention_norm: PlacedTensor
    router: PlacedTensor | None  # packed, never quantised; None where there are no experts
    mlps: tuple[NativeMlp, ...]  # one, or one for each expert
    sliding_window: int  # 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeights:
    """A whole model."""

    settings: DecoderSettings
    layers: tuple[NativeLayer, ...]
    embedding: PlacedTensor | None  # [vocab_size, hidden_size]; None: its rows are read from the head
    final_norm: PlacedTensor
    head: PlacedTensor
    dtype: PlacedDtype  # of everything that is not quantised
    weight_bits: int  # of the layers' matrices; 0: they and the head are not quantised

    def tensors(self) -> Iterator[torch.Tensor]:
        """All of them; experts side by side are views of the same memory."""
        mlps = (mlp for layer in self.layers for mlp in layer.mlps)
        parts: tuple[NativeWeights | NativeLayer | NativeMlp, ...] = (self, *self.layers, *mlps)
        for part in parts:
            for value in (getattr(part, each.name) for each in fields(part)):
                if isinstance(value, torch.Tensor):
                    yield value

    def layout(self, memory: ctypes.Array[Any]) -> bytes:
        """Their places in the memory that has them all, for `weights_at`."""
        return _NATIVE_WEIGHTS.dump_json(self, context=memory)


_NATIVE_WEIGHTS = TypeAdapter(NativeWeights)


def weights_at(layout: bytes, memory: ctypes.Array[Any]) -> NativeWeights:
    """Weights that lie in a memory as the layout says. They keep it."""
    return _NATIVE_WEIGHTS.validate_json(layout, context=memory)


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


class Allocate(Protocol):
    """Uninitialised memory of a shape; `device` meta: sizes alone."""

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor: ...


@torch.inference_mode()
def pack_weights(
    weights: Weights,
    settings: DecoderSettings,
    *,
    bits: int = 0,
    release: Callable[[], None] = lambda: None,
    allocate: Allocate = in_large_pages,
) -> NativeWeights:
    """Pack weights that are all of one type, one layer after the other. Does not change them.

    Of weights on the meta device the packed ones are there too: they have sizes and no numbers.

    An embedding that is tied to the head is not kept. Another one is not packed: a step reads only its tokens' rows.

    bits: 8 or 4 quantise the matrices of the layers so, and the head to 8 bits.
    release: called after each layer, when what was asked of `weights` so far has been packed.
    allocate: gives the memory of all that is kept; nothing of it is a view of `weights`.
    """
    embedding, head = given(weights, EMBEDDING), given(weights, HEAD)
    dtype, threads = embedding.dtype, None
    if not embedding.is_meta:
        threads = ThreadPool(torch.get_num_threads())
        _log_use_of_amx(settings, dtype, bits)
    pack = _Packing(threads, bits, allocate)
    # First: the largest matrices, while nothing else is there.
    kept = None if _are_equal(embedding, head) else pack.copy(embedding)
    del embedding
    head_bits = 8  # where the layers are quantised, as in the sources
    packed_head = pack([head], bits=head_bits if bits else 0)
    del head
    release()
    layers = []
    for index, window in enumerate(settings.sliding_windows):
        own = partial(named, weights, f"model.layers.{index}.")
        layers.append(_pack_layer(own, pack, window, settings.experts.num_experts))
        release()
    return NativeWeights(
        settings=settings,
        layers=tuple(layers),
        embedding=kept,
        final_norm=pack.copy(given(weights, "model.norm.weight")),
        head=packed_head,
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


class _Packing:
    """Brings weights into memory as the C++ reads them."""

    def __init__(self, threads: ThreadPool | None, bits: int, allocate: Allocate) -> None:
        """threads: None where weights have sizes and no numbers. bits: of matrices; 0: they are not quantised."""
        self._threads, self._bits, self._allocate = threads, bits, allocate

    def copy(self, weight: torch.Tensor) -> torch.Tensor:
        return self._allocate(*weight.shape, dtype=weight.dtype, device=weight.device).copy_(weight)

    def optional_copy(self, weight: torch.Tensor | None) -> torch.Tensor | None:
        return None if weight is None else self.copy(weight)

    def __call__(self, weights: Sequence[torch.Tensor], *, bits: int | None = None) -> torch.Tensor:
        """Matrices side by side, in a memory of their own. weights: each [outputs, inputs]."""
        return self.side_by_side(1, weights, bits=bits)[0]

    def side_by_side(self, count: int, weights: Sequence[torch.Tensor], *, bits: int | None = None) -> torch.Tensor:
        """Memory for `count` such as these, with these as the first: one alone may be smaller than a large page."""
        bits = self._bits if bits is None else bits
        shape, device = _packed_shape(weights, bits), weights[0].device
        packed = self._allocate(count, *shape, dtype=torch.int32, device=device)
        self.into(packed[0], weights, bits=bits)
        return packed

    def into(self, packed: torch.Tensor, weights: Sequence[torch.Tensor], *, bits: int | None = None) -> None:
        """packed: of `_packed_shape`."""
        if self._threads is not None:
            _pack(self._threads, weights, packed, bits=self._bits if bits is None else bits)


def _pack_layer(weights: Weights, pack: _Packing, sliding_window: int, num_experts: int) -> NativeLayer:
    router = weights("mlp.gate.weight")
    return NativeLayer(
        input_norm=pack.copy(given(weights, "input_layernorm.weight")),
        query_key_value=pack([given(weights, f"{name}.weight") for name in QUERIES_KEYS_VALUES]),
        query_key_value_bias=pack.optional_copy(joined_bias(weights, QUERIES_KEYS_VALUES, torch.float32)),
        query_norm=pack.optional_copy(weights("self_attn.q_norm.weight")),
        key_norm=pack.optional_copy(weights("self_attn.k_norm.weight")),
        output=pack([given(weights, "self_attn.o_proj.weight")]),
        output_bias=pack.optional_copy(joined_bias(weights, ("self_attn.o_proj",), torch.float32)),
        post_attention_norm=pack.copy(given(weights, "post_attention_layernorm.weight")),
        router=None if router is None else pack([router], bits=0),
        mlps=_pack_mlps(weights, pack, ["mlp."] if router is None else _expert_names(num_experts)),
        sliding_window=sliding_window,
    )


def _expert_names(num_experts: int) -> list[str]:
    return [f"mlp.experts.{expert}." for expert in range(num_experts)]


def _pack_mlps(weights: Weights, pack: _Packing, names: Sequence[str]) -> tuple[NativeMlp, ...]:
    """The MLP of a layer, or all its experts side by side."""
    gate_up = pack.side_by_side(len(names), _gate_and_up(weights, names[0]))
    down = pack.side_by_side(len(names), [given(weights, f"{names[0]}down_proj.weight")])
    for expert, name in enumerate(names[1:], 1):
        pack.into(gate_up[expert], _gate_and_up(weights, name))
        pack.into(down[expert], [given(weights, f"{name}down_proj.weight")])
    return tuple(NativeMlp(gate_up=gate_up[expert], down=down[expert]) for expert in range(len(names)))


def _gate_and_up(weights: Weights, name: str) -> list[torch.Tensor]:
    """LANES outputs of one, the LANES of the other at the same place, and so on: a panel holds both factors."""
    gate, up = (given(weights, f"{name}{each}_proj.weight") for each in ("gate", "up"))
    return [torch.stack([gate.view(-1, LANES, gate.shape[1]), up.view(-1, LANES, up.shape[1])], 1).flatten(0, 2)]


def _packed_shape(weights: Sequence[torch.Tensor], bits: int) -> tuple[int, int, int]:
    """Of matrices side by side: [panels, units of inputs, PANEL outputs] units of 32 bits.

    Of 8 or 4 bits, [panels, groups of inputs × (1 + units), PANEL outputs]: the first unit of a group has its scale
    and its least weight, both in bfloat16; the others hold unsigned numbers: a weight is the least one and so many
    times the scale. Groups of 8 bits are rotated.
    """
    num_outputs, num_inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
    num_units = num_inputs * weights[0].element_size() // 4
    if bits:
        num_units = -(-num_inputs // GROUPS[bits]) * (1 + GROUPS[bits] * bits // 32)
    return -(-num_outputs // PANEL), num_units, PANEL


def _pack(threads: ThreadPool, weights: Sequence[torch.Tensor], packed: torch.Tensor, *, bits: int) -> None:
    """Matrices side by side, padded with zeros. weights: each [outputs, inputs]. packed: of `_packed_shape`."""
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0].contiguous()
    if bits:
        pack = getattr(threads.code, f"carousel_pack_in_{bits}_bits_{DTYPES[weight.dtype]}")
        pack(threads.handle, weight.data_ptr(), *weight.shape, packed.data_ptr())
    else:
        threads.code.carousel_pack(threads.handle, weight.data_ptr(), len(weight), packed.shape[1], packed.data_ptr())
