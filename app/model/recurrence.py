"""Operators with a recurrent state: the short convolution, the gated delta rule, Mamba 1 and Mamba 2.

The tokens of all sequences of a step stand in one packed row. The states of a layer lie in slots of one tensor. Every
operator computes one token after the other, so the bits of a token depend on nothing but the tokens before it in its
own sequence: not on how the sequence is cut into steps, and not on what else is in a step.

The operators below are plain torch: the reference for the faster ones (`cpu/recurrence.py`, `cuda/recurrence.py`).
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
NORM_EPSILON = 1e-6  # is added to the squared length of a query or a key


class StatePiece(NamedTuple):
    """Neighbouring tokens of one sequence in the packed row."""

    first_token: int
    num_tokens: int
    read_slot: int  # -1: the zero state, since a sequence begins
    written_slot: int  # gets the state after the last token

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.num_tokens)


@dataclass(frozen=True, slots=True)
class StatePieces:
    """The pieces of a step. Pieces of one sequence follow one another: each reads the slot that the last one wrote.

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
        """The pieces as chains that may be computed side by side, and the number of chains; copied once for a device.

        Returns: [num_chains + num_pieces, 4] int32. A row for each chain has the row of its first piece, the row behind
            its last piece, and two zeros; the rows of the pieces follow. The chain with most tokens is the first.
        """
        if device not in self._chains:
            chains = sorted(_chains_of(list(self)), key=_num_tokens, reverse=True)
            ends = list(accumulate(map(len, chains), initial=len(chains)))
            rows = [(first, end, 0, 0) for first, end in pairwise(ends)]
            rows += chain.from_iterable(chains)
            self._chains[device] = to_device(rows, device, torch.int32), len(chains)
        return self._chains[device]


def _chains_of(pieces: Sequence[StatePiece]) -> list[list[StatePiece]]:
    """The pieces in groups, each in the given order. Nothing reads or writes a slot that another group writes."""
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
    """The operators of layers that have a recurrent state: one of several backends, chosen when an engine is built.

    Each operator reads and writes slots of `states` and returns the outputs of the packed row in the type of its
    inputs, which is the model's. States of heads are float32, and all sums are.
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
        """A causal convolution of each channel with the last inputs.

        Args:
            inputs: [num_tokens, num_channels].
            weight: [num_channels, kernel_size], that of the oldest input first.
            bias: [num_channels].
            states: [num_slots, kernel_size - 1, num_channels] in the model's type: the last inputs, the oldest first.
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
        """The gated delta rule (Yang, Kautz & Hatamizadeh, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 compute it.

        A state decays by exp(decay), then moves by `beta` of the way to where its product with the key is the value.
        Its product with the query is the output.

        Args:
            query, key: [num_tokens, num_key_heads, key_dim]; each head serves neighbouring value heads, as many each.
            value: [num_tokens, num_value_heads, value_dim].
            decay: [num_tokens, num_value_heads] float32, a logarithm.
            beta: [num_tokens, num_value_heads].
            states: [num_slots, num_value_heads, key_dim, value_dim] float32.
            scale: is multiplied with each query.
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
        """The selective state space of Mamba (Gu & Dao, arXiv 2312.00752), as Jamba and Falcon Mamba compute it.

        As in Mamba 2, but each channel has a time step of its own, and each number of its state decays by a factor of
        its own: by exp(time step × decay).

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
        """The selective state space of Mamba 2 (Dao & Gu, arXiv 2405.21060).

        A state decays by exp(time step × decay), then takes in the time step × the outer product of the input and
        `inputs_to_state` (B). Its product with `state_to_outputs` (C) and `skip` (D) × the input are the output.

        Args:
            inputs: [num_tokens, num_heads, head_dim].
            time_steps: [num_tokens, num_heads] float32, after softplus and limits.
            decay: [num_heads] float32, negative (A).
            inputs_to_state, state_to_outputs: [num_tokens, num_groups, state_size]; each group serves neighbouring
                heads, as many each.
            skip: [num_heads] float32.
            states: [num_slots, num_heads, head_dim, state_size] float32.

        Returns: [num_tokens, num_heads, head_dim].
        """
        ...


def check_slots(states: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Whether kernels can read states. shape: of a slot."""
    assert states.dtype is dtype, f"states are {dtype}, not {states.dtype}"
    assert states.shape[1:] == shape, f"a slot has the shape {tuple(states.shape[1:])}, not {shape}"
    assert states[:1].is_contiguous(), f"the numbers of a slot do not stand side by side: strides {states.stride()}"


def check_heads(num_heads: int, num_keys: int) -> None:
    assert num_heads % num_keys == 0, f"{num_heads} heads cannot share {num_keys} keys evenly"


class TorchRecurrence:
    """Plain torch. A loop over tokens gives each of them the same operations on the same shapes."""

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
    """Take the state of each piece through its tokens. advance: gives the state behind a token of the packed row."""
    for piece in pieces:
        state = _read(states, piece)
        for token in range(piece.tokens.start, piece.tokens.stop):
            state = advance(state, token)
        states[piece.written_slot] = state


def _read(states: torch.Tensor, piece: StatePiece) -> torch.Tensor:
    return torch.zeros_like(states[0]) if piece.read_slot < 0 else states[piece.read_slot]


def _for_heads(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[num_groups, dim] → [num_heads, dim]: each row for its neighbouring heads."""
    return rows.repeat_interleave(num_heads // rows.shape[0], dim=0)


def _normalised(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + NORM_EPSILON)
