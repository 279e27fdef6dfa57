"""Makes a forward pass on CUDA batch-invariant: no bit of a row depends on the other rows of the step.

Libraries choose tiles and the order of sums by the number of rows, so the last bits of a request's logits depend on
the rest of its batch. This module replaces every summing operator of a forward pass with a kernel that sums in one
fixed order, as in "Defeating Nondeterminism in LLM Inference" (He et al., Thinking Machines, 2025). Its
batch_invariant_ops replace the operators in the whole process; the dispatch mode here replaces them only during the
forward pass. The mode adds overhead in Python, which captured steps incur only once, during the capture.

Torch's own kernels for layer and RMS norms, softmax and elementwise operators already compute row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.errors import UnsupportedModel
from app.model.cuda.launching import kernels_of

_KERNELS = "invariant_kernels"
_MEAN_TILE = 1024


class BatchInvariantMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the operators of a forward pass: `with BatchInvariantMode(): module(...)`.

    The forward pass raises UnsupportedModel if the model uses a summing operator that has no replacement here.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = _OURS.get(func)
        if ours is not None:
            return ours(*args, **kwargs)
        if func in _REFUSED:
            raise UnsupportedModel(f"batch_invariant: the model uses {func}, for which there is no invariant kernel")
        with self:  # linear, matmul and einsum decompose into operators that `_OURS` replaces
            made_of = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if made_of is NotImplemented else made_of


def invariant_mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [num_rows, depth] by [depth, num_columns]."""
    return _product(left[None], right[None])[0]


def invariant_addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Multiply like `invariant_mm` and add a bias, [num_columns]. Raises UnsupportedModel for any other addend."""
    if beta != 1 or alpha != 1 or bias.dim() != 1:
        raise UnsupportedModel("batch_invariant: the model adds something other than a bias to a matrix product")
    return _product(left[None], right[None], bias)[0]


def invariant_scaled_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Multiply FP8 matrices. Requires one scale for each row, [num_rows, 1], and each column, [1, num_columns]."""
    if row_scales.numel() != len(left) or column_scales.numel() != right.shape[1] or out_dtype is None:
        raise UnsupportedModel("batch_invariant: the model has FP8 weights with a scale for each block of numbers")
    return _product(left[None], right[None], bias, scales=(row_scales, column_scales), dtype=out_dtype)[0]


def invariant_mean(
    values: torch.Tensor, dims: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the mean over the last dimension. Raises UnsupportedModel for any other dimensions."""
    if dims is None or [dim % values.dim() for dim in dims] != [values.dim() - 1]:
        raise UnsupportedModel(
            f"batch_invariant: the model takes a mean over dimensions {dims}, not just over the last"
        )
    values = values.contiguous()
    means = torch.empty(values.shape[:-1], dtype=dtype or values.dtype, device=values.device)
    kernels_of(_KERNELS, values.device).mean_kernel[(means.numel(),)](values, means, values.shape[-1], tile=_MEAN_TILE)
    return means[..., None] if keepdim else means


def _product(
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply [num_batches, num_rows, depth] by [num_batches, depth, num_columns].

    dtype: the type of the output, or None for the type of the operands.
    """
    num_batches, num_rows, depth = left.shape
    num_columns = right.shape[2]
    output = left.new_empty(num_batches, num_rows, num_columns, dtype=dtype)
    # The tiles depend on the type alone, never on the shapes. 64 rows are one wgmma; float32 uses half the depth.
    tiles = {"tile_rows": 64, "tile_columns": 64, "tile_depth": 128 // output.element_size()}
    grid = (-(-num_rows // tiles["tile_rows"]), -(-num_columns // tiles["tile_columns"]), num_batches)
    kernels_of(_KERNELS, left.device).matmul_kernel[grid](
        left, right, left if bias is None else bias, *(scales or (left, left)), output, num_rows, num_columns, depth,
        *left.stride(), *right.stride(), **tiles, has_bias=bias is not None, has_scales=scales is not None,
        widen=left.device.type == "cpu", num_warps=4, num_stages=4,
    )  # fmt: skip
    return output


_aten = torch.ops.aten
_OURS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.mm.default: invariant_mm,
    _aten.addmm.default: invariant_addmm,
    _aten.bmm.default: _product,
    _aten.mean.dim: invariant_mean,
    _aten._scaled_mm.default: invariant_scaled_mm,
}
_REFUSED = frozenset({
    _aten.baddbmm.default, _aten.mv.default, _aten.addmv.default, _aten.dot.default, _aten.mean.default,
    _aten._grouped_mm.default, _aten.convolution.default,
})  # fmt: skip
