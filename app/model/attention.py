"""Attention over paged KV memory. `paged_attention` is registered with transformers, so models run unmodified.

Every layer of a model calls `attend` on the step, which is passed as the forward keyword argument `paged`, so no state
has to be set before the forward pass. This module implements attention in plain torch for CPU and CUDA. The faster
versions (`cpu/attention.py`, `cuda/attention.py`) must agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from app.engine.batch import StepBatch
from app.engine.state_pool import NO_STATE
from app.model.inputs import AttentionRows, DecodeRows, ModelInputs, PrefillChunk, build_attention_rows
from app.model.kv_cache import ONE_GROUP, KVCache, LayerGroups, LayerShape, Place
from app.model.latent_attention import LatentHeads
from app.model.recurrence import Recurrence, StatePieces, TorchRecurrence

ATTENTION_NAME = "carousel_paged"

# Keyword arguments of transformers' attention functions that may be ignored, because they do not change the result.
_HARMLESS = frozenset(
    {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "is_causal", "return_dict",
     "cache_position", "position_embeddings", "output_router_logits", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
     "max_length_k", "head_mask", "logits_to_keep", "layer_past", "encoder_hidden_states", "encoder_attention_mask",
     "num_items_in_batch"}
)  # fmt: skip


class UnknownAttention(Exception):
    """Raised if a model needs an attention feature that is not implemented."""


class NoStep(UnknownAttention):
    """Raised if a model does not pass the step on to its attention layers; `hand_steps_on` may help."""


class AttentionStep(Protocol):
    """The attention of all layers in one forward pass."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        """Store the new tokens' keys and values, then attend to all keys that each new token sees.

        query: [num_tokens, num_heads, key_dim]; key, value: [num_tokens, num_kv_heads, dim], of new tokens only.

        Returns [num_tokens, num_heads, value_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape and the type of one sequence's state in one recurrent operator."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


class Slots(NamedTuple):
    """The states that one recurrent operator uses in a step, and the code that runs it."""

    states: torch.Tensor  # [num_slots, *sizes]
    pieces: StatePieces
    recurrence: Recurrence


class RecurrentStep(Protocol):
    """The recurrent operators of one forward pass."""

    def next_slots(self, shape: StateShape, inputs: torch.Tensor) -> Slots:
        """Return the states of the next operator. Every forward pass must call its operators in the same order.

        inputs: the operator's inputs, [num_tokens, ...].
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionRules:
    """How a layer computes its scores. The rules are fixed by the model and the same in every step."""

    scaling: float
    sliding_window: int | None = None  # the number of positions that a token sees, including its own
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [num_heads], an extra score per head in the softmax, without a value
    is_latent: bool = False  # whether a key is its value followed by more numbers; only those are stored as the key
    # The earlier layer whose keys and values this layer reads, as found by `ProbeStep`, or None if it stores its own.
    stored_by: int | None = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: AttentionStep | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention interface requires. Returns [1, num_tokens, num_heads, value_dim] and None."""
    check_call(paged, attention_mask, others)
    assert paged is not None, "checked"
    if not getattr(module, "is_causal", True):
        raise UnknownAttention("an attention layer is not causal")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnknownAttention("attention layers are not numbered (no layer_idx)")
    heads: LatentHeads | None = getattr(module, "latent_heads", None)
    rules = AttentionRules(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        is_latent=heads is not None,
    )
    queries = query[0] if heads is None else heads.queries(query[0])
    output = paged.attend(layer, queries.transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), rules)
    output = output if heads is None else heads.values(output)
    return output.contiguous()[None], None  # contiguous, because some models take views of the result


def check_call(step: object, attention_mask: torch.Tensor | None, others: Mapping[str, Any]) -> None:
    """Raise UnknownAttention if a model requests an attention feature that is not implemented.

    step: the forward keyword argument `paged`. Raises NoStep if it is missing.
    """
    if step is None:
        raise NoStep("the model does not pass forward keyword arguments to its attention layers")
    if attention_mask is not None:
        raise UnknownAttention("the model adds its own attention mask")
    unknown = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if unknown:
        raise UnknownAttention(f"attention needs {', '.join(sorted(unknown))}, which is not implemented")


def hand_steps_on(module: torch.nn.Module) -> None:
    """Make a model pass the step to its attention layers, for models whose decoder layers drop keyword arguments."""
    given: dict[str, Any] = {}

    def keep(_module: torch.nn.Module, _inputs: Any, named: dict[str, Any]) -> None:
        given["paged"] = named.get("paged")

    def add(_module: torch.nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, given | named

    module.register_forward_pre_hook(keep, with_kwargs=True)
    for part in module.modules():
        if hasattr(part, "layer_idx") and hasattr(part, "scaling"):
            part.register_forward_pre_hook(add, with_kwargs=True)


def number_layers(module: torch.nn.Module) -> None:
    """Set `layer_idx` on attention modules that several layers share, from the argument that each call passes."""

    def number(part: torch.nn.Module, _inputs: Any, named: dict[str, Any]) -> None:
        part.layer_idx = named["layer_idx"]

    for part in module.modules():
        if hasattr(part, "scaling") and "layer_idx" in signature(part.forward).parameters:
            part.register_forward_pre_hook(number, with_kwargs=True)


class PagedAttention(Protocol):
    """KV memory and the code that attends over it. The backend of an engine determines the implementation."""

    block_size: int
    kv_tensors: list[torch.Tensor]  # all KV memory; the first dimension is the block

    def begin_step(self, batch: StepBatch, inputs: ModelInputs) -> AttentionStep:
        """Return the attention of all layers for the next forward pass."""
        ...


BYTES_AT_ONCE = 256 * 1024**2  # limit for gathered keys and values, and for scores


def plain_attention_bytes(layers: Iterable[LayerShape], length: int, dtype: torch.dtype) -> int:
    """Return the most bytes that `TorchAttention` needs in addition to those of a step with short sequences.

    length: tokens of the longest sequence, whose keys and values are gathered as a whole and copied once.
    """
    of_token = max((each.num_kv_heads * (each.key_dim + each.value_dim) for each in layers), default=0)
    return 3 * BYTES_AT_ONCE + 2 * length * of_token * dtype.itemsize


class TorchAttention:
    """Attention in plain torch. Gathers each sequence's blocks, then calls `scaled_dot_product_attention`."""

    def __init__(self, cache: KVCache, device: torch.device, groups: LayerGroups = ONE_GROUP) -> None:
        self.block_size = cache.block_size
        self.kv_tensors = cache.tensors
        self.cache = cache
        self.groups = groups
        self._device = device

    def begin_step(self, batch: StepBatch, inputs: ModelInputs) -> AttentionStep:
        rows = [
            build_attention_rows(batch, group=group, block_size=self.block_size, device=self._device)
            for group in range(self.groups.num_groups)
        ]
        return _TorchStep(self, inputs.slots, rows)


_Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # reads a layer's keys and values by block tables


class _TorchStep:
    """One step. In each layer, stores the new tokens' keys and values, then attends over gathered blocks."""

    def __init__(self, attention: TorchAttention, slots: Sequence[torch.Tensor], rows: Sequence[AttentionRows]) -> None:
        """slots, rows: by group of layers."""
        self._cache = attention.cache
        self._groups = attention.groups
        self._slots = slots
        self._rows = rows

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        own = self._groups.place_of(layer)
        rows = self._rows[own.group]
        stored = key[..., value.shape[-1] :] if rules.is_latent else key
        self._cache.write(own.place, self._slots[own.group], stored, value, part=own.part)
        read = partial(self._read, own, (stored, value), rules)
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        if rows.decode is not None:
            of_row = rows.decode.block_tables.shape[1] * self._cache.block_size * (stored[0].nbytes + value[0].nbytes)
            number = max(1, BYTES_AT_ONCE // of_row)
            for part in rows.decode.parts(number):
                output[part.token_indices] = self._decode(read, query[part.token_indices], part, rules)
        for chunk in rows.prefill:
            output[chunk.tokens] = self._prefill(read, query[chunk.tokens], chunk, rules)
        return output

    def _read(
        self, own: Place, like: tuple[torch.Tensor, torch.Tensor], rules: AttentionRules, block_tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, with latent keys completed. like: the new tokens' keys and values."""
        keys, values = self._cache.read(own.place, block_tables, part=own.part, like=like)
        return (torch.cat((values, keys), dim=-1) if rules.is_latent else keys), values

    def _decode(self, read: _Read, query: torch.Tensor, rows: DecodeRows, rules: AttentionRules) -> torch.Tensor:
        """Attend for single tokens of many sequences. query: [num_rows, num_heads, key_dim]."""
        keys, values = read(rows.block_tables)
        at = torch.arange(keys.shape[1], device=keys.device)
        visible = at < rows.lengths[:, None]  # [num_rows, max_length]
        if rules.sliding_window is not None:
            visible &= at >= rows.lengths[:, None] - rules.sliding_window
        _blank_others(keys, values, visible)
        output = _scores_to_output(query[:, None], keys, values, visible[:, None], rules)
        return output[:, 0]

    def _prefill(self, read: _Read, query: torch.Tensor, chunk: PrefillChunk, rules: AttentionRules) -> torch.Tensor:
        """Attend for several tokens of one sequence. query: [num_tokens, num_heads, key_dim]."""
        keys, values = read(chunk.block_table)
        # Blocks behind the window of the first new token may already belong to other sequences.
        first = 0 if rules.sliding_window is None else max(0, chunk.start - rules.sliding_window + 1)
        keys, values = keys[first : chunk.length], values[first : chunk.length]
        return _causal(query, keys, values, start=chunk.start - first, rules=rules)


class ProbeStep:
    """A step without KV memory, for one whole sequence. Records the layers' shapes and rules."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}  # only layers that store their own keys and values
        self.rules: dict[int, AttentionRules] = {}
        self._keys: dict[int, torch.Tensor] = {}  # by layer; kept so that no later tensor reuses their memory
        self.states: list[StateShape] = []  # one for each recurrent operator, in the order of the calls

    @property
    def stored_by(self) -> dict[int, int]:
        """Maps a layer to the earlier layer whose keys and values it reads. Omits layers that store their own."""
        return {layer: own.stored_by for layer, own in self.rules.items() if own.stored_by is not None}

    def next_slots(self, shape: StateShape, inputs: torch.Tensor) -> Slots:
        """Record the state's shape, and return a zero state for one sequence. inputs: [num_tokens, ...]."""
        self.states.append(shape)
        states = torch.zeros(1, *shape.sizes, dtype=shape.dtype, device=inputs.device)
        whole = StatePieces(torch.tensor([[0, len(inputs), NO_STATE, 0]], dtype=torch.int32))
        return Slots(states, whole, TorchRecurrence())

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        if layer in self.rules:
            raise UnknownAttention(f"attention layer {layer} runs more than once in a forward pass")
        stored_by = next((at for at, other in self._keys.items() if _is_same_memory(key, other)), None)
        if stored_by is None:
            value_dim = value.shape[-1]
            key_dim = key.shape[-1] - value_dim if rules.is_latent else key.shape[-1]
            self.layers[layer] = LayerShape(num_kv_heads=key.shape[1], key_dim=key_dim, value_dim=value_dim)
            self._keys[layer] = key
        self.rules[layer] = replace(rules, stored_by=stored_by)
        return _causal(query, key, value, start=0, rules=rules)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal views of one storage. Works for meta tensors, which have no address."""
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.storage_offset(), one.shape, one.stride()) == (other.storage_offset(), other.shape, other.stride())
    )  # fmt: skip


def with_contiguous_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a contiguous last dimension, as kernels require. Copies only if needed."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, start: int, rules: AttentionRules
) -> torch.Tensor:
    """Attend causally. start: the position of the first query.

    query: [num_tokens, num_heads, dim]; keys, values: [length, num_kv_heads, dim].
    """
    at = torch.arange(keys.shape[0], device=keys.device)
    number = max(1, BYTES_AT_ONCE // (query.shape[1] * keys.shape[0] * torch.float32.itemsize))
    parts = []
    for first, part in zip(range(0, len(query), number), torch.split(query, number), strict=True):
        own = torch.arange(start + first, start + first + len(part), device=keys.device)[:, None]
        visible = at <= own
        if rules.sliding_window is not None:
            visible &= at > own - rules.sliding_window
        parts.append(_scores_to_output(part[None], keys[None], values[None], visible[None], rules)[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _blank_others(keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> None:
    """Zero invisible slots in place: they may contain other sequences' NaNs, which a masked score would not remove."""
    others = ~visible[..., None, None]
    keys.masked_fill_(others, 0)
    values.masked_fill_(others, 0)


def _scores_to_output(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, rules: AttentionRules
) -> torch.Tensor:
    """Compute grouped-query attention.

    query: [n, num_tokens, num_heads, key_dim]; keys, values: [n, length, num_kv_heads, dim];
    visible: [n, num_tokens, length] → [n, num_tokens, num_heads, value_dim].
    """
    n, num_tokens, num_heads, _ = query.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    # The query heads that share a KV head become adjacent rows: [n, num_kv_heads, group * num_tokens, dim].
    grouped = query.view(n, num_tokens, num_kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = visible[:, None].repeat(1, 1, group, 1)  # [n, 1, group * num_tokens, length]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if rules.softcap is None and rules.sinks is None:
        output = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=rules.scaling)
    else:
        output = _attend_in_full(grouped, keys, values, mask, rules, num_tokens)
    output = output.view(n, num_kv_heads, group, num_tokens, -1).permute(0, 3, 1, 2, 4)
    return output.reshape(n, num_tokens, num_heads, -1)


def _attend_in_full(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    rules: AttentionRules,
    num_tokens: int,
) -> torch.Tensor:
    """Attend with soft caps or sinks, which `scaled_dot_product_attention` does not support."""
    scores = torch.matmul(query, keys.transpose(2, 3)) * rules.scaling
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if rules.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        n, num_kv_heads = query.shape[:2]
        sinks = rules.sinks.float().view(num_kv_heads, -1, 1).repeat(1, 1, num_tokens).flatten(1)
        column = sinks[None, :, :, None].expand(n, -1, -1, 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
