"""How penalties and biases change the logits of one sequence, kept up to date token by token. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy

from app.engine.request import SamplingParams


class LogitAdjustments:
    """The tokens with changed logits, as arrays that a sampler reads in place.

    A step costs the work of its new token, however long prompt and output are. It holds 8 bytes for each token of both
    where there is a repetition penalty, 8 for each generated token where there is any, and about 100 for each distinct
    generated token where there is another one.
    """

    def __init__(self, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self.repetition_penalty = sampling.repetition_penalty
        # Tokens of prompt and output, some several times: each is changed once.
        self.seen = array("q", prompt_token_ids if self.repetition_penalty != 1.0 else ())
        self.generated = array("q")  # where there is a penalty
        self.deducted = array("q")  # distinct generated tokens, where presence or frequency is penalised
        self.deductions = array("f")  # what is added to the logit of each of them
        self.biased = array("q", [token for token, _ in sampling.logit_bias])
        self.biases = array("f", [bias for _, bias in sampling.logit_bias])
        self._places: dict[int, int] = {}  # of each generated token in `deducted`
        self._counts = array("q")

    def follow(self, generated_token_ids: Sequence[int]) -> None:
        """Count the tokens that were generated since the last call. All of them must be known."""
        new = generated_token_ids[len(self.generated) :]
        assert min(new, default=0) >= 0, "penalties need known tokens"
        self.generated.extend(new)
        if self.repetition_penalty != 1.0:
            self.seen.extend(new)
        if self._sampling.presence_penalty or self._sampling.frequency_penalty:
            for token in new:
                self._deduct(token)

    def after(self, token_id: int) -> LogitAdjustments:
        """What they will be behind one more generated token. These stay."""
        if not self._sampling.has_penalties:
            return self
        other = copy(self)
        for name in ("seen", "generated", "deducted", "deductions", "_places", "_counts"):
            setattr(other, name, copy(getattr(self, name)))
        other.follow([*self.generated, token_id])
        return other

    def deductions_of(self, tokens: Sequence[int]) -> list[float]:
        """What is added to their logits for presence and frequency."""
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
