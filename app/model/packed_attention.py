"""Attention over several whole sequences in one row, each with itself only; the loader registers it with transformers.

There is no padding and no KV memory. A layer attends in both directions, or backwards where the model is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from app.model.attention import UnknownAttention, check_arguments

PACKED_ATTENTION_NAME = "carousel_packed"


class PackedSequences:
    """Where the sequences of a row begin and end."""

    def __init__(self, ends: Sequence[int]) -> None:
        self.bounds = list(pairwise([0, *ends]))  # first token, and the one behind the last


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    packed: PackedSequences | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' interface; returns [1, num_tokens, num_heads, value_dim]."""
    if packed is None:
        raise UnknownAttention("the model does not hand forward keyword arguments to its attention layers")
    if attention_mask is not None:
        raise UnknownAttention("the model puts an attention mask of its own on top")
    check_arguments(others)
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for first, end in packed.bounds:
        attended = functional.scaled_dot_product_attention(
            query[:, :, first:end],
            key[:, :, first:end],
            value[:, :, first:end],
            scale=scaling,
            is_causal=bool(getattr(module, "is_causal", True)),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        output[:, first:end] = attended.transpose(1, 2)
    return output, None
