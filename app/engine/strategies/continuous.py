"""Iteration-level batching: at every step, as slots, blocks and the token budget allow."""

from __future__ import annotations

from app.config import ContinuousConfig, HybridConfig
from app.engine.sequence import Sequence
from app.engine.strategies.selective import Selective
from app.engine.strategies.strategy import BatchingStrategy, Situation, StepPlan


class Continuous(BatchingStrategy):
    """At every step, as slots allow: iteration-level scheduling (Orca, Yu et al., 2022)."""

    joins_any_step = True

    def __init__(self, config: ContinuousConfig | HybridConfig) -> None:
        self._selective = Selective() if config.selective else None

    def plan(self, situation: Situation) -> StepPlan:
        return StepPlan(
            num_admissible=max(0, min(situation.num_free_slots, len(situation.waiting))),
            max_prefill_tokens=self._max_prefill_tokens(situation),
            includes=None if self._selective is None else self._selective.begin_step(situation),
        )

    def opens_at(self, situation: Situation) -> float | None:
        return situation.now if len(situation.waiting) else None

    def admits(self, sequence: Sequence) -> bool:
        return self._selective is None or self._selective.admits(sequence)

    def _max_prefill_tokens(self, situation: Situation) -> int | None:
        return None


class Hybrid(Continuous):
    """Continuous, with a bound on what prefill may take of a step while anything decodes.

    It keeps the time between tokens flat under long prompts, as Sarathi-Serve (Agrawal et al., 2024) does with its
    token budget, without shortening the steps in which nobody decodes.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self._prefill_share = config.prefill_share

    def _max_prefill_tokens(self, situation: Situation) -> int | None:
        if not any(sequence.is_decoding for sequence in situation.running):
            return None
        return max(1, int(self._prefill_share * situation.max_step_tokens))
