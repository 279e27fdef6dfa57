"""One serving of a whole workload, as it was observed: the moment of each token, on a clock that starts at zero."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class Timeline:
    """One request: when it came and when its tokens did, in seconds after the start."""

    arrival_s: float
    token_ids: list[int] = field(default_factory=list)
    delivered_s: list[float] = field(default_factory=list)  # once for each delivery of one or more tokens

    has_failed: bool = False  # refused, expired or ended by an error

    def deliver(self, token_ids: tuple[int, ...] | list[int], *, at_s: float) -> None:
        if token_ids:
            self.token_ids.extend(token_ids)
            self.delivered_s.append(at_s)

    @property
    def time_to_first_token_s(self) -> float:
        return self.delivered_s[0] - self.arrival_s

    @property
    def latency_s(self) -> float:
        return self.delivered_s[-1] - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one delivery and the next."""
        return [after - before for before, after in zip(self.delivered_s, self.delivered_s[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A workload served to its end. Counters are None where the engine does not report them."""

    seconds: float
    timelines: Mapping[str, Timeline]  # by request id
    streams: bool = True  # tokens are handed over as they are drawn, not only at the end
    num_steps: int | None = None
    num_preemptions: int | None = None
    num_cached_prompt_tokens: int | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(timeline.token_ids) for timeline in self.timelines.values())


class Clock(Protocol):
    """Seconds since its making."""

    def now(self) -> float: ...

    def wait_until(self, at_s: float) -> None: ...


class MonotonicClock:
    """The real one."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, at_s: float) -> None:
        """Sleep once, until then; a moment that has passed costs nothing."""
        time.sleep(max(0.0, at_s - self.now()))
