"""Matrix products in FP8 (e4m3) on CUDA, with a float32 scale for each output of a matrix and for each token.

The tensor cores multiply the FP8 numbers and sum the products in float32. Each sum is then multiplied by both scales
and rounded once, to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from app.model.cuda.attention import TritonAttention
from app.model.llama import experts_of, head_dims_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest FP8 number
SMALLEST_SCALE = 1e-12  # used for a row of zeros, which would otherwise be divided by zero
_ROWS_AT_ONCE = 1024  # rows to convert at once: each conversion needs a float32 copy of its rows
_UNIT = 16  # `torch._scaled_mm` requires matrices whose inputs and outputs are multiples of this
LEAST_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0


class Fp8Rows(NamedTuple):
    """FP8 numbers with a scale for each row. A row contains the weights of an output or the inputs of a token."""

    values: torch.Tensor  # [num_rows, size]
    scales: torch.Tensor  # [num_rows, 1] float32


Rows = torch.Tensor | Fp8Rows


def in_fp8(rows: torch.Tensor) -> Fp8Rows:
    """Convert rows to FP8. A row's scale maps its largest absolute value to the largest FP8 number."""
    values = torch.empty_like(rows, dtype=FP8)
    scales = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
    for some, to, scale in zip(*(torch.split(each, _ROWS_AT_ONCE) for each in (rows, values, scales)), strict=True):
        wide = some.float()
        scale.copy_((wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp_min(SMALLEST_SCALE))
        to.copy_((wide / scale).clamp(-LARGEST, LARGEST))
    return Fp8Rows(values, scales)


def concatenated(pieces: Sequence[Fp8Rows]) -> Fp8Rows:
    """Concatenate the rows of all pieces. A single piece is returned without a copy."""
    if len(pieces) == 1:
        return pieces[0]
    values = torch.cat([piece.values.view(torch.uint8) for piece in pieces])
    return Fp8Rows(values.view(FP8), torch.cat([piece.scales for piece in pieces]))


def empty_inputs(weight: Rows, num_tokens: int) -> Rows:
    """Allocate inputs for a product with this matrix: uninitialised, and in FP8 if the matrix is."""
    if isinstance(weight, torch.Tensor):
        return weight.new_empty(num_tokens, weight.shape[-1])
    values, scales = weight
    return Fp8Rows(values.new_empty(num_tokens, values.shape[1]), scales.new_empty(num_tokens, 1))


def plain(rows: Rows) -> torch.Tensor:
    """Return rows as a tensor. They must not be in FP8."""
    assert isinstance(rows, torch.Tensor), "these rows are not in FP8"
    return rows


def linear(inputs: Rows, weight: Rows, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply [num_tokens, inputs] by [outputs, inputs] → [num_tokens, outputs]. Both must be FP8, or neither.

    bias: [outputs], in bfloat16 if the inputs are in FP8.
    """
    if isinstance(weight, torch.Tensor):
        return functional.linear(plain(inputs), weight, bias)
    assert isinstance(inputs, Fp8Rows), "the inputs must come from `empty_inputs` with this weight"
    # `use_fast_accum` would sum in fewer bits on Hopper, without speeding up decode steps, which are bound by memory.
    return torch._scaled_mm(
        inputs.values, weight.values.t(), scale_a=inputs.scales, scale_b=weight.scales.t(), bias=bias,
        out_dtype=torch.bfloat16,
    )  # fmt: skip


def why_no_fp8(device: torch.device, *, on_a_cpu: str) -> str | None:
    """Return the reason why a device cannot compute in FP8, or None if it can.

    on_a_cpu: the settings to suggest for a CPU.
    """
    if not TritonAttention.fits(device):
        return f"it runs on {device.type}; a CPU supports {on_a_cpu}"
    if device.type != "cuda":
        return None  # a CPU with Triton's interpreter
    found = torch.cuda.get_device_capability(device)
    if found >= LEAST_CAPABILITY:
        return None
    least, own = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, found))
    return f"{torch.cuda.get_device_name(device)} has compute capability {own}, but FP8 needs {least} or higher"


def why_not_in_fp8(module: PreTrainedModel, num_ranks: int = 1) -> str | None:
    """Return the reason why a Llama-like model's matrices cannot be in FP8, or None if they can.

    Experts' matrices are never in FP8.
    """
    config, head_dim = module.config, max(head_dims_of(module), default=0)
    sizes = {
        "hidden size": config.hidden_size,
        "size of query heads": config.num_attention_heads * head_dim // num_ranks,
        "size of key heads": config.num_key_value_heads * head_dim // num_ranks,
    } | ({} if experts_of(module).num_experts else {"intermediate size": config.intermediate_size // num_ranks})
    odd = [f"its {name} is {size}" for name, size in sizes.items() if size % _UNIT]
    of = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
    return f"sizes must be multiples of {_UNIT}; {', '.join(odd)}{of}" if odd else None
