"""The dispatch policies: each orders the replicas for one request. The request goes to the first that accepts it."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from app.fleet.dispatch.decision import Candidate, Decision, RequestSize, Scoring

# At most so many outstanding (weighed) tokens more than the least loaded replica has are accepted for a cached prefix,
# a session or an adapter: about the work of one long conversation. With fewer, two requests in a row could end the
# affinity of a session; with more, one replica is filled while others are idle.
MAX_IMBALANCE_TOKENS = 4096
# A cached token is worth so many outstanding ones. A prompt that is computed again is more work for the fleet, and more
# work in one place is not. With 1 replicas compute more; with 4 the first replicas that have a prompt which many
# conversations share have most of the work (docs/results/scale.md).
_WORTH_OF_CACHED = 3


def near_adapter(candidates: Sequence[Candidate], size: RequestSize, loaded_on: Collection[str]) -> list[Candidate]:
    """The candidates for a request whose adapter these replicas have: those, unless they have much more to do."""
    balanced = _balanced(candidates, Scoring.of(candidates, size), MAX_IMBALANCE_TOKENS)
    return [each for each in balanced if each.replica_id in loaded_on] or list(candidates)


def _balanced(candidates: Sequence[Candidate], scoring: Scoring, max_imbalance_tokens: int) -> list[Candidate]:
    """Those that are not full and have at most so much more to do than the least loaded of them."""
    free = [each for each in candidates if not each.is_full]
    least = min((scoring.outstanding(each) for each in free), default=0.0)
    return [each for each in free if scoring.outstanding(each) <= least + max_imbalance_tokens]


class DispatchPolicy(Protocol):
    """Orders replicas for one request: at least one. Called on one thread, once for each time a request is placed."""

    def some(self, replica_ids: Sequence[str], number: int) -> list[str]:
        """So many replicas of a large fleet that `decide` should look at. The ids are sorted."""
        ...

    def decide(self, candidates: Sequence[Candidate], size: RequestSize) -> Decision:
        """All candidates, most preferred first; those that are full come last."""
        ...


def make_policy(name: str, rng: random.Random) -> DispatchPolicy:
    """A new policy by its name in `replicas.dispatch`."""
    policies: dict[str, Callable[[random.Random], DispatchPolicy]] = {
        "round_robin": lambda rng: RoundRobin(),
        "least_loaded": LeastLoaded,
        "prefix_affinity": PrefixAffinity,
    }
    return policies[name](rng)


class RoundRobin:
    """Each in turn, whatever its load. A replica that joins or leaves does not make another lose or repeat its turn."""

    def __init__(self) -> None:
        self._last = ""  # sorts before every id: the first turn goes to the lowest

    def some(self, replica_ids: Sequence[str], number: int) -> list[str]:
        """Those whose turn is next."""
        at = bisect_right(replica_ids, self._last)
        after = replica_ids[at : at + number]
        return [*after, *replica_ids[: min(at, number - len(after))]]

    def decide(self, candidates: Sequence[Candidate], size: RequestSize) -> Decision:
        turn = sorted(candidates, key=lambda each: (each.is_full, each.replica_id <= self._last, each.replica_id))
        self._last = turn[0].replica_id
        scoring = Scoring.of(candidates, size)
        return Decision(policy="round_robin", rule="its turn", candidates=tuple(turn), scoring=scoring)


class LeastLoaded:
    """The replica that has the fewest tokens to compute until this request would have ended, by its speed.

    The wait for a free slot counts as work, and all work is divided by the replica's speed. So an idle slow replica
    gets a request only when the fast ones would end it later (shortest expected delay), and where all have queues each
    gets its share by speed. Equal replicas come in random order: several ingresses with the same knowledge would
    otherwise all choose the same one.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def some(self, replica_ids: Sequence[str], number: int) -> list[str]:
        """Any. The least loaded of a few at random is nearly as good as the least loaded of all, and what is known of a
        replica is never new: of all, many requests would choose the same one (Mitzenmacher, The Power of Two Choices).
        """
        return self._rng.sample(replica_ids, min(number, len(replica_ids)))

    def decide(self, candidates: Sequence[Candidate], size: RequestSize) -> Decision:
        scoring = Scoring.of(candidates, size)
        ranked = tuple(self.ranked(candidates, scoring))
        return Decision(policy="least_loaded", rule="the least work", candidates=ranked, scoring=scoring)

    def ranked(self, candidates: Sequence[Candidate], scoring: Scoring) -> list[Candidate]:
        """The candidates, the least loaded first."""
        return sorted(candidates, key=lambda each: (each.is_full, scoring.score(each), self._rng.random()))


class PrefixAffinity:
    """The least work, where each cached token of the prompt makes up for three; or the session's replica.

    So a prefix that many requests share comes to more replicas the more requests there are, and a conversation moves
    away only if its replica has much more to do than others. Where all have queues, the longest match is first. A
    replica with `max_imbalance_tokens` more outstanding (weighed) tokens than the least loaded one is passed over,
    whatever it has cached. A session counts where no prefix is known to be cached. Without any match the least loaded
    is first.
    The idea of a bound on imbalance is that of SGLang's cache-aware router; Preble (arXiv 2407.00023) has both sides
    of the trade.
    """

    def __init__(self, rng: random.Random, *, max_imbalance_tokens: int = MAX_IMBALANCE_TOKENS) -> None:
        self._least_loaded = LeastLoaded(rng)
        self._max_imbalance_tokens = max_imbalance_tokens

    def some(self, replica_ids: Sequence[str], number: int) -> list[str]:
        """As for the least loaded. Those with a cached prefix or the session are looked at anyway."""
        return self._least_loaded.some(replica_ids, number)

    def decide(self, candidates: Sequence[Candidate], size: RequestSize) -> Decision:
        scoring = Scoring.of(candidates, size)
        ranked = self._least_loaded.ranked(candidates, scoring)
        near = _balanced(ranked, scoring, self._max_imbalance_tokens)
        # The sorts are stable: of equal candidates the least loaded stays first.
        near.sort(key=lambda each: not each.holds_session)
        if all(each.num_ahead for each in near):  # all have queues: no place is lost by waiting, only by computing more
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
            return "the least work, the matching have too much more"
        return "the least work, no match"


def _work_beyond_cached(candidate: Candidate, scoring: Scoring) -> float:
    saved = _WORTH_OF_CACHED * candidate.num_cached_tokens / scoring.relative_speed(candidate)
    return scoring.score(candidate) - saved
