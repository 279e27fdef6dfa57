"""Paged attention with torch's precompiled FlashAttention, which needs no Triton, no compiler and no other package.

The method is FlashAttention-2 (Dao, 2023). The keys and values of all sequences of a step are gathered side by side,
and one call attends to them. This file has not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any

import torch

from app.engine.batch import ScheduledSequence, StepBatch
from app.model.attention import BYTES_AT_ONCE, AttentionRules, AttentionStep, TorchAttention, with_contiguous_rows
from app.model.inputs import ModelInputs, moved
from app.model.kv_cache import LayerShape

_DTYPES = (torch.float16, torch.bfloat16)
_MOST_NUMBERS = 256  # the largest size of a head
_UNIT = 8  # the size of a head is a multiple of this


def varlen_attn(*given: Any, **named: Any) -> torch.Tensor:
    """Call torch's function of this name. The import takes seconds, because it imports torch's compiler."""
    from torch.nn.attention import varlen

    function: Callable[..., Any] = varlen.varlen_attn
    output = function(*given, **named, **_shared_heads(function))
    assert isinstance(output, torch.Tensor), "only the output is requested"
    return output


@cache
def _shared_heads(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the argument that the function needs since torch 2.12 if heads share keys."""
    return {"enable_gqa": True} if "enable_gqa" in signature(function).parameters else {}


class LibraryAttention(TorchAttention):
    """Attention over the same blocks as plain torch, computed by torch's FlashAttention."""

    @staticmethod
    def why_not(
        layers: Mapping[int, LayerShape], rules: Mapping[int, AttentionRules], dtype: torch.dtype
    ) -> str | None:
        """Return why torch's FlashAttention cannot compute a model, or None if it computes all layers."""
        if dtype not in _DTYPES:
            return f"torch's FlashAttention computes in 16 bits, and the model is in {dtype}"
        for layer, shape in layers.items():
            if shape.key_dim != shape.value_dim or shape.key_dim > _MOST_NUMBERS or shape.key_dim % _UNIT:
                return (
                    f"torch's FlashAttention has no heads with {shape.key_dim} numbers in a key and {shape.value_dim} "
                    f"in a value, which layer {layer} has"
                )
        for layer, own in rules.items():
            asked = (("softcap", own.softcap), ("attention sinks", own.sinks), ("latents", own.is_latent or None))
            for name, given in asked:
                if given is not None:
                    return f"torch's FlashAttention has no {name}, which layer {layer} has"
        return None

    def begin_step(self, batch: StepBatch, inputs: ModelInputs) -> AttentionStep:
        return _LibraryStep(self, batch.scheduled, inputs.slots, inputs.token_ids.device)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some sequences of a step, side by side. Lengths are in tokens."""

    queries: slice  # the part's tokens in the step
    query_ends: torch.Tensor  # [num_sequences + 1] int32, starting with 0
    key_ends: torch.Tensor  # [num_sequences + 1] int32, starting with 0
    most_queries: int  # the most queries of one sequence
    most_keys: int
    slots: torch.Tensor  # [num_keys], the slots of the keys in KV memory


class _LibraryStep:
    """One step, which writes the KV of the new tokens and then attends to a copy of all keys and values."""

    def __init__(
        self,
        attention: TorchAttention,
        items: Sequence[ScheduledSequence],
        slots: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        """slots: the slots of the new tokens, by group of layers."""
        self._cache, self._groups = attention.cache, attention.groups
        self._items, self._slots, self._device = items, slots, device
        self._parts: dict[tuple[int, int | None, int], list[_Part]] = {}  # by group, window and bytes of a token

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        own = self._groups.place_of(layer)
        self._cache.write(own.place, self._slots[own.group], key, value, part=own.part)
        window = rules.sliding_window
        kind = (own.group, window, key[0].nbytes + value[0].nbytes)
        if kind not in self._parts:
            self._parts[kind] = list(self._parts_of(*kind))
        output = torch.empty_like(query)
        before = -1 if window is None else window - 1  # earlier tokens that a token sees; -1 for all
        for part in self._parts[kind]:
            keys, values = self._cache.read_tokens(own.place, part.slots, part=own.part, like=(key, value))
            output[part.queries] = varlen_attn(
                with_contiguous_rows(query[part.queries]), keys, values, part.query_ends, part.key_ends,
                part.most_queries, part.most_keys, scale=rules.scaling, window_size=(before, 0),
            )  # fmt: skip
        return output

    def _parts_of(self, group: int, window: int | None, num_bytes: int) -> Iterator[_Part]:
        """Divide the sequences into parts of at most `BYTES_AT_ONCE` of keys and values, or of one sequence each."""
        first_query = num_queries = num_keys = 0
        part: list[tuple[ScheduledSequence, int]] = []  # sequences with the positions of their first keys
        for item in self._items:
            # Blocks before the window of the first token may belong to another sequence by now.
            first = 0 if window is None else max(0, item.start - window + 1)
            more = item.start + len(item.token_ids) - first
            if part and (num_keys + more) * num_bytes > BYTES_AT_ONCE:
                yield self._part(part, group, first_query)
                first_query, num_keys, part = num_queries, 0, []
            part.append((item, first))
            num_queries += len(item.token_ids)
            num_keys += more
        yield self._part(part, group, first_query)

    def _part(self, part: Sequence[tuple[ScheduledSequence, int]], group: int, first_query: int) -> _Part:
        sizes = [len(item.token_ids) for item, _ in part]
        lengths = [item.start + len(item.token_ids) - first for item, first in part]
        ends = torch.tensor([list(accumulate(each, initial=0)) for each in (sizes, lengths)], dtype=torch.int32)
        query_ends, key_ends = moved(ends, self._device)
        block_size = self._cache.block_size
        slots = [
            (torch.tensor(item.ids_of(group))[:, None] * block_size + torch.arange(block_size)).flatten()[
                first : first + length
            ]
            for (item, first), length in zip(part, lengths, strict=True)
        ]
        return _Part(
            queries=slice(first_query, first_query + sum(sizes)), query_ends=query_ends, key_ends=key_ends,
            most_queries=max(sizes), most_keys=max(lengths), slots=moved(torch.cat(slots), self._device),
        )  # fmt: skip
