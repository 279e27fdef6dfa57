"""Is a way to compute a model right? A few tokens through the model's own code and attention, against any other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import SamplingParams
from app.errors import UnsupportedModel
from app.model.attention import ATTENTION_NAME, AttentionStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_TOKENS = 24
# Of the first layer's output and of the whole model's, relative to their size, by number type or quantised weights.
# Measured at most in tests/tiny_models.py, which has wide weights: 0.04 and 0.08 in 8 bits, 0.43 and 0.63 in 4.
# In SmolLM2-135M 0.008 and 0.021 in 8 bits, 0.009 and 0.025 in 4. Unrelated outputs of a size differ by 1.4.
MAX_DIFFERENCES = {
    torch.float32: (1e-4, 1e-3),
    torch.bfloat16: (0.03, 0.5),
    "int8": (0.1, 0.25),
    "int4": (0.7, 1.0),
    "fp8": (0.3, 0.6),
}


@dataclass(frozen=True, slots=True)
class Output:
    """The outputs for the first few tokens of a sequence."""

    first_layer: torch.Tensor  # [1, num_tokens, hidden_size]; or its logits, see `Reference.behind_head`
    logits: torch.Tensor  # [1, num_tokens, vocab_size]
    is_mixture: bool = False  # of experts

    @classmethod
    def joined(cls, parts: Sequence[Output]) -> Output:
        """The outputs for the tokens of all parts, one after the other."""
        first = torch.cat([part.first_layer for part in parts], dim=1)
        return cls(first, torch.cat([part.logits for part in parts], dim=1), parts[0].is_mixture)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        return replace(self, first_layer=change(self.first_layer), logits=change(self.logits))

    def part(self, first: int, end: int) -> Output:
        """The outputs for some of the tokens."""
        return self.changed(lambda each: each[:, first:end])


def run_module(
    module: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep | None
) -> Output:
    """What transformers' code gives. token_ids, positions: [1, num_tokens]. step: of our attention."""
    output = module(
        input_ids=token_ids, position_ids=positions, use_cache=False, output_hidden_states=True, paged=step
    )  # fmt: skip
    is_mixture = any(name.endswith(".experts") for name, _ in module.named_modules())
    return Output(output.hidden_states[1], output.logits, is_mixture)


def tokens_to_try(module: PreTrainedModel, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A few tokens and their positions, [1, num_tokens] each.

    Ordinary ones: special tokens, which often are the first, bring out numbers that no text does.
    """
    positions = torch.arange(NUM_TOKENS, device=device)[None]
    num_embeddings = module.get_input_embeddings().weight.shape[0]
    return (positions + 1) * max(1, num_embeddings // (NUM_TOKENS + 1)) % num_embeddings, positions


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model gives for a few tokens with its own attention: every other way to compute it is verified by that."""

    path: str  # of the model, as in the settings
    token_ids: torch.Tensor  # [1, num_tokens]
    positions: torch.Tensor  # [1, num_tokens]
    own: Output

    @classmethod
    def of(cls, path: str, module: PreTrainedModel, device: torch.device) -> Reference:
        """Computed by the module, which has numbers on the device."""
        token_ids, positions = tokens_to_try(module, device)
        module.set_attn_implementation("eager")
        own = run_module(module, token_ids, positions, None)
        module.set_attn_implementation(ATTENTION_NAME)
        return cls(path, token_ids, positions, own)

    def to(self, device: torch.device) -> Reference:
        own = self.own.changed(lambda each: each.to(device))
        return replace(self, token_ids=self.token_ids.to(device), positions=self.positions.to(device), own=own)

    def part(self, first: int, end: int) -> Reference:
        """The same for some of the tokens."""
        token_ids, positions = self.token_ids[:, first:end], self.positions[:, first:end]
        return Reference(self.path, token_ids, positions, self.own.part(first, end))

    def batch_of(self, first: int, end: int, *, block_size: int, num_groups: int = 1) -> StepBatch:
        """A step with some of the tokens, in blocks 0, 1, … of as many groups; logits of all of them are wanted."""
        token_ids, number = tuple(self.token_ids[0, first:end].tolist()), -(-end // block_size)
        block_ids, *window_ids = (list(range(group, number * num_groups, num_groups)) for group in range(num_groups))
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        item = ScheduledSequence("verify", token_ids, first, block_ids, True, greedy, window_ids=tuple(window_ids))
        return StepBatch((item,), (), has_drafts=True)

    def behind_head(self, module: PreTrainedModel, *, num_layers: int) -> Reference:
        """Logits in place of the first layer's output, by norm and head: a decoder of ours gives no layer's output."""
        first = self.own.first_layer
        first = first if num_layers == 1 else module.model.norm(first)
        return replace(self, own=replace(self.own, first_layer=module.lm_head(first)))

    def verify(self, how: str, computed: Output, quantization: str = "none") -> None:
        """Raises UnsupportedModel, with the numbers, where another way computes something else.

        how: in words. quantization: of its weights, or of its KV memory.
        """
        difference = self.difference(computed, quantization)
        if difference is not None:
            raise UnsupportedModel(f"{self.path} computes other results {how} than with its own code: {difference}")

    def difference(self, computed: Output, quantization: str = "none") -> str | None:
        """The difference in words, if it is more than rounding."""
        # Rounding errors grow from layer to layer, a wrong attention shows in the first: so a tight and a wide limit.
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
    """How much two outputs differ, relative to their size, in words; None within the limit.

    by_token: the difference that three quarters of the tokens keep to, instead of that of all together. In bfloat16 two
    experts are often all but equally good, and rounding takes another one for some tokens.
    """
    dims = (-1,) if by_token else None
    difference = torch.linalg.vector_norm(mine.float() - theirs.float(), dim=dims)
    relative = difference / torch.linalg.vector_norm(theirs.float(), dim=dims).clamp_min(least_size)
    found = float(relative.quantile(0.75))
    return None if found <= limit else f"{found:.2%}, {limit:.2%} is allowed"
