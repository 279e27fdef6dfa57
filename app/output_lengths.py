"""Learns expected output lengths from past requests. Estimates only have to distinguish short from long outputs."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

WINDOW = 64  # number of outputs to remember for each kind
MAX_KINDS = 4_096


class OutputLengths:
    """The last output lengths for each kind of request, in bounded memory. A request may have several kinds."""

    def __init__(self, *, by_median: bool) -> None:
        """by_median: whether to expect a kind's median. Otherwise, expects its mean, for callers that sum estimates."""
        self._by_median = by_median
        self._windows: OrderedDict[Hashable, _Window] = OrderedDict()  # the least recently used kind first

    def expected(self, kinds: Sequence[Hashable], *, at_least: int = 1, at_most: int) -> int | None:
        """Return the expected number of output tokens for the first kind with 4 known outputs, or None without one."""
        min_outputs = 4
        for kind in kinds:
            window = self._windows.get(kind)
            if window is not None and len(window.by_length) >= min_outputs:
                expected = window.median if self._by_median else window.mean
                return max(1, at_least, min(at_most, expected))
        return None

    def learn(self, kinds: Sequence[Hashable], num_generated: int) -> None:
        """Add the output length of a request that ended by stop or length. Aborted outputs would be misleading."""
        for kind in kinds:
            window = self._windows.get(kind)
            if window is None:
                window = self._windows[kind] = _Window()
                if len(self._windows) > MAX_KINDS:
                    self._windows.popitem(last=False)
            else:
                self._windows.move_to_end(kind)
            window.add(num_generated)


class _Window:
    """The last output lengths for one kind, sorted by age and by length."""

    def __init__(self) -> None:
        self._by_age: deque[int] = deque()
        self.by_length: list[int] = []
        self._total = 0

    def add(self, length: int) -> None:
        if len(self._by_age) == WINDOW:
            oldest = self._by_age.popleft()
            del self.by_length[bisect_left(self.by_length, oldest)]
            self._total -= oldest
        self._by_age.append(length)
        insort(self.by_length, length)
        self._total += length

    @property
    def median(self) -> int:
        return self.by_length[len(self.by_length) // 2]

    @property
    def mean(self) -> int:
        return round(self._total / len(self.by_length))
