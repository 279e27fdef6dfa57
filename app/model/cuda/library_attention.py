"""Paged attention with torch's precompiled FlashAttention, which needs no Triton, no compiler and no other package.

The method is FlashAttention-2 (Dao, 2023). A step gathers the keys and values of its sequences side by side and attends
to them in one call, or in several if they need too much memory. This file has not been run on a GPU yet.
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
_MOST_NUMBERS = 256  # the largest supported head size
_UNIT = 8  # head sizes must be multiples of this


def varlen_attn(*given: Any, **named: Any) -> torch.Tensor:
    """Call torch's function of this name. Its import takes seconds, because it also imports torch's compiler."""
    from torch.nn.attention import varlen

    function: Callable[..., Any] = varlen.varlen_attn
    output = function(*given, **named, **_shared_heads(function))
    assert isinstance(output, torch.Tensor), "only the output is requested"
    return output


@cache
def _shared_heads(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the argument that torch 2.12 and later require if several query heads share a KV head."""
    return {"enable_gqa": True} if "enable_gqa" in signature(function).parameters else {}


class LibraryAttention(TorchAttention):
    """Attends with torch's FlashAttention. Blocks have the same layout as in `TorchAttention`."""

    @staticmethod
    def why_not(
        layers: Mapping[int, LayerShape], rules: Mapping[int, AttentionRules], dtype: torch.dtype
    ) -> str | None:
        """Return the reason why torch's FlashAttention does not support a model, or None if it supports all layers."""
        if dtype not in _DTYPES:
            return f"torch's FlashAttention requires a 16-bit type, but the model is in {dtype}"
        for layer, shape in layers.items():
            if shape.key_dim != shape.value_dim or shape.key_dim > _MOST_NUMBERS or shape.key_dim % _UNIT:
                return (
                    f"torch's FlashAttention does not support keys of {shape.key_dim} and values of {shape.value_dim} "
                    f"numbers, as in layer {layer}"
                )
        for layer, own in rules.items():
            asked = (("softcap", own.softcap), ("attention sinks", own.sinks), ("latents", own.is_latent or None))
            for name, given in asked:
                if given is not None:
                    return f"torch's FlashAttention does not support {name}, which layer {layer} uses"
        return None

    def begin_step(self, batch: StepBatch, inputs: ModelInputs) -> AttentionStep:
        return _LibraryStep(self, batch.scheduled, inputs.slots, inputs.token_ids.device)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some sequences of a step, side by side, for one call of FlashAttention. Lengths are in tokens."""

    queries: slice  # the part's tokens in the step
    query_ends: torch.Tensor  # [num_sequences + 1] int32, starting with 0
    key_ends: torch.Tensor  # [num_sequences + 1] int32, starting with 0
    most_queries: int  # the most queries of one sequence
    most_keys: int
    slots: torch.Tensor  # [num_keys], the slots of the keys in KV memory


class _LibraryStep:
    """One step. In each layer, writes the new tokens' KV and then attends to gathered copies of keys and values."""

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
        self._parts: dict[tuple[int, int | None, int], list[_Part]] = {}  # by group, window and bytes per token

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
        before = -1 if window is None else window - 1  # the number of earlier tokens that a token sees; -1 for all
        for part in self._parts[kind]:
            keys, values = self._cache.read_tokens(own.place, part.slots, part=own.part, like=(key, value))
            output[part.queries] = varlen_attn(
                with_contiguous_rows(query[part.queries]), keys, values, part.query_ends, part.key_ends,
                part.most_queries, part.most_keys, scale=rules.scaling, window_size=(before, 0),
            )  # fmt: skip
        return output

    def _parts_of(self, group: int, window: int | None, num_bytes: int) -> Iterator[_Part]:
        """Divide the sequences into parts with at most `BYTES_AT_ONCE` of keys and values, or of one sequence each."""
        first_query = num_queries = num_keys = 0
        part: list[tuple[ScheduledSequence, int]] = []  # sequences, each with the position of its first key
        for item in self._items:
            # Blocks behind the window of the first new token may already belong to other sequences.
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
