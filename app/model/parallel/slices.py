"""The part of a Llama-like model's weights that one of several ranks has, as pure functions.

A rank has some of the attention's heads, of the inner numbers of each MLP and each expert, and of the vocabulary. So of
the matrices that make these it has outputs, of those that read them inputs: what such a matrix gives is summed over the
ranks. Norms, routers and the biases of those sums are whole on all ranks.

The vocabulary is divided although only rank 0 needs logits: the output layer is up to a quarter of what a decode step
of a small model reads, and a rank that has none of it would wait. The embedding is divided in the same way: it may be
the same matrix.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from app.errors import InvalidSetup
from app.model.llama import EMBEDDING, HEAD, DecoderSettings, Weights

_BY_HEADS = frozenset({"q_proj", "k_proj", "v_proj"})
_BY_OUTPUTS = frozenset({"gate_proj", "up_proj"})
_BY_INPUTS = frozenset({"o_proj", "down_proj"})


def settings_of_rank(whole: DecoderSettings, *, rank: int, size: int, unit: int) -> DecoderSettings:
    """The settings of one of `size` ranks. Where there are fewer KV heads than ranks, several ranks have the same one.

    unit: the inputs of a matrix come in multiples of so many, those that share a scale where weights are quantised.

    Raises InvalidSetup if the model cannot be divided so.
    """
    heads, kv_heads = whole.num_heads, whole.num_kv_heads
    reasons = [f"{size} does not divide its {heads} query heads"] if heads % size else []
    if kv_heads % size and size % kv_heads:
        reasons.append(f"{size} neither divides its {kv_heads} KV heads nor is a multiple of them")
    for what, count in (
        ("inputs of its attention's output", heads * whole.head_dim),
        ("inner numbers of its MLP", whole.intermediate_size),
        ("inner numbers of its experts", whole.experts.intermediate_size),
    ):
        if not reasons and count % (size * unit):
            reasons.append(f"the {count} {what} are no multiple of {size} x {unit}")
    if reasons:
        raise InvalidSetup(f"the model cannot be divided among {size} ranks: {'; '.join(reasons)}")
    return replace(
        whole,
        num_heads=heads // size,
        num_kv_heads=max(1, kv_heads // size),
        intermediate_size=whole.intermediate_size // size,
        experts=replace(whole.experts, intermediate_size=whole.experts.intermediate_size // size),
        rank=rank,
        num_ranks=size,
    )


def part_of(settings: DecoderSettings, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A rank's part, a view, of the weight that has this name in the model's checkpoint. settings: of the rank."""
    module, kind = name.split(".")[-2:]
    if module in _BY_HEADS:
        return _heads(settings, weight)
    if module in _BY_OUTPUTS:
        return _evenly(settings, weight, dim=0)
    if module in _BY_INPUTS and kind == "weight":
        return _evenly(settings, weight, dim=1)
    if name in (EMBEDDING, HEAD):
        first = settings.rank * settings.rank_tokens
        return weight[first : first + settings.rank_tokens]
    return weight


def parts_of(settings: DecoderSettings, weights: Weights) -> Weights:
    """The same for all of a model's weights."""

    def part(name: str) -> torch.Tensor | None:
        weight = weights(name)
        return None if weight is None else part_of(settings, name, weight)

    return part


def _heads(settings: DecoderSettings, weight: torch.Tensor) -> torch.Tensor:
    """weight: rows of all heads, one head after the other."""
    num_heads, head_dim = weight.shape[0] // settings.head_dim, settings.head_dim
    first = settings.rank * num_heads // settings.num_ranks
    return weight[first * head_dim : (first + max(1, num_heads // settings.num_ranks)) * head_dim]


def _evenly(settings: DecoderSettings, weight: torch.Tensor, *, dim: int) -> torch.Tensor:
    size = weight.shape[dim] // settings.num_ranks
    return weight.narrow(dim, settings.rank * size, size)
