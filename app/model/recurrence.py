"""Operators with a recurrent state: the short convolution, the gated delta rule, Mamba 1 and Mamba 2.

The tokens of all sequences of a step are in one packed row. The states of a layer are in slots of one tensor. Every
operator computes one token after another, so a token's bits depend only on the earlier tokens of its own sequence. They
do not depend on how the sequence is cut into steps, or on other sequences in a step.

The operators in this module are plain torch, the reference for the faster ones (`cpu/recurrence.py`,
`cuda/recurrence.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from app.model.inputs import to_device

ACTIVATIONS = (None, "silu")  # of a short convolution
NORM_EPSILON = 1e-6  # added to the squared length of a query or a key


class StatePiece(NamedTuple):
    """Consecutive tokens of one sequence in the packed row."""

    first_token: int
    num_tokens: int
    read_slot: int  # -1: the zero state, at the start of a sequence
    written_slot: int  # receives the state after the last token

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.num_tokens)


@dataclass(frozen=True, slots=True)
class StatePieces:
    """The pieces of a step. Adjacent pieces of a sequence: each reads the slot that the previous one wrote.

    No piece writes the slot that it reads, and each token of the packed row belongs to one piece.
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
        """Return the pieces as independent chains, and the number of chains. The result is copied to a device once.

        Returns: [num_chains + num_pieces, 4] int32. The chains come first: the row of a chain's first piece, the row
            after its last piece, and two zeros. The rows of the pieces follow. The longest chain in tokens is first.
        """
        if device not in self._chains:
            chains = sorted(_chains_of(list(self)), key=_num_tokens, reverse=True)
            ends = list(accumulate(map(len, chains), initial=len(chains)))
            rows = [(first, end, 0, 0) for first, end in pairwise(ends)]
            rows += chain.from_iterable(chains)
            self._chains[device] = to_device(rows, device, torch.int32), len(chains)
        return self._chains[device]


def _chains_of(pieces: Sequence[StatePiece]) -> list[list[StatePiece]]:
    """Group the pieces, in the given order. No group reads or writes a slot that another group writes."""
    same = {piece.written_slot: piece.written_slot for piece in pieces}  # leads from slot to slot within a group

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


class Recurrence(Protocol):
    """The operators of layers with a recurrent state: one of several backends, chosen when an engine is built.

    Each operator reads and writes slots of `states`, and returns outputs for the packed row in the model's type, which
    is also the type of its inputs. The states of heads, and all sums, are float32.
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
        """Compute a causal convolution of each channel with the last inputs.

        Args:
            inputs: [num_tokens, num_channels].
            weight: [num_channels, kernel_size], for the oldest input first.
            bias: [num_channels].
            states: [num_slots, kernel_size - 1, num_channels] in the model's type: the last inputs, oldest first.
            activation: one of `ACTIVATIONS`.

        Returns: [num_tokens, num_channels].
        """
        ...

    def gated_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        pieces: StatePieces,
        *,
        scale: float,
        normalises: bool,
    ) -> torch.Tensor:
        """Compute the gated delta rule (Yang, Kautz & Hatamizadeh, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

        A state decays by exp(decay). It then moves, by the fraction `beta`, towards the state whose product with the
        key is the value. The product of the state with the query is the output.

        Args:
            query, key: [num_tokens, num_key_heads, key_dim]; each head serves equally many adjacent value heads.
            value: [num_tokens, num_value_heads, value_dim].
            decay: [num_tokens, num_value_heads] float32, a logarithm.
            beta: [num_tokens, num_value_heads].
            states: [num_slots, num_value_heads, key_dim, value_dim] float32.
            scale: multiplies each query.
            normalises: whether queries and keys are divided by their lengths first.

        Returns: [num_tokens, num_value_heads, value_dim].
        """
        ...

    def mamba1(
        self,
        inputs: torch.Tensor,
        time_steps: torch.Tensor,
        decay: torch.Tensor,
        inputs_to_state: torch.Tensor,
        state_to_outputs: torch.Tensor,
        skip: torch.Tensor,
        states: torch.Tensor,
        pieces: StatePieces,
    ) -> torch.Tensor:
        """Compute the selective state space of Mamba (Gu & Dao, arXiv 2312.00752), as in Jamba and Falcon Mamba.

        This is Mamba 2, except that each channel has its own time step, and each number of a channel's state has its
        own decay factor exp(time step × decay).

        Args:
            inputs: [num_tokens, num_channels].
            time_steps: [num_tokens, num_channels] float32, after softplus.
            decay: [num_channels, state_size] float32, negative (A).
            inputs_to_state, state_to_outputs: [num_tokens, state_size], the same for all channels (B and C).
            skip: [num_channels] float32 (D).
            states: [num_slots, num_channels, state_size] float32.

        Returns: [num_tokens, num_channels].
        """
        ...

    def mamba2(
        self,
        inputs: torch.Tensor,
        time_steps: torch.Tensor,
        decay: torch.Tensor,
        inputs_to_state: torch.Tensor,
        state_to_outputs: torch.Tensor,
        skip: torch.Tensor,
        states: torch.Tensor,
        pieces: StatePieces,
    ) -> torch.Tensor:
        """Compute the selective state space of Mamba 2 (Dao & Gu, arXiv 2405.21060).

        A state decays by exp(time step × decay). It then adds the time step × the outer product of the input and
        `inputs_to_state` (B). The output is its product with `state_to_outputs` (C), plus `skip` (D) × the input.

        Args:
            inputs: [num_tokens, num_heads, head_dim].
            time_steps: [num_tokens, num_heads] float32, after softplus and limits.
            decay: [num_heads] float32, negative (A).
            inputs_to_state, state_to_outputs: [num_tokens, num_groups, state_size]; each group serves equally many
                adjacent heads.
            skip: [num_heads] float32.
            states: [num_slots, num_heads, head_dim, state_size] float32.

        Returns: [num_tokens, num_heads, head_dim].
        """
        ...


def check_slots(states: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Check that kernels can read the states. shape: the shape of a slot."""
    assert states.dtype is dtype, f"states are {dtype}, not {states.dtype}"
    assert states.shape[1:] == shape, f"a slot has the shape {tuple(states.shape[1:])}, not {shape}"
    assert states[:1].is_contiguous(), f"a slot is not contiguous: strides {states.stride()}"


def check_heads(num_heads: int, num_keys: int) -> None:
    assert num_heads % num_keys == 0, f"{num_heads} heads cannot share {num_keys} keys evenly"


class TorchRecurrence:
    """Operators in plain torch. A loop over tokens computes each token by the same operations on the same shapes."""

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
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        pieces: StatePieces,
        *,
        scale: float,
        normalises: bool,
    ) -> torch.Tensor:
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

    def mamba1(
        self,
        inputs: torch.Tensor,
        time_steps: torch.Tensor,
        decay: torch.Tensor,
        inputs_to_state: torch.Tensor,
        state_to_outputs: torch.Tensor,
        skip: torch.Tensor,
        states: torch.Tensor,
        pieces: StatePieces,
    ) -> torch.Tensor:
        outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)

        def advance(state: torch.Tensor, token: int) -> torch.Tensor:
            own, time_step = inputs[token].float(), time_steps[token][:, None]
            change = own[:, None] * time_step * inputs_to_state[token].float()
            state = state * (time_step * decay).exp() + change
            outputs[token] = (state * state_to_outputs[token].float()).sum(dim=1) + own * skip
            return state

        _each_token(states, pieces, advance)
        return outputs

    def mamba2(
        self,
        inputs: torch.Tensor,
        time_steps: torch.Tensor,
        decay: torch.Tensor,
        inputs_to_state: torch.Tensor,
        state_to_outputs: torch.Tensor,
        skip: torch.Tensor,
        states: torch.Tensor,
        pieces: StatePieces,
    ) -> torch.Tensor:
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
    """Advance the state of each piece through its tokens. advance: returns the state after a token."""
    for piece in pieces:
        state = _read(states, piece)
        for token in range(piece.tokens.start, piece.tokens.stop):
            state = advance(state, token)
        states[piece.written_slot] = state


def _read(states: torch.Tensor, piece: StatePiece) -> torch.Tensor:
    return torch.zeros_like(states[0]) if piece.read_slot < 0 else states[piece.read_slot]


def _for_heads(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[num_groups, dim] → [num_heads, dim]: repeat each row for its adjacent heads."""
    return rows.repeat_interleave(num_heads // rows.shape[0], dim=0)


def _normalised(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + NORM_EPSILON)
