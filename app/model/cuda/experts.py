"""A mixture of experts on CUDA: five launches, whatever the number of experts, because all their products are one.

torch has a grouped product, too. It is for bfloat16 on Hopper and newer, chooses its tiles by the number of rows, and
needs the rows sorted before and summed up afterwards; the kernels here (`expert_kernels.py`) do all of that.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional

from app.model.cuda.attention import NoKernels, padded
from app.model.llama import ExpertSettings

# One size for any number of tokens, because a row's bits follow from it. 64 rows are one wgmma.
_TILE_ROWS = _TILE_COLUMNS = 64
_TILE_DEPTH_BYTES = 128
_ORDER_TILE = 1024


class ExpertMixture:
    """The MLPs of a layer with experts, each token's in a few of them."""

    def __init__(self, settings: ExpertSettings, device: torch.device) -> None:
        self._settings = settings
        self._widen = device.type == "cpu"
        self._kernels = NoKernels() if device.type == "meta" else _kernels()

    def __call__(
        self, x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        """Each token's outputs of its experts times their shares: [num_tokens, per_token, hidden_size].

        x: [num_tokens, hidden_size]; router: [num_experts, hidden_size]; gate_up: [num_experts, 2 * inner size,
        hidden_size]; down: [num_experts, hidden_size, inner size].
        """
        num_experts, size, inner = down.shape
        num_tokens, per_token = len(x), self._settings.per_token
        experts = {"num_experts": num_experts, "experts_padded": padded(num_experts, 1)}
        chosen = torch.empty(num_tokens, per_token, dtype=torch.int32, device=x.device)
        shares = torch.empty(num_tokens, per_token, dtype=torch.float32, device=x.device)
        order, starts = torch.empty_like(chosen), chosen.new_empty(num_experts + 1)
        self._kernels.route_kernel[(num_tokens,)](
            functional.linear(x, router), chosen, shares, per_token=per_token, per_token_padded=padded(per_token, 1),
            sums_to_one=self._settings.weights_sum_to_one, rounds=self._settings.rounds_weights, num_warps=1, **experts,
        )  # fmt: skip
        self._kernels.order_kernel[(num_experts,)](chosen, order, starts, chosen.numel(), tile=_ORDER_TILE)
        # As many tiles as there can be: each expert's last one may be short, and none is without a row.
        num_tiles = min(chosen.numel(), -(-chosen.numel() // _TILE_ROWS) + num_experts)
        options = experts | {
            "tile_rows": _TILE_ROWS, "tile_columns": _TILE_COLUMNS, "tile_depth": _TILE_DEPTH_BYTES // x.element_size(),
            "widen": self._widen, "num_warps": 4, "num_stages": 3,
        }  # fmt: skip
        gated = x.new_empty(chosen.numel(), inner)
        self._kernels.expert_gate_kernel[(num_tiles, -(-inner // _TILE_COLUMNS))](
            x, gate_up, order, starts, gated, size=inner, depth=size, per_token=per_token, **options
        )
        output = x.new_empty(num_tokens, per_token, size)
        self._kernels.expert_down_kernel[(num_tiles, -(-size // _TILE_COLUMNS))](
            gated, down, order, starts, shares, output, size=size, depth=inner, **options
        )
        return output


@cache
def _kernels() -> Any:
    """The kernels' module, imported on first use: a machine without Triton imports this file too."""
    from app.model.cuda import expert_kernels

    return expert_kernels
