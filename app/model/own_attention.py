"""Supports models whose attention code cannot be replaced, because it ignores transformers' attention interface.

Their code still reads the keys and values of earlier tokens from transformers' cache object. This module fills the
cache object from one sequence's blocks, and writes the new keys and values back to blocks. ALiBi, masks and all other
rules of the model therefore apply. The code does not support packed rows, so the sequences of a step run one after
another, and each one reads all weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from app.engine.batch import StepBatch
from app.model.attention import AttentionRules, AttentionStep, StateShape, UnknownAttention
from app.model.inputs import ModelInputs, to_device
from app.model.kv_cache import KVCache, LayerShape

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


def keep_own_attention(module: PreTrainedModel) -> None:
    """Make a module use its own attention. transformers' `set_attn_implementation` has no effect on old code."""
    from transformers import PreTrainedConfig

    for part in module.modules():
        if isinstance(getattr(part, "config", None), PreTrainedConfig):
            part.config._attn_implementation = "eager"


def run_forward(module: PreTrainedModel, step: AttentionStep | CacheProbe | None, **given: Any) -> Any:
    """Run a module in a step, with any kind of attention, and return its output. given: other keyword arguments."""
    if isinstance(step, CacheProbe | OwnStep):
        return step.run(module, **given)
    return module(**given, use_cache=False, paged=step)


class CacheProbe:
    """A step for one whole sequence, which records the shapes of the keys and values in the cache object."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.rules: dict[int, AttentionRules] = {}  # stays empty, because the model's code applies its own rules
        self.states: list[StateShape] = []  # stays empty
        self.stored_by: dict[int, int] = {}  # stays empty

    def run(self, module: PreTrainedModel, **given: Any) -> Any:
        """Run the module and return its output. Raises UnknownAttention if it does not use the cache object."""
        cache = _cache()
        output = _call(module, cache, given)
        if not cache.layers:
            raise UnknownAttention("its code stores no keys and values in the cache object that it receives")
        for layer, (keys, values) in enumerate(_added(cache, given["input_ids"].shape[1], num_before=0)):
            self.layers[layer] = LayerShape(
                num_kv_heads=keys.shape[1], key_dim=keys.shape[2], value_dim=values.shape[2]
            )
        return output


class OwnAttention:
    """KV memory in blocks for a model with its own attention. A step may contain only one sequence."""

    def __init__(self, cache: KVCache, layers: Mapping[int, LayerShape], device: torch.device) -> None:
        self.block_size = cache.block_size
        self.kv_tensors = cache.tensors
        self.cache = cache
        self.layers = sorted(layers)
        self.device = device

    def begin_step(self, batch: StepBatch, inputs: ModelInputs) -> OwnStep:
        (item,) = batch.scheduled
        num_blocks = -(-item.start // self.block_size)
        return OwnStep(self, to_device(list(item.block_ids[:num_blocks]), self.device), item.start, inputs.slots[0])


class OwnStep:
    """A step of one sequence. `run` moves keys and values between its blocks and the model's cache object."""

    def __init__(self, attention: OwnAttention, blocks: torch.Tensor, num_before: int, slots: torch.Tensor) -> None:
        """blocks: the blocks of the `num_before` earlier tokens. slots: the slots of the new tokens."""
        self._attention = attention
        self._blocks = blocks
        self._num_before = num_before
        self._slots = slots

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        raise UnknownAttention("the model computes attention with its own code")

    def run(self, module: PreTrainedModel, **given: Any) -> Any:
        """Run the module with the sequence's cached tokens, store the new keys and values, and return the output."""
        memory, cache = self._attention.cache, _cache()
        if self._num_before:
            for layer in self._attention.layers:
                kept = (each[: self._num_before].transpose(0, 1)[None] for each in memory.read(layer, self._blocks))
                cache.update(*kept, layer)
        output = _call(module, cache, given)
        added = _added(cache, len(self._slots), num_before=self._num_before)
        for layer, (keys, values) in zip(self._attention.layers, added, strict=True):
            memory.write(layer, self._slots, keys, values)
        return output


def _cache() -> Cache:
    from transformers import DynamicCache

    return DynamicCache()


def _call(module: PreTrainedModel, cache: Cache, given: dict[str, Any]) -> Any:
    """Run a module and return its output, with logits for `logits_to_keep` only, even if old code returns all."""
    known = signature(module.forward).parameters
    wanted = given.get("logits_to_keep", 0)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in known.values())
    named = {name: value for name, value in given.items() if takes_all or name in known}
    output = module(**named, past_key_values=cache, use_cache=True)
    if "logits_to_keep" not in known and isinstance(wanted, torch.Tensor):
        output.logits = output.logits[:, wanted]
    return output


def _added(cache: Cache, num_tokens: int, *, num_before: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's keys and values of the new tokens, [num_tokens, num_kv_heads, dim] each.

    Raises UnknownAttention unless every layer stores exactly one key and one value for each token.
    """
    added = []
    for layer in cache.layers:
        kept = [each for each in (getattr(layer, "keys", None), getattr(layer, "values", None)) if each is not None]
        if [each.shape[2] for each in kept if each.dim() == 4] != [num_before + num_tokens] * 2:
            raise UnknownAttention("a layer does not store one key and one value for each token in its cache object")
        keys, values = (each[0, :, num_before:].transpose(0, 1) for each in kept)
        added.append((keys, values))
    return added
