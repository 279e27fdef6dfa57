"""Computes a step of a Llama-like model in one call to C++: no operator and no Python between its layers.

Each row is computed in an order of its own, so its bits do not depend on the other rows of the step.
"""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from typing import NamedTuple

import torch

from app.engine.batch import StepBatch
from app.model.cpu.adapters import AdaptedModel, adapter_columns
from app.model.cpu.attention import MAX_SEGMENT_TOKENS
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import (
    DTYPES,
    DecoderShape,
    DecoderStep,
    ExpertsShape,
    LayerWeights,
    MlpWeights,
    ThreadPool,
)
from app.model.cpu.weights import GROUPS, PANEL, NativeLayer, NativeWeights
from app.model.forward import Prediction
from app.model.inputs import ModelInputs, build_segments
from app.model.matcher_preparer import MatcherPreparer


class NativeDecoder:
    """A ForwardPass with packed weights, KV memory and a pool of threads."""

    def __init__(
        self,
        weights: NativeWeights,
        pages: NativeKVCache,
        threads: ThreadPool,
        *,
        num_layers: int = 0,
    ) -> None:
        """num_layers: only the first few (then norm and head as always); 0 for all."""
        self.block_size = pages.block_size
        self.kv_tensors = pages.tensors
        self._weights, self._pages, self._threads = weights, pages, threads
        self.adapting = AdaptedModel.of(weights)
        suffix = DTYPES[weights.dtype]
        self._run = getattr(threads.code, f"carousel_decoder_run_{suffix}")
        num_layers = num_layers or len(weights.layers)
        settings = weights.settings
        shape = DecoderShape(
            hidden_size=settings.hidden_size, num_heads=settings.num_heads, num_kv_heads=settings.num_kv_heads,
            head_dim=settings.head_dim, intermediate_size=settings.intermediate_size, vocab_size=settings.vocab_size,
            block_size=pages.block_size, num_layers=num_layers, weight_bits=weights.weight_bits,
            epsilon=settings.epsilon, scaling=settings.scaling,
            experts=ExpertsShape(**dataclasses.asdict(settings.experts)),
        )  # fmt: skip
        self._mlps = [_mlp_pointers(layer) for layer in weights.layers[:num_layers]]
        layers = (LayerWeights * num_layers)(
            *(self._pointers(layer, index) for index, layer in enumerate(weights.layers[:num_layers]))
        )
        self._decoder = getattr(threads.code, f"carousel_decoder_new_{suffix}")(
            ctypes.byref(shape), layers, None if weights.embedding is None else weights.embedding.data_ptr(),
            weights.final_norm.data_ptr(), weights.head.data_ptr(), threads.handle,
        )  # fmt: skip
        weakref.finalize(self, getattr(threads.code, f"carousel_decoder_delete_{suffix}"), self._decoder)
        self._preparer = MatcherPreparer()
        self._cosine = self._sine = torch.empty(0)  # [num_positions, head_dim] each, of the model's type

    def predict(self, batch: StepBatch, inputs: ModelInputs) -> Prediction:
        """Logits in float32, rounded to the model's type where weights are in it. Matchers are prepared meanwhile."""
        segments = build_segments(batch, block_size=self.block_size, max_tokens=MAX_SEGMENT_TOKENS)
        adapters = adapter_columns(batch) if batch.has_adapters else None
        self._provide_rotary(segments.num_positions)
        num_logits = inputs.logits_indices.shape[0]
        logits = torch.empty(num_logits, self._weights.settings.vocab_size)
        likeliest = torch.empty(num_logits, dtype=torch.long)
        wanted = _wanted_rows(inputs)
        hidden = None if wanted.hidden is None else torch.empty(len(wanted.rows), self._weights.settings.hidden_size)
        step = DecoderStep(
            num_tokens=inputs.token_ids.shape[1], num_segments=segments.segments.shape[0], num_rows=len(wanted.rows),
            num_logits=num_logits, token_ids=inputs.token_ids.data_ptr(), positions=inputs.positions.data_ptr(),
            slots=inputs.slots[0].data_ptr(), segments=segments.segments.data_ptr(),
            tables=segments.tables[0].data_ptr(), rows=wanted.rows.data_ptr(), logits_rows=wanted.logits.data_ptr(),
            cosine=self._cosine.data_ptr(), sine=self._sine.data_ptr(), logits=logits.data_ptr(),
            likeliest=likeliest.data_ptr(), hidden=_pointer(hidden),
            num_adapters=0 if adapters is None else len(adapters.adapters),
            adapters=None if adapters is None else ctypes.addressof(adapters.adapters),
            adapter_of=None if adapters is None else adapters.of_token.data_ptr(),
        )  # fmt: skip
        # Not earlier: up to here this thread runs Python, and only one thread can.
        with self._preparer.preparing(batch.matchers):
            self._run(self._decoder, ctypes.byref(step))
        return Prediction(logits, likeliest, None if hidden is None else hidden[wanted.hidden])

    def _provide_rotary(self, num_positions: int) -> None:
        """Make the tables of cosines and sines long enough. To compute a step's own took a dozen operators."""
        if num_positions > len(self._cosine):
            positions = torch.arange(_num_rotary(num_positions))
            self._cosine, self._sine = self._weights.settings.rotary(positions, self._weights.dtype)

    def _pointers(self, layer: NativeLayer, index: int) -> LayerWeights:
        names = [each.name for each in dataclasses.fields(layer) if each.name not in ("mlps", "sliding_window")]
        return LayerWeights(
            **{name: _pointer(getattr(layer, name)) for name in names},
            mlps=ctypes.addressof(self._mlps[index]),
            keys=self._pages.keys[index].data_ptr(),
            values=self._pages.values[index].data_ptr(),
            scales=_pointer(self._pages.scales.get(index)),
            sliding_window=layer.sliding_window,
        )


def buffer_bytes(weights: NativeWeights, *, num_tokens: int, num_positions: int) -> int:
    """What a decoder keeps once it has computed a step of so many tokens, and a position so late.

    Its buffers in C++, as `grow` has them in decoder.h and experts.h, and the tables of `_provide_rotary`.
    """
    settings, experts, of_type = weights.settings, weights.settings.experts, weights.dtype.itemsize
    hidden, query = settings.hidden_size, settings.num_heads * settings.head_dim
    projected = query + 2 * settings.num_kv_heads * settings.head_dim
    num_places = num_tokens * experts.per_token
    activated = max(num_tokens * settings.intermediate_size, num_places * experts.intermediate_size)
    numbers = num_tokens * (hidden + projected + query) + activated + num_places * hidden
    padded_experts = -(-experts.num_experts // PANEL) * PANEL
    routing = num_tokens * padded_experts * 4 + num_places * (8 + 4 + 8)
    total = numbers * of_type + num_tokens * hidden * 4 + routing
    if weights.weight_bits:
        size = max(hidden, query, settings.intermediate_size, experts.intermediate_size)
        of_row = -(-size // GROUPS[8]) * GROUPS[8] + -(-size // GROUPS[4]) * (4 + 4)
        total += max(num_tokens, num_places) * of_row
    return total + 2 * _num_rotary(num_positions) * settings.head_dim * of_type


def _num_rotary(num_positions: int) -> int:
    return 1 << (num_positions - 1).bit_length()  # a power of two, so that the tables seldom grow


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _mlp_pointers(layer: NativeLayer) -> ctypes.Array[MlpWeights]:
    return (MlpWeights * len(layer.mlps))(
        *(MlpWeights(gate_up=_pointer(mlp.gate_up), down=_pointer(mlp.down)) for mlp in layer.mlps)
    )


class _WantedRows(NamedTuple):
    """The tokens with a wanted result, and which of them need logits or hidden states. All int64."""

    rows: torch.Tensor  # [num_rows], places in the packed row, ascending
    logits: torch.Tensor  # [num_logits], among the rows
    hidden: torch.Tensor | None  # [num_hidden], among the rows


def _wanted_rows(inputs: ModelInputs) -> _WantedRows:
    logits, hidden = inputs.logits_indices, inputs.hidden_indices
    if hidden is None:
        return _WantedRows(logits, logits, None)
    rows = torch.unique(torch.cat((logits, hidden)), sorted=True)
    return _WantedRows(rows, torch.searchsorted(rows, logits), torch.searchsorted(rows, hidden))
