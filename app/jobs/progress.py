"""What a run has come to, while it runs and at its end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RATE_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run, as summary.json has it. Rates are of the last run on the folder, the rest of all."""

    rows: int
    ok: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float  # of the last run, from the first engine's readiness to the last record
    rows_per_s: float
    tokens_per_s: float  # generated
    runs: int
    engines_lost: int
    continued_rows: int
    recomputed_rows: int

    def __str__(self) -> str:
        lines = [
            f"{self.rows:,} rows: {self.ok:,} ok, {self.failed:,} failed",
            f"{self.prompt_tokens:,} prompt tokens, {self.completion_tokens:,} generated; "
            f"{self.rows_per_s:,.1f} rows/s, {self.tokens_per_s:,.0f} tokens/s in {self.seconds:,.1f} s",
        ]
        if self.engines_lost or self.runs > 1 or self.recomputed_rows:
            lines.append(
                f"{self.runs:,} runs, {self.engines_lost:,} engines lost; {self.continued_rows:,} rows went on where "
                f"they were, {self.recomputed_rows:,} began again ({self.recomputed_rows / self.rows:.2%})"
            )
        return "\n".join(lines)


class RunProgress:
    """How fast a run is now, over the last half minute, and when it will be done."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._num_tokens = 0
        self._marks: deque[tuple[float, int, int]] = deque()  # (time, rows, tokens)

    def begin(self, now: float, num_ended: int) -> None:
        """The clock runs from here on."""
        self._marks.append((now, num_ended, self._num_tokens))

    def generated(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def line(self, now: float, num_ended: int) -> str:
        """One line of progress. `now` is in seconds, on any clock that does not go back."""
        self._marks.append((now, num_ended, self._num_tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > RATE_WINDOW_S:
            self._marks.popleft()
        began, rows, tokens = self._marks[0]
        seconds = max(now - began, 1e-9)
        rows_per_s, tokens_per_s = (num_ended - rows) / seconds, (self._num_tokens - tokens) / seconds
        left = self._num_rows - num_ended
        eta = f"{_duration(left / rows_per_s)} left" if rows_per_s > 0 else "pace not known yet"
        share = num_ended / self._num_rows
        return (
            f"{num_ended:,} of {self._num_rows:,} rows ({share:.0%}), "
            f"{rows_per_s:,.1f} rows/s, {tokens_per_s:,.0f} tokens/s, {eta}"
        )


def _duration(seconds: float) -> str:
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
