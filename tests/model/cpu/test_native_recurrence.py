"""The operators with a recurrent state in C++ against those in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.model.cpu import library as native
from app.model.cpu import recurrence
from app.model.cpu.library import ThreadPool
from app.model.cpu.recurrence import NativeRecurrence
from app.model.recurrence import TorchRecurrence
from tests.model.test_recurrence import (
    OPERATORS,
    Operator,
    check_bits_depend_on_nothing_else,
    check_only_what_is_written_changes,
    convolution,
    delta_rule,
    mamba1,
    mamba2,
)

DTYPES = tuple(native.DTYPES)
Build = Callable[..., Operator]

SIZES: list[tuple[Build, dict[str, Any]]] = [
    (convolution, {}),
    (convolution, {"has_bias": False, "activation": None}),
    (convolution, {"num_channels": 1, "kernel_size": 1}),
    (convolution, {"num_channels": 300, "kernel_size": 3}),
    (convolution, {"num_channels": 256, "kernel_size": 30}),
    (delta_rule, {}),
    (delta_rule, {"normalises": False}),
    (delta_rule, {"key_heads": 1, "value_heads": 1, "key_dim": 16, "num_tokens": 300}),
    (delta_rule, {"key_heads": 1, "value_heads": 1, "key_dim": 1, "value_dim": 1}),
    (delta_rule, {"key_heads": 3, "value_heads": 3, "key_dim": 32, "value_dim": 64}),
    (mamba1, {}),
    (mamba1, {"num_channels": 128, "state_size": 16, "num_tokens": 300}),
    (mamba1, {"num_channels": 1, "state_size": 1}),
    (mamba2, {}),
    (mamba2, {"num_heads": 6, "num_groups": 1, "head_dim": 64, "state_size": 128}),
    (mamba2, {"num_heads": 1, "num_groups": 1, "head_dim": 1, "state_size": 1, "num_tokens": 300}),
    (mamba2, {"num_heads": 3, "num_groups": 3, "head_dim": 32, "state_size": 16}),
]


@pytest.fixture(scope="module", params=[1, 2, 3])
def anywhere(request: pytest.FixtureRequest) -> NativeRecurrence:
    """With any number of threads."""
    return native_recurrence(request.param)


@pytest.fixture(scope="module")
def two_threads() -> NativeRecurrence:
    return native_recurrence(2)


def native_recurrence(num_threads: int) -> NativeRecurrence:
    if native.library() is None:
        pytest.skip("no C++ compiler here")
    return NativeRecurrence(ThreadPool(num_threads))


@pytest.mark.parametrize(("build", "sizes"), SIZES, ids=lambda each: str(getattr(each, "__name__", each)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_numbers_are_those_of_plain_torch(
    dtype: torch.dtype, build: Build, sizes: dict[str, Any], two_threads: NativeRecurrence
) -> None:
    operator = build(dtype, **sizes)
    (outputs, state), (expected, expected_state) = map(operator.whole, (two_threads, TorchRecurrence()))
    assert outputs.dtype is dtype
    atol, rtol = (1e-5, 1e-5) if dtype is torch.float32 else (1e-3, 2**-7)  # a rounding that goes the other way
    torch.testing.assert_close(outputs, expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("build", OPERATORS)
@pytest.mark.parametrize("seed", range(4))
def test_a_tokens_bits_depend_on_its_own_sequence_alone(
    dtype: torch.dtype, build: Build, seed: int, anywhere: NativeRecurrence
) -> None:
    check_bits_depend_on_nothing_else(anywhere, build(dtype), seed=seed)


@pytest.mark.parametrize(("build", "sizes"), SIZES, ids=lambda each: str(getattr(each, "__name__", each)))
def test_bits_do_not_depend_on_the_number_of_threads(
    build: Build, sizes: dict[str, Any], anywhere: NativeRecurrence, two_threads: NativeRecurrence
) -> None:
    operator = build(**sizes)
    assert all(map(torch.equal, operator.whole(anywhere), operator.whole(two_threads)))


@pytest.mark.parametrize("build", OPERATORS)
def test_slots_that_no_piece_writes_stay_as_they_are(build: Build, two_threads: NativeRecurrence) -> None:
    check_only_what_is_written_changes(two_threads, build())


@pytest.mark.parametrize("build", OPERATORS)
def test_slots_may_be_part_of_larger_ones(build: Build, two_threads: NativeRecurrence) -> None:
    """As where one tensor has the states of several layers."""
    operator = build()
    larger = operator.slots(10).unflatten(0, (5, 2))
    outputs = operator.run(two_threads, operator.rows, larger[:, 1], (0, 20, -1, 3), (20, 3, 3, 1))
    expected, state = operator.whole(two_threads)
    assert torch.equal(outputs, expected)
    assert torch.equal(larger[1, 1], state)
    assert torch.equal(larger[:, 0], operator.slots(5))


def test_it_says_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        NativeRecurrence.why_not(torch.float16)
        == "the C++ code supports torch.float32 and torch.bfloat16, not torch.float16"
    )
    monkeypatch.setattr(recurrence, "library", lambda: None)
    assert NativeRecurrence.why_not(torch.float32) == "there is no C++ compiler"
    monkeypatch.setattr(recurrence, "library", object)
    assert NativeRecurrence.why_not(torch.bfloat16) is None
