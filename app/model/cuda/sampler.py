"""Draws tokens on CUDA: the same function as `app/model/sampler.py`, in one launch for all rows of a step.

A token is the one that the plain sampler draws, except where
- two tokens' scores with noise differ by less than some 1e-5: its noise has float64 inside, that of the kernel float32;
- a token lies within some 1e-6 of the edge of top-p or min-p: sums of weights are rounded in another order;
- two logits become one score when they are divided by the temperature: here the greater logit still goes first.
Of equal logits the lower token goes first. Logits that are not numbers are never drawn.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from app.engine.batch import ScheduledSequence
from app.model.cuda.attention import NoKernels
from app.model.inputs import bytes_to_device
from app.model.sampler import adjust

_FACTS = "6q3f4x"  # of a row, see `draw_kernel`
_TILE = 2048  # tokens of one pass of a program's loop: 4 for each of its threads
_NUM_WARPS = 16
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low ones of a float32, zero in this type


class TritonSampler:
    """Replaces `sampler.sample` for logits in a device's memory."""

    def __init__(self, device: torch.device, *, tile: int = _TILE) -> None:
        """tile: tokens of the vocabulary that a program looks at together, a power of two."""
        self._kernels = NoKernels() if device.type == "meta" else _kernels()
        self._tile = tile
        self._no_masks = torch.zeros(1, dtype=torch.uint8, device=device)

    def __call__(
        self, logits: torch.Tensor, items: Sequence[ScheduledSequence], *, likeliest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `sampler.Sample`. A launch; two and a copy of their logits for rows with penalties or biases; none where
        all rows take the likeliest, which are known."""
        if likeliest is not None and all(item.sampling.is_greedy and item.takes_all_logits for item in items):
            return likeliest
        tokens = torch.empty(len(items), dtype=torch.long, device=logits.device)
        adjusted = [place for place, item in enumerate(items) if item.adjustments is not None]
        if not adjusted:
            self._draw(logits, range(len(items)), range(len(items)), items, tokens)
            return tokens
        self._draw(
            adjust(logits, adjusted, [items[place] for place in adjusted]),
            range(len(adjusted)),
            adjusted,
            items,
            tokens,
        )
        if plain := [place for place, item in enumerate(items) if item.adjustments is None]:
            self._draw(logits, plain, plain, items, tokens)
        return tokens

    def _draw(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        places: Sequence[int],
        items: Sequence[ScheduledSequence],
        tokens: torch.Tensor,
    ) -> None:
        """One token from each of some rows. places: of the rows, in items and in tokens."""
        if not rows:
            return
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        vocab_size, masks = logits.shape[-1], bytearray()
        facts = bytearray()
        for row, place in zip(rows, places, strict=True):
            item = items[place]
            mask = item.mask(vocab_size)
            facts += _facts_of(item, row, place, -1 if mask is None else len(masks) // len(mask))
            masks += mask or b""
        of_rows = bytes_to_device(facts, torch.long, logits.device)
        of_masks = bytes_to_device(masks, torch.uint8, logits.device) if masks else self._no_masks
        self._kernels.draw_kernel[(len(rows),)](
            logits, logits.stride(0), vocab_size, of_rows, of_rows.view(torch.float32), of_masks, -(-vocab_size // 8),
            tokens, unused=_UNUSED_BITS[logits.dtype], tile=min(self._tile, 1 << (vocab_size - 1).bit_length()),
            num_warps=_NUM_WARPS,
        )  # fmt: skip


def _facts_of(item: ScheduledSequence, row: int, place: int, mask: int) -> bytes:
    sampling = item.sampling
    if sampling.is_greedy:
        return struct.pack(_FACTS, row, place, mask, 0, 0, 0, 0.0, 1.0, 0.0)
    return struct.pack(
        _FACTS, row, place, mask, sampling.seed, item.end, sampling.top_k, sampling.temperature, sampling.top_p,
        sampling.min_p,
    )  # fmt: skip


@cache
def _kernels() -> Any:
    """The kernels' module, imported on first use: a machine without Triton imports this file too."""
    from app.model.cuda import sampler_kernels

    return sampler_kernels
