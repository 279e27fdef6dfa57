"""Runs the forward pass of a Llama-like model on CUDA, as the C++ decoder (`cpu/decoder.py`) does on a CPU.

One matrix product computes queries, keys and values, and another computes gate and up. Three of our kernels
(`decoder_kernels.py`) compute everything between the products and the attention. A layer needs ten launches if every
sequence has one token, otherwise eleven. Experts (`experts.py`) and FP8 (`fp8.py`) each add one launch. The loader
verifies the decoder's logits against transformers' code.

Nothing here waits for the device or reads from it, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.nn import functional

from app.model.cuda.adapters import AdaptedRows
from app.model.cuda.attention import TritonAttention, TritonStep, padded
from app.model.cuda.experts import ExpertMixture
from app.model.cuda.fp8 import Fp8Rows, Rows, empty_inputs, linear, plain
from app.model.cuda.launching import kernels_of
from app.model.cuda.weights import CudaLayer, CudaWeights
from app.model.forward import Prediction
from app.model.parallel.split_plan import Exchange

_KERNELS_PER_LAYER = 6  # launches of our own kernels for a layer in a decode step, including attention
_KERNELS_OF_EXPERTS = 8  # the same for a layer with experts
_GATE_TILE = 1024  # outputs per program, eight for each thread of its four warps
# Eight numbers of queries for each thread. A thread needs at least one, because queries change in place.
_NUMBERS_PER_WARP = 256
_NORM_NUMBERS_PER_WARP = 512

_Output = TypeVar("_Output", bound=Rows)


class CudaDecoder:
    """The `DeviceForward` of Llama-like models, with fused weights and our paged attention."""

    def __init__(
        self,
        weights: CudaWeights,
        attention: TritonAttention,
        *,
        num_layers: int = 0,
        group: Exchange | None = None,
    ) -> None:
        """Run the first `num_layers` layers, or all if it is 0, followed by the final norm and the head.

        group: the ranks, if the weights are one rank's part. All ranks run every step, but only rank 0 gets all logits.
        """
        self._group = group
        self._weights, self._settings, self._attention = weights, weights.settings, attention
        self._layers = weights.layers[:num_layers] if num_layers else weights.layers
        self._kernels = kernels_of("decoder_kernels", attention.device)
        self._mixture = ExpertMixture(
            weights.settings.experts, attention.device, batch_invariant=attention.batch_invariant
        )
        self._num_experts = max((len(each.down) for each in self._layers if each.router is not None), default=0)

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: TritonStep,
        *,
        logits_indices: torch.Tensor | None = None,
        hidden_indices: torch.Tensor | None = None,
        adapted: AdaptedRows | None = None,
    ) -> Prediction:
        residual = functional.embedding(token_ids[0], self._weights.embedding)  # [num_tokens, hidden_size]
        addend = None
        lengths = positions.new_zeros(len(self._layers), self._num_experts, dtype=torch.int32)
        for index, layer in enumerate(self._layers):
            normed = empty_inputs(layer.query_key_value, len(residual))
            self._add_norm(addend, residual, layer.input_norm, normed)
            addend = self._attention_output(index, layer, normed, positions[0], step, adapted)
            normed = empty_inputs(layer.gate_up, len(residual))
            self._add_norm(addend, residual, layer.post_attention_norm, normed)
            addend = self._mlp_output(index, layer, normed, lengths[index], adapted)
        hidden = self._add_norm(addend, residual, self._weights.final_norm, torch.empty_like(residual))
        wanted = hidden if logits_indices is None else hidden[logits_indices]
        logits = functional.linear(wanted, self._weights.head)
        if self._group is not None and len(self._weights.head) < len(self._weights.embedding):
            logits = self._group.gather_at_first(logits)
        return Prediction(
            logits,
            hidden=None if hidden_indices is None else hidden[hidden_indices],
        )

    def _attention_output(
        self,
        index: int,
        layer: CudaLayer,
        normed: Rows,
        positions: torch.Tensor,
        step: TritonStep,
        adapted: AdaptedRows | None,
    ) -> torch.Tensor:
        """Return the output of a layer's attention, [num_tokens, hidden_size], after storing new keys and values."""
        num_heads, own = self._settings.num_heads, self._settings.layers[index]
        joined = linear(normed, layer.query_key_value, layer.query_key_value_bias)
        if adapted is not None:
            adapted.add(index, "query_key_value", normed, joined)
        heads = joined.view(len(joined), num_heads + 2 * own.num_kv_heads, own.head_dim)
        self._rotate_and_write(index, layer, heads, positions, step.slots)
        attended = step.attend_written(index, heads[:, :num_heads], layer.rules)
        inputs = self._as_inputs(attended.flatten(1), layer.output)
        output = linear(inputs, layer.output, layer.output_bias)
        if adapted is not None:
            adapted.add(index, "output", inputs, output)
        return self._summed(output)

    def _mlp_output(
        self, index: int, layer: CudaLayer, normed: Rows, lengths: torch.Tensor, adapted: AdaptedRows | None
    ) -> torch.Tensor:
        """Return the output of a layer's MLP, [num_tokens, hidden_size]. lengths: [num_experts] zeros, overwritten.

        Experts without ranks return [num_tokens, num_chosen, hidden_size]: `_add_norm` sums the experts' outputs.
        """
        if layer.router is not None:
            chosen = self._mixture(plain(normed), layer.router, plain(layer.gate_up), plain(layer.down), lengths)
            return chosen if self._group is None else self._summed(chosen.sum(dim=1))
        gate_up = linear(normed, layer.gate_up)
        if adapted is not None:
            adapted.add(index, "gate_up", normed, gate_up)
        gated = self._gated(gate_up, empty_inputs(layer.down, len(gate_up)))
        output = linear(gated, layer.down)
        if adapted is not None:
            adapted.add(index, "down", gated, output)
        return self._summed(output)

    def _summed(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks in place, because each rank computes only some heads or some columns of the MLP."""
        if self._group is not None:
            self._group.all_reduce(part)
        return part

    def _add_norm(
        self, addend: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, normed: _Output
    ) -> _Output:
        """Add to the residual in place, write its norm to `normed`, and return `normed`: [num_tokens, hidden_size].

        addend: may contain several rows for each token, [num_tokens, num_addends, hidden_size].
        """
        num_tokens, size = residual.shape
        width = padded(size, 1)
        self._kernels.add_norm_kernel[(num_tokens,)](
            residual if addend is None else addend, residual, weight, *_pointers(normed), self._settings.epsilon,
            size=size, padded=width, num_addends=0 if addend is None else addend[0].numel() // size,
            in_fp8=isinstance(normed, Fp8Rows),
            num_warps=_warps(width, _NORM_NUMBERS_PER_WARP),
        )  # fmt: skip
        return normed

    def _as_inputs(self, rows: torch.Tensor, weight: Rows) -> Rows:
        """Convert rows to FP8 if the weight is in FP8, because a product needs both in one type."""
        if isinstance(weight, torch.Tensor):
            return rows
        num_rows, size = rows.shape
        width, inputs = padded(size, 1), empty_inputs(weight, num_rows)
        self._kernels.quantise_kernel[(num_rows,)](
            rows, *_pointers(inputs), size=size, padded=width, num_warps=_warps(width, _NORM_NUMBERS_PER_WARP)
        )
        return inputs

    def _rotate_and_write(
        self, index: int, layer: CudaLayer, heads: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rotate queries in place, store keys, values. heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]."""
        settings, own = self._settings, self._settings.layers[index]
        cache = self._attention.cache
        keys, values = cache.layer(index)
        group, half = settings.num_heads // own.num_kv_heads, own.head_dim // 2
        group_padded, half_padded = padded(group, 1), padded(half, 1)
        self._kernels.rotate_write_kernel[(heads.shape[0], own.num_kv_heads)](
            heads, _or_any(layer.query_norm, heads), _or_any(layer.key_norm, heads), self._weights.rotary, positions,
            slots, keys, values, _or_any(cache.scales.get(index), heads), settings.epsilon,
            num_kv_heads=own.num_kv_heads, group=group, half=half, group_padded=group_padded,
            half_padded=half_padded, block_size=cache.block_size, has_norm=layer.query_norm is not None,
            in_fp8=cache.in_fp8,
            num_warps=_warps(group_padded * half_padded, _NUMBERS_PER_WARP),
        )  # fmt: skip

    def _gated(self, gate_up: torch.Tensor, output: _Output) -> _Output:
        """Write SiLU(gate) * up to `output` and return it: [num_tokens, 2 * size] → [num_tokens, size]."""
        num_tokens, size, in_fp8 = gate_up.shape[0], gate_up.shape[1] // 2, isinstance(output, Fp8Rows)
        tile = padded(size, 1) if in_fp8 else _GATE_TILE  # FP8 has one scale for a whole row
        self._kernels.gate_kernel[(num_tokens, -(-size // tile))](
            gate_up, *_pointers(output), size=size, tile=tile, in_fp8=in_fp8, num_warps=_gate_warps(tile)
        )
        return output


def num_kernels_of(weights: CudaWeights) -> int:
    """Return how many of our own kernels a decode step launches, including attention and the final norm."""
    of_layers = (_KERNELS_PER_LAYER if each.router is None else _KERNELS_OF_EXPERTS for each in weights.layers)
    return 1 + sum(of_layers) + sum(isinstance(each.output, Fp8Rows) for each in weights.layers)


def _pointers(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pointers to values and scales. Rows without scales repeat the values, because kernels need a pointer."""
    return rows if isinstance(rows, Fp8Rows) else (rows, rows)


def _gate_warps(tile: int) -> int:
    """Return the number of warps. At most 16, because more would leave each thread fewer than 128 registers."""
    return min(16, max(4, tile // 1024))


def _or_any(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


def _warps(size: int, numbers_per_warp: int) -> int:
    return min(8, max(1, size // numbers_per_warp))
