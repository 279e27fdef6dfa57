"""The changes that penalties and biases make to one sequence's logits. Updated with each token. Does not use torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy

from app.engine.request import SamplingParams


class LogitAdjustments:
    """The tokens with changed logits, as arrays that a sampler reads in place.

    The work per step does not depend on the length of the prompt and output. With any penalty, memory use is 8 bytes
    per generated token. A repetition penalty adds 8 bytes per prompt and output token. A presence or frequency penalty
    adds about 100 bytes per distinct generated token.
    """

    def __init__(self, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self.repetition_penalty = sampling.repetition_penalty
        # Prompt and output tokens, with duplicates. The repetition penalty is applied once to each distinct token.
        self.seen = array("q", prompt_token_ids if self.repetition_penalty != 1.0 else ())
        self.generated = array("q")  # all generated tokens; only filled with a penalty
        self.deducted = array("q")  # the distinct generated tokens; only filled with a presence or frequency penalty
        self.deductions = array("f")  # the (negative) number to add to the logit of each token in `deducted`
        self.biased = array("q", [token for token, _ in sampling.logit_bias])
        self.biases = array("f", [bias for _, bias in sampling.logit_bias])
        self._places: dict[int, int] = {}  # the index of each generated token in `deducted`
        self._counts = array("q")  # how many times each token in `deducted` was generated

    def follow(self, generated_token_ids: Sequence[int]) -> None:
        """Count the tokens that were generated since the last call. All generated tokens must be known."""
        new = generated_token_ids[len(self.generated) :]
        assert min(new, default=0) >= 0, "penalties require known tokens"
        self.generated.extend(new)
        if self.repetition_penalty != 1.0:
            self.seen.extend(new)
        if self._sampling.presence_penalty or self._sampling.frequency_penalty:
            for token in new:
                self._deduct(token)

    def after(self, token_id: int) -> LogitAdjustments:
        """Return the adjustments after one more generated token. Does not change this object."""
        if not self._sampling.has_penalties:
            return self
        other = copy(self)
        for name in ("seen", "generated", "deducted", "deductions", "_places", "_counts"):
            setattr(other, name, copy(getattr(self, name)))
        other.follow([*self.generated, token_id])
        return other

    def deductions_of(self, tokens: Sequence[int]) -> list[float]:
        """Return the numbers that presence and frequency penalties add to the logits of these tokens."""
        places, deductions = self._places, self.deductions
        return [deductions[places[token]] if token in places else 0.0 for token in tokens]

    def _deduct(self, token: int) -> None:
        place = self._places.setdefault(token, len(self.deducted))
        if place == len(self.deducted):
            self.deducted.append(token)
            self.deductions.append(0.0)
            self._counts.append(0)
        self._counts[place] += 1
        sampling = self._sampling
        self.deductions[place] = -(sampling.presence_penalty + sampling.frequency_penalty * self._counts[place])
