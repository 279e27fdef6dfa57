"""Recurrent operators for CPUs in C++. `TorchRecurrence` is their reference, and their fallback without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from app.model.attention import with_contiguous_rows
from app.model.cpu.library import DTYPES, ConvolutionShape, RecurrenceShape, Strides, ThreadPool, library
from app.model.recurrence import ACTIVATIONS, DeltaRuleInputs, MambaInputs, StatePieces, check_heads, check_slots


class NativeRecurrence:
    """Implements `Recurrence` for tensors of any size in host memory."""

    def __init__(self, threads: ThreadPool) -> None:
        self._threads = threads

    @staticmethod
    def why_not(dtype: torch.dtype) -> str | None:
        """Return the reason why the C++ code does not support models of a type, or None if it does."""
        if dtype not in DTYPES:
            return f"the C++ code supports {' and '.join(map(str, DTYPES))}, not {dtype}"
        return "there is no C++ compiler" if library() is None else None

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
        assert weight.dtype is inputs.dtype, f"the weight is {weight.dtype}, the inputs are {inputs.dtype}"
        check_slots(states, inputs.dtype, kernel_size - 1, num_channels)
        shape = ConvolutionShape(
            num_channels=num_channels, kernel_size=kernel_size, input_token=inputs.stride(0), slot=states.stride(0),
            has_silu=activation is not None,
        )  # fmt: skip
        outputs = inputs.new_empty(inputs.shape)
        self._function("short_convolution", inputs.dtype)(
            self._threads.handle, ctypes.byref(shape), inputs.data_ptr(), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), states.data_ptr(), *_pointer_and_length(pieces),
            outputs.data_ptr(),
        )  # fmt: skip
        return outputs

    def gated_delta_rule(
        self, given: DeltaRuleInputs, states: torch.Tensor, pieces: StatePieces, *, scale: float, normalises: bool
    ) -> torch.Tensor:
        query, key, value, *numbers = given
        check_slots(states, torch.float32, value.shape[1], key.shape[2], value.shape[2])
        return self._over_heads(
            "gated_delta_rule", query, key, value, numbers, states, pieces, scale=scale, normalises=normalises
        )

    def mamba1(self, given: MambaInputs, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        inputs, time_steps, decay, inputs_to_state, state_to_outputs, skip = given
        check_slots(states, torch.float32, inputs.shape[1], inputs_to_state.shape[1])
        # The channels form a single head.
        query, key, value = (each[:, None] for each in (state_to_outputs, inputs_to_state, inputs))
        output = self._over_heads("mamba1", query, key, value, (time_steps, decay, skip), states, pieces)
        return output[:, 0]

    def mamba2(self, given: MambaInputs, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        inputs, time_steps, decay, inputs_to_state, state_to_outputs, skip = given
        check_slots(states, torch.float32, *inputs.shape[1:], inputs_to_state.shape[2])
        numbers = (time_steps, decay, skip)
        return self._over_heads("mamba2", state_to_outputs, inputs_to_state, inputs, numbers, states, pieces)

    def _over_heads(
        self,
        name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        numbers: Sequence[torch.Tensor],
        states: torch.Tensor,
        pieces: StatePieces,
        *,
        scale: float = 1.0,
        normalises: bool = False,
    ) -> torch.Tensor:
        """Run an operator that works on heads. See `HeadRows` in recurrence.h.

        query, key, value: [num_tokens, num_heads, dim] each. numbers: the operator's other inputs, in the order of the
        C++ function's arguments. They are passed as float32.
        """
        query, key, value = map(with_contiguous_rows, (query, key, value))
        kept = [each.float().contiguous() for each in numbers]
        shape = _recurrence_shape(key, value, states, scale=scale, normalises=normalises)
        outputs = value.new_empty(value.shape)
        self._function(name, value.dtype)(
            self._threads.handle, ctypes.byref(shape), ctypes.byref(Strides.of(query, key, value)),
            query.data_ptr(), key.data_ptr(), value.data_ptr(), *(each.data_ptr() for each in kept),
            states.data_ptr(), *_pointer_and_length(pieces), outputs.data_ptr(),
        )  # fmt: skip
        return outputs

    def _function(self, name: str, dtype: torch.dtype) -> Any:
        return getattr(self._threads.code, f"carousel_{name}_{DTYPES[dtype]}")


def _recurrence_shape(
    key: torch.Tensor, value: torch.Tensor, states: torch.Tensor, *, scale: float, normalises: bool
) -> RecurrenceShape:
    check_heads(value.shape[1], key.shape[1])
    return RecurrenceShape(
        num_key_heads=key.shape[1], num_value_heads=value.shape[1], key_dim=key.shape[2], value_dim=value.shape[2],
        slot=states.stride(0), normalises=normalises, scale=scale,
    )  # fmt: skip


def _pointer_and_length(pieces: StatePieces) -> tuple[int, int]:
    return pieces.table.data_ptr(), pieces.table.shape[0]
