"""Makes transformers' recurrent layers use states in slots, without changing the models.

The layers call a few functions that they look up by name in their model's Python module. This module replaces these
functions once. Many layers do not pass keyword arguments on, so hooks of the model store the keyword argument `paged`
in a context variable during a forward pass. Outside of a step, the replacement calls the original function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from app.engine.batch import StepBatch
from app.model.attention import AttentionRules, AttentionStep, PagedAttention, RecurrentStep, Slots, StateShape
from app.model.inputs import ModelInputs
from app.model.recurrence import DeltaRuleInputs, MambaInputs, Recurrence, StatePieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_RUNNING_STEP: ContextVar[object] = ContextVar("running_step", default=None)  # the step of this thread's forward pass


class StatefulAttention:
    """Paged attention, combined with the state slots of all recurrent layers."""

    def __init__(
        self,
        attention: PagedAttention,
        shapes: Sequence[StateShape],
        recurrence: Recurrence,
        *,
        num_slots: int,
        device: torch.device,
    ) -> None:
        """shapes: one for each operator, in the order in which a forward pass calls the operators."""
        self.block_size = attention.block_size
        self.kv_tensors = attention.kv_tensors
        self.attention = attention
        self._recurrence = recurrence
        self.states = [torch.zeros(num_slots, *shape.sizes, dtype=shape.dtype, device=device) for shape in shapes]

    def begin_step(self, batch: StepBatch, inputs: ModelInputs) -> AttentionStep:
        pieces = pieces_of(batch)
        slots = [Slots(states, pieces, self._recurrence) for states in self.states]
        return _StatefulStep(self.attention.begin_step(batch, inputs), slots)


class _StatefulStep:
    """One step, in which each operator receives the next layer's slots."""

    def __init__(self, attention: AttentionStep, slots: Sequence[Slots]) -> None:
        self._attention = attention
        self._slots = iter(slots)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        return self._attention.attend(layer, query, key, value, rules)

    def next_slots(self, _shape: StateShape, _inputs: torch.Tensor) -> Slots:
        return next(self._slots)


def pieces_of(batch: StepBatch) -> StatePieces:
    """Return the pieces of a step, with the slots that each reads and writes."""
    rows: list[tuple[int, int, int, int]] = []
    first = 0
    for item in batch.scheduled:
        assert item.states is not None, "the model has recurrent layers"
        slot, begin = item.states.read, 0
        for end, written in item.states.writes:
            rows.append((first + begin, end - begin, slot, written))
            slot, begin = written, end
        first += len(item.token_ids)
    return StatePieces(torch.tensor(rows, dtype=torch.int32))


def use_slots(module: PreTrainedModel) -> None:
    """Make a model's recurrent layers use the slots of a step. Does nothing if the model has no such layers."""
    replaced = False
    for code in {sys.modules[type(part).__module__] for part in module.modules()}:
        for name, compute in _OPERATORS.items():
            if (own := getattr(code, name, None)) is None:
                continue
            replaced = True
            if not hasattr(own, "computes_with_slots"):
                setattr(code, name, _with_slots(own, compute))
    if replaced:
        module.register_forward_pre_hook(_keep_step, with_kwargs=True)
        module.register_forward_hook(_forget_step, always_call=True)


def _keep_step(_module: torch.nn.Module, _inputs: Any, named: dict[str, Any]) -> None:
    _RUNNING_STEP.set(named.get("paged"))


def _forget_step(_module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
    _RUNNING_STEP.set(None)


def has_operators(model: type[PreTrainedModel]) -> bool:
    """Return whether a class may have recurrent layers, judging by the functions in its Python module."""
    return any(hasattr(sys.modules[model.__module__], name) for name in _OPERATORS)


def _with_slots(own: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def operator(*given: Any, paged: Any = None, **named: Any) -> Any:
        step = _RUNNING_STEP.get()
        return compute(step, *given, **named) if hasattr(step, "next_slots") else own(*given, **named)

    operator.computes_with_slots = True  # type: ignore[attr-defined]
    return operator


def _convolution(
    step: RecurrentStep,
    hidden_states: torch.Tensor,  # [1, num_channels, num_tokens]
    weight: torch.Tensor,  # [num_channels, kernel_size]
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_others: Any,
) -> torch.Tensor:
    inputs = hidden_states[0].transpose(0, 1).contiguous()
    slots = step.next_slots(StateShape((weight.shape[1] - 1, weight.shape[0]), inputs.dtype), inputs)
    output = slots.recurrence.short_convolution(inputs, weight, bias, slots.states, slots.pieces, activation=activation)
    return output.transpose(0, 1)[None]


def _gated_delta_rule(
    step: RecurrentStep,
    query: torch.Tensor,  # [1, num_tokens, num_key_heads, key_dim], as key
    key: torch.Tensor,
    value: torch.Tensor,  # [1, num_tokens, num_value_heads, value_dim]
    g: torch.Tensor,  # [1, num_tokens, num_value_heads], the logarithm of the decay
    beta: torch.Tensor,  # [1, num_tokens, num_value_heads]
    use_qk_l2norm_in_kernel: bool = False,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    sizes = (value.shape[2], key.shape[3], value.shape[3])
    slots = step.next_slots(StateShape(sizes, torch.float32), value[0])
    output = slots.recurrence.gated_delta_rule(
        DeltaRuleInputs(query[0], key[0], value[0], g[0].float(), beta[0]), slots.states, slots.pieces,
        scale=key.shape[3] ** -0.5, normalises=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return output[None], None


def _mamba1(
    step: RecurrentStep,
    hidden_states: torch.Tensor,  # [1, num_channels, num_tokens]
    dt: torch.Tensor,  # [1, num_channels, num_tokens]
    decay: torch.Tensor,  # [num_channels, state_size], A in the paper
    inputs_to_state: torch.Tensor,  # [1, state_size, num_tokens], B
    state_to_outputs: torch.Tensor,  # [1, state_size, num_tokens], C
    z: torch.Tensor | None = None,  # [1, num_channels, num_tokens], a gate
    delta_bias: torch.Tensor | None = None,  # [num_channels]
    delta_softplus: bool = False,
    **others: Any,  # including D, which skips the state, [num_channels]
) -> torch.Tensor:
    inputs, time_steps, into, out = (each[0].t() for each in (hidden_states, dt, inputs_to_state, state_to_outputs))
    time_steps = time_steps if delta_bias is None else time_steps + delta_bias.to(dt.dtype)
    time_steps = functional.softplus(time_steps) if delta_softplus else time_steps
    slots = step.next_slots(StateShape((inputs.shape[1], into.shape[1]), torch.float32), inputs)
    given = MambaInputs(inputs, time_steps.float(), decay.float(), into, out, others["D"].float())
    output = slots.recurrence.mamba1(given, slots.states, slots.pieces).t()[None]
    return output if z is None else output * functional.silu(z)


def _mamba2(
    step: RecurrentStep,
    hidden_states: torch.Tensor,  # [1, num_tokens, num_heads, head_dim]
    dt: torch.Tensor,  # [1, num_tokens, num_heads]
    decay: torch.Tensor,  # [num_heads], A in the paper
    inputs_to_state: torch.Tensor,  # [1, num_tokens, num_groups, state_size], B
    state_to_outputs: torch.Tensor,  # [1, num_tokens, num_groups, state_size], C
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,  # including D, which skips the state, [num_heads]
) -> torch.Tensor:
    time_steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    time_steps = functional.softplus(time_steps) if dt_softplus else time_steps
    time_steps = time_steps.clamp(*dt_limit).float()
    sizes = (hidden_states.shape[2], hidden_states.shape[3], inputs_to_state.shape[3])
    slots = step.next_slots(StateShape(sizes, torch.float32), hidden_states[0])
    given = MambaInputs(
        hidden_states[0], time_steps, decay.float(), inputs_to_state[0], state_to_outputs[0], others["D"].float()
    )
    return slots.recurrence.mamba2(given, slots.states, slots.pieces)[None]


# Name of a function in transformers' modules → its replacement.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba_selective_scan": _mamba1,
    "mamba2_chunk_scan": _mamba2,
}
