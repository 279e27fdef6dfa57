"""Operators with a recurrent state: the short convolution, the gated delta rule, Mamba 1 and Mamba 2.

The tokens of all sequences of a step are packed into one row, and a layer's states are stored in slots of one tensor.
Every operator processes one token after another. A token's output therefore depends, bit for bit, only on its own
sequence's tokens up to it, and not on other sequences or on how the sequence is split into steps.

The operators in this module are plain torch, and the reference for `cpu/recurrence.py` and `cuda/recurrence.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from app.model.inputs import to_device

ACTIVATIONS = (None, "silu")  # the activations that a short convolution supports
NORM_EPSILON = 1e-6  # added to the squared length of a query or a key


class StatePiece(NamedTuple):
    """Consecutive tokens of one sequence in the packed row, and where the state before and after them is stored."""

    first_token: int
    num_tokens: int
    read_slot: int  # -1 for the zero state, with which a sequence starts
    written_slot: int  # receives the state after the last token

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.num_tokens)


@dataclass(frozen=True, slots=True)
class StatePieces:
    """The pieces of a step. If a sequence has several, each reads the slot that the previous one has written.

    No piece writes the slot that it reads. Each token of the packed row belongs to exactly one piece.
    """

    table: torch.Tensor  # [num_pieces, 4] int32 on the CPU; the columns are the fields of `StatePiece`
    _chains: dict[torch.device, tuple[torch.Tensor, int]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        table = self.table
        assert table.dtype is torch.int32, f"pieces are int32 numbers, not {table.dtype}"
        assert table.shape[1:] == (4,), f"a piece has 4 numbers; the table's shape is {tuple(table.shape)}"
        assert table.is_contiguous(), "operators read a table row by row"
        assert table.device.type == "cpu", f"operators read a table in host memory, not on {table.device}"

    def __iter__(self) -> Iterator[StatePiece]:
        return (StatePiece(*row) for row in self.table.tolist())

    def chains_on(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the pieces, grouped in independent chains, and the number of chains. Copied to each device only once.

        Returns: [num_chains + num_pieces, 4] int32. The first rows describe the chains, from the most tokens to the
            fewest: the row of the chain's first piece, the row after its last, and two zeros. The pieces follow.
        """
        if device not in self._chains:
            chains = sorted(_chains_of(list(self)), key=_num_tokens, reverse=True)
            ends = list(accumulate(map(len, chains), initial=len(chains)))
            rows = [(first, end, 0, 0) for first, end in pairwise(ends)]
            rows += chain.from_iterable(chains)
            self._chains[device] = to_device(rows, device, torch.int32), len(chains)
        return self._chains[device]


def _chains_of(pieces: Sequence[StatePiece]) -> list[list[StatePiece]]:
    """Group the pieces so that no group reads or writes a slot that another one writes. Keeps the order of pieces."""
    same = {piece.written_slot: piece.written_slot for piece in pieces}  # union-find over slots

    def root(slot: int) -> int:
        while same[slot] != slot:
            slot = same[slot]
        return slot

    for piece in pieces:
        if piece.read_slot in same:
            same[root(piece.read_slot)] = root(piece.written_slot)
    chains: dict[int, list[StatePiece]] = {}
    for piece in pieces:
        chains.setdefault(root(piece.written_slot), []).append(piece)
    return list(chains.values())


def _num_tokens(pieces: Sequence[StatePiece]) -> int:
    return sum(piece.num_tokens for piece in pieces)


class DeltaRuleInputs(NamedTuple):
    """The inputs of the gated delta rule."""

    query: torch.Tensor  # [num_tokens, num_key_heads, key_dim]; each is shared by equally many adjacent value heads
    key: torch.Tensor  # the same shape
    value: torch.Tensor  # [num_tokens, num_value_heads, value_dim]
    decay: torch.Tensor  # [num_tokens, num_value_heads] float32, a logarithm
    beta: torch.Tensor  # [num_tokens, num_value_heads]


class MambaInputs(NamedTuple):
    """The inputs of Mamba 1 and Mamba 2, which have different shapes. The paper calls them x, Δ, A, B, C and D.

    | | Mamba 1 | Mamba 2 |
    |---|---|---|
    | `inputs` | [num_tokens, num_channels] | [num_tokens, num_heads, head_dim] |
    | `time_steps`, float32, after softplus and limits | [num_tokens, num_channels] | [num_tokens, num_heads] |
    | `decay`, float32, negative | [num_channels, state_size] | [num_heads] |
    | `inputs_to_state`, `state_to_outputs` | [num_tokens, state_size] | [num_tokens, num_groups, state_size] |
    | `skip`, float32 | [num_channels] | [num_heads] |

    All channels of Mamba 1 share `inputs_to_state` and `state_to_outputs`. Equally many adjacent heads of Mamba 2 share
    a group.
    """

    inputs: torch.Tensor
    time_steps: torch.Tensor
    decay: torch.Tensor
    inputs_to_state: torch.Tensor
    state_to_outputs: torch.Tensor
    skip: torch.Tensor


class Recurrence(Protocol):
    """The operators of layers with a recurrent state. The backend of an engine determines the implementation.

    Each operator reads and writes slots of `states`, and returns outputs for the packed row. Inputs and outputs have
    the model's type; the states of heads, and all sums, are float32.
    """

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
        """Compute a causal convolution over each channel's last `kernel_size` inputs.

        Args:
            inputs: [num_tokens, num_channels].
            weight: [num_channels, kernel_size], ordered from the oldest input to the newest.
            bias: [num_channels].
            states: [num_slots, kernel_size - 1, num_channels] in the model's type: the last inputs, oldest first.
            activation: one of `ACTIVATIONS`.

        Returns: [num_tokens, num_channels].
        """
        ...

    def gated_delta_rule(
        self, given: DeltaRuleInputs, states: torch.Tensor, pieces: StatePieces, *, scale: float, normalises: bool
    ) -> torch.Tensor:
        """Compute the gated delta rule (Yang, Kautz & Hatamizadeh, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

        A state decays by exp(decay), then moves by the fraction `beta` towards the state whose product with the key is
        the value. The output is the product of the new state and the query.

        Args:
            states: [num_slots, num_value_heads, key_dim, value_dim] float32.
            scale: multiplies each query.
            normalises: whether queries and keys are first scaled to unit length.

        Returns: [num_tokens, num_value_heads, value_dim].
        """
        ...

    def mamba1(self, given: MambaInputs, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        """Compute the selective state space of Mamba (Gu & Dao, arXiv 2312.00752), as in Jamba and Falcon Mamba.

        Unlike in Mamba 2, each channel has its own time step, and each number in a channel's state has its own decay
        factor exp(time step × decay).

        states: [num_slots, num_channels, state_size] float32. Returns: [num_tokens, num_channels].
        """
        ...

    def mamba2(self, given: MambaInputs, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        """Compute the selective state space of Mamba 2 (Dao & Gu, arXiv 2405.21060).

        A state decays by exp(time step × decay), then time step × outer product of the input and `inputs_to_state` (B)
        is added. The output is the state's product with `state_to_outputs` (C), plus `skip` (D) × the input.

        states: [num_slots, num_heads, head_dim, state_size] float32. Returns: [num_tokens, num_heads, head_dim].
        """
        ...


def check_slots(states: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Assert that kernels can read the states. shape: the expected shape of a slot."""
    assert states.dtype is dtype, f"states are {dtype}, not {states.dtype}"
    assert states.shape[1:] == shape, f"a slot has the shape {tuple(states.shape[1:])}, not {shape}"
    assert states[:1].is_contiguous(), f"a slot is not contiguous: strides {states.stride()}"


def check_heads(num_heads: int, num_keys: int) -> None:
    assert num_heads % num_keys == 0, f"{num_heads} heads cannot share {num_keys} keys evenly"


class TorchRecurrence:
    """Operators in plain torch. They loop over tokens, to compute each token with the same operations and shapes."""

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
        kernel_size = weight.shape[1]
        taps = weight.float().t().contiguous()
        outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
        for piece in pieces:
            seen = torch.cat([_read(states, piece), inputs[piece.tokens]])
            for at in range(piece.num_tokens):
                output = (seen[at : at + kernel_size].float() * taps).sum(dim=0)
                output = output if bias is None else output + bias.float()
                outputs[piece.first_token + at] = functional.silu(output) if activation else output
            states[piece.written_slot] = seen[piece.num_tokens :]
        return outputs

    def gated_delta_rule(
        self, given: DeltaRuleInputs, states: torch.Tensor, pieces: StatePieces, *, scale: float, normalises: bool
    ) -> torch.Tensor:
        query, key, value, decay, beta = given
        outputs = torch.empty_like(value, memory_format=torch.contiguous_format)

        def advance(state: torch.Tensor, token: int) -> torch.Tensor:
            own_query, own_key = (_for_heads(each[token].float(), states.shape[1]) for each in (query, key))
            if normalises:
                own_query, own_key = _normalised(own_query), _normalised(own_key)
            state = state * decay[token].float().exp()[:, None, None]
            found = (state * own_key[:, :, None]).sum(dim=1)
            change = (value[token].float() - found) * beta[token].float()[:, None]
            state = state + own_key[:, :, None] * change[:, None, :]
            outputs[token] = (state * (own_query * scale)[:, :, None]).sum(dim=1)
            return state

        _each_token(states, pieces, advance)
        return outputs

    def mamba1(self, given: MambaInputs, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        inputs, time_steps, decay, inputs_to_state, state_to_outputs, skip = given
        outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)

        def advance(state: torch.Tensor, token: int) -> torch.Tensor:
            own, time_step = inputs[token].float(), time_steps[token][:, None]
            change = own[:, None] * time_step * inputs_to_state[token].float()
            state = state * (time_step * decay).exp() + change
            outputs[token] = (state * state_to_outputs[token].float()).sum(dim=1) + own * skip
            return state

        _each_token(states, pieces, advance)
        return outputs

    def mamba2(self, given: MambaInputs, states: torch.Tensor, pieces: StatePieces) -> torch.Tensor:
        inputs, time_steps, decay, inputs_to_state, state_to_outputs, skip = given
        outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)

        def advance(state: torch.Tensor, token: int) -> torch.Tensor:
            into, out = (
                _for_heads(each[token].float(), states.shape[1]) for each in (inputs_to_state, state_to_outputs)
            )
            own = inputs[token].float()
            change = own * time_steps[token][:, None]
            state = state * (time_steps[token] * decay).exp()[:, None, None] + change[:, :, None] * into[:, None, :]
            outputs[token] = (state * out[:, None, :]).sum(dim=2) + own * skip[:, None]
            return state

        _each_token(states, pieces, advance)
        return outputs


def _each_token(
    states: torch.Tensor, pieces: StatePieces, advance: Callable[[torch.Tensor, int], torch.Tensor]
) -> None:
    """Advance each piece's state token by token. advance: returns the state after the token with this index."""
    for piece in pieces:
        state = _read(states, piece)
        for token in range(piece.tokens.start, piece.tokens.stop):
            state = advance(state, token)
        states[piece.written_slot] = state


def _read(states: torch.Tensor, piece: StatePiece) -> torch.Tensor:
    return torch.zeros_like(states[0]) if piece.read_slot < 0 else states[piece.read_slot]


def _for_heads(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeat each row for the adjacent heads that share it: [num_groups, dim] → [num_heads, dim]."""
    return rows.repeat_interleave(num_heads // rows.shape[0], dim=0)


def _normalised(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + NORM_EPSILON)
