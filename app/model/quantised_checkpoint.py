"""Decides how a quantised checkpoint is loaded, and explains why one cannot be served.

`Checkpoint` dequantises packed weights, and 8-bit weights with scales, when it reads them. transformers loads all other
kinds, and needs an extra package for most of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from app.model.packed_numbers import ROWS_AT_ONCE, Packing

# The methods in which a weight is its number times its scale. Weights in other methods would be read incorrectly.
_BY_SCALES = frozenset({"fp8", "fbgemm_fp8", "compressed-tensors", "modelopt"})
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@dataclass(frozen=True, slots=True)
class Quantised:
    """How config.json describes a checkpoint's quantised weights."""

    method: str  # `quant_method`, such as gptq
    block: tuple[int, int] | None = None  # rows and columns that share a scale, if given
    packing: Packing | None = None
    unread: str = ""  # the reason if the method is supported, but not this form of it

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Quantised | None:
        """Read the content of a config.json. Returns None if the weights are not quantised."""
        text: Mapping[str, Any] = described.get("text_config") or {}
        found = described.get("quantization_config") or text.get("quantization_config")
        if not found:
            return None
        bits = next((f"_{n}bit" for n in (4, 8) if found.get(f"load_in_{n}bit")), "")
        block = found.get("weight_block_size")
        packing, unread = None, ""
        try:
            packing = Packing.of(found)
        except ValueError as error:
            unread = str(error)
        method = str(found.get("quant_method") or "unnamed") + bits
        return cls(method, tuple(block) if block else None, packing, unread)

    @property
    def has_scales(self) -> bool:
        """Whether `Checkpoint` can dequantise the weights."""
        return not self.unread and (self.packing is not None or self.method in _BY_SCALES)

    def why_not(self, path: str, reason: str, device: torch.device) -> str:
        """Return the error message. reason: transformers' reason, which names the missing package."""
        reason = f"{self.unread}; {reason}" if self.unread else reason
        fix = "with model.quantization: int8" if device.type == "cpu" else "in bfloat16"
        return (
            f"{path} is a checkpoint quantised by {self.method}, which cannot be loaded on {device.type} with the "
            f"installed packages: {reason}. Install what is missing, or serve the unquantised checkpoint, {fix}"
        )


def loading_options(quantised: Quantised, device: torch.device) -> dict[str, Any]:
    """Return the options with which transformers loads the checkpoint onto a device.

    Raises ValueError for an unknown method, because transformers would load its numbers without their scales.
    """
    from transformers import Mxfp4Config
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    known = {"bitsandbytes", *AUTO_QUANTIZER_MAPPING}
    if quantised.method not in known:
        raise ValueError(f"transformers does not support it, only {', '.join(sorted(known))}")
    has_kernels = all(find_spec(package) is not None for package in ("kernels", "accelerate"))
    if quantised.method == "mxfp4" and (device.type == "cpu" or not has_kernels):
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    # Most quantised modules cannot be moved to a device after loading.
    return {"device_map": {"": device}} if device.type == "cuda" else {}


def can_dequantise(weight: torch.Tensor, scales: torch.Tensor | None, block: tuple[int, int] | None) -> bool:
    """Return whether `multiplied_out` supports these tensors."""
    return scales is not None and weight.dtype in _EIGHT_BITS and _sizes(weight, scales, block) is not None


def multiplied_out(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantise 8-bit numbers, rounding once to `dtype`.

    weight: [out_features, in_features].
    scales: a single scale, one for each row, or one for each block.
    """
    sizes = _sizes(weight, scales, block)
    assert sizes is not None, "`can_dequantise` must have returned True"
    factors = _as_matrix(scales).float().repeat_interleave(sizes[1], dim=1)[:, : weight.shape[1]]
    result = torch.empty_like(weight, dtype=dtype)
    for first in range(0, len(weight), ROWS_AT_ONCE):
        rows = torch.arange(first, min(first + ROWS_AT_ONCE, len(weight)))
        torch.mul(weight[rows[0] : rows[-1] + 1].float(), factors[rows // sizes[0]], out=result[rows[0] : rows[-1] + 1])
    return result


def scales_of_rows(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor | None:
    """Return one scale per row of a weight, [num_rows, 1] float32, or None if a row has several scales."""
    sizes = _sizes(weight, scales, block)
    if sizes is None or sizes[1] < weight.shape[1]:
        return None
    return _as_matrix(scales).float().repeat_interleave(sizes[0], dim=0)[: len(weight)]


def _sizes(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the numbers of rows and columns that share a scale, or None if the scales do not fit the weight."""
    if weight.dim() != 2 or scales.dim() > 2 or not scales.is_floating_point():
        return None
    counts = tuple(_as_matrix(scales).shape)
    if block is not None and counts == tuple(-(-n // size) for n, size in zip(weight.shape, block, strict=True)):
        return block
    if any(n % count for n, count in zip(weight.shape, counts, strict=True)):
        return None
    return weight.shape[0] // counts[0], weight.shape[1] // counts[1]


def _as_matrix(scales: torch.Tensor) -> torch.Tensor:
    return scales if scales.dim() == 2 else scales.reshape(-1, 1)
