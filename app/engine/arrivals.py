"""From a request to the sequence that waits: what is expected of it, and until when it is worth a try."""

from __future__ import annotations

from app.engine.lengths import LengthPredictor
from app.engine.matcher import Matcher
from app.engine.pace import Pace
from app.engine.policies.policy import SchedulingPolicy
from app.engine.request import Request, SamplingParams
from app.engine.sequence import Sequence

# The output length that is expected of a request is the median of past ones: half of the refusals by a higher quantile
# would be of requests that would have met their deadlines.
_EXPECTED_QUANTILE = 0.5


class Arrivals:
    """Numbers those who come, and looks ahead for them: how long they will be, how long that will take."""

    def __init__(self, *, lengths: LengthPredictor, pace: Pace, eos_token_ids: frozenset[int]) -> None:
        self._lengths = lengths
        self._pace = pace
        self._eos_token_ids = eos_token_ids
        self._num_arrived = 0

    def sequence_of(
        self, request: Request, policy: SchedulingPolicy, *, now: float, matcher: Matcher | None
    ) -> Sequence:
        """A new sequence, ranked, that arrived at `now`."""
        num_predicted_tokens = self._lengths.predict(request, quantile=_EXPECTED_QUANTILE)
        sequence = Sequence(
            request=request,
            arrival=self._num_arrived,
            arrived_at=now,
            end_token_ids=self._end_token_ids(request.sampling),
            num_predicted_tokens=request.sampling.max_tokens if num_predicted_tokens is None else num_predicted_tokens,
            matcher=matcher,
        )
        sequence.rank = policy.rank(sequence)
        self._num_arrived += 1
        return sequence

    def give_up_at(self, sequence: Sequence, policy: SchedulingPolicy, *, chunk_tokens: int) -> float:
        """When one with a deadline is refused if it has not started; `chunk_tokens` of its prompt go into a step."""
        deadline_at = sequence.deadline_at
        assert deadline_at is not None, "only a sequence with a deadline is given up"
        num_chunks = -(-sequence.num_prompt_tokens // chunk_tokens)
        service_s = self._pace.step_s * (num_chunks + self._num_tokens_to_come(sequence) - 1)
        if sequence.arrived_at + service_s > deadline_at:
            return sequence.arrived_at  # not even if it started now
        give_up_at = policy.give_up_at(sequence, service_s)
        return deadline_at if give_up_at is None else give_up_at

    def _num_tokens_to_come(self, sequence: Sequence) -> int:
        # Nobody is refused on a guess: without experience, only what is certain to be computed counts.
        predicted = self._lengths.predict(sequence.request, quantile=_EXPECTED_QUANTILE)
        num_tokens = sequence.request.sampling.min_tokens if predicted is None else predicted
        return max(1, num_tokens - sequence.num_generated_tokens)

    def _end_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Where generation ends. Requests without stop tokens of their own share one set."""
        eos_token_ids = self._eos_token_ids if sampling.ends_at_eos else frozenset[int]()
        return eos_token_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else eos_token_ids
