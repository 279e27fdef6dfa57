"""Keeping short sequences and the prefill of long prompts out of each other's steps."""

from __future__ import annotations

from collections.abc import Callable

from app.engine.sequence import Sequence
from app.engine.strategies.strategy import Situation

# A sequence below SHORT_TOKENS is short; a chunk of a prompt above LONG_TOKENS is long. A chat turn is the one, a
# document the other; what is between them costs neither much.
SHORT_TOKENS, LONG_TOKENS = 64, 1024


class Selective:
    """Where both are there, they take turns: one step for the short ones, one for the long prompts.

    Whatever is neither takes part in every step, so nobody waits for more than one step.
    """

    def __init__(self) -> None:
        self._is_turn_of_long = False
        self._has_short = False  # in the step that is being made
        self._has_long = False

    def begin_step(self, situation: Situation) -> Callable[[Sequence], bool] | None:
        """Which running sequences take part in the next step; None for all of them."""
        running, waiting = situation.running, situation.waiting
        self._has_short = any(map(self._is_short, running))
        self._has_long = any(map(self._is_long, running))
        there = [*running, waiting.peek()] if len(waiting) and situation.num_free_slots > 0 else running
        if not (any(map(self._is_short, there)) and any(map(self._is_long, there))):
            return None
        self._is_turn_of_long = not self._is_turn_of_long
        if self._is_turn_of_long:
            self._has_short = False
            return lambda sequence: not self._is_short(sequence)
        self._has_long = False
        return lambda sequence: not self._is_long(sequence)

    def admits(self, sequence: Sequence) -> bool:
        """Whether a sequence may join the step; if so, the step has one of its kind."""
        is_short, is_long = self._is_short(sequence), self._is_long(sequence)
        if (is_short and self._has_long) or (is_long and self._has_short):
            return False
        self._has_short |= is_short
        self._has_long |= is_long
        return True

    def _is_short(self, sequence: Sequence) -> bool:
        return sequence.num_tokens < SHORT_TOKENS

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.num_prompt_tokens > LONG_TOKENS and not sequence.is_decoding
