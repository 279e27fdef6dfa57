"""Verifies an implementation of a model by comparing its output for a few tokens with that of the model's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import SamplingParams
from app.engine.state_pool import NO_STATE, StatePath
from app.errors import UnsupportedModel
from app.model.attention import AttentionStep
from app.model.llama import described_as
from app.model.own_attention import CacheProbe, run_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_TOKENS = 24
_SLOTS_OF_SEQUENCE = 3  # for states: two that alternate, and one for a state from which several pieces start
# Number type or quantisation → limits for the first layer's output and the whole model's, relative to their size.
# The largest differences measured with the wide weights of tests/tiny_models.py were 0.04 and 0.08 in 8 bits, and 0.43
# and 0.63 in 4; in SmolLM2-135M, 0.008 and 0.021 in 8 bits, and 0.009 and 0.025 in 4. Unrelated outputs differ by 1.4.
MAX_DIFFERENCES = {
    torch.float32: (1e-4, 1e-3),
    torch.bfloat16: (0.03, 0.5),
    "int8": (0.1, 0.25),
    "int4": (0.7, 1.0),
    "fp8": (0.3, 0.6),
}


@dataclass(frozen=True, slots=True)
class Output:
    """A model's outputs for consecutive tokens of a sequence."""

    first_layer: torch.Tensor  # [1, num_tokens, size]; logits after `Reference.with_first_logits`
    logits: torch.Tensor  # [1, num_tokens, vocab_size]
    is_mixture: bool = False  # whether the model has experts

    @classmethod
    def joined(cls, parts: Sequence[Output]) -> Output:
        """Concatenate the outputs of consecutive parts."""
        first = torch.cat([part.first_layer for part in parts], dim=1)
        return cls(first, torch.cat([part.logits for part in parts], dim=1), parts[0].is_mixture)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        return replace(self, first_layer=change(self.first_layer), logits=change(self.logits))

    def part(self, first: int, end: int) -> Output:
        """Return the outputs of tokens `first` to `end` - 1."""
        return self.changed(lambda each: each[:, first:end])


# Runs a step with the implementation under test, and returns the outputs of all tokens in the packed row.
ComputeStep = Callable[[StepBatch], Output]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBlocks:
    """The size of the KV memory that trial steps may overwrite, starting with block 0."""

    block_size: int
    num_blocks: int  # in each group of layers
    max_blocks: int  # of one sequence, in each group of layers
    num_groups: int = 1
    max_rows: int = NUM_TOKENS  # the most sequences in a step

    @classmethod
    def enough(cls, block_size: int, *, num_groups: int = 1) -> TrialBlocks:
        """Return a size that is enough for the sequence under test and another sequence of the same length."""
        max_blocks = -(-NUM_TOKENS // block_size)
        return cls(block_size=block_size, num_blocks=2 * max_blocks, max_blocks=max_blocks, num_groups=num_groups)

    @property
    def num_state_slots(self) -> int:
        """The slots that the states of two sequences need."""
        return 2 * _SLOTS_OF_SEQUENCE

    @property
    def num_own_tokens(self) -> int:
        """The most tokens of the sequence under test. Leaves a block for another sequence unless there is only one."""
        return min(self.max_blocks, max(1, self.num_blocks - 1)) * self.block_size

    def piece(
        self, name: str, token_ids: Sequence[int], start: int, *, first_block: int = 0, kept: int = 0
    ) -> ScheduledSequence:
        """Return the part of a sequence from position `start` on. The sequence's blocks start at `first_block`.

        kept: the states after this many tokens stay in their own slot, so that several pieces can start from them.
        """
        end_block = first_block + -(-(start + len(token_ids)) // self.block_size)
        blocks = range(first_block * self.num_groups, end_block * self.num_groups, self.num_groups)
        block_ids, *window_ids = ([block + group for block in blocks] for group in range(self.num_groups))
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        first_slot = _SLOTS_OF_SEQUENCE * (first_block > 0)
        read, written = (first_slot + (2 if at == kept else at % 2) for at in (start, start + len(token_ids)))
        states = StatePath(read if start else NO_STATE, ((len(token_ids), written),))
        return ScheduledSequence(
            name, tuple(token_ids), start, block_ids, True, greedy, window_ids=tuple(window_ids), states=states
        )


def step_of(*pieces: ScheduledSequence) -> StepBatch:
    """Return a batch that requests the logits of all tokens."""
    return StepBatch(pieces, (), has_drafts=True)


def run_module(
    module: PreTrainedModel,
    token_ids: torch.Tensor,
    positions: torch.Tensor | None,
    step: AttentionStep | CacheProbe | None,
) -> Output:
    """Run transformers' code. token_ids, positions: [1, num_tokens].

    positions: None to let the model's code choose them. step: the step of our attention, if the module uses it.
    """
    output = run_forward(module, step, input_ids=token_ids, position_ids=positions, output_hidden_states=True)
    is_mixture = any(name.endswith(".experts") for name, _ in module.named_modules())
    first_layer = output.hidden_states[1]
    if first_layer.shape[0] > 1:  # several residual streams, [num_streams, 1, num_tokens, hidden_size]
        first_layer = first_layer.movedim(0, -2)
    return Output(first_layer.flatten(2), output.logits, is_mixture)


def tokens_to_try(module: PreTrainedModel, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a few tokens and their positions, [1, num_tokens] each.

    Avoids low ids, which are often special tokens and cause unusually large values.
    """
    positions = torch.arange(NUM_TOKENS, device=device)[None]
    num_embeddings = module.get_input_embeddings().weight.shape[0]
    return (positions + 1) * max(1, num_embeddings // (NUM_TOKENS + 1)) % num_embeddings, positions


@dataclass(frozen=True, slots=True)
class Reference:
    """The outputs of a model's own code and attention for a few tokens, with which implementations are compared."""

    path: str  # the model's path in the settings, for messages
    token_ids: torch.Tensor  # [1, num_tokens]
    positions: torch.Tensor  # [1, num_tokens]
    own: Output

    @classmethod
    def of(cls, path: str, module: PreTrainedModel, device: torch.device) -> Reference:
        """Compute the reference with a module, whose weights must be on the device."""
        token_ids, positions = tokens_to_try(module, device)
        ours = module.config._attn_implementation
        module.set_attn_implementation("eager")
        own = run_module(module, token_ids, positions, None)
        module.set_attn_implementation(ours)
        return cls(path, token_ids, positions, own)

    def to(self, device: torch.device) -> Reference:
        own = self.own.changed(lambda each: each.to(device))
        return replace(self, token_ids=self.token_ids.to(device), positions=self.positions.to(device), own=own)

    def part(self, first: int, end: int) -> Reference:
        """Return the reference for tokens `first` to `end` - 1."""
        token_ids, positions = self.token_ids[:, first:end], self.positions[:, first:end]
        return Reference(self.path, token_ids, positions, self.own.part(first, end))

    def with_first_logits(self, module: PreTrainedModel) -> Reference:
        """Convert the first layer's output to logits by norm and head, because our decoders only return logits."""
        first, base, cap = self.own.first_layer, module.model, getattr(module.config, "final_logit_softcapping", None)
        if len(base.layers) > 1:  # the output of a model's last layer is already normalised
            first = base.get_submodule(described_as(module).names.final_norm)(first)
        logits = module.lm_head(first)
        return replace(self, own=replace(self.own, first_layer=torch.tanh(logits / cap) * cap if cap else logits))

    def verify_steps(self, how: str, compute: ComputeStep, blocks: TrialBlocks, quantization: str = "none") -> None:
        """Verify every form of step: pieces of a prompt, single tokens, and tokens alongside another sequence.

        Later pieces of a prompt reveal layers with unknown state. Raises UnsupportedModel if results differ by more
        than rounding errors. how, quantization: as in `verify`.
        """
        for what, expected, computed in self._in_steps(compute, blocks):
            expected.verify(f"{how}, of {what},", computed, quantization)

    def difference_in_steps(self, compute: ComputeStep, blocks: TrialBlocks, quantization: str = "none") -> str | None:
        """Describe the first difference for which `verify_steps` would raise. Returns None if there is none."""
        for what, expected, computed in self._in_steps(compute, blocks):
            difference = expected.difference(computed, quantization)
            if difference is not None:
                return f"{difference}, for {what}"
        return None

    def _in_steps(self, compute: ComputeStep, blocks: TrialBlocks) -> Iterator[tuple[str, Reference, Output]]:
        """Run every form of step. Yields (name of the form, reference for its tokens, computed outputs)."""
        token_ids: list[int] = self.token_ids[0].tolist()
        num_tokens = min(len(token_ids), blocks.num_own_tokens)
        third = max(1, num_tokens // 3)
        later = (third, min(2 * third, num_tokens))

        def own(first: int, end: int) -> ScheduledSequence:
            return blocks.piece(f"own-{first}", token_ids[first:end], first, kept=third)

        singles = [(at, at + 1) for at in range(2 * third, num_tokens)]
        for what, pieces in (
            ("the beginning of a prompt", [(0, third)]),
            ("a later piece of a prompt", [later]),
            ("single tokens", singles),
        ):
            pieces = [piece for piece in pieces if piece[0] < piece[1]]
            if pieces:  # with one or two tokens, there is only a first piece
                outputs = [compute(step_of(own(*piece))) for piece in pieces]
                yield what, self.part(pieces[0][0], pieces[-1][1]), Output.joined(outputs)
        together = [later, *singles][: blocks.max_rows - 1]
        first_block = -(-num_tokens // blocks.block_size)
        num_others = min(third, (blocks.num_blocks - first_block) * blocks.block_size)
        if later[0] == later[1] or num_others <= 0 or not together:  # no two sequences can share a step
            return
        # In this step, each single token is a separate sequence. They share blocks, like sequences with one prefix.
        other = blocks.piece("other", token_ids[::-1][:num_others], 0, first_block=first_block)
        row = compute(step_of(other, *(own(*piece) for piece in together)))
        end = together[-1][1]
        yield "tokens alongside another sequence", self.part(third, end), row.part(num_others, num_others + end - third)

    def verify(self, how: str, computed: Output, quantization: str = "none") -> None:
        """Raise UnsupportedModel, with the numbers, if the outputs differ from the reference.

        how: describes the implementation, for the message. quantization: how its weights or KV memory are quantised.
        """
        difference = self.difference(computed, quantization)
        if difference is not None:
            raise UnsupportedModel(f"{self.path} computes different results {how} than with its own code: {difference}")

    def difference(self, computed: Output, quantization: str = "none") -> str | None:
        """Describe the difference if it exceeds rounding errors. Returns None otherwise."""
        # The first layer's limit is tight, because it reveals wrong attention. Rounding errors grow with each layer.
        kind = self.own.logits.dtype if quantization == "none" else quantization
        for what, mine, theirs, limit in zip(
            ("the first layer's output", "the output"),
            (computed.first_layer, computed.logits),
            (self.own.first_layer, self.own.logits),
            MAX_DIFFERENCES.get(kind, MAX_DIFFERENCES[torch.bfloat16]),
            strict=True,
        ):
            difference = difference_above(limit, mine, theirs, by_token=self.own.is_mixture)
            if difference is not None:
                return f"{what} differs by {difference}"
        return None


def difference_above(
    limit: float, mine: torch.Tensor, theirs: torch.Tensor, *, by_token: bool = False, least_size: float = 1e-9
) -> str | None:
    """Describe the relative difference between two outputs. Returns None if it is within the limit.

    by_token: use the third quartile of the tokens' differences instead of the difference over all tokens. Mixtures need
    this: in bfloat16, two experts often have nearly equal scores, so rounding changes some tokens' experts.
    """
    dims = (-1,) if by_token else None
    difference = torch.linalg.vector_norm(mine.float() - theirs.float(), dim=dims)
    relative = difference / torch.linalg.vector_norm(theirs.float(), dim=dims).clamp_min(least_size)
    found = float(relative.quantile(0.75))
    return None if found <= limit else f"{found:.2%}; at most {limit:.2%} is allowed"
