"""Reads the weights of AWQ, GPTQ and compressed-tensors, which pack several integers of a few bits into an int32.

A weight is its integer minus a zero point, times a scale. For each output, a group of inputs shares these two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Method → (supported versions, supported bits). The first version is the default if config.json names none. 3 bits
# are not supported, because some integers would span two int32.
_READ = {
    "awq": (("gemm",), (4,)),
    "gptq": (("gptq", "gptq_v2"), (2, 4, 8)),
    "compressed-tensors": (("pack-quantized",), (2, 4, 8)),
}
# The tensors that replace a weight in the files: integers, scales, zero points, and the group of each input.
_PARTS = ("qweight", "scales", "qzeros", "g_idx")
_PARTS_OF_COMPRESSED_TENSORS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
_PLACES_IN_AWQ = [0, 4, 1, 5, 2, 6, 3, 7]  # the place of each of eight outputs in an int32, from the lowest bits up
ROWS_AT_ONCE = 1024  # rows that `multiplied_out` converts at once, to bound its memory


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint packs its weights, according to its config.json."""

    method: str
    bits: int
    group_size: int | None  # inputs per group; None if all inputs form one group
    has_zeros: bool = True  # if False, every zero point is the middle of the range
    has_order: bool = False  # whether a tensor assigns each input to a group; otherwise groups are adjacent inputs
    adds_one: bool = False  # whether zero points are stored less 1

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Packing | None:
        """Return the packing that a `quantization_config` describes, or None if it describes no packed weights.

        Raises ValueError if it describes an unsupported form of a supported method.
        """
        method = str(found.get("quant_method"))
        if method == "compressed-tensors":
            if found.get("transform_config"):
                raise ValueError("it has a transform_config, which transforms inputs and is not supported")
            if found.get("format") != "pack-quantized":
                return None
            found = _in_words_of_gptq(found)
        if method not in _READ:
            return None
        (versions, widths), size = _READ[method], found.get("group_size", 128)
        named = [found.get(key) for key in ("checkpoint_format", "version", "format")]
        version = str(next(filter(None, named), versions[0])).lower()
        version = "llm-awq" if found.get("backend") == "llm-awq" else version
        bits = found.get("bits", 4 if method == "awq" else None)
        for name, value, known in (("version", version, versions), ("bits", bits, widths)):
            if value not in known:
                raise ValueError(f"its {name} is {value}; only {' or '.join(map(str, known))} can be read")
        if size in (None, -1):
            size = None
        elif type(size) is not int or size < 1:
            raise ValueError(f"its group_size is {size!r}; it must be a number of inputs, or -1 for all")
        return cls(
            method, bits, size, has_zeros=method != "compressed-tensors" or not found["sym"],
            has_order=bool(found.get("desc_act")) and size is not None, adds_one=version == "gptq",
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.method} in {self.bits} bits, groups of {self.group_size or 'all'} inputs"

    def weight(self, name: str, find: Callable[[str], torch.Tensor | None]) -> PackedWeight | None:
        """Return the weight with this name, or None if the files do not contain it in packed form.

        find: returns a tensor in the files by name, or None.

        Raises ValueError, with the numbers, if the weight's tensors do not fit together.
        """
        inputs_first, per_word = self.method != "compressed-tensors", 32 // self.bits
        ends = _PARTS if inputs_first else _PARTS_OF_COMPRESSED_TENSORS
        names = [name.removesuffix("weight") + end for end in ends]
        words, scales, zeros, groups = map(find, names)
        if words is None:
            return None
        if words.dtype is not torch.int32 or words.dim() != 2 or not words.numel():
            raise ValueError(f"{names[0]} is {_shown(words)}; it must be a matrix of int32")
        num_outputs, num_inputs = reversed(words.shape) if inputs_first else words.shape
        if self.method == "awq":
            num_outputs *= per_word
        else:
            num_inputs *= per_word
        size = self.group_size or num_inputs
        if num_inputs % size:
            raise ValueError(f"{names[0]} has {num_inputs} inputs, which is not a multiple of the group size {size}")
        num_groups = num_inputs // size
        for part, tensor, shape, is_needed in (
            (names[1], scales, [num_outputs, num_groups], True),
            (names[2], zeros, [-(-num_outputs // per_word), num_groups], self.has_zeros),
            (names[3], groups, [num_inputs], self.has_order),
        ):
            shape = shape[::-1] if inputs_first else shape
            if tensor is None and is_needed:
                raise ValueError(f"{names[0]} has no {part}")
            if tensor is not None and (list(tensor.shape) != shape or tensor.is_floating_point() != (tensor is scales)):
                raise ValueError(
                    f"{part} is {_shown(tensor)}; it must be {shape} for {num_outputs} outputs of {num_inputs} inputs "
                    f"in {num_groups} groups"
                )
        if groups is not None and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise ValueError(f"{names[3]} has groups from {groups.min()} to {groups.max()}; there are {num_groups}")
        assert scales is not None, "it is needed"
        if zeros is not None and self.adds_one:
            zeros = zeros + sum(1 << at for at in range(0, 32, self.bits))  # adds 1 to each packed number
        if inputs_first:
            words, scales, zeros = words.t(), scales.t(), None if zeros is None else zeros.t()
        return PackedWeight(self, torch.Size((num_outputs, num_inputs)), words, scales, zeros, groups)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The packed tensors of a weight. Matrices are transposed where needed, so that outputs come first."""

    packing: Packing
    shape: torch.Size
    words: torch.Tensor  # [num_outputs, words of inputs]; AWQ: [words of outputs, num_inputs]
    scales: torch.Tensor  # [num_outputs, num_groups]
    zeros: torch.Tensor | None  # [words of outputs, num_groups]
    groups: torch.Tensor | None  # [num_inputs]; None if groups consist of adjacent inputs

    def multiplied_out(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantised weight, [num_outputs, num_inputs]. It is computed in float32 and rounded once."""
        num_outputs, num_inputs = self.shape
        bits, is_awq, scales = self.packing.bits, self.packing.method == "awq", self.scales.float().contiguous()
        if self.zeros is None:
            zeros = torch.full_like(scales, 1 << bits - 1, dtype=torch.int32)
        else:
            zeros = _unpacked(self.zeros, bits, dim=0, is_awq=is_awq)
        side_by_side = torch.arange(num_inputs) // (num_inputs // scales.shape[1])
        groups = side_by_side if self.groups is None else self.groups.long()
        result = torch.empty(num_outputs, num_inputs, dtype=dtype)
        for first in range(0, num_outputs, ROWS_AT_ONCE):
            rows = slice(first, min(first + ROWS_AT_ONCE, num_outputs))
            words = self.words[rows.start // 8 : rows.stop // 8] if is_awq else self.words[rows]
            numbers = _unpacked(words, bits, dim=0 if is_awq else 1, is_awq=is_awq)
            torch.mul(numbers.sub_(zeros[rows][:, groups]), scales[rows][:, groups], out=result[rows])
        return result


def _unpacked(words: torch.Tensor, bits: int, *, dim: int, is_awq: bool) -> torch.Tensor:
    """Unpack each int32 into integers along `dim`. The order is from the lowest bits up, or that of AWQ."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shifts = shifts[_PLACES_IN_AWQ] if is_awq else shifts
    numbers = words.contiguous().unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (1 - dim))
    return numbers.bitwise_and_((1 << bits) - 1).flatten(dim, dim + 1)


def _in_words_of_gptq(found: Mapping[str, Any]) -> dict[str, Any]:
    """Translate compressed-tensors' description to GPTQ's fields. Raises ValueError if groups differ."""
    kinds = [each["weights"] for each in (found.get("config_groups") or {}).values() if each.get("weights")]
    if not kinds or any(each != kinds[0] for each in kinds):
        raise ValueError(f"its config_groups describe {len(kinds)} kinds of weights; only one kind can be read")
    return {
        "bits": kinds[0].get("num_bits"),
        "group_size": kinds[0].get("group_size"),
        "sym": kinds[0].get("symmetric", True),
        "desc_act": kinds[0].get("actorder") in ("group", "dynamic"),
    }


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
