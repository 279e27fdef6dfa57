"""Paged attention for CPUs in C++, for models that run on transformers' code.

`TorchAttention` is used if there is no compiler, or if the C++ code does not support a model's shapes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from app.engine.batch import StepBatch
from app.model.attention import AttentionRules, AttentionStep, with_contiguous_rows
from app.model.cpu.kv_cache import LayerMemory, NativeKVCache
from app.model.cpu.library import DTYPES, AttentionShape, Strides, ThreadPool, log_use_of_amx
from app.model.inputs import ModelInputs, Segments, build_segments
from app.model.kv_cache import ONE_GROUP, LayerGroups, LayerShape

MAX_SEGMENT_TOKENS = 32  # the most tokens of one sequence that one thread processes at once


class NativeAttention:
    """The C++ kernel, together with KV memory in the layout that it reads."""

    def __init__(self, pages: NativeKVCache, threads: ThreadPool, groups: LayerGroups = ONE_GROUP) -> None:
        self.groups = groups
        self.block_size = pages.block_size
        self.kv_tensors = pages.tensors
        self.pages = pages
        self.memories: dict[int, LayerMemory] = {}  # by layer; filled when a layer is first called
        self.function = getattr(threads.code, f"carousel_attention_step_{DTYPES[pages.dtype]}")
        self.threads = threads
        if pages.dtype is torch.bfloat16:
            log_use_of_amx("bfloat16", *(2 * keys.shape[2] for keys in pages.keys.values()))

    def begin_step(self, batch: StepBatch, inputs: ModelInputs) -> AttentionStep:
        segments = build_segments(
            batch, num_groups=self.groups.num_groups, block_size=self.block_size, max_tokens=MAX_SEGMENT_TOKENS
        )
        return _NativeStep(self, inputs.slots, segments)


class _NativeStep:
    def __init__(self, attention: NativeAttention, slots: Sequence[torch.Tensor], segments: Segments) -> None:
        """slots: the slots of the new tokens, one tensor for each group of layers."""
        self._attention = attention
        self._slots = slots
        self._segments = segments

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        attention, pages, segments = self._attention, self._attention.pages, self._segments
        place = attention.groups.place_of(layer)
        query, key, value = map(with_contiguous_rows, (query, key, value))
        num_tokens, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = value.shape[1:]
        memory = attention.memories.get(layer)
        if memory is None:
            stored_dim = key_dim - value_dim if rules.is_latent else key_dim
            own = LayerShape(num_kv_heads=num_kv_heads, key_dim=stored_dim, value_dim=value_dim)
            memory = attention.memories[layer] = pages.of_layer(place, own)
        output = query.new_empty(num_tokens, num_heads, value_dim)
        sinks = None if rules.sinks is None else rules.sinks.float().contiguous()
        shape = AttentionShape(
            num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim,
            block_size=pages.block_size, scaling=rules.scaling, softcap=rules.softcap or 0.0,
            sliding_window=rules.sliding_window or 0, sinks=None if sinks is None else sinks.data_ptr(),
            heads_in_block=memory.heads_in_block, scales_in_block=memory.scales_in_block, is_latent=rules.is_latent,
        )  # fmt: skip
        strides = Strides.of(query, key, value)
        attention.function(
            attention.threads.handle, ctypes.byref(shape), ctypes.byref(strides),
            query.data_ptr(), key.data_ptr(), value.data_ptr(), self._slots[place.group].data_ptr(), num_tokens,
            memory.keys, memory.values, memory.scales,
            segments.segments.data_ptr(), segments.segments.shape[0], segments.tables[place.group].data_ptr(),
            output.data_ptr(),
        )  # fmt: skip
        return output
