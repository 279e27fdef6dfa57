"""An order of preference, with the numbers it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """What a request will add to the load of its replica."""

    num_prompt_tokens: int
    num_expected_tokens: int  # to be generated


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One replica as the decision about one request sees it. A struct, as each request has one for each replica."""

    replica_id: str
    num_requests: int = 0  # sent there and not ended
    num_prefill_tokens: int = 0  # of their prompts, not computed yet
    num_decode_tokens: int = 0  # that they are expected still to generate
    num_ahead: int = 0  # of those requests, how many must end before another one is computed
    wake_s: float = 0.0  # until it computes, as it sleeps; 0: it is awake
    tokens_per_s: float = 0.0  # in a step of a given size, the same for all replicas; 0: not known
    num_cached_tokens: int = 0  # of this request's prompt that the replica should have in its KV memory
    holds_session: bool = False  # the previous request of the same session went there
    group: str = ""  # of an A/B trial; "": none
    is_full: bool = False  # it would refuse this request
    has_slot: bool = True  # it would compute this request at once, as far as is known
    is_suspect: bool = False  # its stream broke or is silent
    weights: int = 0  # a digest of its model's files; 0 while not known


@dataclass(frozen=True, slots=True)
class Scoring:
    """How candidates compare for one request, in tokens of a replica of the usual speed."""

    num_request_tokens: int  # that the request would add
    usual_tokens_per_s: float  # the median of the known speeds; 0: no speed is known

    @classmethod
    def of(cls, candidates: Sequence[Candidate], size: RequestSize) -> Scoring:
        """For these candidates and a request of this size."""
        known = [each.tokens_per_s for each in candidates if each.tokens_per_s > 0]
        return cls(size.num_prompt_tokens + size.num_expected_tokens, median(known) if known else 0.0)

    def relative_speed(self, candidate: Candidate) -> float:
        """1: the usual speed, or not known; at most 100 and at least 0.01, whatever a replica reports."""
        if candidate.tokens_per_s <= 0:
            return 1.0
        return min(100.0, max(0.01, candidate.tokens_per_s / self.usual_tokens_per_s))

    def outstanding(self, candidate: Candidate) -> float:
        """The work that is there already."""
        return (candidate.num_prefill_tokens + candidate.num_decode_tokens) / self.relative_speed(candidate)

    def score(self, candidate: Candidate) -> float:
        """The work that is there, the queue, the time to wake and this request; the least is best."""
        num_tokens = candidate.num_prefill_tokens + candidate.num_decode_tokens
        # While a replica is full, one request ends for as many tokens as a request has; this one stands for all.
        num_tokens += (1 + candidate.num_ahead) * self.num_request_tokens
        # Of a replica that sleeps, while no speed is known: any wake is worth waiting for some tokens
        tokens_per_s = 100.0
        waking = candidate.wake_s * (self.usual_tokens_per_s or tokens_per_s)  # what could be computed meanwhile
        return num_tokens / self.relative_speed(candidate) + waking

    def explain(self, candidate: Candidate) -> str:
        """The candidate with the parts of its score."""
        parts = f"{candidate.num_prefill_tokens:,} prompt + {candidate.num_decode_tokens:,} output"
        parts += f" + {self.num_request_tokens:,} own tokens at speed {self.relative_speed(candidate):.2f}"
        parts += f" = {self.score(candidate):,.0f}"
        parts += f", {candidate.num_ahead:,} must end first" if candidate.num_ahead else ""
        parts += f", wakes in {candidate.wake_s:.2g} s" if candidate.wake_s else ""
        parts += f", {candidate.num_cached_tokens:,} cached" if candidate.num_cached_tokens else ""
        parts += ", has the session" if candidate.holds_session else ""
        parts += ", full" if candidate.is_full else ""
        return f"{candidate.replica_id} ({parts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The candidates, most preferred first, and why."""

    policy: str
    rule: str  # why the first is first, in a few words
    candidates: tuple[Candidate, ...]  # all of them, most preferred first
    scoring: Scoring

    @property
    def replica_id(self) -> str:
        """The most preferred."""
        return self.candidates[0].replica_id

    @property
    def reason(self) -> str:
        """The policy, the replica and the rule, in a few words. It has no numbers of other requests."""
        return f"{self.policy}: {self.candidates[0].replica_id}, {self.rule}"

    def explain_loads(self) -> str:
        """The numbers of all candidates, in one line."""
        max_explained = 4  # candidates that the line shows; the rest are counted
        shown = "; ".join(map(self.scoring.explain, self.candidates[:max_explained]))
        num_more = len(self.candidates) - max_explained
        more = f"; and {num_more:,} more" if num_more > 0 else ""
        return shown + more
