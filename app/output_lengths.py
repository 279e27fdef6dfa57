"""How long outputs are, by those of ended requests. It only has to tell short from long. Knows nothing of requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

WINDOW = 64  # outputs remembered of each kind
MAX_KINDS = 4_096


class OutputLengths:
    """The last outputs of each kind of request, in bounded memory. A request may be of several kinds."""

    def __init__(self, *, by_median: bool) -> None:
        """`by_median`: half of what comes is longer than expected; else the mean is expected, as sums need it."""
        self._by_median = by_median
        self._windows: OrderedDict[Hashable, _Window] = OrderedDict()  # the longest unused first

    def expected(self, kinds: Sequence[Hashable], *, at_least: int = 1, at_most: int) -> int | None:
        """Tokens that a request should generate, by the first of its kinds of which enough is known; None: of none."""
        min_outputs = 4  # with fewer, a kind says nothing
        for kind in kinds:
            window = self._windows.get(kind)
            if window is not None and len(window.by_length) >= min_outputs:
                expected = window.median if self._by_median else window.mean
                return max(1, at_least, min(at_most, expected))
        return None

    def learn(self, kinds: Sequence[Hashable], num_generated: int) -> None:
        """A request of these kinds has ended by itself (a stop or its limit, no abort) at this length."""
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
    """The last outputs of one kind, by age and by length."""

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
