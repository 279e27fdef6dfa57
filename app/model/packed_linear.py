"""Faster linear layers for CPUs: packs weights once for oneDNN, and joins layers that read the same input.

This uses private torch operators, which exist in versions 2.11 to 2.13. `pack_linear_layers` tests them first, and
leaves a model unchanged if they are missing or return wrong results.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

logger = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight in oneDNN's layout. Inference only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: [out_features, in_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        tokens_hint = 32  # the expected number of rows; other hints led to the same layout on the measured CPUs
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), tokens_hint)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features]. x: [..., in_features]."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return output

    @property
    def weight(self) -> torch.Tensor:
        """A copy in the layout of `nn.Linear`, for models whose code reads a layer's weight instead of calling it."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense


class JoinedLinear(nn.Module):
    """Several linear layers with the same input, computed in one product.

    In the model, each layer is replaced by a `JoinedPart`. The parts are called one after another with the same tensor:
    the first call computes all outputs, and each part returns its own output once.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
        self._linear = PackedLinear(weight, bias)
        self._sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer with this index for `x`."""
        if x is not self._input or self._outputs[index] is None:
            self._input, self._outputs = x, list(self._linear(x).split(self._sizes, dim=-1))
        output = self._outputs[index]
        assert output is not None, "just computed"
        self._outputs[index] = None
        if not any(left is not None for left in self._outputs):
            self._input = None  # all parts have been called, so release the input
        return output

    def weight_of(self, index: int) -> torch.Tensor:
        weight: torch.Tensor = torch.split(self._linear.weight, self._sizes)[index]
        return weight


class JoinedPart(nn.Module):
    """Replaces one of the layers of a `JoinedLinear` in the model."""

    def __init__(self, joined: JoinedLinear, index: int, linear: nn.Linear) -> None:
        super().__init__()
        # The joined layer must not become a submodule, because several parts share it.
        self._take, self._weight_of, self._index = joined.take, joined.weight_of, index
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._take(self._index, x)

    @property
    def weight(self) -> torch.Tensor:
        """A copy of this layer's weight, see `PackedLinear.weight`."""
        return self._weight_of(self._index)


@torch.inference_mode()
def pack_linear_layers(model: nn.Module) -> int:
    """Replace a CPU model's linear layers with packed ones, in place. Returns the number of replaced layers."""
    for dtype in {module.weight.dtype for module in model.modules() if type(module) is nn.Linear}:
        if not _operators_work(dtype):
            logger.warning(
                f"torch has no packed linear operators for {dtype} on this CPU: linear layers run unpacked and slower"
            )
            return 0
    num_replaced = 0
    # Groups of linear layers that read the same input, by attribute name in transformers' modules, in call order.
    siblings = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    # The list must not contain linear layers, so that each is freed as soon as it is replaced.
    for module in [each for each in model.modules() if type(each) is not nn.Linear]:
        for names in siblings:
            linears = [getattr(module, name, None) for name in names]
            if _can_join(linears):
                joined = JoinedLinear(linears)  # type: ignore[arg-type]  # checked by _can_join
                for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
                    setattr(module, name, JoinedPart(joined, index, linear))  # type: ignore[arg-type]
                num_replaced += len(names)
        for name, child in list(module.named_children()):
            # With latent heads, `kv_b_proj` is never called, so it is not packed.
            if type(child) is nn.Linear and not (name == "kv_b_proj" and hasattr(module, "latent_heads")):
                setattr(module, name, PackedLinear(child.weight, child.bias))
                num_replaced += 1
    return num_replaced


def _can_join(linears: list[nn.Module | None]) -> bool:
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    first = linears[0]
    return all(
        linear.in_features == first.in_features and (linear.bias is None) == (first.bias is None)  # type: ignore[union-attr]
        for linear in linears
    )


def _operators_work(dtype: torch.dtype) -> bool:
    """Return whether the operators work for a small layer. In bfloat16, they need AVX-512 or AVX-NE-CONVERT."""
    try:
        linear = nn.Linear(32, 48, dtype=dtype)
        x = torch.randn(5, 32, dtype=dtype)
        packed = PackedLinear(linear.weight, linear.bias)(x)
        return torch.allclose(packed.float(), linear(x).float(), atol=0.05)
    except (AttributeError, RuntimeError):
        return False
