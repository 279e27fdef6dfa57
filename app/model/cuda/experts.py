"""Runs a mixture of experts on CUDA with four launches for any number of experts: each launch covers all experts.

In bfloat16 on Hopper, if each expert has many rows, torch's grouped product replaces two of the launches. It is meant
for prompts: it needs sorted rows, which cost more launches, and its tiles depend on the number of rows, so it is never
used with `batch_invariant`. Our kernels (`expert_kernels.py`) have neither limit.

A shared expert, which processes every token, is cut into pieces of the size of a routed expert.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from app.model.cuda.attention import padded
from app.model.cuda.launching import kernels_of
from app.model.llama import ExpertSettings

# The size is fixed for any number of tokens, because the bits of a row depend on it. 64 rows are one wgmma.
_TILE_ROWS = _TILE_COLUMNS = 64
_TILE_DEPTH_BYTES = 128
# If experts have fewer rows on average, reading the weights takes longer than the products. Not measured yet.
_FEWEST_GROUPED_ROWS = 64
_GROUPED_UNIT = 8  # numbers in 16 bytes: the grouped product requires rows aligned to 16 bytes


class ExpertMixture:
    """The MLP of a layer with experts: a router sends each token to a few experts."""

    def __init__(self, settings: ExpertSettings, device: torch.device, *, batch_invariant: bool = False) -> None:
        self._settings = settings
        # Before Hopper, torch multiplies one group after the other and waits for the device. Devices other than CUDA
        # use the grouped product as an H100 does, so that memory planned on the meta device is that of an H100.
        is_grouped = device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)
        self._groups = is_grouped and not batch_invariant
        self._widen = device.type == "cpu"
        self._kernels = kernels_of("expert_kernels", device)

    def __call__(
        self, x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of each token's experts times their shares: [num_tokens, num_chosen, hidden_size].

        x: [num_tokens, hidden_size]; router: [num_routed, hidden_size], with one more row if there is a shared expert;
        gate_up: [num_experts, 2 * inner size, hidden_size], with the shared expert's pieces last; down: [num_experts,
        hidden_size, inner size]; lengths: [num_experts] int32 zeros, which are overwritten.
        """
        num_experts, size, inner = down.shape
        num_shared = num_experts - self._settings.num_experts
        num_tokens, num_chosen = len(x), self._settings.per_token + num_shared
        lists = lengths.new_empty(num_experts, num_tokens)
        shares = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=x.device)
        self._kernels.route_kernel[(num_tokens,)](
            functional.linear(x, router), lists, lengths, shares, num_routed=self._settings.num_experts,
            num_shared=num_shared, experts_padded=padded(self._settings.num_experts, 1), num_chosen=num_chosen,
            chosen_padded=padded(num_chosen, 1), sums_to_one=self._settings.weights_sum_to_one,
            rounds=self._settings.rounds_weights, num_warps=1,
        )  # fmt: skip
        is_even = size % _GROUPED_UNIT == inner % _GROUPED_UNIT == 0 and x.dtype is torch.bfloat16
        if self._groups and is_even and shares.numel() >= _FEWEST_GROUPED_ROWS * num_experts:
            return _grouped(x, gate_up, down, lists, lengths, shares)
        # The largest possible number of tiles. An expert's last tile may be short, but every tile has a row.
        num_tiles = min(shares.numel(), -(-shares.numel() // _TILE_ROWS) + num_experts)
        options = {
            "num_experts": num_experts, "experts_padded": padded(num_experts, 1), "tile_rows": _TILE_ROWS,
            "tile_columns": _TILE_COLUMNS, "tile_depth": _TILE_DEPTH_BYTES // x.element_size(), "widen": self._widen,
            "num_warps": 2 * x.element_size(), "num_stages": 3,
        }  # fmt: skip
        gated = x.new_empty(shares.numel(), inner)
        self._kernels.expert_gate_kernel[(num_tiles, -(-inner // _TILE_COLUMNS))](
            x, gate_up, lists, lengths, gated, num_tokens, size=inner, depth=size, num_chosen=num_chosen, **options
        )
        output = x.new_empty(num_tokens, num_chosen, size)
        self._kernels.expert_down_kernel[(num_tiles, -(-size // _TILE_COLUMNS))](
            gated, down, lists, lengths, shares, output, num_tokens, size=size, depth=inner, **options
        )
        return output


def _grouped(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    lists: torch.Tensor,
    lengths: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    """Return the result of `expert_gate_kernel` and `expert_down_kernel`, from torch's grouped product."""
    ends = lengths.cumsum(0, dtype=torch.int32)
    rows = torch.arange(shares.numel(), device=x.device)
    experts = torch.searchsorted(ends, rows, right=True)
    assignments = lists[experts, rows - (ends - lengths)[experts]].long()
    tokens = x[assignments // shares.shape[1]]
    gate, up = functional.grouped_mm(tokens, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    outputs = functional.grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    # The shares are float32, so the product is rounded once, as in the kernel.
    outputs = (outputs * shares.flatten()[assignments, None]).to(x.dtype)
    return torch.empty_like(outputs).index_copy_(0, assignments, outputs).view(*shares.shape, -1)
