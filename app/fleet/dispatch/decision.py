"""A dispatch decision: the candidates in order of preference, and the numbers behind the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """The load that a request adds to its replica."""

    num_prompt_tokens: int
    num_expected_tokens: int  # tokens that the request is expected to generate


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One replica as a candidate for one request. A msgspec struct, because each request creates many candidates."""

    replica_id: str
    num_requests: int = 0  # unfinished requests on the replica
    num_prefill_tokens: int = 0  # uncomputed prompt tokens of these requests
    num_decode_tokens: int = 0  # tokens that these requests are expected to generate
    num_ahead: int = 0  # how many of these requests must end before this request can run
    wake_s: float = 0.0  # expected seconds until a sleeping replica is awake; 0 if it is awake
    tokens_per_s: float = 0.0  # measured at a step size that all replicas share; 0 if unknown
    num_cached_tokens: int = 0  # prompt tokens of this request that the replica should have cached
    holds_session: bool = False  # the previous request of the same session went to this replica
    group: str = ""  # group of an A/B trial; "" for no group
    is_full: bool = False  # the replica would refuse this request
    has_slot: bool = True  # according to its last report, the replica could run this request immediately
    is_suspect: bool = False  # the replica's stream broke or fell silent
    weights: int = 0  # a digest of the model's files; 0 while unknown


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scores candidates for one request. The unit is the work for one token on a replica of the usual speed."""

    num_request_tokens: int  # tokens that the request would add
    usual_tokens_per_s: float  # the median of the known speeds; 0 if no speed is known

    @classmethod
    def of(cls, candidates: Sequence[Candidate], size: RequestSize) -> Scoring:
        known = [each.tokens_per_s for each in candidates if each.tokens_per_s > 0]
        return cls(size.num_prompt_tokens + size.num_expected_tokens, median(known) if known else 0.0)

    def relative_speed(self, candidate: Candidate) -> float:
        """Return the speed relative to the usual speed, limited to 0.01 to 100; 1 if the speed is unknown."""
        if candidate.tokens_per_s <= 0:
            return 1.0
        return min(100.0, max(0.01, candidate.tokens_per_s / self.usual_tokens_per_s))

    def outstanding(self, candidate: Candidate) -> float:
        """Return the replica's remaining work for its other requests."""
        return (candidate.num_prefill_tokens + candidate.num_decode_tokens) / self.relative_speed(candidate)

    def score(self, candidate: Candidate) -> float:
        """Return the total cost of the replica's work, its queue, its wake-up and this request. Lower is better."""
        num_tokens = candidate.num_prefill_tokens + candidate.num_decode_tokens
        # Each request ahead is assumed to have the size of this request.
        num_tokens += (1 + candidate.num_ahead) * self.num_request_tokens
        # Assumed while no speed is known. The value is low, which makes a wake-up cheap.
        tokens_per_s = 100.0
        waking = candidate.wake_s * (self.usual_tokens_per_s or tokens_per_s)
        return num_tokens / self.relative_speed(candidate) + waking

    def explain(self, candidate: Candidate) -> str:
        """Return a readable description of one candidate and the parts of its score."""
        parts = f"{candidate.num_prefill_tokens:,} prompt + {candidate.num_decode_tokens:,} output"
        parts += f" + {self.num_request_tokens:,} of this request at speed {self.relative_speed(candidate):.2f}"
        parts += f" = {self.score(candidate):,.0f} tokens"
        parts += f", {candidate.num_ahead:,} requests ahead" if candidate.num_ahead else ""
        parts += f", wakes in {candidate.wake_s:.2g} s" if candidate.wake_s else ""
        parts += f", {candidate.num_cached_tokens:,} cached" if candidate.num_cached_tokens else ""
        parts += ", has the session" if candidate.holds_session else ""
        parts += ", full" if candidate.is_full else ""
        return f"{candidate.replica_id} ({parts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The candidates for one request in order of preference, and the reason for this order."""

    policy: str
    rule: str  # why the first candidate is first, in a few words
    candidates: tuple[Candidate, ...]  # all candidates, most preferred first
    scoring: Scoring

    @property
    def replica_id(self) -> str:
        """The most preferred replica."""
        return self.candidates[0].replica_id

    @property
    def reason(self) -> str:
        """The policy, the replica and the rule in a few words, without numbers about other requests."""
        return f"{self.policy}: {self.candidates[0].replica_id}, {self.rule}"

    def explain_loads(self) -> str:
        """Return one line with the loads of the first candidates and the number of further candidates."""
        max_explained = 4
        shown = "; ".join(map(self.scoring.explain, self.candidates[:max_explained]))
        num_more = len(self.candidates) - max_explained
        more = f"; and {num_more:,} more" if num_more > 0 else ""
        return shown + more
