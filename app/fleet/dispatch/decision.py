"""An order of preference, with the numbers it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from app.fleet.dispatch.load import ReplicaLoad, RequestSize

_MAX_EXPLAINED = 4  # candidates that the line shows; the rest are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One replica as a decision saw it. Weighed tokens are tokens of a replica of the usual speed."""

    replica_id: str
    num_prefill_tokens: int
    num_decode_tokens: int
    num_ahead: int
    num_request_tokens: int  # that this request would add
    relative_speed: float  # 1: as fast as the middle one of those whose speed is known, or not known
    num_cached_tokens: int
    holds_session: bool
    is_full: bool

    @property
    def outstanding(self) -> float:
        """Weighed tokens of what is there already."""
        return (self.num_prefill_tokens + self.num_decode_tokens) / self.relative_speed

    @property
    def queue(self) -> float:
        """Weighed tokens until this request would join those that are computed: so many must end before.

        While a replica is full, one ends for as many tokens as a request has; this one stands for all.
        """
        return self.num_ahead * self.num_request_tokens / self.relative_speed

    @property
    def score(self) -> float:
        """Weighed tokens for all that is there, the queue and this request; the least is best."""
        return self.outstanding + self.queue + self.num_request_tokens / self.relative_speed

    def __str__(self) -> str:
        parts = f"{self.num_prefill_tokens:,} prompt + {self.num_decode_tokens:,} output"
        parts += f" + {self.num_request_tokens:,} own tokens at speed {self.relative_speed:.2f} = {self.score:,.0f}"
        parts += f", {self.num_ahead:,} must end first" if self.num_ahead else ""
        parts += f", {self.num_cached_tokens:,} cached" if self.num_cached_tokens else ""
        parts += ", has the session" if self.holds_session else ""
        parts += ", full" if self.is_full else ""
        return f"{self.replica_id} ({parts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The replicas, most preferred first, and why."""

    policy: str
    rule: str  # why the first is first, in a few words
    reasons: tuple[Candidate, ...]  # all candidates, most preferred first

    @property
    def order(self) -> list[str]:
        """The ids of all replicas that were given, most preferred first."""
        return [candidate.replica_id for candidate in self.reasons]

    def explain(self) -> str:
        """One line for a log or a trace."""
        if not self.reasons:
            return f"{self.policy}: there is no replica"
        shown = "; ".join(map(str, self.reasons[:_MAX_EXPLAINED]))
        num_more = len(self.reasons) - _MAX_EXPLAINED
        more = f"; and {num_more:,} more" if num_more > 0 else ""
        return f"{self.policy}: {self.reasons[0].replica_id}, {self.rule}: {shown}{more}"


def candidates_from(loads: Sequence[ReplicaLoad], size: RequestSize) -> list[Candidate]:
    """Each replica with the parts of its score, in the order given."""
    known = [load.tokens_per_s for load in loads if load.tokens_per_s > 0]
    usual = median(known) if known else 0.0
    return [
        Candidate(
            replica_id=load.replica_id,
            num_prefill_tokens=load.num_prefill_tokens,
            num_decode_tokens=load.num_decode_tokens,
            num_ahead=load.num_ahead,
            num_request_tokens=size.num_prompt_tokens + size.num_expected_tokens,
            relative_speed=load.tokens_per_s / usual if load.tokens_per_s > 0 else 1.0,
            num_cached_tokens=load.num_cached_tokens,
            holds_session=load.holds_session,
            is_full=load.is_full,
        )
        for load in loads
    ]
