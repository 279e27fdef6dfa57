"""The operators with a recurrent state in plain torch, and what every implementation of them must show."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest
import torch
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from app.model.recurrence import DeltaRuleInputs, MambaInputs, Recurrence, StatePieces, TorchRecurrence
from tests.kit.models import CPU

NUM_TOKENS = 23
NUM_SLOTS = 9
GUARD = 7.0  # in every number of a slot that nothing has written

# The packed rows that an operator reads; its weights.
Tensors = tuple[torch.Tensor, ...]
Call = Callable[[Recurrence, Tensors, torch.Tensor, StatePieces], torch.Tensor]


@dataclass(frozen=True)
class Operator:
    """One of the operators with random weights, and random rows for it."""

    rows: Tensors
    weights: tuple[Any, ...]
    state: torch.Tensor  # of the shape and the type of a slot
    call: Call

    def run(self, recurrence: Recurrence, rows: Tensors, states: torch.Tensor, *pieces: Sequence[int]) -> torch.Tensor:
        return self.call(recurrence, rows, states, StatePieces(torch.tensor(pieces, dtype=torch.int32).reshape(-1, 4)))

    def whole(self, recurrence: Recurrence, rows: Tensors | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs and the last state of one sequence in one piece."""
        rows = self.rows if rows is None else rows
        states = self.slots(1)
        outputs = self.run(recurrence, rows, states, (0, len(rows[0]), -1, 0))
        return outputs, states[0]

    def slots(self, num_slots: int) -> torch.Tensor:
        return self.state.new_full((num_slots, *self.state.shape), GUARD)


def convolution(
    dtype: torch.dtype = torch.float32,
    *,
    num_channels: int = 37,
    kernel_size: int = 4,
    has_bias: bool = True,
    activation: str | None = "silu",
    num_tokens: int = NUM_TOKENS,
) -> Operator:
    torch.manual_seed(0)
    rows = torch.randn(num_tokens, num_channels + 3).to(dtype)[:, 1:-2]
    weight = torch.randn(num_channels, kernel_size).to(dtype)
    bias = torch.randn(num_channels).to(dtype) if has_bias else None

    def call(recurrence: Recurrence, rows: Tensors, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        return recurrence.short_convolution(rows[0], weight, bias, states, pieces, activation=activation)

    return Operator((rows,), (weight, bias), torch.empty(kernel_size - 1, num_channels, dtype=dtype), call)


def delta_rule(
    dtype: torch.dtype = torch.float32,
    *,
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 19,
    value_dim: int = 37,
    normalises: bool = True,
    num_tokens: int = NUM_TOKENS,
) -> Operator:
    torch.manual_seed(0)
    sizes = key_heads * key_dim, key_heads * key_dim, value_heads * value_dim
    query, key, value = torch.randn(num_tokens, sum(sizes)).to(dtype).split(sizes, dim=1)
    query, key = (each.unflatten(1, (key_heads, key_dim)) for each in (query, key))
    value = value.unflatten(1, (value_heads, value_dim))
    if not normalises:  # the state would grow without bound
        query, key = (each * key_dim**-0.5 for each in (query, key))
    decay, beta = -torch.rand(num_tokens, value_heads), torch.rand(num_tokens, value_heads).to(dtype)

    def call(recurrence: Recurrence, rows: Tensors, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        given = DeltaRuleInputs(*rows)
        return recurrence.gated_delta_rule(given, states, pieces, scale=key_dim**-0.5, normalises=normalises)

    return Operator((query, key, value, decay, beta), (), torch.empty(value_heads, key_dim, value_dim), call)


def mamba1(
    dtype: torch.dtype = torch.float32,
    *,
    num_channels: int = 37,
    state_size: int = 13,
    num_tokens: int = NUM_TOKENS,
) -> Operator:
    torch.manual_seed(0)
    sizes = num_channels, state_size, state_size
    inputs, into, out = torch.randn(num_tokens, sum(sizes)).to(dtype).split(sizes, dim=1)
    time_steps = torch.rand(num_tokens, num_channels)
    decay, skip = -torch.rand(num_channels, state_size) * 4, torch.randn(num_channels)

    def call(recurrence: Recurrence, rows: Tensors, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        inputs, time_steps, into, out = rows
        return recurrence.mamba1(MambaInputs(inputs, time_steps, decay, into, out, skip), states, pieces)

    return Operator((inputs, time_steps, into, out), (decay, skip), torch.empty(num_channels, state_size), call)


def mamba2(
    dtype: torch.dtype = torch.float32,
    *,
    num_heads: int = 4,
    num_groups: int = 2,
    head_dim: int = 13,
    state_size: int = 37,
    num_tokens: int = NUM_TOKENS,
) -> Operator:
    torch.manual_seed(0)
    sizes = num_heads * head_dim, num_groups * state_size, num_groups * state_size
    inputs, into, out = torch.randn(num_tokens, sum(sizes)).to(dtype).split(sizes, dim=1)
    inputs = inputs.unflatten(1, (num_heads, head_dim))
    into, out = (each.unflatten(1, (num_groups, state_size)) for each in (into, out))
    time_steps = torch.rand(num_tokens, num_heads)
    decay, skip = -torch.rand(num_heads) * 4, torch.randn(num_heads)

    def call(recurrence: Recurrence, rows: Tensors, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        inputs, time_steps, into, out = rows
        return recurrence.mamba2(MambaInputs(inputs, time_steps, decay, into, out, skip), states, pieces)

    return Operator((inputs, time_steps, into, out), (decay, skip), torch.empty(num_heads, head_dim, state_size), call)


OPERATORS: tuple[Callable[..., Operator], ...] = (convolution, delta_rule, mamba1, mamba2)


def check_bits_depend_on_nothing_else(recurrence: Recurrence, operator: Operator, *, seed: int) -> None:
    """Two sequences, cut at random and in random steps together, give the bits that each has alone in one piece."""
    sequences = [slice(0, 14), slice(14, NUM_TOKENS)]
    expected = [operator.whole(recurrence, tuple(each[own] for each in operator.rows)) for own in sequences]
    chance = random.Random(seed)
    cuts = [own for own, tokens in enumerate(sequences) for _ in range(tokens.start, tokens.stop)]
    chance.shuffle(cuts)  # whose token is next
    states, slots = operator.slots(NUM_SLOTS), [-1, -1]
    next_tokens = [tokens.start for tokens in sequences]
    outputs: list[list[torch.Tensor]] = [[], []]
    while cuts:
        step = [(own, len(list(group))) for own, group in groupby(cuts[: chance.randint(1, 6)])]
        pieces, tokens = [], []
        for own, num_tokens in step:
            slot = chance.choice([slot for slot in range(NUM_SLOTS) if slot not in slots])
            pieces.append((len(tokens), num_tokens, slots[own], slot))
            tokens += range(next_tokens[own], next_tokens[own] + num_tokens)
            slots[own] = slot
            next_tokens[own] += num_tokens
        together = operator.run(recurrence, tuple(each[tokens] for each in operator.rows), states, *pieces)
        for (own, num_tokens), (first, *_) in zip(step, pieces, strict=True):
            outputs[own].append(together[first : first + num_tokens])
        del cuts[: len(tokens)]
    for own, (output, state) in enumerate(expected):
        assert torch.equal(torch.cat(outputs[own]), output)
        assert torch.equal(states[slots[own]], state)


def check_only_what_is_written_changes(recurrence: Recurrence, operator: Operator) -> None:
    """Slots that no piece writes stay as they are, and the row may have no tokens at all."""
    states = operator.slots(5)
    operator.run(recurrence, operator.rows, states, (0, 20, -1, 3), (20, 3, 3, 1))
    assert [bool((slot == GUARD).all()) for slot in states] == [True, False, True, False, True]
    before = states.clone()
    nothing = tuple(each[:0] for each in operator.rows)
    assert len(operator.run(recurrence, nothing, states)) == 0
    assert torch.equal(states, before)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("seed", range(4))
def test_a_tokens_bits_depend_on_its_own_sequence_alone(operator: Callable[..., Operator], seed: int) -> None:
    check_bits_depend_on_nothing_else(TorchRecurrence(), operator(), seed=seed)


@pytest.mark.parametrize("operator", OPERATORS)
def test_slots_that_no_piece_writes_stay_as_they_are(operator: Callable[..., Operator]) -> None:
    check_only_what_is_written_changes(TorchRecurrence(), operator())


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("kernel_size", [1, 3, 4])
def test_the_convolution_is_that_of_transformers(activation: str | None, kernel_size: int) -> None:
    operator = convolution(kernel_size=kernel_size, activation=activation)
    weight, bias = operator.weights
    outputs, state = operator.whole(TorchRecurrence())
    expected = causal_conv1d_fn(operator.rows[0].t()[None], weight, bias, activation=activation)
    assert torch.allclose(outputs, expected[0].t(), atol=1e-5)
    assert torch.equal(state, operator.rows[0][NUM_TOKENS - kernel_size + 1 :])


@pytest.mark.parametrize("normalises", [False, True])
def test_the_gated_delta_rule_is_that_of_transformers(normalises: bool) -> None:
    operator = delta_rule(normalises=normalises)
    outputs, state = operator.whole(TorchRecurrence())
    expected, expected_state = torch_recurrent_gated_delta_rule(
        *(each[None] for each in operator.rows), output_final_state=True, use_qk_l2norm_in_kernel=normalises
    )
    assert torch.allclose(outputs, expected[0], atol=1e-5)
    assert torch.allclose(state, expected_state[0], atol=1e-5)


def test_mamba1_is_that_of_transformers() -> None:
    operator = mamba1()
    inputs, time_steps, into, out = (each.t()[None] for each in operator.rows)
    decay, skip = operator.weights
    outputs, state = operator.whole(TorchRecurrence())
    expected, expected_state = mamba_selective_scan(
        inputs, time_steps, decay, into, out, D=skip, return_last_state=True
    )
    assert torch.allclose(outputs, expected[0].t(), atol=1e-5)
    assert torch.allclose(state, expected_state[0], atol=1e-5)


def test_mamba2_is_that_of_transformers() -> None:
    operator = mamba2()
    inputs, time_steps, into, out = (each[None] for each in operator.rows)
    decay, skip = operator.weights
    outputs, state = operator.whole(TorchRecurrence())
    expected, expected_state = mamba2_chunk_scan(
        inputs, time_steps, decay, into, out, chunk_size=8, D=skip, return_final_states=True
    )
    assert torch.allclose(outputs, expected[0], atol=1e-5)
    assert torch.allclose(state, expected_state[0], atol=1e-5)


@pytest.mark.parametrize(
    ("pieces", "chains"),
    [
        ([], []),
        ([(0, 1, 0, 1), (1, 1, 2, 3)], [[0], [1]]),  # two sequences decode
        ([(0, 1, 5, 1), (1, 1, 5, 3)], [[0], [1]]),  # two sequences begin behind one snapshot
        ([(0, 4, -1, 1), (4, 2, 1, 2), (6, 9, -1, 3)], [[2], [0, 1]]),  # the longest chain is the first
        ([(0, 4, -1, 1), (4, 9, -1, 3), (13, 2, 1, 2)], [[1], [0, 2]]),  # pieces of a sequence stand apart
        ([(0, 4, 3, 1), (4, 2, -1, 3)], [[0, 1]]),  # a slot is read before it is written
        ([(0, 1, 3, 1), (1, 1, 4, 3), (2, 1, 5, 4)], [[0, 1, 2]]),
    ],
)
def test_pieces_that_meet_in_a_slot_are_one_chain(pieces: list[tuple[int, ...]], chains: list[list[int]]) -> None:
    step = StatePieces(torch.tensor(pieces, dtype=torch.int32).reshape(-1, 4))
    table, num_chains = step.chains_on(CPU)
    rows = table.tolist()
    assert [[pieces.index(tuple(row)) for row in rows[slice(*rows[at][:2])]] for at in range(num_chains)] == chains
    assert step.chains_on(CPU)[0] is table, "it is copied once in a step"
