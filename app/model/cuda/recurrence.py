"""Runs operators with a recurrent state on CUDA, with our Triton kernels (`recurrence_kernels.py`)."""

from __future__ import annotations

import torch

from app.model.attention import with_contiguous_rows
from app.model.cuda.attention import padded
from app.model.cuda.launching import kernels_of
from app.model.recurrence import (
    ACTIVATIONS,
    NORM_EPSILON,
    DeltaRuleInputs,
    MambaInputs,
    StatePieces,
    check_heads,
    check_slots,
)

# State numbers that a program holds in registers: 64 for each thread of its single warp. At this size no register is
# spilled, a decode step has many programs, and a token's sums stay within a warp. The speed has not been measured.
_STATE_NUMBERS = 2048
_TILE_TOKENS, _TILE_CHANNELS = 8, 128  # the tile of a convolution


class TritonRecurrence:
    """Implements `Recurrence` for rows and states of any sizes on one device.

    Chains of pieces run in parallel. In a decode step, each sequence is a chain.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernels = kernels_of("recurrence_kernels", device)

    def short_convolution(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        pieces: StatePieces,
        *,
        activation: str | None,
    ) -> torch.Tensor:
        assert activation in ACTIVATIONS, f"activation {activation} is not one of {ACTIVATIONS}"
        inputs, weight = with_contiguous_rows(inputs), weight.contiguous()
        num_channels, kernel_size = weight.shape
        check_slots(states, inputs.dtype, kernel_size - 1, num_channels)
        outputs = inputs.new_empty(inputs.shape)
        chains, num_chains = pieces.chains_on(self._device)
        if num_chains:
            tile = min(_TILE_CHANNELS, padded(num_channels, 1))
            self._kernels.convolution_kernel[(-(-num_channels // tile), num_chains)](
                inputs, weight, weight if bias is None else bias, states, chains, outputs, inputs.stride(0),
                states.stride(0), num_channels=num_channels, kernel_size=kernel_size,
                kept_padded=padded(kernel_size - 1, 1), tile_tokens=_TILE_TOKENS, tile_channels=tile,
                has_bias=bias is not None, has_silu=activation is not None,
            )  # fmt: skip
        return outputs

    def gated_delta_rule(
        self, given: DeltaRuleInputs, states: torch.Tensor, pieces: StatePieces, *, scale: float, normalises: bool
    ) -> torch.Tensor:
        query, key, value, decay, beta = map(with_contiguous_rows, given)
        (num_key_heads, key_dim), (num_heads, value_dim) = key.shape[1:], value.shape[1:]
        check_heads(num_heads, num_key_heads)
        check_slots(states, torch.float32, num_heads, key_dim, value_dim)
        outputs = value.new_empty(value.shape)
        chains, num_chains = pieces.chains_on(self._device)
        if num_chains:
            key_padded = padded(key_dim, 1)
            tile = _tile(value_dim, key_padded)
            self._kernels.delta_rule_kernel[(-(-value_dim // tile), num_heads, num_chains)](
                query, key, value, decay, beta, states, chains, outputs, *query.stride()[:2], *key.stride()[:2],
                *value.stride()[:2], decay.stride(0), beta.stride(0), states.stride(0), scale, NORM_EPSILON,
                num_heads=num_heads, group=num_heads // num_key_heads, key_dim=key_dim, value_dim=value_dim,
                key_padded=key_padded, tile=tile, normalises=normalises, num_warps=1,
            )  # fmt: skip
        return outputs

    def mamba1(self, given: MambaInputs, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        check_slots(states, torch.float32, given.inputs.shape[1], given.inputs_to_state.shape[1])
        # The kernel treats the channels of Mamba 1 as the numbers of one head.
        of_one_head = given._replace(
            inputs=given.inputs[:, None], inputs_to_state=given.inputs_to_state[:, None],
            state_to_outputs=given.state_to_outputs[:, None],
        )  # fmt: skip
        return self._scan(of_one_head, states, pieces, by_channel=True)[:, 0]

    def mamba2(self, given: MambaInputs, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        check_slots(states, torch.float32, *given.inputs.shape[1:], given.inputs_to_state.shape[2])
        return self._scan(given, states, pieces, by_channel=False)

    def _scan(self, given: MambaInputs, states: torch.Tensor, pieces: StatePieces, *, by_channel: bool) -> torch.Tensor:
        """Run Mamba 1 or Mamba 2. by_channel: True for Mamba 1, whose channels are passed as a single head."""
        inputs, time_steps, decay, into, out, skip = map(with_contiguous_rows, given)
        (num_heads, head_dim), (num_groups, state_size) = inputs.shape[1:], into.shape[1:]
        check_heads(num_heads, num_groups)
        outputs = inputs.new_empty(inputs.shape)
        chains, num_chains = pieces.chains_on(self._device)
        if num_chains:
            state_padded = padded(state_size, 1)
            tile = _tile(head_dim, state_padded)
            self._kernels.mamba_kernel[(-(-head_dim // tile), num_heads, num_chains)](
                inputs, time_steps, decay.contiguous(), into, out, skip.contiguous(), states, chains, outputs,
                *inputs.stride()[:2], time_steps.stride(0), *into.stride()[:2], *out.stride()[:2], states.stride(0),
                num_heads=num_heads, group=num_heads // num_groups, head_dim=head_dim, state_size=state_size,
                state_padded=state_padded, tile=tile, by_channel=by_channel, num_warps=1,
            )  # fmt: skip
        return outputs


def _tile(num_parts: int, part_padded: int) -> int:
    """Return how many columns (or rows) of a state a program computes. part_padded: the padded size of each."""
    return min(padded(num_parts, 1), max(1, _STATE_NUMBERS // part_padded))
