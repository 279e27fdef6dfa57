"""Runs a step of a Llama-like model in a single C++ call, so neither torch nor Python runs between its layers.

The order of each row's operations is fixed, so its result is bitwise independent of the other rows in the step.
"""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import torch

from app.engine.batch import StepBatch
from app.model.architectures import Mixer
from app.model.cpu.adapters import AdaptedModel, adapter_columns
from app.model.cpu.attention import MAX_SEGMENT_TOKENS
from app.model.cpu.kv_cache import LayerMemory, NativeKVCache
from app.model.cpu.library import (
    DTYPES,
    ConvolutionShape,
    DecoderShape,
    DecoderStep,
    ExpertsShape,
    LayerWeights,
    MlpWeights,
    PerLayerShape,
    RecurrenceShape,
    ThreadPool,
)
from app.model.cpu.weights import (
    GROUPS,
    PANEL,
    NativeAttentionPart,
    NativeConvolutionPart,
    NativeDeltaRulePart,
    NativeLayer,
    NativePerLayerPart,
    NativeWeights,
)
from app.model.forward import Prediction
from app.model.inputs import ModelInputs, build_segments
from app.model.kv_cache import ONE_GROUP, LayerGroups
from app.model.matcher_preparer import MatcherPreparer
from app.model.recurrent_layers import pieces_of

# Constants of stored matrices, which must match the C++ sources.
_IN_BLOCKS, _BLOCK, _SUMS_OF_BLOCK = 2, 256, 48
_TILE_ROWS = 12  # the most rows of a tile

MIXERS: tuple[str, ...] = get_args(Mixer)  # the index of a mixer is its number in the C++ code


class NativeDecoder:
    """A `ForwardPass` in C++, with packed weights, KV memory and a thread pool."""

    def __init__(
        self,
        weights: NativeWeights,
        pages: NativeKVCache,
        threads: ThreadPool,
        *,
        groups: LayerGroups = ONE_GROUP,
        num_slots: int = 0,
        num_layers: int = 0,
    ) -> None:
        """groups: how layers share blocks. num_slots: the number of slots for recurrent states.
        num_layers: the number of layers to run before norm and head, to verify the first ones; 0 for all.
        """
        self.block_size = pages.block_size
        self.kv_tensors = pages.tensors
        self._weights, self._pages, self._threads, self._groups = weights, pages, threads, groups
        self.adapting = AdaptedModel.of(weights)
        suffix = DTYPES[weights.dtype]
        self._run = getattr(threads.code, f"carousel_decoder_run_{suffix}")
        num_layers = num_layers or len(weights.layers)
        # One tensor for each state of a recurrent layer, [num_slots, *sizes].
        self.states = [
            torch.zeros(num_slots, *shape.sizes, dtype=shape.dtype) for shape in weights.settings.states(weights.dtype)
        ]
        shape = _shape_of(weights, num_layers, block_size=pages.block_size, num_groups=groups.num_groups)
        self._mlps = [_mlp_pointers(layer) for layer in weights.layers[:num_layers]]
        layers = (LayerWeights * num_layers)(*self._all_pointers(num_layers))
        self._decoder = getattr(threads.code, f"carousel_decoder_new_{suffix}")(
            ctypes.byref(shape), layers, None if weights.embedding is None else weights.embedding.data_ptr(),
            weights.final_norm.data_ptr(), weights.head.data_ptr(), threads.handle,
        )  # fmt: skip
        weakref.finalize(self, getattr(threads.code, f"carousel_decoder_delete_{suffix}"), self._decoder)
        self._preparer = MatcherPreparer()
        # One table for each kind of rotary positions, [num_positions, 2, size / 2] float32.
        self._rotary = [torch.empty(0) for _ in weights.settings.rotary]
        self._rotary_pointers = _pointers(self._rotary)

    def predict(self, batch: StepBatch, inputs: ModelInputs) -> Prediction:
        """Return float32 logits, rounded to the type of unquantised weights. Also prepares the batch's matchers."""
        segments = build_segments(
            batch, num_groups=self._groups.num_groups, block_size=self.block_size, max_tokens=MAX_SEGMENT_TOKENS
        )
        pieces = pieces_of(batch).table if self.states else None
        adapters = adapter_columns(batch) if batch.has_adapters else None
        self._provide_rotary(segments.num_positions)
        num_logits = inputs.logits_indices.shape[0]
        logits = torch.empty(num_logits, self._weights.settings.vocab_size)
        likeliest = torch.empty(num_logits, dtype=torch.long)
        wanted = _wanted_rows(inputs)
        hidden = None if wanted.hidden is None else torch.empty(len(wanted.rows), self._weights.settings.hidden_size)
        slots, tables = map(_pointers, (inputs.slots, segments.tables))
        step = DecoderStep(
            num_tokens=inputs.token_ids.shape[1], num_segments=segments.segments.shape[0],
            num_pieces=0 if pieces is None else len(pieces), num_rows=len(wanted.rows), num_logits=num_logits,
            token_ids=inputs.token_ids.data_ptr(), positions=inputs.positions.data_ptr(),
            slots=ctypes.addressof(slots), segments=segments.segments.data_ptr(), tables=ctypes.addressof(tables),
            pieces=_pointer(pieces), rows=wanted.rows.data_ptr(), logits_rows=wanted.logits.data_ptr(),
            rotary=ctypes.addressof(self._rotary_pointers), logits=logits.data_ptr(), likeliest=likeliest.data_ptr(),
            hidden=_pointer(hidden),
            num_adapters=0 if adapters is None else len(adapters.adapters),
            adapters=None if adapters is None else ctypes.addressof(adapters.adapters),
            adapter_of=None if adapters is None else adapters.of_token.data_ptr(),
        )  # fmt: skip
        # Starting earlier would gain nothing: this thread has held the GIL until here, and the C++ call releases it.
        with self._preparer.preparing(batch.matchers):
            self._run(self._decoder, ctypes.byref(step))
        return Prediction(logits, likeliest, None if hidden is None else hidden[wanted.hidden])

    def _provide_rotary(self, num_positions: int) -> None:
        """Extend the tables of cosines and sines if needed. Computing them in each step would take many operators."""
        if num_positions > len(self._rotary[0]):
            settings, positions = self._weights.settings, torch.arange(_num_rotary(num_positions))
            rounded = self._weights.dtype if settings.described.rounds_rotary else torch.float32
            self._rotary = [each.table(positions, rounded).float() for each in settings.rotary]
            self._rotary_pointers = _pointers(self._rotary)

    def _all_pointers(self, num_layers: int) -> Iterator[LayerWeights]:
        """Yield the pointers of the first layers. Each recurrent layer is assigned the next of the states."""
        states = iter(self.states)
        for index in range(num_layers):
            yield self._pointers(index, states)

    def _pointers(self, index: int, states: Iterator[torch.Tensor]) -> LayerWeights:
        layer, settings, pages = self._weights.layers[index], self._weights.settings.layers[index], self._pages
        place = self._groups.place_of(index if settings.stored_by is None else settings.stored_by)
        attention, convolution, delta_rule = layer.attention, layer.convolution, layer.delta_rule
        return LayerWeights(
            mixer=MIXERS.index(settings.mixer),
            intermediate_size=settings.intermediate_size,
            **_part(layer, NativeLayer, ("attention", "convolution", "delta_rule", "per_layer", "mlps")),
            **_part(attention, NativeAttentionPart),
            **_part(convolution, NativeConvolutionPart),
            **_part(delta_rule, NativeDeltaRulePart),
            **_part(layer.per_layer, NativePerLayerPart),
            **(_NO_MEMORY if attention is None else pages.of_layer(place, settings.kv_shape)._asdict()),
            num_kv_heads=settings.num_kv_heads,
            head_dim=settings.head_dim,
            num_kv_projections=len(settings.attention_linears) - 1,
            sliding_window=settings.sliding_window,
            group=place.group,
            rotary=settings.rotary,
            rotary_dim=2 * len(self._weights.settings.rotary[settings.rotary].frequencies),
            convolution_states=_pointer(None if convolution is None else next(states)),
            delta_states=_pointer(None if delta_rule is None else next(states)),
            mlps=ctypes.addressof(self._mlps[index]),
        )


# The `LayerMemory` fields of a layer without keys and values.
_NO_MEMORY = dict.fromkeys(LayerMemory._fields[:3]) | dict.fromkeys(LayerMemory._fields[3:], 0)


def _part(part: Any, kind: type[Any], others: Collection[str] = ()) -> dict[str, int | None]:
    """Return the addresses of a layer part's tensors by field name, or None if the part or tensor is missing."""
    names = [each.name for each in dataclasses.fields(kind) if each.name not in others]
    return {name: _pointer(getattr(part, name, None)) for name in names}


def _shape_of(weights: NativeWeights, num_layers: int, *, block_size: int, num_groups: int) -> DecoderShape:
    settings, described = weights.settings, weights.settings.described
    recurrent, is_delta_rule = settings.recurrent, bool(settings.recurrent.num_value_heads)
    with_states = [each for each in settings.layers if each.mixer != "attention"]
    channels = settings.num_channels if recurrent.kernel_size else 0
    convolution = ConvolutionShape(
        num_channels=channels, kernel_size=recurrent.kernel_size, slot=channels * (recurrent.kernel_size - 1),
        input_token=max((settings.projected_size(each) for each in with_states), default=0),
        has_silu=is_delta_rule,
    )  # fmt: skip
    delta_rule = RecurrenceShape(
        num_key_heads=recurrent.num_key_heads, num_value_heads=recurrent.num_value_heads, key_dim=recurrent.key_dim,
        value_dim=recurrent.value_dim, slot=recurrent.key_dim * recurrent.values_size, normalises=True,
        scale=max(1, recurrent.key_dim) ** -0.5,
    )  # fmt: skip
    return DecoderShape(
        hidden_size=settings.hidden_size, num_heads=settings.num_heads, vocab_size=settings.vocab_size,
        block_size=block_size, num_layers=num_layers, weight_bits=weights.weight_bits, num_groups=num_groups,
        gates_attention=described.gates_attention, norms_all_heads=described.norms_all_heads,
        norms_values=described.norms_values, rounds_in_norms=described.rounds_in_norms,
        rounds_rotary=described.rounds_rotary, has_gelu=described.activation == "gelu_tanh", epsilon=settings.epsilon,
        scaling=settings.scaling, softcap=settings.softcap, logits_softcap=settings.logits_softcap,
        embedding_scale=_embedding_scale(weights, settings.hidden_size) if described.scales_embedding else 1.0,
        per_layer=_per_layer_shape(weights), experts=ExpertsShape(**dataclasses.asdict(settings.experts)),
        convolution=convolution, delta_rule=delta_rule,
    )  # fmt: skip


def _per_layer_shape(weights: NativeWeights) -> PerLayerShape:
    settings, own = weights.settings, weights.per_layer_inputs
    return PerLayerShape(
        size=settings.per_layer_size, total_size=settings.per_layer_size * len(settings.layers),
        **{name: _pointer(getattr(own, name, None)) for name in ("embedding", "projection", "norm")},
        embedding_scale=_embedding_scale(weights, settings.per_layer_size),
        projection_scale=settings.hidden_size**-0.5, sum_scale=2**-0.5,
    )  # fmt: skip


def _embedding_scale(weights: NativeWeights, size: int) -> float:
    """Return the square root of an embedding's size, rounded to the model's type as transformers does."""
    return float(torch.tensor(size**0.5, dtype=torch.float32).to(weights.dtype))


def buffer_bytes(weights: NativeWeights, *, num_tokens: int, num_positions: int) -> int:
    """Return the bytes of the buffers that remain after a step of `num_tokens` at positions below `num_positions`.

    Includes the buffers that `grow` allocates in decoder.h and experts.h, and the tables of `_provide_rotary`.
    """
    settings, experts, of_type = weights.settings, weights.settings.experts, weights.dtype.itemsize
    hidden, mixers = settings.hidden_size, {layer.mixer for layer in settings.layers}
    projected, mixed = (max(map(size, settings.layers)) for size in (settings.projected_size, settings.mixed_size))
    inner = max(settings.per_layer_size, *(layer.intermediate_size for layer in settings.layers))
    num_places = num_tokens * experts.per_token
    activated = max(num_tokens * inner, num_places * experts.intermediate_size)
    per_layer = settings.per_layer_size * len(settings.layers)
    numbers = num_tokens * (hidden + projected + mixed + per_layer) + activated + num_places * hidden
    padded_experts = -(-experts.num_experts // PANEL) * PANEL
    routing = num_tokens * padded_experts * 4 + num_places * (8 + 4 + 8)
    total = numbers * of_type + num_tokens * hidden * 4 + routing
    if "gated_delta_rule" in mixers:
        heads = settings.recurrent.num_value_heads
        total += num_tokens * (settings.num_channels * of_type + (-(-2 * heads // PANEL) * PANEL + 2 * heads) * 4)
    if weights.weight_bits:
        size = max(hidden, mixed, inner, experts.intermediate_size)
        of_row = -(-size // GROUPS[8]) * GROUPS[8] + -(-size // GROUPS[4]) * (4 + 4)
        num_rows = max(num_tokens, num_places)
        if weights.weight_bits < min(GROUPS):  # inputs of stored matrices, padded by a tile, perhaps also in blocks
            num_rows += _TILE_ROWS
            of_row += size + size // _BLOCK * (4 + _SUMS_OF_BLOCK) if weights.weight_bits & _IN_BLOCKS else 0
        total += num_rows * of_row
    of_position = sum(2 * len(each.frequencies) for each in settings.rotary) * torch.float32.itemsize
    return total + _num_rotary(num_positions) * of_position


def _num_rotary(num_positions: int) -> int:
    return 1 << (num_positions - 1).bit_length()  # a power of two, so that the tables rarely grow


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointers(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))


def _mlp_pointers(layer: NativeLayer) -> ctypes.Array[MlpWeights]:
    return (MlpWeights * len(layer.mlps))(
        *(MlpWeights(gate_up=_pointer(mlp.gate_up), down=_pointer(mlp.down)) for mlp in layer.mlps)
    )


class _WantedRows(NamedTuple):
    """The tokens of a step that need logits, hidden states or both. All tensors are int64."""

    rows: torch.Tensor  # [num_rows], indices in the packed row, ascending
    logits: torch.Tensor  # [num_logits], indices in `rows`
    hidden: torch.Tensor | None  # [num_hidden], indices in `rows`


def _wanted_rows(inputs: ModelInputs) -> _WantedRows:
    logits, hidden = inputs.logits_indices, inputs.hidden_indices
    if hidden is None:
        return _WantedRows(logits, logits, None)
    rows = torch.unique(torch.cat((logits, hidden)), sorted=True)
    return _WantedRows(rows, torch.searchsorted(rows, logits), torch.searchsorted(rows, hidden))
