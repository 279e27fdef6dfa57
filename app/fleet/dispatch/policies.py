"""The dispatch policies. A policy ranks the replicas for a request, which is then sent to the first replica."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from app.fleet.dispatch.decision import Candidate, Decision, RequestSize, Scoring

# A replica is preferred for its cached prefix, session or adapter only while it has at most this many more outstanding
# tokens (scaled by speed) than the least loaded replica. The value is roughly the work of one long conversation. If it
# were lower, two consecutive requests could end a session's affinity. If it were higher, one replica would fill up
# while others are idle.
MAX_IMBALANCE_TOKENS = 4096
# A cached token offsets this many outstanding tokens, because recomputing a prompt adds work to the fleet, while an
# uneven load does not. With 1, the replicas compute more. With 4, if many conversations share a prompt, the first
# replicas that cache it receive most of the work (`benchmarks.service.thousand --part hot`).
_CACHED_TOKEN_WEIGHT = 3


def near_adapter(candidates: Sequence[Candidate], size: RequestSize, loaded_on: Collection[str]) -> list[Candidate]:
    """Return the candidates that have loaded the request's adapter and are not overloaded, or all if there are none."""
    balanced = _balanced(candidates, Scoring.of(candidates, size), MAX_IMBALANCE_TOKENS)
    return [each for each in balanced if each.replica_id in loaded_on] or list(candidates)


def _balanced(candidates: Sequence[Candidate], scoring: Scoring, max_imbalance_tokens: int) -> list[Candidate]:
    """Return the candidates that are not full and within `max_imbalance_tokens` of the least loaded candidate."""
    free = [each for each in candidates if not each.is_full]
    least = min((scoring.outstanding(each) for each in free), default=0.0)
    return [each for each in free if scoring.outstanding(each) <= least + max_imbalance_tokens]


class DispatchPolicy(Protocol):
    """Ranks the replicas for one request. Called on one thread, each time that a request is placed."""

    def some(self, replica_ids: Sequence[str], number: int) -> list[str]:
        """Choose up to `number` of a large fleet's sorted ids, as candidates for `decide`."""
        ...

    def decide(self, candidates: Sequence[Candidate], size: RequestSize) -> Decision:
        """Rank the candidates, most preferred first and full ones last. There must be at least one candidate."""
        ...


def make_policy(name: str, rng: random.Random) -> DispatchPolicy:
    """Create the policy with this name in the setting `replicas.dispatch`."""
    policies: dict[str, Callable[[random.Random], DispatchPolicy]] = {
        "round_robin": lambda rng: RoundRobin(),
        "least_loaded": LeastLoaded,
        "prefix_affinity": PrefixAffinity,
    }
    return policies[name](rng)


class RoundRobin:
    """Cycles through the replicas, regardless of load. Changes to the fleet neither skip nor repeat a replica."""

    def __init__(self) -> None:
        self._last = ""  # sorts before every id, so that the lowest id comes first

    def some(self, replica_ids: Sequence[str], number: int) -> list[str]:
        """Return the next replicas in the cycle."""
        at = bisect_right(replica_ids, self._last)
        after = replica_ids[at : at + number]
        return [*after, *replica_ids[: min(at, number - len(after))]]

    def decide(self, candidates: Sequence[Candidate], size: RequestSize) -> Decision:
        turn = sorted(candidates, key=lambda each: (each.is_full, each.replica_id <= self._last, each.replica_id))
        self._last = turn[0].replica_id
        scoring = Scoring.of(candidates, size)
        return Decision(policy="round_robin", rule="its turn", candidates=tuple(turn), scoring=scoring)


class LeastLoaded:
    """Prefers the replica that would finish this request first (shortest expected delay).

    The wait for a free slot counts as work, and all work is divided by the replica's speed. A slow replica that is idle
    therefore receives a request only if the fast replicas would finish it later. If all replicas have queues, each
    receives requests in proportion to its speed. Ties are broken at random. Otherwise, ingresses that have received the
    same reports would all choose the same replica.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def some(self, replica_ids: Sequence[str], number: int) -> list[str]:
        """Return random replicas.

        The least loaded of a few is nearly as good as the least loaded of all (Mitzenmacher, The Power of Two Choices).
        If all were compared, many requests would choose the same replica, because reports are always slightly outdated.
        """
        return self._rng.sample(replica_ids, min(number, len(replica_ids)))

    def decide(self, candidates: Sequence[Candidate], size: RequestSize) -> Decision:
        scoring = Scoring.of(candidates, size)
        ranked = tuple(self.ranked(candidates, scoring))
        return Decision(policy="least_loaded", rule="the least work", candidates=ranked, scoring=scoring)

    def ranked(self, candidates: Sequence[Candidate], scoring: Scoring) -> list[Candidate]:
        """Sort the candidates by score, with full ones last. Ties are broken at random."""
        return sorted(candidates, key=lambda each: (each.is_full, scoring.score(each), self._rng.random()))


class PrefixAffinity:
    """Prefers the replica with the least work, where each cached prompt token offsets three tokens of work.

    A prefix that many requests share therefore spreads to more replicas as the number of requests grows, and a
    conversation moves only if its replica has much more work than others. If all replicas have queues, the longest
    match wins. A replica with over `max_imbalance_tokens` more outstanding tokens (scaled by speed) than the least
    loaded replica is not preferred, whatever it has cached. If no replica has cached a prefix, the session's replica
    is preferred, and without a session the least loaded one. The bound on the imbalance comes from SGLang's cache-aware
    router. Preble (arXiv 2407.00023) describes both sides of the trade-off.
    """

    def __init__(self, rng: random.Random, *, max_imbalance_tokens: int = MAX_IMBALANCE_TOKENS) -> None:
        self._least_loaded = LeastLoaded(rng)
        self._max_imbalance_tokens = max_imbalance_tokens

    def some(self, replica_ids: Sequence[str], number: int) -> list[str]:
        """Return random replicas. The caller adds replicas that have cached the prefix or served the session."""
        return self._least_loaded.some(replica_ids, number)

    def decide(self, candidates: Sequence[Candidate], size: RequestSize) -> Decision:
        scoring = Scoring.of(candidates, size)
        ranked = self._least_loaded.ranked(candidates, scoring)
        near = _balanced(ranked, scoring, self._max_imbalance_tokens)
        # The sorts are stable, so the least loaded of equal candidates stays first.
        near.sort(key=lambda each: not each.holds_session)
        if all(each.num_ahead for each in near):  # all have queues, so a longer queue leaves no slot idle
            near.sort(key=lambda each: -each.num_cached_tokens)
        elif any(each.num_cached_tokens for each in near):
            near.sort(key=lambda each: _work_beyond_cached(each, scoring))
        chosen = {each.replica_id for each in near}
        order = (*near, *(each for each in ranked if each.replica_id not in chosen))
        return Decision(policy="prefix_affinity", rule=self._rule(order), candidates=order, scoring=scoring)

    def _rule(self, order: Sequence[Candidate]) -> str:
        first, *others = order
        if first.num_cached_tokens:
            return f"{first.num_cached_tokens:,} tokens of the prompt cached"
        if first.holds_session:
            return "the session's replica"
        if any((each.num_cached_tokens or each.holds_session) and not each.is_full for each in others):
            return "the least work, because the replicas with a matching prefix have too much"
        return "the least work, because no replica has a matching prefix"


def _work_beyond_cached(candidate: Candidate, scoring: Scoring) -> float:
    saved = _CACHED_TOKEN_WEIGHT * candidate.num_cached_tokens / scoring.relative_speed(candidate)
    return scoring.score(candidate) - saved
