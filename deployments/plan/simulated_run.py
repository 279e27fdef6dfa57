"""Collects the results of a trace in simulated time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class SimulatedRun:
    """Every request's times from the client's view, in simulated seconds, and totals of the replicas' work."""

    def __init__(self) -> None:
        # Arrays with one number per request, in order of arrival. Ten million requests use 0.3 GB.
        self.arrivals_s = array("d")
        self.first_tokens_s = array("d")  # negative if the request has received no token
        self.last_tokens_s = array("d")
        self.num_tokens = array("I")
        self.gaps_s = array("f")  # the time between two tokens, for all requests
        self.num_refused = 0
        self.num_failed = 0  # requests that have missed their deadline
        self.num_steps = 0
        self.num_preemptions = 0
        self.computing_s = 0.0  # sum over all replicas
        self.seconds = 0.0  # from the first arrival to the last token
        self.share = 1.0  # the simulated share of the fleet and the requests; counts include only this share

    @property
    def num_requests(self) -> int:
        return len(self.arrivals_s)

    def arrive(self, at_s: float) -> None:
        """Record the arrival of the next request."""
        self.arrivals_s.append(at_s)
        self.first_tokens_s.append(-1.0)
        self.last_tokens_s.append(-1.0)
        self.num_tokens.append(0)

    def note(self, number: int, num_tokens: int, *, at_s: float) -> None:
        """Record that a request has received `num_tokens` tokens at the same time. Does nothing for 0."""
        if not num_tokens:
            return
        if self.num_tokens[number]:
            self.gaps_s.append(at_s - self.last_tokens_s[number])
        else:
            self.first_tokens_s[number] = at_s
        self.last_tokens_s[number] = at_s
        self.num_tokens[number] += num_tokens

    def note_steps(self, numbers: Sequence[int], ended_at: Sequence[float]) -> None:
        """Record a token for each request at each time in `ended_at`. The requests must already have tokens."""
        later = array("f", [after - before for before, after in pairwise(ended_at)])
        for number in numbers:
            self.gaps_s.append(ended_at[0] - self.last_tokens_s[number])
            self.gaps_s.extend(later)
            self.last_tokens_s[number] = ended_at[-1]
            self.num_tokens[number] += len(ended_at)

    @property
    def num_output_tokens(self) -> int:
        return int(_numbers(self.num_tokens).sum())

    @property
    def output_tokens_per_s(self) -> float:
        """The whole fleet's output tokens per second."""
        return self.num_output_tokens / self.seconds / self.share

    @property
    def requests_per_s(self) -> float:
        """The whole fleet's served requests per second."""
        return int(self.is_served.sum()) / self.seconds / self.share

    @property
    def is_served(self) -> NDArray[np.bool_]:
        """Whether each request has received any tokens, [num_requests]."""
        return _numbers(self.num_tokens) > 0

    def per_request_s(self, metric: str) -> NDArray[np.float64]:
        """Return each served request's `ttft`, `latency` or mean `itl`."""
        served = self.is_served
        first, last, arrivals = (
            np.array(each, dtype=np.float64)[served]
            for each in (self.first_tokens_s, self.last_tokens_s, self.arrivals_s)
        )
        if metric == "itl":
            spent: NDArray[np.float64] = (last - first) / np.maximum(_numbers(self.num_tokens)[served] - 1, 1)
        else:
            spent = (first if metric == "ttft" else last) - arrivals
        return spent

    def percentile_s(self, metric: str, percent: float) -> float:
        """Return a percentile of `ttft`, of `latency`, or of all gaps between tokens (`itl`).

        Refused and failed requests count as infinitely slow: `ttft` and `latency` are infinite if they are more than
        100 - `percent` percent of the requests, or if no request was served.
        """
        if metric == "itl":
            return float(np.percentile(np.asarray(self.gaps_s), percent)) if self.gaps_s else 0.0
        times = self.per_request_s(metric)
        num_lost = self.num_refused + self.num_failed
        if not len(times) or num_lost / (num_lost + len(times)) > 1 - percent / 100:
            return float("inf")
        return float(np.percentile(times, percent))


def _numbers(values: array[int]) -> NDArray[np.int64]:
    return np.asarray(values).astype(np.int64)
