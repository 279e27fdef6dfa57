"""The operators with a recurrent state in Triton against those in plain torch, as `test_triton_attention.py` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.model.recurrence import TorchRecurrence
from tests.kit.models import DEVICE
from tests.model.test_recurrence import (
    Operator,
    check_bits_depend_on_nothing_else,
    check_only_what_is_written_changes,
    convolution,
    delta_rule,
    mamba1,
    mamba2,
)

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.recurrence import TritonRecurrence

Build = Callable[..., Operator]

SIZES: list[tuple[Build, dict[str, Any]]] = [
    (convolution, {"num_tokens": 9}),
    (convolution, {"has_bias": False, "activation": None, "num_channels": 300}),
    (convolution, {"num_channels": 1, "kernel_size": 1}),
    (convolution, {"kernel_size": 10}),  # a piece is shorter than what is kept
    (delta_rule, {"num_tokens": 5}),
    (delta_rule, {"normalises": False, "num_tokens": 5}),
    (delta_rule, {"key_heads": 1, "value_heads": 1, "key_dim": 1, "value_dim": 1, "num_tokens": 3}),
    (delta_rule, {"key_heads": 1, "value_heads": 3, "key_dim": 128, "value_dim": 40, "num_tokens": 3}),
    (mamba1, {"num_tokens": 5}),
    (mamba1, {"num_channels": 1, "state_size": 1, "num_tokens": 3}),
    (mamba1, {"num_channels": 150, "state_size": 16, "num_tokens": 3}),
    (mamba2, {"num_tokens": 5}),
    (mamba2, {"num_heads": 1, "num_groups": 1, "head_dim": 1, "state_size": 1, "num_tokens": 3}),
    (mamba2, {"num_heads": 3, "num_groups": 1, "head_dim": 40, "state_size": 128, "num_tokens": 3}),
]
# The interpreter takes a millisecond for a token of a head.
FEW_HEADS: list[tuple[Build, dict[str, Any]]] = [
    (convolution, {}),
    (delta_rule, {"key_heads": 1, "value_heads": 2, "key_dim": 5, "value_dim": 3}),
    (mamba1, {"num_channels": 5, "state_size": 3}),
    (mamba2, {"num_heads": 2, "num_groups": 1, "head_dim": 3, "state_size": 5}),
]


@pytest.fixture(scope="module")
def triton() -> TritonRecurrence:
    return TritonRecurrence(DEVICE)


def on_device(build: Build, *given: torch.dtype, **sizes: Any) -> Operator:
    with DEVICE:
        return build(*given, **sizes)


@pytest.mark.parametrize(("build", "sizes"), SIZES, ids=lambda each: str(getattr(each, "__name__", each)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_numbers_are_those_of_plain_torch(
    dtype: torch.dtype, build: Build, sizes: dict[str, Any], triton: TritonRecurrence
) -> None:
    operator = on_device(build, dtype, **sizes)
    (outputs, state), (expected, expected_state) = map(operator.whole, (triton, TorchRecurrence()))
    assert outputs.dtype is dtype
    # In the interpreter a number is cut off to bfloat16, not rounded.
    atol, rtol = (1e-5, 1e-5) if dtype is torch.float32 else (1e-3, 2**-6)
    torch.testing.assert_close(outputs, expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("build", "sizes"), FEW_HEADS)
@pytest.mark.parametrize("seed", range(2))
def test_a_tokens_bits_depend_on_its_own_sequence_alone(
    build: Build, sizes: dict[str, Any], seed: int, triton: TritonRecurrence
) -> None:
    check_bits_depend_on_nothing_else(triton, on_device(build, **sizes), seed=seed)


@pytest.mark.parametrize(("build", "sizes"), FEW_HEADS)
def test_slots_that_no_piece_writes_stay_as_they_are(
    build: Build, sizes: dict[str, Any], triton: TritonRecurrence
) -> None:
    check_only_what_is_written_changes(triton, on_device(build, **sizes))


@pytest.mark.parametrize(("build", "sizes"), FEW_HEADS)
def test_slots_may_be_part_of_larger_ones(build: Build, sizes: dict[str, Any], triton: TritonRecurrence) -> None:
    operator = on_device(build, **sizes)
    larger = operator.slots(10).unflatten(0, (5, 2))
    outputs = operator.run(triton, operator.rows, larger[:, 1], (0, 20, -1, 3), (20, 3, 3, 1))
    expected, state = operator.whole(triton)
    assert torch.equal(outputs, expected)
    assert torch.equal(larger[1, 1], state)
    assert torch.equal(larger[:, 0], operator.slots(5))
