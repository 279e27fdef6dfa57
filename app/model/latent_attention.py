"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), computed on the latents themselves.

The keys and values of all heads are products of a token's latent; all heads share one rotated key. This module makes a
layer store only the latent and the rotated key. Queries are multiplied by the key matrix before attention, and the
result by the value matrix afterwards ("absorbed", section 2.1.2 of the paper). DeepSeek-V3 then stores 576 numbers per
token and layer instead of 40,960.

transformers' modules expand the latents in their method `expand_kv`, which this module replaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LatentHeads:
    """The matrices of one layer that turn a latent into the keys and values of all heads."""

    def __init__(self, module: Any) -> None:
        """module: an attention layer of transformers with `kv_b_proj`, see `store_latents`."""
        self._nope_dim = module.qk_nope_head_dim
        weight = module.kv_b_proj.weight.detach()
        by_head = weight.view(-1, self._nope_dim + module.v_head_dim, weight.shape[1])
        self._keys, self._values = by_head.split((self._nope_dim, module.v_head_dim), dim=1)  # [num_heads, dim, latent]

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Convert queries so that they can be multiplied with latents and rotated keys.

        query: [num_heads, num_tokens, nope_dim + rope_dim] → [num_heads, num_tokens, latent_dim + rope_dim].
        """
        plain, rotated = query[..., : self._nope_dim], query[..., self._nope_dim :]
        return torch.cat((torch.bmm(plain, self._keys), rotated), dim=-1)

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """Convert attended latents [num_tokens, num_heads, latent_dim] to values [num_tokens, num_heads, value_dim]."""
        return torch.bmm(latents.transpose(0, 1), self._values.transpose(1, 2)).transpose(0, 1)


def store_latents(module: PreTrainedModel, attention_name: str) -> None:
    """Make layers with latent attention store latents, but only while the model runs with the named attention."""
    for part in module.modules():
        linear = getattr(part, "kv_b_proj", None)
        # Only plain linear layers qualify: quantised weights have another layout, and a bias cannot be absorbed.
        if hasattr(part, "expand_kv") and type(linear) is torch.nn.Linear and linear.bias is None:
            _store_latents(part, attention_name)


def store_expanded(module: PreTrainedModel) -> None:
    """Undo `store_latents`: layers store the keys and values of all heads again."""
    for part in module.modules():
        if hasattr(part, "latent_heads"):
            del part.latent_heads, part.expand_kv


def _store_latents(part: Any, attention_name: str) -> None:
    expand = part.expand_kv

    def latents(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """kv_nope: [1, 1, num_tokens, latent_dim], k_rot: [1, 1, num_tokens, rope_dim]."""
        if part.config._attn_implementation != attention_name:
            result: tuple[torch.Tensor, torch.Tensor] = expand(kv_nope, k_rot)
            return result
        return torch.cat((kv_nope, k_rot), dim=-1), kv_nope

    part.expand_kv = latents
    part.latent_heads = LatentHeads(part)
