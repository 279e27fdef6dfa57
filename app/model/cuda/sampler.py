"""Draws tokens and computes log-probabilities on CUDA: each in one launch for all rows of a step.

The drawn token is the token that the plain sampler draws, except where
- two scores with noise differ by less than some 1e-5: the plain sampler has noise in float64, the kernel in float32;
- a token lies within some 1e-6 of the limit of top-p, min-p or top-n-sigma: sums are computed in a different order;
- two logits become one score when they are divided by the temperature: the kernel still ranks the greater logit first.
The kernel applies penalties, biases, bans and masks while it reads the logits, with the same bits as `Sampler.adjust`.
The tokens that penalties and biases change stay on the device, and a step sends only new changes.
If logits are equal, the lower token id comes first. A token whose logit is NaN is never drawn.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import make_dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch

from app.engine.batch import ScheduledSequence
from app.engine.logit_adjustments import LogitAdjustments
from app.engine.request import SamplingParams
from app.model.attention import with_contiguous_rows
from app.model.cuda.launching import kernels_of
from app.model.inputs import bytes_to_device, to_device
from app.model.logprobs import Logprobs
from app.model.sampler import DRAW_FLOATS, DRAW_INTEGERS, Sampler, draw_numbers

# The numbers of a row of `draw_kernel`, which describes them: int64, then float32.
_INTEGERS = [*"mask changes num_changes bans num_bans entries num_entries scratch position".split(), *DRAW_INTEGERS]
_ROW = struct.Struct(f"{len(_INTEGERS)}q{len(DRAW_FLOATS)}f0q")  # 0q: the next row is aligned
_PLACES = (*range(len(_INTEGERS)), *range(2 * len(_INTEGERS), 2 * len(_INTEGERS) + len(DRAW_FLOATS)))
# The place of each number, in numbers of its size, and the size of a row in int64. Launches hash it by identity.
ROW_LAYOUT: Any = make_dataclass("RowLayout", [*_INTEGERS, *DRAW_FLOATS, "size"], eq=False)(*_PLACES, _ROW.size // 8)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_CHANGE_BYTES = 5 * 4
_FEWEST_ENTRIES = 256  # entries in the first allocation for a sequence: 4 KiB
# Tokens in one pass of a program's loop, 4 for each thread. Float32 uses half, because more would spill registers.
_TILE = 2048
_NUM_WARPS = 16
_MOST_TOP = 32  # the kernel is compiled for this number of likeliest tokens at startup; the API allows 20
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a float32 that are always zero


class TritonSampler(Sampler):
    """A sampler for logits in the memory of a GPU."""

    def __init__(self, device: torch.device, *, tile: int = _TILE) -> None:
        """tile: the number of 16-bit logits that a program reads at once, a power of two."""
        self._kernels = kernels_of("sampler_kernels", device)
        self._tile = tile
        self._entries: WeakKeyDictionary[LogitAdjustments, DeviceEntries] = WeakKeyDictionary()

    def sample(
        self, logits: torch.Tensor, items: Sequence[ScheduledSequence], *, likeliest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Draw with one launch, or with none if `likeliest` is given and all rows take the likeliest token."""
        if likeliest is not None and all(item.sampling.is_greedy and item.takes_all_logits for item in items):
            return likeliest
        tokens = torch.empty(len(items), dtype=torch.long, device=logits.device)
        if not items:
            return tokens
        try:
            self._draw(with_contiguous_rows(logits), items, tokens)
        except Exception:
            self._entries.clear()  # changes may not have reached the device
            raise
        return tokens

    def logprobs(self, logits: torch.Tensor, rows: Sequence[int], token_ids: torch.Tensor, *, num_top: int) -> Logprobs:
        """Compute log-probabilities in one launch, without a buffer of the size of the logits. NaN counts as -inf."""
        logits = with_contiguous_rows(logits)
        found = Logprobs.empty(len(rows), num_top, token_ids.device)
        self._kernels.logprobs_kernel[(len(rows),)](
            logits, logits.stride(0), logits.shape[-1], to_device(rows, logits.device), token_ids, num_top, *found,
            **_sizes(logits, self._tile), most_top=max(_MOST_TOP, 1 << (num_top - 1).bit_length()),
        )  # fmt: skip
        return found

    def _draw(self, logits: torch.Tensor, items: Sequence[ScheduledSequence], tokens: torch.Tensor) -> None:
        vocab_size = logits.shape[-1]
        # The scratch memory of a row with changed logits has a bit for each token, and the changed logits in float32.
        num_changed = sum(_changes_logits(item) for item in items)
        scratch = torch.empty(num_changed, -(-vocab_size // 32) + vocab_size, dtype=torch.int32, device=logits.device)
        self._kernels.draw_kernel[(len(items),)](
            logits, logits.stride(0), vocab_size, self._facts_of(items, scratch), tokens,
            **_sizes(logits, self._tile),
            layout=ROW_LAYOUT, enable_fp_fusion=False,  # products and sums are rounded separately, as on a CPU
        )  # fmt: skip

    def _facts_of(self, items: Sequence[ScheduledSequence], scratch: torch.Tensor) -> torch.Tensor:
        """Return the kernel's inputs besides logits: the numbers of each row, then masks, then changes and bans."""
        masks = [b"" if item.matcher is None else item.allowed() for item in items]
        of_masks = b"".join(masks)
        next_mask = len(items) * _ROW.size
        of_masks += bytes(-(next_mask + len(of_masks)) % 4)
        first_value = (next_mask + len(of_masks)) // 4
        rows, values, next_scratch = bytearray(), bytearray(), scratch.data_ptr()
        sent: dict[LogitAdjustments, tuple[int, int]] = {}
        for item, mask in zip(items, masks, strict=True):
            of_values: tuple[int, ...] = (0,) * 7
            if _changes_logits(item):
                of_values = (*self._values_of(item, values, first_value, sent, scratch.device), next_scratch)
                next_scratch += scratch.stride(0) * scratch.itemsize
            sampling = _GREEDY if item.sampling.is_greedy else item.sampling
            rows += _ROW.pack(next_mask if mask else 0, *of_values, item.end, *draw_numbers(sampling))
            next_mask += len(mask)
        together = rows + of_masks + values
        return bytes_to_device(together + bytes(-len(together) % 8), torch.long, scratch.device)

    def _values_of(
        self,
        item: ScheduledSequence,
        values: bytearray,
        first_value: int,
        sent: dict[LogitAdjustments, tuple[int, int]],
        device: torch.device,
    ) -> tuple[int, ...]:
        """Append the changes and bans of a row to `values`, and return their places (see `draw_kernel`).

        sent: the places of changes by sequence. Programs of its rows run in any order, so each applies all changes.
        """
        own, entries, num_entries = item.adjustments, 0, 0
        at_change, num_changes = 0, 0
        if own is not None:
            kept = self._entries.get(own)
            if kept is None:
                kept = self._entries[own] = DeviceEntries(device)
            if own not in sent:
                changes = kept.changes(own)
                sent[own] = first_value + len(values) // 4, len(changes) // _CHANGE_BYTES
                values += changes
            at_change, num_changes = sent[own]
            entries, num_entries = kept.tensor.data_ptr(), len(kept)
        bans = array("i", () if item.matcher is not None else item.banned_token_ids)
        at_ban = first_value + len(values) // 4
        values += bans.tobytes()
        return (at_change, num_changes, at_ban, len(bans), entries, num_entries)


class DeviceEntries:
    """The tokens of one sequence whose logits penalties and biases change, on the device: [_, 4], see `draw_kernel`."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.empty(0, 4, dtype=torch.int32, device=device)
        self._places: dict[int, int] = {}
        self._biases: dict[int, float] = {}
        self._only_biased: set[int] = set()  # biased tokens that are not in the prompt or the output
        self._num_generated = 0

    def __len__(self) -> int:
        return len(self._places)

    def changes(self, own: LogitAdjustments) -> bytes:
        """Return the packed changes that the device lacks."""
        new: Iterable[int] = own.generated[self._num_generated :]
        self._num_generated = len(own.generated)
        if not len(self.tensor):
            self._biases.update(zip(own.biased, own.biases, strict=True))
            self._only_biased.update(own.biased)
            new = [*own.seen, *own.generated]
        self._only_biased.difference_update(new)
        changed: Iterable[int] = dict.fromkeys(chain(new, () if len(self.tensor) else own.biased))
        places = self._places
        new_ones = [token for token in changed if token not in places]
        places.update(zip(new_ones, range(len(places), len(places) + len(new_ones)), strict=True))
        if len(self) > len(self.tensor):
            self.tensor = self.tensor.new_empty(max(_FEWEST_ENTRIES, 2 * len(self)), 4)
            changed = places
        return self._packed(own, list(changed)) if changed else b""

    def _packed(self, own: LogitAdjustments, tokens: list[int]) -> bytes:
        """Pack changes column by column, because a prompt has thousands of tokens."""
        packed = array("i", bytes(_CHANGE_BYTES * len(tokens)))
        packed[0::5] = array("i", [self._places[token] for token in tokens])
        packed[1::5] = array("i", tokens)
        penalty, only_biased, biases = own.repetition_penalty, self._only_biased, self._biases
        numbers = (
            [1.0 if token in only_biased else penalty for token in tokens],
            own.deductions_of(tokens),
            [biases.get(token, 0.0) for token in tokens],
        )
        for column, of_column in enumerate(numbers, start=2):
            packed[column::5] = array("i", array("f", of_column).tobytes())
        return packed.tobytes()


def _sizes(logits: torch.Tensor, tile: int) -> dict[str, int]:
    of_row = 1 << (logits.shape[-1] - 1).bit_length()
    tile = min(tile * 2 // logits.itemsize, of_row)
    return {"unused": _UNUSED_BITS[logits.dtype], "tile": tile, "num_warps": _NUM_WARPS}


def _changes_logits(item: ScheduledSequence) -> bool:
    """Return whether any logits change. A matcher's mask excludes banned tokens without changing logits."""
    return item.adjustments is not None or (bool(item.banned_token_ids) and item.matcher is None)
