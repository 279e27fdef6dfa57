"""The replica that has the prompt's beginning in its KV memory, within bounds of fairness."""

from __future__ import annotations

import random
from collections.abc import Sequence

from app.fleet.dispatch.decision import Candidate, Decision, candidates_from
from app.fleet.dispatch.least_loaded import LeastLoaded
from app.fleet.dispatch.load import ReplicaLoad, RequestSize


class PrefixAffinity:
    """The longest cached prefix first, or the session's replica, while its load is near enough to the least.

    A replica with `max_imbalance_tokens` more outstanding (weighed) tokens than the least loaded one is passed over, so
    that a prefix which everybody shares does not end up on one replica; without any match the least loaded is first.
    The idea of a bound on imbalance is that of SGLang's cache-aware router; Preble (arXiv 2407.00023) has both sides
    of the trade.
    """

    def __init__(self, rng: random.Random, *, max_imbalance_tokens: int) -> None:
        self._least_loaded = LeastLoaded(rng)
        self._max_imbalance_tokens = max_imbalance_tokens

    def decide(self, loads: Sequence[ReplicaLoad], size: RequestSize) -> Decision:
        ranked = self._least_loaded.ranked(candidates_from(loads, size))
        limit = min((each.outstanding for each in ranked if not each.is_full), default=0.0) + self._max_imbalance_tokens
        matching = [each for each in ranked if (each.num_cached_tokens or each.holds_session) and not each.is_full]
        near = [each for each in matching if each.outstanding <= limit]
        # The sort is stable: of equal matches the least loaded comes first.
        near.sort(key=lambda each: (-each.num_cached_tokens, not each.holds_session))
        rest = [each for each in ranked if each not in near]
        return Decision(policy="prefix_affinity", rule=self._rule(near, matching), reasons=(*near, *rest))

    def _rule(self, near: Sequence[Candidate], matching: Sequence[Candidate]) -> str:
        if near and near[0].num_cached_tokens:
            return f"{near[0].num_cached_tokens:,} tokens of the prompt cached"
        if near:
            return "the session's replica"
        if matching:
            return f"the least work, the matching have over {self._max_imbalance_tokens:,} tokens more"
        return "the least work, no match"
